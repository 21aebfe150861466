"""Adapters beneath the trained one: frozen, and merged into the base's weights while these are read.

A style that is drawn too, under a face; or an assistant, such as one that undoes the distillation of a model for as long as it
is trained on, which is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.hashing import file_sha256
from stages.settings import Section, selects, setting_path

if TYPE_CHECKING:
    import mlx.core as mx

    from stages.models.family import Family
    from stages.tuner.adapters.combine import Part

Arrange = Callable[[str, Any], Any]  # (name, weight) -> the weight, or what stands for it


@dataclass(frozen=True)
class BeneathConfig(Section):
    file: str = selects(
        "", "an adapter's file, of ai-toolkit, kohya, diffusers, musubi or mflux too; relative to the project", path=True
    )
    strength: float = selects(1.0, "factor of what it changes: 1 as it was trained", unit="factor", bounds=(-10.0, 10.0))
    drawn: bool = selects(
        True, "pictures have it too, such as a style under a face; false: an assistant, which is only trained over"
    )

    def check(self) -> None:
        if not self.file.strip():
            raise ValueError(f'file must name an adapter, such as "style.safetensors", got "{self.file}"')

    def __str__(self) -> str:
        return f"{Path(self.file).name} at {self.strength:g}{'' if self.drawn else ', not drawn'}"


Entries = Sequence[BeneathConfig]


def drawn_of(entries: Entries | None) -> list[BeneathConfig]:
    return [each for each in entries or () if each.drawn]


def files_of(entries: Entries, root: Path) -> list[Path]:
    """Raises ValueError for a file that does not exist."""
    found = [setting_path(each.file, root) for each in entries]
    if absent := next((each for each in found if not each.is_file()), None):
        raise ValueError(f"beneath: file must be an adapter's file, got {str(absent)!r}: it does not exist")
    return found


def content_of(entries: Entries, root: Path) -> list[tuple[str, float]]:
    """(sha256 of the file, strength) of each: what decides the weights."""
    return [(file_sha256(file), each.strength) for file, each in zip(files_of(entries, root), entries, strict=True)]


def read_beneath(entries: Entries, root: Path, family: Family, linears: Mapping[str, tuple[int, int]]) -> list[Part]:
    """`linears`: the transformer's, (outputs, inputs). Raises ValueError for a file that cannot be read or does not fit."""
    from stages.models.adapters import first_not_finite
    from stages.tuner.adapters.lora import check_fits

    parts: list[Part] = []
    for file, each in zip(files_of(entries, root), entries, strict=True):
        try:
            arrays, scales = family.architecture.read_adapter(file)
            check_fits(linears, arrays, scales)
        except ValueError as error:
            raise ValueError(f"beneath: {file} does not fit {family.name}: {error}") from None
        if key := first_not_finite(arrays):
            raise ValueError(f"beneath: {file}: {key} holds values that are not finite; take another file")
        parts.append((arrays, scales, each.strength))
    return parts


def merging(parts: Sequence[Part], arrange: Arrange | None) -> Arrange | None:
    """`arrange` of weights into which the adapters are merged first, in their order."""
    if not parts:
        return arrange

    def merged(name: str, weight: mx.array) -> Any:
        import mlx.core as mx

        from stages.tuner.adapters.lora import arrays_of_linear, merge

        linear = name.removesuffix(".weight")
        found = [part for part in parts if linear in part[1]]
        if found:
            wide = weight.astype(mx.float32)
            for arrays, scales, strength in found:
                wide = merge(wide, arrays_of_linear(dict(arrays), linear), scales[linear] * strength)
            weight = wide.astype(weight.dtype)
            mx.eval(weight)  # one weight in float32 at a time
        return arrange(name, weight) if arrange else weight

    return merged
