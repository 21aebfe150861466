from __future__ import annotations

from dataclasses import dataclass

from stages.settings import selects


@dataclass(frozen=True)
class ScoresConfig:
    # Recorded by content in `snapshot`: another path to the same files changes nothing, other content gives a new table
    # folder.
    references: str = selects(
        "references", "folder of real pictures of the style, with captions, none of which is a training image", path=True
    )
    map: str = selects(
        "",
        "safetensors file with the map from pictures to texts, which data/micro/training/agreement.py fits; empty: no agreement",
        path=True,
    )
