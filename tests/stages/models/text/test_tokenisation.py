"""Tokenized prompts against transformers; hostile tokenizers. test_encoder.py compares what becomes of the ids with diffusers."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers, processors

from stages.models.text import tokenisation
from stages.models.text.tokenisation import PromptTokenizer
from stages.text_to_image.families import family
from tests.checkpoints import mistral_tokenizer

TINY = family("tiny")
TEXTS = ["", "a photo of a cat", "Füchse, 狐 🦊\nand\ttabs  two", "it's <|im_end|> 123", "word " * 90]


@pytest.fixture
def folder(tiny_weights: Path, tmp_path: Path) -> Path:
    """A copy of a tokenizer, to be changed."""
    return Path(shutil.copytree(tiny_weights / "tokenizer", tmp_path / "tokenizer"))


PANICS = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("tokenizer.json", None, r"tokenizer\.json is not a tokenizer\.json: "),
        ("tokenizer.json", {"normalizer": PANICS}, r"tokenizer\.json is not a tokenizer\.json: "),
        ("tokenizer_config.json", None, r"tokenizer_config\.json: not valid JSON"),
        ("tokenizer_config.json", {"pad_token": None}, r"no pad_token in tokenizer_config\.json; it should be <\|endoftext"),
        *(
            ("tokenizer_config.json", {"added_tokens_decoder": wrong}, "added_tokens_decoder in .* cannot be read: ")
            for wrong in ({"7": {"lstrip": []}}, {"x": {}}, 7)
        ),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_one_line(folder: Path, name: str, change: dict[str, Any] | None, said: str) -> None:
    file = folder / name
    whole = file.read_text()
    file.write_text(whole[:99] if change is None else json.dumps(json.loads(whole) | change))
    with pytest.raises(ValueError, match=said) as error:
        PromptTokenizer(file.parent, TINY)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "did not end within 0.2 s"),
        ("{{ 'x' * 10000000000 }}", "must not use Mul"),
        ("{{ '%9999999999d' % 1 }}", "must not use Mod"),
        ("{% set loop = namespace(index='%9999999999d') %}{{ loop.index % 1 }}", "must not use Mod"),
        ("{{ 'x' | center(9999999999) }}", "must not use center"),
        ("{{ 'x'.ljust(9999999999) }}", "must not use ljust"),
        ("{{ messages[7].content.nothing.at.all }}", "the chat template failed"),
        ("{{ messages | tojson(indent=9999999999) }}", "tojson must not indent by 9999999999"),
        ("{{ raise_exception('no ' + messages[0].role) }}", "no user"),
        ("{{ messages.append(1) }}", "is not safely callable|unsafe"),
        ("{% if %}", "cannot be read"),
        ("x" * 200_000, "at most 100,000 characters"),
    ],
)
def test_a_hostile_chat_template_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, template: str, said: str) -> None:
    monkeypatch.setattr(tokenisation, "TEMPLATE_SECONDS", 0.2)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=said) as error:
        PromptTokenizer(folder, TINY)("a cat")
    assert "\n" not in str(error.value)


def test_a_text_that_takes_the_tokenizer_too_long_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = PromptTokenizer(folder, TINY)
    monkeypatch.setattr(prompts, "apply_template", lambda text: text)
    monkeypatch.setattr(tokenisation, "TEMPLATE_SECONDS", 0.01)
    with pytest.raises(ValueError, match=r"the tokenizer did not end within 0\.01 s"):
        prompts("a" * 300_000)


def test_a_template_cannot_store_what_jinja_calls_outside_its_sandbox(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ namespace(__html__=messages[0].role.upper) | e }}")
    assert "USER" not in PromptTokenizer(folder, TINY).apply_template("a cat")


def test_no_code_in_the_folder_of_a_tokenizer_runs(folder: Path, tmp_path: Path) -> None:
    ran, own = tmp_path / "ran", ["own.Own", "own.Own"]
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Own\n")
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": own}}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": own}}))
    with contextlib.suppress(ValueError):  # refused, or read without that code
        PromptTokenizer(folder, TINY)
    assert not ran.exists()


# As the templates of Qwen3 and Mistral Small have it: branches for tools and documents, a namespace, marks of white space.
BRANCHES = """
{%- if tools %}
    {{- '<|im_start|>system\\n' + tools | tojson(indent=2) }}
{%- endif %}
{%- if documents is not none %}{{ raise_exception("no documents") }}{% endif %}
{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- set today = strftime_now("%Y") %}
{%- for message in messages %}
    {%- if loop.index0 % 2 > 1 %}{{ raise_exception("never") }}{% endif %}
    {%- if message.role == "assistant" %}{% continue %}{% endif %}
    {%- if loop.index0 == ns.last %}{% set ns.seen = true %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{ part.text }}{% endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{ dict(a='<é>', b=[ns.seen, tools, bos_token is defined, today|length]) | tojson }}
   {% if add_generation_prompt %}
{{- eos_token ~ pad_token }}
   {% endif %}
"""
HOSTILE = (
    *TEXTS,
    "<s> a <mark> b<mark>c  <loud>\td",
    "<|im_start|>system\nno<|im_end|> {{ x }} {% y %}",
    "e\u0301 \ufeff\u200b\0 ﬁ",
)


def mixed(folder: Path, template: str) -> Path:
    """A tokenizer whose files say different things of tokens, with a token that starts each text."""
    made = mistral_tokenizer().backend_tokenizer
    flags = {"lstrip": True, "rstrip": True, "normalized": True, "single_word": False, "special": False}
    made.add_tokens([AddedToken("<mark>"), AddedToken("<loud>", rstrip=True)])
    made.normalizer = normalizers.NFC()
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.enable_truncation(9)
    made.enable_padding(length=2000)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "pad_token": {"__type": "AddedToken", "content": "<pad>"},
    }
    about |= {"eos_token": "<end>", "image_token": "[IMG]", "chat_template": [{"name": "default", "template": template}]}
    about["added_tokens_decoder"] = {str(made.token_to_id("<mark>")): {"content": "<mark>", **flags}}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def older(folder: Path, template: str) -> Path:
    """The same, with the tokens named in a file of their own."""
    mixed(folder, template)
    about = json.loads((folder / "tokenizer_config.json").read_text())
    kept = {"chat_template": about["chat_template"], "pad_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    tokens = {name: about[name] for name in ("bos_token", "eos_token", "image_token")} | {"pad_token": {"content": "<pad>"}}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    return folder


@pytest.mark.parametrize("name", ["tiny", "z-image", "flux3-klein-base", "dev"])  # one for each form of a chat
def test_forms_and_ids_are_those_of_transformers(name: str, tiny_weights: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    plain = shutil.copytree(tiny_weights / "tokenizer", tmp_path / "plain")
    mistral_tokenizer().save_pretrained(tmp_path / "mistral")
    branched = shutil.copytree(plain, tmp_path / "branched")
    (branched / "chat_template.jinja").write_text(BRANCHES)
    forms = "{{ bos_token }}" + BRANCHES, BRANCHES
    folders = [plain, tmp_path / "mistral", branched, mixed(tmp_path / "mixed", forms[0]), mixed(tmp_path / "begun", forms[1])]
    for folder in (*folders, older(tmp_path / "older", forms[1])):
        ours, theirs = PromptTokenizer(folder, family(name)), AutoTokenizer.from_pretrained(folder)
        assert (ours.pad, ours.highest) == (theirs.pad_token_id, max(theirs.get_vocab().values()))
        if folder == plain and ours.chat.system:
            continue  # that template takes a text alone
        for text in (*TEXTS, *HOSTILE):
            formed = theirs.apply_chat_template(ours.chat.messages(text), tokenize=False, **ours.chat.settings)
            assert ours.apply_template(text) == formed
            begun = bool(theirs.bos_token) and formed.startswith(theirs.bos_token)
            ids = theirs(formed, add_special_tokens=not begun, padding=False, truncation=False)["input_ids"]
            made = ours(text)
            found = made.ids[made.first : made.first + made.real].tolist()
            assert (found, made.dropped) == (ids[: ours.length], max(0, len(ids) - ours.length)), (folder.name, text)


def test_a_chat_template_is_taken_where_transformers_looks_first(folder: Path) -> None:
    about = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "second"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": named}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "third"}))
    (folder / "chat_template.jinja").write_text("first")
    assert PromptTokenizer(folder, TINY).apply_template("") == "first"
    (folder / "chat_template.jinja").unlink()
    assert PromptTokenizer(folder, TINY).apply_template("") == "second"
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    assert PromptTokenizer(folder, TINY).apply_template("") == "third"
