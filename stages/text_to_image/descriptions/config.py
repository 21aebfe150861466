"""The settings of the stage `descriptions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from stages.settings import check_bounds, runtime, selects, setting

LOCAL = ("localhost", "127.0.0.1", "::1")
PROMPT = (
    "Describe this picture in one or two plain sentences for training an image model: the subject, what it does, the background, "
    "the light. Begin with the subject. Do not write that it is a picture."
)


@dataclass(frozen=True)
class DescriptionsConfig:
    """The section [descriptions]: which model writes captions, and how. Raises ValueError if `server` is on another machine."""

    model: str = setting(
        "",
        "folder of a vision-language model that transformers loads, relative to the project, or the name of a model of the "
        "server; empty: no captions are written",
        path=True,
    )
    server: str = setting(
        "", 'address of an OpenAI-compatible server on this machine, such as "http://localhost:1234/v1"; empty: no server'
    )
    prompt: str = setting(PROMPT, "instruction to the model")
    most_tokens: int = setting(160, "length at which a caption is cut, tokens", bounds=(1, 4096))
    side: int = setting(
        768, "longer side of the picture that the model sees, pixels; larger pictures are reduced", bounds=(32, 4096)
    )
    timeout: float = runtime(120.0, "seconds that one caption may take on a server", bounds=(0.01, 86_400.0))
    sources: tuple[Literal["sidecar", "metadata", "filename"], ...] | None = selects(
        None, "where captions are looked for; by default as in [captions]", follows="captions.sources"
    )
    extension: str | tuple[str, ...] | None = selects(
        None, "suffix of sidecar files; by default as in [captions]", follows="captions.extension"
    )
    folder: str | None = selects(
        None, "separate folder of sidecars; by default as in [captions]", follows="captions.folder", path=True
    )
    caption_column: str | None = selects(
        None, "column that holds the caption; by default as in [captions]", follows="captions.caption_column"
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.prompt.strip():
            raise ValueError('prompt must be an instruction, such as "Describe this picture", got ""')
        address = urlsplit(self.server)
        if self.server and (address.scheme not in ("http", "https") or address.hostname not in LOCAL):
            near = '"http://localhost:1234/v1"'
            raise ValueError(f'server must be on this machine, such as {near}, got "{self.server}": it gets the pictures')
        if self.server and not self.model:
            raise ValueError('model must be the name of a model of the server, got ""')
