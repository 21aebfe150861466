"""The training of retriever-micro at a tiny size: what is extracted, packed, computed and exported."""

import json
import math
import tarfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, T5Config, T5EncoderModel

from data.research.retriever import corpus, export, judge, maxsim, tokenizer, train
from data.research.retriever.batches import END, NAME, Batches, Texts, load
from data.research.retriever.extract import functions, is_query, sentences
from data.research.retriever.model import Encoder, Sizes, buckets
from tests.data.micro.test_training import Clock

TINY = Sizes(pieces=300, width=32, layers=2, heads=2, head=8, inner=24, output=16, dropout=0.0)
SOURCE = '''
class Reader:
    """Read things."""

    def parseHTTPHeader(self, raw_line=None):
        """Split a header line into name and value.

        The name is lower-cased before it is returned. Values keep their case.

        :param raw_line: the line
        """
        name, _, value = raw_line.partition(":")  # at the first colon
        value = value.strip()
        return name.lower(), value

def one_line(): """Say nothing at all here."""; return 1

def read_all_lines(path):
    with open(path) as file:
        lines = file.readlines()
        lines.sort()
        return lines
'''


def many(count: int) -> corpus.Pairs:
    """Return `count` functions that differ, every fifth without a docstring."""
    pairs = corpus.Pairs()
    for n in range(count):
        words = " ".join(f"word{n * k % 97}" for k in range(2, 9))
        doc = f'    """Compute the {words} of number {n}. It also prints {n} of them."""\n' if n % 5 else ""
        body = "".join(f"    value{n}_{k} = word{n * k % 97} + {k}\n" for k in range(n % 7 + 3))
        source = f"def compute_the_value{n}(x, y):\n{doc}{body}    return x\n"
        pairs.add(next(functions(source, "package.module")), "package")
    return pairs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a small corpus and its tokenizer, and the functions in it."""
    folder = tmp_path_factory.mktemp("carry")
    pairs = many(200)
    pieces = tokenizer.train([text for f in pairs.functions for text in (f.text, *f.queries)], TINY.pieces)
    tokenizer.write(pieces, folder)
    packed = corpus.Encoder(pieces).pack(pairs)
    asked = packed["query_counts"] > 0
    arrays = {
        f"{kind}_{key}": a for kind in ("documented", "standard", "aside") for key, a in corpus.select(packed, asked).items()
    }
    arrays |= {f"named_{key}": a for key, a in corpus.select(packed, ~asked).items()}
    corpus.save(folder / "corpus.npz.xz", arrays)
    return folder, pairs


def test_a_function_is_its_place_and_its_code_without_the_docstring():
    header, lines = functions(SOURCE, "web.reader")
    assert (header.module, header.owner, header.name, header.lines) == ("web.reader", "Reader", "parseHTTPHeader", 3)
    assert header.text.startswith("web.reader Reader.parseHTTPHeader(self, raw_line=None):")
    assert "at the first colon" in header.rest and "lower-cased" not in header.text
    assert header.queries == (
        "Split a header line into name and value.",
        "The name is lower-cased before it is returned.",
        "Values keep their case.",
    )
    assert lines.name == "read_all_lines" and lines.queries == () and lines.lines == 4
    assert list(functions("def f(:\n", "m")) == [], "it does not parse"


def test_a_query_is_a_first_sentence_of_three_to_forty_words():
    for doc in ("", "Two words.", ":param x: the value of the thing", ">>> one two three four", "1 2 3 4 5 6"):
        assert sentences(doc) == (), doc
    assert [is_query("word " * count) for count in (2, 3, 40, 41)] == [False, True, True, False]


def test_the_tokenizer_reads_raw_code_without_case_and_with_identifiers_split(made):
    folder, _ = made
    pieces = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    raw, plain = "def parseHTTPHeader(self, x_y=1):", "def parse http header self x y 1"
    assert pieces(raw)["input_ids"] == pieces(plain)["input_ids"]
    assert pieces.decode(pieces(raw)["input_ids"], skip_special_tokens=True).strip() == plain
    assert pieces(raw)["input_ids"][-1] == END == pieces.eos_token_id and pieces.pad_token_id == 0
    assert pieces.unk_token_id not in pieces("naïve ≠ 名前 \U0001f600")["input_ids"]
    assert pieces("a == b += c -> d")["input_ids"] != pieces("a b c d")["input_ids"]


def test_a_packed_document_is_the_tokens_of_its_text(made):
    folder, pairs = made
    pieces = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    texts = Texts.join(load(folder / "corpus.npz.xz"), ("documented", "named"), torch.device("cpu"))
    written = [f for f in pairs.functions if f.queries] + [f for f in pairs.functions if not f.queries]
    rows = torch.tensor([3, 100, 190])
    ids, seen = texts.documents(rows, torch.ones(3, 4, dtype=torch.bool), 64)
    for n, row in enumerate(rows.tolist()):
        expected = pieces(written[row].text)["input_ids"]
        expected = expected if len(expected) <= 64 else [*expected[:63], END]
        assert ids[n][seen[n]].tolist() == expected
    kept = torch.tensor([[True, True, False, True]]).expand(3, 4)
    shorter, seen = texts.documents(rows, kept, 300)
    for n, row in enumerate(rows.tolist()):
        without = f"{written[row].module} {written[row].rest}"
        assert shorter[n][seen[n]].tolist() == pieces(without)["input_ids"][:300]
    asked, seen = texts.queries(rows, torch.tensor([0, 1, -1]), 40)
    assert asked[0][seen[0]].tolist() == pieces(written[3].queries[0])["input_ids"]
    assert asked[1][seen[1]].tolist() == pieces(written[100].queries[1])["input_ids"]
    assert asked[2][seen[2]].tolist() == pieces(written[190].name)["input_ids"]


def test_what_is_trained_has_no_near_copy_of_what_is_known_and_equal_bodies_once(made):
    folder, pairs = made
    encoder = corpus.Encoder(Tokenizer.from_file(str(folder / "tokenizer.json")))
    packed = encoder.pack(pairs)
    known = np.unique(corpus.shingles(corpus.select(packed, np.arange(len(packed["parts"])) < 20))[0])
    assert corpus.copies(packed, known)[:20].all()
    header, lines = functions(SOURCE, "web.reader")
    other = corpus.Pairs()
    for function, package in ((header, "web"), (lines, "web"), (header, "copy of web")):
        other.add(function, package)
    assert other.packages == ["web", "web"]
    assert not corpus.copies(encoder.pack(other), known).any()


def test_buckets_and_states_are_those_of_transformers():
    torch.manual_seed(0)
    encoder = Encoder(TINY).eval()
    reference = T5EncoderModel(T5Config(**TINY.config())).eval()
    weights = {name: w for name, w in encoder.state_dict().items() if name != "linear.weight"}
    missing = reference.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"encoder.embed_tokens.weight"}
    ids = torch.randint(3, TINY.pieces, (3, 150))
    seen = torch.arange(150) < torch.tensor([[150], [9], [77]])
    with torch.no_grad():
        ours = encoder.hidden(ids, seen, buckets(150, TINY))
        theirs = reference(input_ids=ids, attention_mask=seen.long()).last_hidden_state
    assert float((ours - theirs)[seen].abs().max()) < 5e-5
    offset = torch.arange(1200)[None] - torch.arange(1200)[:, None]
    attention = reference.encoder.block[0].layer[0].SelfAttention
    assert torch.equal(buckets(1200, TINY), attention._relative_position_bucket(offset, True, 32, 128))


def test_maxima_in_pieces_have_the_scores_and_gradients_of_the_plain_form(monkeypatch):
    monkeypatch.setattr(maxsim, "PIECE", 100)
    torch.manual_seed(1)
    query = torch.nn.functional.normalize(torch.randn(4, 5, 16), dim=-1).requires_grad_()
    groups = [torch.nn.functional.normalize(torch.randn(2, k, 16), dim=-1).requires_grad_() for k in (3, 6)]
    masks = [torch.arange(3) < torch.tensor([[3], [2]]), torch.arange(6) < torch.tensor([[4], [1]])]
    seen = torch.arange(5) < torch.tensor([[5], [2], [3], [1]])
    weights = torch.randn(4, 4)

    def plain():
        each = [
            torch.einsum("bqe,nke->bqnk", query, g).masked_fill(~m[None, None], -9.0).amax(-1)
            for g, m in zip(groups, masks, strict=True)
        ]
        return (torch.cat(each, -1) * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)

    found = maxsim.scores(query, seen, list(zip(groups, masks, strict=True)))
    assert float((found - plain()).detach().abs().max()) < 1e-6
    ours = torch.autograd.grad((found * weights).sum(), [query, *groups])
    theirs = torch.autograd.grad((plain() * weights).sum(), [query, *groups])
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-6


def test_a_batch_holds_documents_with_their_own_queries_and_marks_repeats(made):
    folder, _ = made
    arrays = load(folder / "corpus.npz.xz")
    texts = Texts.join(arrays, ("documented", "named"), torch.device("cpu"))
    batches = Batches(texts, len(arrays["documented_parts"]), 64, (32, 96), 4, seed=5)
    _, which, kept = batches._choice()
    assert not kept[which < 0, NAME].any(), "a document that is asked for by its name does not show it"
    batch = batches.draw()
    assert [len(ids) for ids, _ in batch.documents] == [16] * 4
    assert batch.documents[-1][0].shape[1] == 96
    assert batch.same.any() and not batch.same.diagonal().any() and torch.equal(batch.same, batch.same.T)


def test_a_training_writes_a_folder_whose_loss_fell_and_whose_8_bit_weights_are_near(made, tmp_path, monkeypatch):
    folder, _ = made
    monkeypatch.setattr(train, "time", Clock())
    monkeypatch.setattr(train, "EVERY", 10)
    monkeypatch.setattr(train, "WARM", 5)
    monkeypatch.setattr(train, "JUDGED", 2)
    sizes = {"pieces": TINY.pieces, "width": 32, "layers": 2, "heads": 2, "head": 8, "output": 16}
    limits = ["--minutes", "0.04", "--limit", "8"]
    command = ["--data", str(folder), "--out", str(tmp_path), "--batch", "16", "--inner", "24", "--device", "cpu", *limits]
    train.main([*command, "--rate", "5e-3", "--dropout", "0"], **sizes)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if line["about"] == "step"]
    assert losses[-1] < 0.8 * losses[0]
    with tarfile.open(tmp_path / "retriever.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    stored = load_file(tmp_path / "retriever" / "model.safetensors")
    assert stored["shared.weight"].dtype == torch.int8
    body = export.widen(stored)
    exact = load_file(tmp_path / "float16.safetensors")
    head = load_file(tmp_path / "retriever" / "1_Dense" / "model.safetensors")["linear.weight"]
    assert torch.equal(head, exact.pop("linear.weight"))
    assert body.keys() == exact.keys()
    for name, weight in body.items():
        assert float((weight - exact[name].float()).abs().max()) <= 0.006 * float(exact[name].abs().max()), name
    config = json.loads((tmp_path / "retriever" / "config.json").read_text())
    reference = T5EncoderModel(T5Config(**{k: v for k, v in config.items() if k != "quantization"}))
    assert not reference.load_state_dict(body, strict=False).unexpected_keys


def test_equal_scores_count_against_the_function():
    found = judge.counted(torch.tensor([[3.0, 1, 1], [2, 2, 1], [5, 6, 4]]))
    assert found == {"p1": 0.3333, "mrr10": round((1 + 1 / 2 + 1 / 3) / 3, 4), "r10": 1.0, "queries": 3}


def test_bm25_has_the_scores_of_its_formula(made, monkeypatch):
    folder, pairs = made
    pieces = Tokenizer.from_file(str(folder / "tokenizer.json"))
    asked = [f for f in pairs.functions if f.queries][:20]
    documents = [pieces.encode(f.text).ids[:-1] for f in asked]
    mean = sum(map(len, documents)) / len(documents)

    def score(query, document):
        total = 0.0
        for piece in query:
            known, count = sum(piece in each for each in documents), document.count(piece)
            rarity = math.log(1 + (len(documents) - known + 0.5) / (known + 0.5))
            total += rarity * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(document) / mean))
        return total

    queries = [pieces.encode(f.queries[0]).ids[:-1][: corpus.QUERY - 1] for f in asked]
    monkeypatch.setattr(judge, "counted", lambda scores: scores)
    texts = train._head(Texts.join(load(folder / "corpus.npz.xz"), ("documented",), torch.device("cpu")), len(asked))
    expected = [[score(query, document) for document in documents] for query in queries]
    assert np.allclose(judge.lexical(texts, TINY.pieces).numpy(), expected, rtol=1e-4)
