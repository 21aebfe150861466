"""`latentmill export` of the pipeline retrieval: writes the trained retriever as a folder that other programs load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click

from pipeline.commands.adapters import STEP, adapter_of, dtype_option, file_name, run_label, which_option
from pipeline.options import with_project
from pipeline.project.project import Project
from pipeline.store.disk import atomic_folder
from pipeline.terminal import Say, say_aside, silent, tell

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model")


@click.command("export")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@dtype_option("float32", "weights")
@STEP
@which_option("highest held-out MRR")
@with_project
def command(out: Path | None, dtype: str, step: int | None, which: str, project: Project) -> None:
    """Write the trained retriever as a folder that other programs can load. OUT is the new folder. Without OUT, it is
    made in exports/ of the project. The folder can be loaded with transformers (T5EncoderModel) and
    sentence-transformers (MultiVectorEncoder).
    """
    tell(f"wrote {export_retriever(project, out, dtype=dtype, step=step, which=which, say=say_aside)}")


def export_retriever(
    project: Project, out: Path | None, *, dtype: str = "float32", step: int | None = None, which: str = "last", say: Say = silent
) -> Path:
    """Write the encoder, the adapter merged in float32 at [vectors] `strength` and rounded once, and its head as a new folder."""
    import mlx.core as mx

    from stages.models.weights import read_file
    from stages.retrieval.encoder import merge_all, read_adapter

    adapter = adapter_of(project, step, say, which)
    trained = read_file(adapter)[1].get("step", "0")
    target = out or project.path / "exports" / Path(file_name(project.name, run_label(project), trained, "merged", which)).stem
    if target.exists():
        raise ValueError(f"{target} exists; move it away or choose another name")
    family: Any = project.family
    strength = project.config.sections["vectors"].strength
    base, architecture = project.component("encoder", fetch=False), family.architecture
    sizes = architecture.sizes(base)
    weights = architecture.load_weights(base, sizes, mx.float32, family.head_seed)
    arrays, scales = read_adapter(adapter, architecture.build_encoder(sizes, weights).linears(), strength)
    merged = {name: value.astype(getattr(mx, dtype)) for name, value in merge_all(weights, arrays, scales).items()}
    tokens: Any = project.config.sections["tokens"]
    settings = {"query_length": tokens.query_tokens, "document_length": tokens.document_tokens}
    settings |= {"do_lower_case": True} if family.lower_case else {}
    with atomic_folder(target) as folder:
        architecture.write_model(folder, sizes, merged, settings)
        _copy_tokenizer(project.component("tokenizer", fetch=False), folder)
    say(f"merged {len(scales)} Linears")
    return target


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    settings = folder / "tokenizer_config.json"
    named = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # T5's; every reader pads with <pad>
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special, **named}, indent=2)
    settings.write_text(text + "\n", encoding="utf-8")
