"""One file per command of `latentmill`: the click command, an object named `command`, and the functions that do the work.

Heavy imports stand inside functions, so that --help answers at once. A pipeline's own commands are listed in
`Pipeline.commands`.
"""
