"""Reads and writes T5 retrievers: folders of transformers, with the projection head beside the encoder.

The head is in 1_Dense or 2_Dense, as sentence-transformers and PyLate write it, with model.safetensors or pytorch_model.bin.
Weights of a decoder are left out. A matrix may be stored in 8 bits: int8 under its own name, and beside it "<name>_scale" with
one factor per row.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.kernels import Arrays
from stages.models.family import RetrieverArchitecture
from stages.models.folders import read_config
from stages.models.random_model import uniform, write_json, write_word_tokenizer
from stages.models.t5.model import BIAS, EMBEDDING, HEAD, T5, T5Config
from stages.models.weights import check_shapes, evaluate_each, read_tensors

DENSE = ("1_Dense", "2_Dense")  # folders of the head; PyLate writes the first, Google's XTR the second
TIED = "encoder.embed_tokens.weight"  # another name of the embedding
DECODER = ("decoder.", "lm_head.weight")


def read_sizes(folder: Path, dimensions: int = 128) -> T5Config:
    """`dimensions`: of a folder without a head. Raises ValueError if config.json is missing or is that of another model."""
    config = read_config(folder)
    if not config:
        raise ValueError(f"{folder} has no config.json: a T5 encoder in the layout of transformers is needed")
    head = find_head(folder)
    return T5Config.from_dict(config, _read_head(head).shape[0] if head else dimensions)


def load_encoder(folder: Path, dtype: mx.Dtype | None = None, head_seed: int | None = None, dimensions: int = 128) -> T5:
    """`dtype` None is float32. A missing head is drawn from `head_seed` (ValueError without), with `dimensions` outputs."""
    config = read_sizes(folder, dimensions)
    return T5(config, load_weights(folder, config, dtype or mx.float32, head_seed))


def load_weights(folder: Path, config: T5Config, dtype: mx.Dtype = mx.float32, head_seed: int | None = None) -> Arrays:
    """Weights by name, checked against `config`. A missing head is drawn from `head_seed`; without a seed it is a ValueError."""
    pickled = folder / "pytorch_model.bin"
    stored = read_torch_file(pickled) if pickled.is_file() and not any(folder.glob("*.safetensors")) else read_tensors(folder)
    if EMBEDDING in stored:
        stored.pop(TIED, None)
    arrays = {EMBEDDING if key == TIED else key: stored[key] for key in stored if not key.startswith(DECODER)}
    check_shapes(arrays, config.encoder_shapes(), folder)
    arrays[HEAD] = _load_head(folder, config, head_seed)
    return evaluate_each({name: arrays.pop(name) for name in config.shapes()}, dtype)


def find_head(folder: Path) -> Path | None:
    files = (folder / dense / name for dense in DENSE for name in ("model.safetensors", "pytorch_model.bin"))
    return next((file for file in files if file.is_file()), None)


def _read_head(file: Path) -> mx.array:
    arrays = read_tensors(file) if file.suffix == ".safetensors" else read_torch_file(file)
    if set(arrays) != {"linear.weight"}:
        raise ValueError(f"{file} must hold linear.weight and nothing else, got {', '.join(sorted(arrays))}")
    if arrays["linear.weight"].ndim != 2:
        raise ValueError(f"linear.weight in {file} must be a matrix (outputs, inputs), got shape {arrays['linear.weight'].shape}")
    return arrays["linear.weight"]


def _load_head(folder: Path, config: T5Config, seed: int | None) -> mx.array:
    file, shape = find_head(folder), (config.dimensions, config.d_model)
    if file:
        check_shapes({HEAD: (weight := _read_head(file))}, {HEAD: shape}, file)
        dense = read_config(file.parent)
        activation = str(dense.get("activation_function", "torch.nn.modules.linear.Identity"))
        if dense.get("bias") or not activation.endswith("Identity"):
            raise ValueError(f"the head in {file.parent} must have no bias and no activation: see its config.json")
        return weight
    if seed is None:
        raise ValueError(f"{folder} has no projection head: looked for {' and '.join(f'{dense}/' for dense in DENSE)}")
    # PyTorch's default for a Linear.
    bound = config.d_model**-0.5
    drawn = np.random.Generator(np.random.Philox(key=seed)).uniform(-bound, bound, shape)
    return mx.array(drawn.astype(np.float32))


STORAGES = {"FloatStorage": np.float32, "HalfStorage": np.float16}
# What a damaged archive or pickle raises; RuntimeError for an archive that is encrypted.
DAMAGE: tuple[type[Exception], ...] = (zipfile.BadZipFile, zlib.error, struct.error, pickle.UnpicklingError, EOFError)
DAMAGE += (ImportError, MemoryError, RuntimeError, StopIteration, LookupError, ValueError, ArithmeticError)
DAMAGE += (AttributeError, TypeError)


class _Reader(pickle.Unpickler):
    """Unpickles a dict of tensors as NumPy arrays. Raises UnpicklingError for a name that such a dict does not need."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(archive.open(f"{folder}/data.pkl"))
        self.archive, self.folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in STORAGES:
            return name
        # Any other name could run code.
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, storage, key, _, count = pid
        data = self.archive.read(f"{self.folder}/data/{key}")
        return np.frombuffer(data, STORAGES[storage], count)


def _rebuild(storage: np.ndarray, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> np.ndarray:
    contiguous = tuple(int(np.prod(size[n + 1 :], dtype=np.int64)) for n in range(len(size)))
    if tuple(stride) != contiguous:
        raise pickle.UnpicklingError("a tensor in it is not contiguous")
    count = int(np.prod(size, dtype=np.int64))
    return storage[offset : offset + count].reshape(size)


def read_torch_file(path: Path) -> dict[str, mx.array]:
    """As float32. Raises ValueError if the file is damaged or holds anything but float32 and float16 tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            folder = next(name.rsplit("/", 1)[0] for name in archive.namelist() if name.endswith("/data.pkl"))
            found = _Reader(archive, folder).load()
        return {str(name): mx.array(np.asarray(value, np.float32)) for name, value in found.items()}
    except DAMAGE as error:
        raise ValueError(f"{path} is not a file of tensors that PyTorch saved: {error or 'it is damaged'}") from None


PACKAGE = "sentence_transformers"
MODULES = (  # folder -> class of the module
    ("", f"{PACKAGE}.base.modules.transformer.Transformer"),
    ("1_Dense", f"{PACKAGE}.base.modules.dense.Dense"),
    ("2_Normalize", f"{PACKAGE}.base.modules.normalize.Normalize"),
    ("3_MultiVectorMask", f"{PACKAGE}.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"),
)


def write_model(
    folder: Path, config: T5Config, weights: Mapping[str, mx.array], settings: Mapping[str, Any] | None = None
) -> None:
    """Writes all but the tokenizer's files. `settings` are added to those of the module `Transformer`, such as "query_length"."""
    check_shapes(weights, config.shapes(), "the model to write")
    folder.mkdir(parents=True, exist_ok=True)
    encoder = {name: mx.contiguous(weights[name]) for name in config.encoder_shapes()}
    mx.save_safetensors(str(folder / "model.safetensors"), encoder, {"format": "pt"})
    write_json(folder / "config.json", config.to_dict())
    (folder / "1_Dense").mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "1_Dense" / "model.safetensors"), {"linear.weight": weights[HEAD]}, {"format": "pt"})
    both = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    sizes = {"in_features": config.d_model, "out_features": config.dimensions, "bias": False}
    identity = "torch.nn.modules.linear.Identity"
    text = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    transformer = {"transformer_task": "feature-extraction", "modality_config": text, "module_output_name": "token_embeddings"}
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(MODULES)]
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {**transformer, **(settings or {})})
    write_json(folder / "1_Dense" / "config.json", {**sizes, "activation_function": identity, **both})
    write_json(folder / "2_Normalize" / "config.json", both)
    mask = {"skiplist_words": [], "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    write_json(folder / "3_MultiVectorMask" / "config.json", mask)
    about = {"model_type": "MultiVectorEncoder", "prompts": {"document": "", "query": ""}, "similarity_fn_name": "MaxSim"}
    write_json(folder / "config_sentence_transformers.json", about)


GAIN = 0.5  # of the residual branches of random weights: the token itself stays visible in its state


def write_random_weights(folder: Path, family: Any, seed: int) -> None:
    """A model to test the pipeline: equal words, equal vectors, so scores are no noise. `family.sizes`: config.json's content."""
    config = T5Config.from_dict(family.sizes, family.sizes.get("dimensions", 128))
    weights: Arrays = {}
    for name, shape in config.shapes().items():
        if len(shape) == 1:
            weights[name] = mx.ones(shape)
            continue
        std = 1.0 if name in (EMBEDDING, BIAS, HEAD) else GAIN * shape[1] ** -0.5
        if ".q." in name:
            std *= config.d_kv**-0.5  # T5 has the root of the width in this weight
        weights[name] = mx.array((uniform(name, shape, seed) * 3**0.5 * std).astype(np.float32))
    write_model(folder, config, weights)
    write_word_tokenizer(folder, config.vocab_size)


def is_model(folder: Path) -> bool:
    return read_config(folder).get("model_type") == "t5"


T5_RETRIEVER = RetrieverArchitecture(read_sizes, load_encoder, load_weights, T5, write_model, write_random_weights, is_model)
