"""Fetch the large files of a hub repository so that a later command goes on where an interrupted one ended.

The hub client throws away what it has of a file if the download of the file ends early. Here the beginning of a file stays in the
hub's cache. A complete file gets the name that the client looks for, once its sha256 is what the hub says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.store.lock import Lock
from stages.hashing import file_sha256

LARGE = 20_000_000  # bytes; smaller files are left to the hub client
AT_ONCE = 4  # files that are fetched at the same time
SUFFIX = ".latentmill.incomplete"
SHA256 = re.compile(r"[0-9a-f]{64}")


class Refused(ValueError):  # noqa: N818  (its message is for the user as it is)
    """Raised if a large file cannot be fetched for a reason other than the hub's answers."""


class Damaged(Refused):
    """Raised if a file that was fetched has the sha256 `found`, where the hub says `wanted`. `name` is its path in the
    repository.
    """

    def __init__(self, name: str, found: str, wanted: str) -> None:
        super().__init__(
            f"{name} arrived damaged: its sha256 is {found[:12]}..., the hub says {wanted[:12]}...; "
            "it is removed, run the command again to fetch it"
        )


@dataclass(frozen=True)
class LargeFile:
    """A file of a hub repository that is not in the cache. `name` is its path in the repository, `size` is in bytes. `blob` is
    where the cache keeps its content. `url` is its address at the hub.
    """

    name: str
    size: int
    blob: Path
    url: str

    @property
    def partial(self) -> Path:
        """The path of the beginning of the file, if a download was interrupted."""
        return self.blob.with_name(self.blob.name + SUFFIX)

    @property
    def arrived(self) -> int:
        """The number of bytes that are there already."""
        return self.partial.stat().st_size if self.partial.is_file() else 0


def fetch_large_files(hub: str, patterns: Sequence[str]) -> None:
    """Fetch the large files of a repository into the hub's cache. `hub` is its id, "org/name". `patterns` are glob patterns
    that choose the files. A file that an earlier command has begun is continued.

    Raises Damaged if a file has another sha256 than the hub says; the file is removed. Raises Refused if another process
    fetches files of the repository. Raises the errors of the hub client if a file cannot be fetched.
    """
    from huggingface_hub import constants

    cache, name = Path(constants.HF_HUB_CACHE), f"models--{hub.replace('/', '--')}"
    files = _absent(hub, patterns, cache / name / "blobs")
    if not files:
        return
    for folder in (cache / name / "blobs", cache / ".locks" / name):
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(Lock(cache / ".locks" / name / "latentmill.lock"))
        except ValueError:
            raise Refused(f"{hub} is being downloaded by another process: wait for it or stop it") from None
        pool, bar = stack.enter_context(ThreadPoolExecutor(AT_ONCE)), stack.enter_context(_bar(hub, files))
        for fetched in [pool.submit(_fetch, file, bar) for file in files]:
            fetched.result()


def _absent(hub: str, patterns: Sequence[str], blobs: Path) -> list[LargeFile]:
    """Return the large files of a repository that the cache lacks. `hub`, `patterns` are those of `fetch_large_files`. `blobs`
    is the folder of the repository's contents in the cache.
    """
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


def _bar(hub: str, files: Sequence[LargeFile]) -> Any:
    """Return a progress bar of the hub client over all bytes of `files`. Bytes that are there already count as done."""
    from huggingface_hub.utils import tqdm

    total, done = sum(file.size for file in files), sum(file.arrived for file in files)
    return tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=f"{hub}, {len(files)} files")


def _fetch(file: LargeFile, bar: Any) -> None:
    """Fetch the rest of a file, check its sha256, and give it its place in the cache. `bar` is the progress bar of all files.
    Raises Damaged if the sha256 is not what the hub says; the file is removed.
    """
    from huggingface_hub import errors
    from huggingface_hub.file_download import http_get

    class Part:
        """The progress of this file, as the hub client reports it, added to that of all files."""

        def __init__(self, **_: Any) -> None:
            self.update = bar.update

        def __enter__(self) -> Part:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    if file.arrived > file.size:
        file.partial.unlink()
    before = -1
    while file.arrived > before:
        before = file.arrived
        try:
            with file.partial.open("r+b" if before else "wb") as out:
                out.seek(before)
                http_get(**_place(file), temp_file=out, resume_size=before, expected_size=file.size, tqdm_class=Part)
            break
        except errors.HfHubHTTPError:  # the address of the content holds for about an hour
            if file.arrived == before:
                raise
    found = file_sha256(file.partial)
    if found != file.blob.name:
        file.partial.unlink()
        raise Damaged(file.name, found, file.blob.name)
    file.partial.replace(file.blob)


def _place(file: LargeFile) -> dict[str, Any]:
    """Return the present address of a file's content as "url", and the "headers" of a request for it."""
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.utils import build_hf_headers

    address, headers = get_hf_file_metadata(file.url).location, build_hf_headers()
    if urlsplit(address).netloc != urlsplit(file.url).netloc:  # another host must not see the user's token
        headers.pop("authorization", None)
    return {"url": address, "headers": headers}
