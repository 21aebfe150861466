"""The stage `descriptions`: a vision-language model writes the captions of images that have none.

A caption that exists is never written again: the stage reads caption files only to find out which images have none. Each
caption is a record batch of its own, so a kill loses at most one. The model runs in this process, through transformers, or
behind an OpenAI-compatible server on this machine, such as LM Studio, Ollama, llama.cpp or mlx-vlm.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import pyarrow as pa
from PIL import Image

from schemas.text_to_image import DESCRIPTIONS, IMAGES
from stages.run import Run
from stages.settings import Section, runtime, selects, setting, setting_path
from stages.stage import Stage
from stages.text_to_image.caption_files import CaptionSources, make_lookups
from stages.text_to_image.imaging.decode import BACKGROUND, ImageError, open_image, parse_colour
from stages.text_to_image.imaging.usable import REFERENCE, first_names, usable_paths
from stages.untrusted import parse_json

WANTED = ("image_id", "path", "prompt")
MOST = 1_000_000  # bytes of a server's answer that are read
LOCAL = ("localhost", "127.0.0.1", "::1")
PROMPT = (
    "Describe this picture in one or two plain sentences for training an image model: the subject, what it does, the background, "
    "the light. Begin with the subject. Do not write that it is a picture."
)


@dataclass(frozen=True)
class DescriptionsConfig(Section):
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
    most_tokens: int = setting(160, "length at which a caption is cut, tokens", unit="tokens", bounds=(1, 4096))
    side: int = setting(
        768,
        "longer side of the picture that the model sees, pixels; larger pictures are reduced",
        unit="pixels",
        bounds=(32, 4096),
    )
    background: str | None = setting(
        None,
        "colour behind transparent pixels; by default that of [latents]",
        follows="latents.background",
        unrecorded=(None, BACKGROUND),
    )
    timeout: float = runtime(120.0, "seconds that one caption may take on a server", unit="seconds", bounds=(0.01, 86_400.0))
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

    def check(self) -> None:
        parse_colour(self.background or BACKGROUND)
        if not self.prompt.strip():
            raise ValueError('prompt must be an instruction, such as "Describe this picture", got ""')
        address = urlsplit(self.server)
        if self.server and (address.scheme not in ("http", "https") or address.hostname not in LOCAL):
            near = '"http://localhost:1234/v1"'
            raise ValueError(f'server must be on this machine, such as {near}, got "{self.server}": it gets the pictures')
        if self.server and not self.model:
            raise ValueError('model must be the name of a model of the server, got ""')


# The model


class Model(Protocol):
    """`name` and `version` are stored with each caption."""

    name: str
    version: str

    def describe(self, image: Image.Image) -> str:
        """The caption of a picture in mode RGB."""


class LocalModel:
    """Downloads nothing. Raises ValueError if the folder, a library or the vision-language model in it is missing."""

    def __init__(self, config: DescriptionsConfig, project: Path) -> None:
        folder = setting_path(config.model, project)
        if not (folder / "config.json").is_file():
            raise ValueError(
                f'descriptions.model must be a folder with a vision-language model, got "{config.model}": there is no file '
                f"{folder / 'config.json'}; or set descriptions.server"
            )
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ValueError(
                f"[descriptions] needs the Python package {error.name}: pip install 'latentmill[describe]'"
            ) from None
        safe = {
            "local_files_only": True,
            "trust_remote_code": False,
        }  # without it, transformers asks whether to run a model's code
        try:
            self.processor: Any = transformers.AutoProcessor.from_pretrained(folder, **safe)
            model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, **safe)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f'descriptions.model "{config.model}" holds no vision-language model: {reason}') from None
        self.torch, self.config = torch, config
        self.device = "mps" if torch.backends.mps.is_available() else "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.eval().to(self.device)
        self.name, self.version = config.model, f"transformers {transformers.__version__}"

    def describe(self, image: Image.Image) -> str:
        content = [{"type": "image"}, {"type": "text", "text": self.config.prompt}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = self.processor(images=image, text=text, return_tensors="pt").to(self.device)
        with self.torch.inference_mode():
            # Greedy, so that equal images get equal captions.
            made = self.model.generate(**inputs, max_new_tokens=self.config.most_tokens, do_sample=False)
        # What is generated begins with the prompt.
        new = made[:, inputs["input_ids"].shape[1] :]
        caption: str = self.processor.batch_decode(new, skip_special_tokens=True)[0]
        return caption


class ServerModel:
    """No request is sent before the first `describe`. `name` and `version` are those of the last answer."""

    def __init__(self, config: DescriptionsConfig) -> None:
        self.config, self.name, self.version = config, config.model, ""
        self.address = f"{config.server.rstrip('/')}/chat/completions"

    def describe(self, image: Image.Image) -> str:
        """Raises ValueError, in one line, if the server cannot be reached, is late, or answers no caption."""
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        content = [{"type": "text", "text": self.config.prompt}, {"type": "image_url", "image_url": {"url": url}}]
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.config.most_tokens,
            "temperature": 0,
        }
        request = urllib.request.Request(self.address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
        try:
            answer = parse_json(self._answer(opener, request), "the answer")
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(200).decode("utf-8", "replace").split())
            raise ValueError(f"{self.address} answered {error.code}: {said or error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None)  # of an URLError: the connection failed
            if isinstance(reason or error, TimeoutError):
                late = f"did not answer within {self.config.timeout:g} seconds"
                raise ValueError(f"{self.address} {late}; raise descriptions.timeout, then run again") from None
            what = f"cannot be reached ({reason})" if reason else f"broke off ({str(error) or type(error).__name__})"
            raise ValueError(f"{self.address} {what}: start the server, then run again") from None
        except ValueError:
            raise ValueError(f"{self.address} must answer JSON") from None
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{self.address} must answer choices with a message, got {json.dumps(answer)[:120]}") from None
        if not isinstance(text, str):
            raise ValueError(f"{self.address} must answer a text, got {json.dumps(text)[:120]}")
        self.name = str(answer.get("model") or self.config.model)
        self.version = str(answer.get("system_fingerprint") or "")
        return text

    def _answer(self, opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> bytes:
        """Raises what `opener` raises, and TimeoutError when the whole answer is late: its timeout is that of each part."""
        done: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

        def ask() -> None:
            try:
                with opener.open(request, timeout=self.config.timeout) as opened:
                    done.put(opened.read(MOST))
            except Exception as error:  # noqa: BLE001  (raised below)
                done.put(error)

        threading.Thread(target=ask, daemon=True).start()
        try:
            found = done.get(timeout=self.config.timeout)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(found, Exception):
            raise found
        return found


# The stage


def wanted_descriptions(run: Run[DescriptionsConfig]) -> pa.Table:
    """One row per usable image for which no file has a caption; none if no model is set."""
    return _wanted(run.once(_without_caption), {row["image_id"]: row["path"] for row in run.output.stored.to_pylist()})


def unanswered(run: Run[DescriptionsConfig]) -> pa.Table:
    """Images for which the model wrote nothing: a server may answer the next time."""
    empty = {row["image_id"]: row["path"] for row in run.output.stored.to_pylist() if not row["text"]}
    return _wanted([row for row in run.once(_without_caption) if row["image_id"] in empty], empty)


def _wanted(rows: list[dict[str, str]], stored: Mapping[str, str]) -> pa.Table:
    # A file that was renamed is not captioned again.
    kept = [row | {"path": stored.get(row["image_id"], row["path"])} for row in rows]
    return DESCRIPTIONS.select(kept, WANTED)


def _without_caption(run: Run[DescriptionsConfig]) -> list[dict[str, str]]:
    if not run.config.model:
        return []
    images, config = run.inputs.rows(IMAGES), run.config
    sources = CaptionSources(config.sources or (), config.extension or (), config.folder or "", config.caption_column or "")
    paths = [row["path"] for row in images.to_pylist() if row["use"] != REFERENCE]
    lookups, _ = make_lookups(run.needs["image_folder"], paths, sources, run.root)
    return [
        {"image_id": image_id, "path": paths[0], "prompt": config.prompt}
        for image_id, paths in usable_paths(images).items()
        if not any(lookup(path) for path in paths for lookup in lookups)
    ]


def describe_images(run: Run[DescriptionsConfig]) -> Iterator[pa.RecordBatch]:
    pending = run.output.pending.to_pylist()
    if not pending:
        if not run.config.model:
            run.report.say("no model is set: set [descriptions] model, and server for a model behind a server")
        return
    config = run.config
    model: Model = run.reuse("describer", lambda: ServerModel(config) if config.server else LocalModel(config, run.root))
    paths = usable_paths(run.inputs.rows(IMAGES))  # the stored path may be that of a file that was renamed since
    for done, row in enumerate(pending):
        if run.report.stop():
            return
        run.report.progress(done, len(pending), "images")
        path = paths[row["image_id"]][0]
        began = time.perf_counter()
        try:
            image = open_image(run.needs["image_folder"] / path, config.background or BACKGROUND)
            image.thumbnail((config.side, config.side), Image.Resampling.LANCZOS)
            text = " ".join(model.describe(image).split())
        except (ValueError, ImageError) as error:
            raise ValueError(f"descriptions: {path}: {error} ({done} of {len(pending)} captions are written)") from None
        facts = {"text": text, "model": model.name, "version": model.version, "seconds": time.perf_counter() - began}
        yield pa.RecordBatch.from_pylist([row | facts], schema=DESCRIPTIONS.batch)
    run.report.progress(len(pending), len(pending), "images")


def finish_descriptions(run: Run[DescriptionsConfig]) -> Iterator[pa.RecordBatch]:
    pending = set(run.output.pending["image_id"].to_pylist())
    if made := [row for row in run.output.stored.to_pylist() if row["image_id"] in pending]:
        empty = [row["path"] for row in made if not row["text"]]
        run.report.say(
            f"{len(made) - len(empty)} captions written; read and change them with: latentmill captions --edit captions.csv"
        )
        if empty:
            run.report.say(
                f"the model wrote nothing for {len(empty)} images, which stay without a caption: {first_names(empty)}; the next "
                "run asks again, another model or prompt may help"
            )
    yield from ()


STAGE = Stage(
    reads=(IMAGES,),
    writes=DESCRIPTIONS,
    unit="picture",
    config=DescriptionsConfig,
    needs=("image_folder",),
    wants=wanted_descriptions,
    redo=unanswered,
    run=describe_images,
    finish=finish_descriptions,
    divisible=False,
)
