"""Contrastive training: the scores and losses of late interaction, batches too large for one graph, and their order.

Losses compare every query of a batch with every document of it. These files import `stages.tuner.blockwise` and
`stages.tuner.draws`, and nothing else of ours. The data may be of any kind.
"""
