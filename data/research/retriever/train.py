"""Train `retriever-micro` on the packed corpus, for a number of minutes, and write the model.

    python -m data.research.retriever.train --data CARRY --out OUT --minutes 8

Loss: cross-entropy of MaxSim / 0.04 among all pairs of a batch, in both directions. The evaluation is on the standard library's
functions; nothing is chosen by it. Needs torch, and a GPU with 40 GB for the batch of 1024 (a CPU is slow: try it with
`--device cpu --batch 16 --minutes 0.2 --limit 500`).
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import platform
import shutil
import tarfile
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from data.research.micro.journal import Journal
from data.research.retriever import export, maxsim
from data.research.retriever.batches import Batch, Batches, Texts, load
from data.research.retriever.judge import judge
from data.research.retriever.model import Encoder, Sizes, buckets

TEMPERATURE = 0.04
QUERY, DOCUMENT = 32, 256  # tokens
AVERAGE = 0.999
WARM = 400  # steps
EVERY = 100  # steps between lines of the log
JUDGED = 4  # evaluations of the average during the training


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; None means sys.argv."""
    parser = argparse.ArgumentParser(description="Train retriever-micro.")
    parser.add_argument("--data", type=Path, required=True, help="folder that corpus.py made")
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--minutes", type=float, default=8.0, help="of training steps, without compilation")
    parser.add_argument("--stop-after", type=float, default=9.0, help="minutes of this call after which training ends")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--groups", type=int, default=4, help="groups of documents of about equal length in a batch")
    parser.add_argument("--rate", type=float, default=1.2e-3)
    parser.add_argument("--inner", type=int, default=Sizes.inner, help="width of the feed-forward layers")
    parser.add_argument("--dropout", type=float, default=Sizes.dropout)
    parser.add_argument("--limit", type=int, help="evaluate on the first LIMIT functions only, to try the script")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, **sizes: int) -> None:
    """Train for the time that the command line `argv` gives, and export the result. `sizes` replace sizes of the model."""
    args = arguments(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("micro").setLevel(logging.INFO)
    args.out.mkdir(parents=True, exist_ok=True)
    journal = Journal(args.out / "log.jsonl")
    torch.set_float32_matmul_precision("high")  # TF32, where autocast does not choose bfloat16
    torch._dynamo.config.suppress_errors = True  # a part that fails to compile runs slowly instead of ending the training
    torch._dynamo.config.cache_size_limit = 64
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    logged = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    journal.note("run", machine=machine, torch=torch.__version__, cores=os.cpu_count(), **logged)
    run = Run(args, Sizes(**{"inner": args.inner, "dropout": args.dropout, **sizes}), journal)
    try:
        run.train()
    finally:  # also after an error, because the training took minutes
        run.results()


class Run:
    """One training run: its data, its model, and the moving average of the weights."""

    def __init__(self, args: argparse.Namespace, sizes: Sizes, journal: Journal) -> None:
        self.args, self.journal = args, journal
        self.device = torch.device(args.device)
        arrays = load(args.data / "corpus.npz.xz")
        self.texts = Texts.join(arrays, ("documented", "named"), self.device)
        self.tests = {}
        for kind in ("standard", "aside"):
            limited = {name: a for name, a in arrays.items() if name.startswith(kind)}
            self.tests[kind] = _head(Texts.join(limited, (kind,), self.device), args.limit)
        documented = len(arrays["documented_parts"])
        self.batches = Batches(self.texts, documented, args.batch, (QUERY, DOCUMENT), args.groups, args.seed)
        torch.manual_seed(args.seed)
        self.encoder = Encoder(sizes).to(self.device)
        self.average = deepcopy(self.encoder).eval().requires_grad_(False)
        self.forward: nn.Module = torch.compile(self.encoder, dynamic=False) if args.device == "cuda" else self.encoder
        self.optimizer = _optimizer(self.encoder, args.rate)
        self.tables = {length: buckets(length, sizes).to(self.device) for length in {QUERY, *self.batches.caps}}
        weights = sum(weight.numel() for weight in self.encoder.parameters())
        tests = {kind: len(texts) for kind, texts in self.tests.items()}
        journal.note(
            "data", documented=documented, named=len(self.texts) - documented, weights=weights, caps=self.batches.caps, **tests
        )
        self.steps = 0

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss, share) of a batch. The share is that of the queries whose own document has the best score."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            queries = self._encode(*batch.queries)
            documents = [(self._encode(*group), group[1]) for group in batch.documents]
        found = maxsim.scores(queries, batch.queries[1], documents).masked_fill(batch.same, -1.0)
        target = torch.arange(len(found), device=found.device)
        logits = found / TEMPERATURE
        both = functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)
        return both / 2, (found.argmax(1) == target).float().mean()

    def _encode(self, ids: Tensor, seen: Tensor) -> Tensor:
        vectors: Tensor = self.forward(ids, seen, self.tables[ids.shape[1]])
        return vectors.bfloat16() if self.device.type == "cuda" else vectors

    def train(self) -> None:
        """Train until the time is over."""
        args, journal = self.args, self.journal
        self.encoder.train()
        for _ in range(3):  # compiles
            loss, _ = self.loss(self.batches.draw())
            loss.backward()
        self.optimizer.zero_grad(set_to_none=True)
        self._wait()
        start_loss = float(loss.detach())
        if self.device.type == "cuda":
            journal.note("memory", gigabytes=round(torch.cuda.max_memory_allocated() / 1e9, 1))
        seconds = min(60 * args.minutes, 60 * (args.stop_after - journal.minutes))
        journal.note("start", loss=round(start_loss, 4), seconds=round(seconds))
        started, judged, paused = time.monotonic(), 1, 0.0
        losses = torch.zeros(2, device=self.device)
        progress = 0.0
        while progress < 1:
            for group in self.optimizer.param_groups:
                group["lr"] = args.rate * rate(progress, self.steps)
            loss, first = self.loss(self.batches.draw())
            loss.backward()
            nn.utils.clip_grad_norm_(self.encoder.parameters(), 1.0, foreach=True)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.steps += 1
            self._update()
            losses += torch.stack([loss.detach(), first])
            if self.steps % 10 == 0:
                self._wait()
            progress = (time.monotonic() - started - paused) / seconds
            if self.steps % EVERY == 0:
                mean, share = (losses / EVERY).tolist()
                losses.zero_()
                journal.note("step", step=self.steps, loss=round(mean, 4), first=round(share, 4), progress=round(progress, 4))
            if JUDGED * progress >= judged and progress < 1:
                before = time.monotonic()
                journal.note(
                    "standard library", step=self.steps, **judge(self.average, self.tests["standard"], (QUERY, DOCUMENT))
                )
                paused += time.monotonic() - before if journal.minutes < args.stop_after - 1 else 0.0
                judged += 1
        journal.note("trained", step=self.steps, seconds=round(time.monotonic() - started, 1))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def _update(self) -> None:
        decay = min(AVERAGE, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.encoder.parameters()), 1 - decay)

    def results(self) -> None:
        """Write the averaged model, its weights as float16, and the results of its evaluation."""
        out = self.args.out
        size = export.write(self.average, self.args.data, out / "retriever")
        with tarfile.open(out / "retriever.tar", "w") as tar:
            tar.add(out / "retriever", "retriever")
        shutil.rmtree(out / "retriever")
        save_file(
            {name: w.detach().half().cpu().contiguous() for name, w in self.average.state_dict().items()},
            out / "float16.safetensors",
        )
        self.journal.note("export", bytes=size)
        torch.set_float32_matmul_precision("highest")
        self._judge("float32, last weights", self.encoder.eval(), "standard")
        self._judge("float32, average", self.average, "standard")
        if self.device.type == "cuda":
            with torch.autocast("cuda", torch.bfloat16):
                self._judge("bfloat16, average", self.average, "standard")
        self.average.load_state_dict(export.rounded(self.average))
        for kind in ("standard", "aside"):
            self._judge("8 bits, average", self.average, kind)
        for without, kept in (
            ("module", (False, True, True, True)),
            ("module and owner", (False, False, True, True)),
            ("name", (True, True, False, True)),
        ):
            self._judge("8 bits, average", self.average, "standard", kept, without=without)
        for length in (128, 192):
            found = judge(self.average, self.tests["standard"], (QUERY, length))
            self.journal.note("standard library", weights="8 bits, average", tokens=length, **found)

    def _judge(self, weights: str, encoder: nn.Module, kind: str, kept: tuple[bool, ...] = (True,) * 4, **more: Any) -> None:
        found = judge(encoder, self.tests[kind], (QUERY, DOCUMENT), kept)
        self.journal.note("standard library" if kind == "standard" else "library aside", weights=weights, **more, **found)


def _head(texts: Texts, limit: int | None) -> Texts:
    if limit is not None:
        texts.starts, texts.parts = texts.starts[:limit], texts.parts[:limit]
        texts.counts, texts.firsts = texts.counts[:limit], texts.firsts[:limit]
    return texts


def _optimizer(encoder: Encoder, rate: float) -> torch.optim.AdamW:
    matrices = [
        weight
        for name, weight in encoder.named_parameters()
        if weight.ndim > 1 and "relative" not in name and "shared" not in name
    ]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in encoder.parameters() if id(weight) not in chosen]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=others[0].is_cuda)


def rate(progress: float, step: int) -> float:
    """Return the factor of the learning rate. It rises over the first steps, and then falls along a cosine to 0.01.
    `progress` is the share of the training time that has passed, 0 to 1.
    """
    return min(1.0, (step + 1) / WARM) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


if __name__ == "__main__":
    main()
