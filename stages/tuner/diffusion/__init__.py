"""What the tuner knows of diffusion: which noise levels are trained, how a prediction's error is measured and weighted.

`noise` has the distribution of noise levels, `loss` the losses per sample, `weighting` the weight of a sample by its noise
level. sigma is the noise level everywhere: 0 is a clean image, 1 pure noise. These files import only `stages.tuner.draws`; no
other folder of the tuner imports them.
"""
