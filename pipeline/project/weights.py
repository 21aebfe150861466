"""Finds the weights of a project's components: a folder of the user, the Hugging Face hub, the checkout, or generated ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeline.project.recipe import TENSOR_SUFFIXES, TEXT_SUFFIXES
from pipeline.store.disk import DiskError, atomic_folder, delete_abandoned, require_room, stamp
from pipeline.store.lock import locked
from stages.bundled import CHECKOUT
from stages.hashing import file_sha256
from stages.models import gguf
from stages.models.family import TOKENIZER, Family, ModelFamily
from stages.models.folders import locate
from stages.models.weights import read_header, recognise, weight_files
from stages.settings import setting_path
from stages.untrusted import read_json

if TYPE_CHECKING:
    from pipeline.project.config import ProjectConfig

SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.(safetensors|gguf)")  # model-00001-of-00002.safetensors
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")


class NotFetched(ValueError):  # noqa: N818  (no mistake of the user: the first stage that needs the weights fetches them)
    """Raised if weights are not on this machine yet and may not be downloaded or generated."""


class Refused(ValueError):  # noqa: N818  (its message is for the user as it is)
    """Raised if another process is downloading from the same repository, or if a file arrived damaged."""


def find(settings: ProjectConfig, project: Path, family: ModelFamily, name: str, *, fetch: bool, key: str = "") -> Path:
    """The folder or file of a component's weights, fetched or generated if `fetch` allows it, else NotFetched. `key`: the
    setting that `components` comes from, for messages.
    """
    given = (settings.components or {}).get(name)
    if given is None:
        return locate(resolve(settings.weights, project, family, (name,), fetch=fetch), name, family)
    key = key or f"project.components.{name}"
    path = setting_path(given, project)
    if not given or not path.exists():
        if not given or not HUB_ID.fullmatch(given):
            raise ValueError(f"{key} must be a folder, a file or a hub id (org/name), got {given!r}: {path} does not exist")
        path = _downloaded_component(given, family, name, key, fetch)
    found = path if path.is_file() or _holds(path, name) else locate(path, name, family)
    if name != TOKENIZER and isinstance(family, Family):
        shapes = {tensor: shape for file in weight_files(found) for tensor, shape, *_ in tensors(file)}
        # Weights that are not recognised pass: loading them reports each wrong tensor.
        kind = recognise(shapes, family)
        if kind and kind != name:
            raise ValueError(f"{key} must be the {name.replace('_', ' ')}, got {found}: it holds the {kind.replace('_', ' ')}")
    return found


def _holds(folder: Path, name: str) -> bool:
    if name == TOKENIZER:
        return _is_complete(folder, name)
    return (folder / "config.json").is_file() and any(path.suffix in TENSOR_SUFFIXES for path in folder.iterdir())


def tensors(file: Path) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    """(name, shape, dtype, bytes) of every tensor in a file."""
    if file.suffix == gguf.SUFFIX:
        for name, entry in gguf.read_entries(file).items():
            yield name, entry.shape, entry.kind.name, entry.size
        return
    for name, tensor in read_header(file).items():
        begin, end = tensor["data_offsets"]
        yield name, tuple(tensor["shape"]), str(tensor["dtype"]), end - begin


def resolve(
    spec: str, project: Path, family: ModelFamily, components: Iterable[str] | None = None, *, fetch: bool = True
) -> Path:
    """The folder of weights; `components` (None: all) are fetched, checked. `spec`: folder or hub id, "": the family's own."""
    wanted = list(family.folders if components is None else components)
    if not spec and family.bundled:
        return _bundled(family, wanted)
    if not spec and family.seeded is not None:
        return _generated(project / "weights" / family.name, family, family.seeded, fetch)
    hub = spec or family.hub
    if not hub:
        raise ValueError(f"[project] weights must be a folder: no weights are published for {family.name}")
    folder = setting_path(hub, project)
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
        own = folder / family.folders[component]
        try:
            for name in family.required[component]:
                if not (own / name).is_file():
                    raise ValueError(f"{own / name} is missing")
            for file in own.glob("[!.]*.json"):
                try:
                    _parse(file, stamp(file))
                except (ValueError, OSError):
                    raise ValueError(f"{file} is damaged: not valid JSON") from None
            for file in () if component == TOKENIZER else weight_files(own):
                read_header(file)
        except ValueError as error:
            problem = str(error).removesuffix("; fetch it again").replace(f"{CHECKOUT}/", "")
            remedy = f"it is part of the checkout; run `git checkout {family.bundled}` in {CHECKOUT} to restore it"
            raise ValueError(f"{problem}: {remedy}") from None
    return folder


@cache
def _parse(file: Path, state: tuple[int, int, int]) -> None:
    """Once per state of the file: a tokenizer takes 10 ms. Raises ValueError."""
    read_json(file)


# Weights that the project generates


def _generated(folder: Path, family: ModelFamily, seed: int, allowed: bool) -> Path:
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
    patterns = [pattern for component in components for pattern in family.patterns(component)] + ["*.json"]
    if (cached := _cached(hub, patterns)) and not _incomplete(cached, components, family):
        return cached
    if not fetch:
        names = ", ".join(family.folders[each] or each for each in components)
        raise NotFetched(f"{names} of {hub} is not downloaded yet; the first stage that needs it downloads it")
    # All components: one folder must serve every stage.
    every = " ".join(f"--include '{pattern}'" for component in family.folders for pattern in family.patterns(component))
    manual = (
        f"on a machine with a network, run `hf download {hub} {every} --local-dir FOLDER`, "
        'then set weights = "FOLDER" in project.toml'
    )
    copy = _fetched(hub, lambda: patterns, family, "[project] weights", manual)
    assert copy is not None
    if missing := _incomplete(copy, components, family):  # without a network the client returns an incomplete cache
        raise ValueError(f"the download of {hub} lacks {', '.join(missing)}: {manual}")
    return copy


def _downloaded_component(hub: str, family: ModelFamily, component: str, setting: str, fetch: bool) -> Path:
    """The folder of one component in a hub repository of a whole model or of it alone; messages name `setting`."""
    from huggingface_hub import HfApi

    below = family.folders[component]
    for folder in (found / below, found) if (found := _cached(hub, ["*.json"])) else ():
        if _is_complete(folder, component):
            return folder
    if not fetch:
        raise NotFetched(f"{hub} is not downloaded yet; the first stage that needs it downloads it")
    suffixes = TEXT_SUFFIXES if component == TOKENIZER else (*TEXT_SUFFIXES, ".safetensors")

    def choose() -> list[str]:
        files = HfApi().list_repo_files(hub)
        nested = [name for name in files if name.startswith(f"{below}/")]
        if component == TOKENIZER:  # weights may lie beside it
            nested = [name for name in nested if name.endswith(suffixes)]
        return nested or [name for name in files if "/" not in name and name.endswith(suffixes)]

    manual = f"on a machine with a network, run `hf download {hub} --local-dir FOLDER`, then set {setting} to FOLDER"
    copy = _fetched(hub, choose, family, setting, manual)
    for folder in (copy / below, copy) if copy else ():
        if _is_complete(folder, component):
            return folder
    wanted = "a tokenizer.json" if component == TOKENIZER else "a config.json beside .safetensors files"
    raise ValueError(
        f"{setting}: {hub} has neither {below}/ nor {wanted} at its top; "
        "download the file that you want with `hf download`, and give its path"
    )


def cache_name(hub: str) -> str:
    return f"models--{hub.replace('/', '--')}"


def cache_folder(hub: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / cache_name(hub)


def _cached(hub: str, patterns: list[str]) -> Path | None:
    """The cached copy, in which files may be missing, or None."""
    from huggingface_hub import errors, snapshot_download

    with suppress(errors.LocalEntryNotFoundError):
        return Path(snapshot_download(hub, allow_patterns=patterns, local_files_only=True))
    return None


def _fetched(hub: str, choose: Callable[[], list[str]], family: ModelFamily, setting: str, manual: str) -> Path | None:
    """The cached copy, with the files that match the patterns of `choose`; None if it finds none."""
    from huggingface_hub import errors, snapshot_download

    try:
        if not (patterns := choose()):
            return None
        _fetch_large_files(hub, patterns)
        blobs = cache_folder(hub) / "blobs"
        before = set(blobs.iterdir()) if blobs.is_dir() else set()
        copy = Path(snapshot_download(hub, allow_patterns=patterns))
        # The hub client compares sizes only. It names a large file by its sha256.
        for path in sorted(copy.rglob("*")):
            blob = path.resolve()
            if path.is_file() and blob not in before and SHA256.fullmatch(blob.name):
                _check_digest(f"{path.relative_to(copy)}", blob.name, blob, path)
        return copy
    except (Refused, DiskError):
        raise
    except (errors.HTTPError, OSError, ValueError) as error:
        raise ValueError(_explain(hub, family, error, setting, manual)) from None


def _check_digest(name: str, wanted: str, content: Path, *links: Path) -> None:
    """Raises Refused for damaged content, and removes it, with the links to it."""
    found = file_sha256(content)
    if found != wanted:
        for path in (*links, content):
            path.unlink(missing_ok=True)
        raise Refused(
            f"{name} arrived damaged: its sha256 is {found[:12]}..., the hub says {wanted[:12]}...; "
            "it is removed, run the command again to fetch it"
        )


def _incomplete(copy: Path, components: list[str], family: ModelFamily) -> list[str]:
    folders = {component: family.folders[component] for component in components}
    return [f"{name}/" if name else each for each, name in folders.items() if not _is_complete(copy / name, each)]


def _is_complete(folder: Path, component: str) -> bool:
    if component == TOKENIZER:
        return (folder / "tokenizer.json").is_file()
    if (folder / "pytorch_model.bin").is_file() and (folder / "config.json").is_file():
        return True
    try:
        found = weight_files(folder)
    except ValueError:  # there are no weights yet, or not all shards that the index names
        return False
    shards = [shard for file in found if (shard := SHARD.fullmatch(file.name))]  # the index itself may be missing
    return (folder / "config.json").is_file() and all(len(found) == int(shard[2]) for shard in shards)


def _explain(hub: str, family: ModelFamily, error: Exception, setting: str, manual: str) -> str:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{hub}"
    status = int(getattr(getattr(error, "response", None), "status_code", 0))
    if isinstance(error, errors.GatedRepoError) or (family.gated and status in (401, 403)):
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


# Large files of a hub repository
#
# If a download ends early, the hub client deletes the bytes that have arrived. They are kept here, in the hub's cache, and a
# later command fetches only the rest. After its sha256 was compared with the hub's, a complete file gets the name that the
# client looks for.

LARGE = 20_000_000  # bytes; smaller files are left to the hub client
AT_ONCE = 4  # files that are fetched at the same time
PARTIAL = ".latentmill.incomplete"


@dataclass(frozen=True)
class LargeFile:
    name: str  # path in the repository
    size: int  # bytes
    blob: Path  # where its content will lie in the cache
    url: str

    @property
    def partial(self) -> Path:
        return self.blob.with_name(self.blob.name + PARTIAL)

    @property
    def arrived(self) -> int:
        return self.partial.stat().st_size if self.partial.is_file() else 0


def _fetch_large_files(hub: str, patterns: Sequence[str]) -> None:
    """Fetch into the hub's cache. Raises Refused, and the errors of the hub client."""
    from huggingface_hub import constants
    from huggingface_hub.utils import tqdm

    cache, name = Path(constants.HF_HUB_CACHE), cache_name(hub)
    files = _absent(hub, patterns, cache / name / "blobs")
    if not files:
        return
    for folder in (cache / name / "blobs", cache / ".locks" / name):
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(cache / ".locks" / name / "latentmill.lock"))
        except ValueError:
            raise Refused(f"{hub} is being downloaded by another process: wait for it or stop it") from None
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        total, done = sum(file.size for file in files), sum(file.arrived for file in files)
        require_room(hub, [(cache, total - done)])
        bar = stack.enter_context(tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=f"{hub}, {len(files)} files"))
        for fetched in [pool.submit(_fetch, file, bar) for file in files]:
            fetched.result()


def _absent(hub: str, patterns: Sequence[str], blobs: Path) -> list[LargeFile]:
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url, snapshot_download

    found: list[LargeFile] = []
    try:
        listed = snapshot_download(hub, allow_patterns=list(patterns), dry_run=True)
    except (errors.HTTPError, OSError, ValueError):  # the client's own download tells the user what is wrong
        return []
    for each in listed:
        if not each.will_download or not LARGE <= (each.file_size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            continue
        url = hf_hub_url(hub, each.filename, revision=each.commit_hash)
        about = get_hf_file_metadata(url)
        if about.size and SHA256.fullmatch(about.etag or ""):
            found.append(LargeFile(each.filename, about.size, blobs / about.etag, url))
    return found


def _fetch(file: LargeFile, bar: Any) -> None:
    from huggingface_hub import errors, get_hf_file_metadata
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    class Part:
        """In place of the client's progress bar of one file: counts on the bar of all files."""

        def __init__(self, **_: Any) -> None:
            self.update = bar.update

        def __enter__(self) -> Part:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    if file.arrived > file.size:
        file.partial.unlink()
    before = -1
    # A round that brings no bytes raises its error.
    while file.arrived > before:
        before = file.arrived
        address, headers = get_hf_file_metadata(file.url).location, build_hf_headers()
        if urlsplit(address).netloc != urlsplit(file.url).netloc:  # another host must not see the user's token
            headers.pop("authorization", None)
        try:
            with file.partial.open("r+b" if before else "wb") as out:
                out.seek(before)
                http_get(address, out, headers=headers, resume_size=before, expected_size=file.size, tqdm_class=Part)
            break
        except errors.HfHubHTTPError:  # the address of the content holds for about an hour
            if file.arrived == before:
                raise
    _check_digest(file.name, file.blob.name, file.partial)
    file.partial.replace(file.blob)
