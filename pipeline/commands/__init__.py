"""One file per command of `latentmill`: the click command, an object named `command`, and the functions that do the work.

A command may import `stages` and all of `pipeline` except `cli`. Heavy imports happen inside functions. Commands of a single
pipeline are listed in `Pipeline.commands`, all others in `pipeline.cli`.
"""
