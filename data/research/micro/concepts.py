"""Make the sprites of the chosen emoji in two styles, and the list of concepts with their splits.

    python -m data.research.micro.concepts WORK_DIR

downloads three npm packages into WORK_DIR, unless they are there, and writes WORK_DIR/sprites.zip and the committed
data/research/micro/concepts.jsonl. The zip holds flat/<name>.png for every chosen concept, 3d/<name>.webp for every emoji with
a usable
name except TWINS, and 3d.json with the split of each 3D picture. choice.py has the choice.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import resvg_py
from PIL import Image

from data.research.micro.captions import phrase
from data.research.micro.choice import CHOICE, EXAMPLE, HELD_OUT, TWINS, entries

FLAT = "@lobehub/fluent-emoji-flat@1.1.0"
SOLID = "@lobehub/fluent-emoji-3d@1.1.0"
NAMES = "openmoji@17.0.0"  # used for the names of all emoji only
CONCEPTS = Path(__file__).with_name("concepts.jsonl")
SIDE = 256  # side of a sprite, pixels
UNWANTED = ("flags", "symbols", "component")  # groups of emoji that are left out
USABLE = re.compile(r"[A-Za-z0-9 .'-]+")  # names that can be file names

Files = dict[str, bytes]  # name -> content


@dataclass(frozen=True)
class Concept:
    """A line of concepts.jsonl. `code` is the stem of the file in the packages; `split` is base, example or held-out."""

    name: str
    phrase: str
    code: str
    group: str
    split: str


def main(work: Path) -> str:
    """Download the packages, write sprites.zip and concepts.jsonl, and return one line that says what was written."""
    work.mkdir(parents=True, exist_ok=True)
    flat, solid = _pictures(_package(work, FLAT)), _pictures(_package(work, SOLID))
    codes = _codes(_package(work, NAMES), solid)
    concepts = chosen(codes, flat)
    CONCEPTS.write_text("".join(json.dumps(asdict(concept)) + "\n" for concept in concepts), encoding="utf-8")
    splits = solid_names(codes, concepts)
    with zipfile.ZipFile(work / "sprites.zip", "w") as archive:
        for concept in concepts:
            _add(archive, f"flat/{concept.name}.png", _rasterised(flat[concept.code]))
        for name, (code, _) in splits.items():
            _add(archive, f"3d/{name}.webp", _square(solid[code]))
        _add(archive, "3d.json", json.dumps({name: split for name, (_, split) in splits.items()}, indent=0).encode())
    size = (work / "sprites.zip").stat().st_size / 1e6
    return f"{len(concepts)} concepts, {len(splits)} pictures in 3D, {size:.1f} MB in {work / 'sprites.zip'}"


def chosen(codes: dict[str, str], flat: Files) -> list[Concept]:
    """Return the concepts of choice.py, in its order. `codes` maps the emoji's own name to its code, the stem of its file.
    `flat` holds the flat pictures. Raises ValueError if the packages lack a concept in either style, or if CHOICE lacks a
    name of EXAMPLE or HELD_OUT.
    """
    example, held_out = entries(EXAMPLE), entries(HELD_OUT)
    concepts = []
    for group, text in CHOICE.items():
        for name, own in entries(text).items():
            code = codes.get(own)
            if code not in flat:
                raise ValueError(f'choice.py, {group}: both styles must have "{name}"; if its own name differs, add it after "="')
            split = "example" if name in example else "held-out" if name in held_out else "base"
            concepts.append(Concept(name, phrase(name), code, group, split))
    unknown = (example.keys() | held_out.keys()) - {concept.name for concept in concepts}
    if unknown:
        raise ValueError(
            f"choice.py: CHOICE must have every name of EXAMPLE and HELD_OUT; {', '.join(sorted(unknown))} are missing"
        )
    return concepts


def solid_names(codes: dict[str, str], concepts: list[Concept]) -> dict[str, tuple[str, str]]:
    """Return the 3D pictures to write: name -> (code, split), sorted by name. A concept has its own name; any other emoji
    has the emoji's name.
    """
    names = {concept.name: (concept.code, concept.split) for concept in concepts}
    taken = {concept.code for concept in concepts}
    for own, code in codes.items():
        name = (
            own.lower() if own.lower() not in names else f"{own.lower()} two"
        )  # "cat" is taken by the concept, which is the cat face
        if code not in taken and USABLE.fullmatch(name):
            names[name] = (code, "base")
            taken.add(code)
    twins = {codes[own] for own in entries(TWINS)}
    return {name: names[name] for name in sorted(names) if names[name][0] not in twins}


def _package(work: Path, spec: str) -> Files:
    """Return path -> content of an npm package, which is downloaded if it is not in `work` yet."""
    found = work / (spec.removeprefix("@").replace("/", "-").replace("@", "-") + ".tgz")
    if not found.exists():
        subprocess.run(["npm", "pack", "--silent", spec], cwd=work, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(found) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}  # type: ignore[union-attr]


def _pictures(package: Files) -> Files:
    """Return code -> content of the pictures in a package; a picture's code is the stem of its file."""
    return {PurePosixPath(path).stem: content for path, content in package.items() if path.startswith("package/assets/")}


def _codes(package: Files, pictures: Files) -> dict[str, str]:
    """Return the emoji's own name -> the code of its picture, without skin tones, flags, symbols and emoji without a picture."""
    found: dict[str, str] = {}
    emoji: list[dict[str, Any]] = json.loads(package["package/data/openmoji.json"])
    for entry in emoji:
        code = entry["hexcode"].lower()
        codes = [code, code.replace("-fe0f", ""), f"{code}-fe0f"]  # the packages differ in the variation selector
        picture = next((code for code in codes if code in pictures), None)
        if picture and not entry["skintone"] and entry["group"] not in UNWANTED:
            found.setdefault(entry["annotation"], picture)
    return found


def _rasterised(svg: bytes) -> bytes:
    drawn = resvg_py.svg_to_bytes(svg_string=svg.decode(), width=SIDE, height=SIDE, dpi=96)
    return _square(bytes(drawn), again="PNG")


def _square(encoded: bytes, again: str = "") -> bytes:
    """Return an encoded picture of SIDE x SIDE pixels. A picture of another size is shrunk and centred. `encoded` is the
    picture. `again` is the name of a format in which the picture is always encoded again, or "".
    """
    image: Image.Image = Image.open(BytesIO(encoded))
    if image.size == (SIDE, SIDE) and not again:
        return encoded
    image = image.convert("RGBA")
    image.thumbnail((SIDE, SIDE))
    square = Image.new("RGBA", (SIDE, SIDE))
    square.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
    out = BytesIO()
    square.save(out, again or "WEBP", **({"optimize": True} if again else {"quality": 95}))
    return out.getvalue()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name), content)  # dated 1980, so that equal content gives an equal zip


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python -m data.research.micro.concepts WORK_DIR")
    sys.stdout.write(main(Path(sys.argv[1])) + "\n")
