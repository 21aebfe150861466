"""Reads ColBERT models on ModernBERT, in folders as PyLate writes them: projections in 1_Dense, 2_Dense, ..., and in
config_sentence_transformers.json how queries and documents are read.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.kernels import Arrays
from stages.models.family import Reading, RetrieverArchitecture
from stages.models.folders import open_tokenizer, read_config, read_object
from stages.models.modernbert.model import ModernBert, ModernBertConfig
from stages.models.weights import check_shapes, evaluate_each, read_tensors

SETTINGS = "config_sentence_transformers.json"
EXPANSIONS = ("mask_token", "eos_token", "pad_token")  # what fills queries up: the first that the tokenizer has
OTHERS = ("head.", "decoder.", "classifier.")  # weights of a masked language model that are not its encoder's


def is_model(folder: Path) -> bool:
    return read_config(folder).get("model_type") == "modernbert"


def read_sizes(folder: Path) -> ModernBertConfig:
    """Raises ValueError if config.json is missing or is that of another model."""
    return ModernBertConfig.from_dict(read_config(folder), tuple(_projection(dense).shape[0] for dense in _dense(folder)))


def load_encoder(folder: Path, dtype: mx.Dtype | None = None, head_seed: int | None = None) -> ModernBert:
    """`dtype` None is float32. `head_seed` is not used: a folder without a projection has token vectors of the model's width."""
    config = read_sizes(folder)
    return ModernBert(config, load_weights(folder, config, dtype or mx.float32))


def load_weights(folder: Path, config: ModernBertConfig, dtype: mx.Dtype = mx.float32, head_seed: int | None = None) -> Arrays:
    stored = {name.removeprefix("model."): value for name, value in read_tensors(folder).items()}
    arrays = {name: value for name, value in stored.items() if not name.startswith(OTHERS)}
    check_shapes(arrays, config.encoder_shapes(), folder)
    head = {f"head.{n}.weight": _projection(dense) for n, dense in enumerate(_dense(folder))}
    check_shapes(head, config.projection_shapes(), folder)
    return evaluate_each({**arrays, **head}, dtype)


def _dense(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("*_Dense") if path.is_dir()), key=lambda path: int(path.name.partition("_")[0]))


def _projection(folder: Path) -> mx.array:
    """(outputs, inputs), what PyLate adds as a residual included."""
    about, file = read_config(folder), folder / "model.safetensors"
    activation = str(about.get("activation_function", "torch.nn.modules.linear.Identity"))
    if about.get("bias") or not activation.endswith("Identity"):
        raise ValueError(f"the projection in {folder} must have no bias and no activation: see its config.json")
    arrays = read_tensors(file)
    if not {"linear.weight"} <= set(arrays) <= {"linear.weight", "residual.weight"} or arrays["linear.weight"].ndim != 2:
        raise ValueError(f"{file} must hold the matrix linear.weight, got {', '.join(sorted(arrays))}")
    weight = arrays["linear.weight"]
    if about.get("use_residual"):
        weight = weight + (arrays["residual.weight"] if "residual.weight" in arrays else mx.eye(weight.shape[0]))
    return weight


def reading(folder: Path) -> Reading:
    """Settings that are missing are PyLate's own. Raises ValueError if a file is missing or a prefix is no token."""
    about, named = read_object(folder / SETTINGS), read_object(folder / "tokenizer_config.json")
    tokenizer = open_tokenizer(folder / "tokenizer.json")

    def special(name: str) -> int | None:
        token = named.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        return tokenizer.token_to_id(text) if isinstance(text, str) else None

    def prefix(name: str, default: str) -> int | None:
        text = default if about.get(name) is None else str(about[name])
        if text and tokenizer.token_to_id(text) is None:
            raise ValueError(f"{folder / SETTINGS}: {name} must be a token of tokenizer.json, got {text!r}")
        return tokenizer.token_to_id(text) if text else None

    expansion = next((each for name in EXPANSIONS if (each := special(name)) is not None), None)
    words = list(string.punctuation) if about.get("skiplist_words") is None else about["skiplist_words"]
    ids = [tokenizer.token_to_id(str(word)) for word in words]
    # As in PyLate, a word that is no token is the unknown one.
    known = (special("unk_token") if each is None else each for each in ids)
    return Reading(
        end=False,
        query=prefix("query_prefix", "[Q] "),
        document=prefix("document_prefix", "[D] "),
        expansion=expansion if about.get("do_query_expansion") in (True, None) else None,
        attended=bool(about.get("attend_to_expansion_tokens")),
        skipped=frozenset(each for each in known if each is not None),
        query_tokens=int(about.get("query_length") or 32),
        document_tokens=int(about.get("document_length") or 180),
    )


def _refuse(*_: Any) -> None:
    raise ValueError("models of this family are read, not written")


MODERNBERT_RETRIEVER = RetrieverArchitecture(
    read_sizes, load_encoder, load_weights, ModernBert, _refuse, _refuse, is_model, reading
)
