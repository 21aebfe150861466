"""Finds the weights of a family: a folder of the user, the Hugging Face cache, the checkout, or generated weights."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.project import large_files
from pipeline.project.paths import CHECKOUT, from_home
from pipeline.store.disk import atomic_folder, delete_abandoned
from stages.hashing import file_sha256
from stages.models.family import ModelFamily
from stages.models.weights import read_header, weight_files
from stages.untrusted import read_json

TOKENIZER = "tokenizer"  # the component without weights
SHARD = re.compile(r"-\d+-of-(\d+)\.")  # in model-00001-of-00002.safetensors
TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")  # configs and tokenizers
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class NotFetched(ValueError):  # noqa: N818  (no mistake of the user: the first stage that needs the weights fetches them)
    """Raised if weights are not on this machine yet and may not be downloaded or generated."""


def resolve(
    spec: str, project: Path, family: ModelFamily, components: Iterable[str] | None = None, *, fetch: bool = True
) -> Path:
    """The folder with the weights of `family`. Only `components` are fetched and checked; None: all.

    spec: the setting `weights`, a folder or hub id; "" for the family's own. Raises NotFetched, ValueError.
    """
    wanted = list(family.folders if components is None else components)
    if not spec and family.bundled:
        return _bundled(family, wanted)
    if not spec and family.seeded is not None:
        return _generated(project / "weights" / family.name, family, family.seeded, fetch)
    hub = spec or family.hub
    if not hub:
        raise ValueError(f"[project] weights must be a folder: no weights are published for {family.name}")
    folder = project / from_home(hub)
    if spec and folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(hub):
        kind = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"[project] weights must be a folder or a hub id (org/name), got {spec!r}: {folder} {kind}")
    return _downloaded(hub, wanted, family, fetch)


# Weights in the checkout


def _bundled(family: ModelFamily, components: Iterable[str]) -> Path:
    folder = CHECKOUT / family.bundled
    for component in components:
        try:
            _check_component(folder / family.folders[component], component, family)
        except ValueError as error:
            problem = str(error).removesuffix("; fetch it again").replace(f"{CHECKOUT}/", "")
            remedy = f"it is part of the checkout; run `git checkout {family.bundled}` in {CHECKOUT} to restore it"
            raise ValueError(f"{problem}: {remedy}") from None
    return folder


def _check_component(folder: Path, component: str, family: ModelFamily) -> None:
    for name in family.required[component]:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing")
    for file in folder.glob("[!.]*.json"):
        try:
            read_json(file)
        except ValueError:
            raise ValueError(f"{file} is damaged: not valid JSON") from None
    for file in () if component == TOKENIZER else weight_files(folder):
        read_header(file)


# Weights that the project generates


def _generated(folder: Path, family: ModelFamily, seed: int, allowed: bool) -> Path:
    """Random weights drawn from `seed`."""
    if folder.is_dir():
        return folder
    if not allowed:
        raise NotFetched(f"{folder} is not generated yet; the first stage that needs it generates it")
    delete_abandoned(folder.parent)
    try:
        with atomic_folder(folder) as temporary:
            family.architecture.write_random_weights(temporary, family, seed)
    except OSError:
        if not folder.is_dir():  # it exists if another process was first, with the same weights
            raise
    return folder


# Weights from the Hugging Face hub


def _downloaded(hub: str, components: list[str], family: ModelFamily, fetch: bool) -> Path:
    """The cached copy of a hub repository. Raises NotFetched, or a ValueError that says what to do."""
    from huggingface_hub import errors

    patterns = [pattern for component in components for pattern in family.patterns(component)] + ["*.json"]
    if (cached := _cached(hub, patterns)) and not _incomplete(cached, components, family):
        return cached
    if not fetch:
        names = ", ".join(family.folders[each] or each for each in components)
        raise NotFetched(f"{names} of {hub} is not downloaded yet; the first stage that needs it downloads it")
    try:
        copy = _fetched(hub, patterns)
    except large_files.Refused:
        raise
    except (errors.HTTPError, OSError, ValueError) as error:
        raise ValueError(_explain(hub, family, error, _manual_download(hub, family))) from None
    if missing := _incomplete(copy, components, family):  # without a network the client returns an incomplete cache
        raise ValueError(f"the download of {hub} lacks {', '.join(missing)}: {_manual_download(hub, family)}")
    return copy


def resolve_component(hub: str, family: ModelFamily, component: str, setting: str, *, fetch: bool) -> Path:
    """The folder of one component in a hub repository, which holds a whole model or only the component.

    setting: names the repository in messages. Raises NotFetched, ValueError.
    """
    from huggingface_hub import HfApi, errors

    below = family.folders[component]
    manual = f"on a machine with a network, run `hf download {hub} --local-dir FOLDER`, then set {setting} to FOLDER"
    for folder in (found / below, found) if (found := _cached(hub, ["*.json"])) else ():
        if _is_complete(folder, component):
            return folder
    if not fetch:
        raise NotFetched(f"{hub} is not downloaded yet; the first stage that needs it downloads it")
    try:
        files = HfApi().list_repo_files(hub)
        nested = any(name.startswith(f"{below}/") for name in files)
        chosen = [name for name in files if name.startswith(f"{below}/")] if nested else _at_the_top(files, component)
        copy = _fetched(hub, chosen) if chosen else None
    except large_files.Refused:
        raise
    except (errors.HTTPError, OSError, ValueError) as error:
        raise ValueError(_explain(hub, family, error, manual, setting)) from None
    if copy is None or not _is_complete(copy / below if nested else copy, component):
        wanted = "a tokenizer.json" if component == TOKENIZER else "a config.json beside .safetensors files"
        raise ValueError(
            f"{setting}: {hub} has neither {below}/ nor {wanted} at its top; "
            "download the file that you want with `hf download`, and give its path"
        )
    return copy / below if nested else copy


def _at_the_top(files: Iterable[str], component: str) -> list[str]:
    """The files of a component in a repository that holds nothing else."""
    suffixes = TEXT_SUFFIXES if component == TOKENIZER else (*TEXT_SUFFIXES, ".safetensors")
    return [name for name in files if "/" not in name and name.endswith(suffixes)]


def _cached(hub: str, patterns: list[str]) -> Path | None:
    """The cached copy, in which files may be missing, or None."""
    from huggingface_hub import errors, snapshot_download

    with suppress(errors.LocalEntryNotFoundError):
        return Path(snapshot_download(hub, allow_patterns=patterns, local_files_only=True))
    return None


def _fetched(hub: str, patterns: list[str]) -> Path:
    """Raises large_files.Refused, and the errors of the hub client unchanged."""
    from huggingface_hub import constants, snapshot_download

    large_files.fetch_large_files(hub, patterns)
    before = _blobs(Path(constants.HF_HUB_CACHE), hub)
    copy = Path(snapshot_download(hub, allow_patterns=patterns))
    _check_digests(copy, before)
    return copy


def _blobs(cache: Path, hub: str) -> set[Path]:
    folder = cache / f"models--{hub.replace('/', '--')}" / "blobs"
    return set(folder.iterdir()) if folder.is_dir() else set()


def _check_digests(copy: Path, before: set[Path]) -> None:
    """Check the files that are not in `before`; remove the first damaged one. Raises large_files.Damaged."""
    # The hub client compares sizes only. It names a large file by its sha256.
    for path in sorted(copy.rglob("*")):
        blob = path.resolve()
        if not path.is_file() or blob in before or not large_files.SHA256.fullmatch(blob.name):
            continue
        found = file_sha256(blob)
        if found != blob.name:
            path.unlink()
            blob.unlink(missing_ok=True)
            raise large_files.Damaged(f"{path.relative_to(copy)}", found, blob.name)


def _incomplete(copy: Path, components: list[str], family: ModelFamily) -> list[str]:
    """Components that are not completely downloaded, by folder ("vae/") if they have one."""
    folders = {component: family.folders[component] for component in components}
    return [f"{name}/" if name else each for each, name in folders.items() if not _is_complete(copy / name, each)]


def _is_complete(folder: Path, component: str) -> bool:
    if component == TOKENIZER:
        return any((folder / name).is_file() for name in ("tokenizer.json", "merges.txt"))
    if (folder / "pytorch_model.bin").is_file() and (folder / "config.json").is_file():
        return True
    try:
        found = weight_files(folder)
    except ValueError:  # there are no weights yet, or not all shards that the index names
        return False
    shards = [shard for file in found if (shard := SHARD.search(file.name))]  # the index itself may be missing
    return (folder / "config.json").is_file() and all(len(found) == int(shard[1]) for shard in shards)


def _manual_download(hub: str, family: ModelFamily) -> str:
    # All components: one folder must serve every stage.
    patterns = " ".join(f"--include '{pattern}'" for component in family.folders for pattern in family.patterns(component))
    return (
        f"on a machine with a network, run `hf download {hub} {patterns} --local-dir FOLDER`, "
        'then set weights = "FOLDER" in project.toml'
    )


def _explain(hub: str, family: ModelFamily, error: Exception, manual: str, setting: str = "[project] weights") -> str:
    """A failed download in one line: what failed, and what the user can do."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{hub}"
    if isinstance(error, errors.GatedRepoError) or (family.gated and _status_code(error) in (401, 403)):
        return f"{hub} is gated ({family.licence} licence): accept the licence at {page}, then run `hf auth login` and try again"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no repository {hub}, or it is private: check {setting}, or give a folder that exists"
    if "Timeout" in type(error).__name__:
        waited = f"{constants.HF_HUB_DOWNLOAD_TIMEOUT} s (HF_HUB_DOWNLOAD_TIMEOUT)"
        again = "run the command again, what has arrived is kept"
        return f"{hub} sent nothing for {waited}: {again}, or {manual}"
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return f"{hub} cannot be written to {constants.HF_HUB_CACHE}: {error.strerror}; free space there, or set HF_HOME"
    return f"{hub} cannot be reached: {manual}"


def _status_code(error: Exception) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0))
