"""Downloads the large files of a hub repository, and continues interrupted downloads.

If a download ends early, the hub client deletes the bytes that have arrived. They are kept here, in the hub's cache, and a
later command fetches only the rest. After its sha256 was compared with the hub's, a complete file gets the name that the
client looks for.
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
    """Raised if another process is downloading from the same repository, or if a file is damaged."""


class Damaged(Refused):
    """Raised if a downloaded file has another sha256 than the hub says."""

    def __init__(self, name: str, found: str, wanted: str) -> None:
        super().__init__(
            f"{name} arrived damaged: its sha256 is {found[:12]}..., the hub says {wanted[:12]}...; "
            "it is removed, run the command again to fetch it"
        )


@dataclass(frozen=True)
class LargeFile:
    """A large file of a hub repository that the cache does not have yet."""

    name: str  # path in the repository
    size: int  # bytes
    blob: Path  # where its content will lie in the cache
    url: str

    @property
    def partial(self) -> Path:
        return self.blob.with_name(self.blob.name + SUFFIX)

    @property
    def arrived(self) -> int:
        """Bytes that earlier downloads have left."""
        return self.partial.stat().st_size if self.partial.is_file() else 0


def fetch_large_files(hub: str, patterns: Sequence[str]) -> None:
    """Fetch into the hub's cache. Raises Damaged, Refused, and the errors of the hub client."""
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
    from huggingface_hub.utils import tqdm

    total, done = sum(file.size for file in files), sum(file.arrived for file in files)
    return tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=f"{hub}, {len(files)} files")


def _fetch(file: LargeFile, bar: Any) -> None:
    from huggingface_hub import errors
    from huggingface_hub.file_download import http_get

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
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.utils import build_hf_headers

    address, headers = get_hf_file_metadata(file.url).location, build_hf_headers()
    if urlsplit(address).netloc != urlsplit(file.url).netloc:  # another host must not see the user's token
        headers.pop("authorization", None)
    return {"url": address, "headers": headers}
