"""Where a family's weights lie: a folder of the user's, the hub's cache, the checkout, or a folder that the project makes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.store.disk import CHECKOUT, from_home
from stages.models.family import FOLDERS, Family
from stages.models.weights import read_header, weight_files

SHARD = re.compile(r"-\d+-of-(\d+)\.")  # model-00001-of-00002.safetensors
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Absent(ValueError):  # noqa: N818  (no mistake: the first stage that needs them brings them)
    """Weights that are not here yet and will come by themselves."""


def resolve(spec: str, project: Path, family: Family, components: Iterable[str] = tuple(FOLDERS), *, fetch: bool = True) -> Path:
    """The folder that `weights = spec` means for a family: found, fetched or made.

    `spec` is a folder (absolute, from ~, or relative to the project), a hub id "org/name", or empty for the family's
    own. From the hub only `components` are fetched, and only those that the cache lacks; with `fetch` False a missing
    one is an error instead. ValueError says in one line what to do.
    """
    if not spec and family.bundled:
        return _bundled(family, components)
    if not spec and family.seeded is not None:
        return _made(project / "weights" / family.name, family, family.seeded, fetch)
    hub = spec or family.hub
    if not hub:
        raise ValueError(f"no weights are published for {family.name}: set weights to a folder")
    folder = project / from_home(hub)
    if spec and folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(hub):
        kind = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"weights = {spec!r}: the folder {folder} {kind}, and it is no hub id (org/name) either")
    return _snapshot(hub, list(components), family, fetch)


def _bundled(family: Family, components: Iterable[str]) -> Path:
    """The family's folder in the checkout, wherever the command was started; of `components` every file must be whole."""
    folder = CHECKOUT / family.bundled
    for component in components:
        try:
            _inspect(folder / FOLDERS[component])
        except ValueError as error:
            wrong = str(error).removesuffix("; fetch it again").replace(f"{CHECKOUT}/", "")
            remedy = f"it is part of the checkout; `git checkout {family.bundled}` in {CHECKOUT} brings it back"
            raise ValueError(f"{wrong}: {remedy}") from None
    return folder


def _inspect(folder: Path) -> None:
    """ValueError for a component's file that is missing or cut short."""
    tokenizer = folder.name == FOLDERS["tokenizer"]
    for name in TOKENIZER if tokenizer else ("config.json",):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing")
    for file in folder.glob("*.json"):
        try:
            json.loads(file.read_bytes())
        except ValueError:
            raise ValueError(f"{file} is not whole") from None
    for file in () if tokenizer else weight_files(folder):
        read_header(file)


def _made(folder: Path, family: Family, seed: int, make: bool) -> Path:
    """A seeded family's folder, made once: beside its place first, so that it is whole when it appears."""
    if folder.is_dir():
        return folder
    if not make:
        raise Absent(f"{folder} is not made yet; a stage that needs it makes it")
    temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        family.architecture.write_random_weights(temporary, family, seed)
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was first; its weights are the same
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _snapshot(hub: str, components: list[str], family: Family, fetch: bool) -> Path:
    """The cached copy of a hub repository's components. The network is asked only for what the cache lacks."""
    from huggingface_hub import errors, snapshot_download

    folders = [FOLDERS[c] for c in components]
    patterns = [f"{name}/*" for name in folders] + ["*.json"]
    with suppress(errors.LocalEntryNotFoundError):
        cached = Path(snapshot_download(hub, allow_patterns=patterns, local_files_only=True))
        if not _lacking(cached, folders):
            return cached
    if not fetch:
        raise Absent(f"{', '.join(folders)} of {hub} is not fetched yet; a stage that needs it fetches it")
    try:
        copy = Path(snapshot_download(hub, allow_patterns=patterns))
    except (errors.HTTPError, OSError, ValueError) as error:
        raise ValueError(_remedy(hub, family, error)) from None
    if lacking := _lacking(copy, folders):  # what the cache has is returned when the network fails, too
        raise ValueError(f"{hub} gave no {', '.join(lacking)}: {_by_hand(hub)}")
    return copy


def _lacking(copy: Path, folders: list[str]) -> list[str]:
    return [f"{name}/" for name in folders if not _whole(copy / name)]


def _whole(folder: Path) -> bool:
    """Whether a download of a component's folder came to its end. The hub gives a file its name when all of it is there."""
    if folder.name == FOLDERS["tokenizer"]:
        return any((folder / name).is_file() for name in ("tokenizer.json", "merges.txt"))
    try:
        found = weight_files(folder)
    except ValueError:  # no weights yet, or not every shard that the index names
        return False
    shards = [shard for file in found if (shard := SHARD.search(file.name))]  # of which the index may be what is missing
    return (folder / "config.json").is_file() and all(len(found) == int(shard[1]) for shard in shards)


def _by_hand(hub: str) -> str:
    what = " ".join(f"--include '{name}/*'" for name in FOLDERS.values())  # a folder that is given serves every stage
    return (
        f"where there is a network, run `hf download {hub} {what} --local-dir FOLDER`, "
        'then set weights = "FOLDER" in project.toml'
    )


def _remedy(hub: str, family: Family, error: Exception) -> str:
    """What went wrong and what the user can do about it, in one line."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{hub}"
    if isinstance(error, errors.GatedRepoError) or (family.gated and _status(error) in (401, 403)):
        return f"{hub} is gated ({family.licence} licence): accept the licence at {page}, then run `hf auth login` and try again"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no {hub}, or it is private: check weights in project.toml, or give a folder that exists"
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return f"{hub} could not be written to {constants.HF_HUB_CACHE}: {error.strerror}"
    return f"{hub} cannot be reached: {_by_hand(hub)}"


def _status(error: Exception) -> int:
    """The status of an answer that was a refusal; 0 where there was none."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))
