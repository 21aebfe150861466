"""Errors that MLX raises as RuntimeError: of the GPU, a full disk, lost ranks. What happened, and what the user can do."""

from __future__ import annotations

import re

# (pattern of the message, what happened, what helps, whether a fresh process may go on)
KINDS = (
    (
        r"impacting ?interactivity",
        "macOS ended the GPU work because it held up the display",
        "let the display sleep (`pmset displaysleepnow`) or log out of the desktop, or use [train] micro_batch = 1 and a lower "
        "resolution",
        True,
    ),
    (
        r"gpu timeout|callbackerrortimeout|gpu hang|callbackerrorhang",
        "macOS ended GPU work that took too long",
        "use [train] micro_batch = 1 or a lower resolution, and close programs that use the GPU",
        True,
    ),
    (
        r"\[write\] unable to write",  # MLX gives no error number
        "disk full, or the file cannot be written",
        "free some space and run again",
        False,
    ),
    (
        r"connection to a peer was lost|\[ring\]|nccl",
        "another rank of the run ended, or the network failed",
        "look at the messages of the other ranks",
        False,
    ),
    (
        r"insufficient memory|outofmemory|out of memory|\b(malloc|alloc\w*)\b.*\b(fail|bytes|unable|memory)|unable to allocate",
        "not enough memory",
        "`latentmill plan` shows what each stage needs and which settings need less",
        False,
    ),
)


def explain(message: str) -> str | None:
    """What happened, `message` and a remedy in one line; None for an unknown error."""
    for pattern, happened, remedy, _ in KINDS:
        if re.search(pattern, message, re.IGNORECASE):
            return f"{happened}: {' '.join(message.split())}; {remedy}. Finished work is kept: the same command goes on."
    return None


def may_restart(message: str) -> bool:
    """True if a fresh process can go on, because macOS ended the GPU work."""
    found = [again for pattern, _, _, again in KINDS if re.search(pattern, message, re.IGNORECASE)]
    return bool(found) and found[0]
