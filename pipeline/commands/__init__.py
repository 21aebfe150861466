"""One file per command: the click command, an object named `command`, and the functions that do its work.

A command imports what it needs when it is called. It may import all of `pipeline` but `cli`, and `stages`. The commands of
one pipeline only are listed in that pipeline's `commands`; all others are listed in `pipeline.cli`.
"""
