"""Names of weights in the makers' files, and diffusers' names of the same. {} in a name is the block's number."""

from __future__ import annotations

import re
from collections.abc import Mapping

from stages.kernels import Arrays
from stages.models import weights

# The makers' name -> diffusers' names, three in the order of its rows where q, k and v are one Linear.
Reference = Mapping[str, tuple[str, ...]]


def split_number(name: str) -> tuple[str, str]:
    # "a.3.b" -> ("a.{}.b", "3"), "a_3_b" -> ("a_{}_b", "3")
    found = re.search(r"([._])(\d+)\1", name)
    return (f"{name[: found.start(2)]}{{}}{name[found.end(2) :]}", found[2]) if found else (name, "")


def parts(name: str, reference: Reference) -> list[str]:
    """diffusers' names of a Linear of the makers' code: three if it stacks q, k and v; [name] if it is unknown."""
    pattern, block = split_number(name)
    return [part.replace("{}", block) for part in reference.get(pattern, (name,))]


def to_diffusers(arrays: Arrays, reference: Reference, swapped: str = "") -> Arrays:
    """Fused q, k, v become three weights; the halves of the rows of `swapped` change places. An unknown name loses its prefix."""
    converted: Arrays = {}
    spelled: dict[str, str] = {}
    for found, value in arrays.items():
        key = weights.strip_prefix(found)
        name, _, ending = key.rpartition(".")
        ours = parts(name, reference)
        ending = "weight" if ending == "scale" and ours != [name] else ending
        rows = value.shape[0] // len(ours) if len(ours) > 1 else 0
        for at, part in enumerate(ours):
            own = value[at * rows : (at + 1) * rows] if rows else value
            new = f"{part}.{ending}" if name else key
            if (other := spelled.setdefault(new, found)) != found:
                raise ValueError(f"{other} and {found} are two spellings of one tensor: remove one")
            converted[new] = weights.swap_halves(own) if name and name == swapped else own
    return converted
