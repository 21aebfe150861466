"""Train the tokenizer: byte-level, without upper case, with identifiers split into words.

The tokenizer normalises its input itself, so the input is raw code or a raw query. For example, `parseHTTPHeader(self,
x_y=1)` is read as `parse http header self x y 1`. Words end where the case changes and at underscores. Upper case becomes
lower case. The signs `_ . , : ; ( ) = ' "` are dropped, and runs of white space become one space. Other signs stay. Equal
texts in equal order give equal files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ("<pad>", "</s>", "<unk>")  # numbers 0, 1, 2 as in T5
HUMP = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
DROPPED = r"(?:[\s_.,:;()'\"`]|(?<![=!<>+\-*/%&|^@~])=(?!=))+"  # a single = too, but neither == nor +=
CUT = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
LONGEST = 512  # tokens; a project chooses shorter queries and documents


def train(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a tokenizer on `texts` and return it. `size` is its number of tokens, including special ones. It ends each text
    with `</s>`.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(Regex(HUMP), " "),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(DROPPED), " "),
            normalizers.Strip(),
            normalizers.Prepend(" "),  # the first word is cut like the others
        ]
    )
    cut = pre_tokenizers.Split(Regex(CUT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=20,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(tokenizer.to_str(pretty=False))
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": LONGEST,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
