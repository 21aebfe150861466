"""Data-parallel training: the processes of one run, called ranks, and what they exchange through `mx.distributed`.

Rank 0 leads: it alone reads checkpoints, decides, writes and talks. The others compute their share of each step. All ranks
call the same functions in the same order. If a rank dies, the calls of the others raise RuntimeError (ring) or never return
(NCCL); `latentmill launch` then ends them.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

RANK, SIZE = "MLX_RANK", "MLX_WORLD_SIZE"  # set by mlx.launch
HOSTS, DEVICES = "MLX_HOSTFILE", "MLX_IBV_DEVICES"  # files that list the ranks, for the backends ring and jaccl
LENGTH, SHORT = 8, 4096  # bytes of a message's length, and of a message that one exchange carries


def launched_rank() -> int | None:
    """Return the rank that `mlx.launch` or `latentmill launch` gave this process, from 0. Return None if this process
    was started alone. MLX is not imported.
    """
    number = os.environ.get(RANK, "")
    size = os.environ.get(SIZE, "")
    files = [Path(os.environ[name]) for name in (HOSTS, DEVICES) if os.environ.get(name)]
    several = (size.isdecimal() and int(size) > 1) or any(file.is_file() and file.read_text().strip() for file in files)
    return int(number) if number.isdecimal() and several else None


@dataclass(frozen=True)
class Ranks:
    """The processes that train together. `rank` is the number of this process, from 0. `size` is the number of
    processes. `group` is the `mx.distributed.Group`, or None if this process trains alone. A process alone exchanges
    nothing: the methods then use its values as those of all processes.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def leads(self) -> bool:
        """True if this process is rank 0. Only rank 0 writes files and shows messages. It also decides for all ranks,
        for example when to stop.
        """
        return self.rank == 0

    def sum(self, arrays: dict[str, Any], share: float = 1.0) -> dict[str, Any]:
        """Return the sums of arrays over all ranks (processes), as a dict of float32 arrays by name. `arrays` holds this rank's
        arrays by name. Each array is multiplied by `share` before it is added. If `share` is one over the number of ranks, the
        result is the mean.

        With several ranks, the dict `arrays` is emptied, and all ranks get the same bits. With one rank, `share` is ignored and
        `arrays` is returned unchanged.
        """
        import mlx.core as mx

        from stages.tuner.blockwise.device import dispatch

        if self.size == 1:
            return arrays
        summed = {}
        for name in sorted(arrays):  # the same order in every process
            value = arrays.pop(name).astype(mx.float32)
            summed[name] = mx.distributed.all_sum(value if share == 1 else share * value, group=self.group)
            dispatch(summed[name])
        return summed

    def everywhere(self, flag: Any) -> Any:
        """Return whether a flag is true in every rank, as a boolean scalar array. A rank is one of the processes that
        train together. `flag` is the flag of this rank, a boolean scalar array. All ranks must call this method, and
        all get equal results.
        """
        import mlx.core as mx

        from stages.tuner.blockwise.device import dispatch

        if self.size == 1:
            return flag
        count = mx.distributed.all_sum(flag.astype(mx.int32), group=self.group)
        dispatch(count)
        return count == self.size

    def gather(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays of all ranks as one list: those of rank 0, then those of rank 1, and so on. Every rank must
        give equally many arrays of equal shapes.
        """
        import mlx.core as mx

        if self.size == 1:
            return list(arrays)
        found = []
        for array in arrays:
            found.append(mx.distributed.all_gather(array[None], group=self.group))
            mx.eval(found[-1])
        return [each[rank] for rank in range(self.size) for each in found]

    def agreed(self, flag: bool) -> bool:
        """Return the `flag` of rank 0. Other ranks' flags are ignored."""
        import mlx.core as mx

        if self.size == 1:
            return flag
        return bool(mx.distributed.all_sum(mx.array(int(flag and self.leads)), group=self.group).item())

    def first(self, value: T) -> T:
        """Return the `value` of rank 0, which can be any object that can be pickled. Other ranks' values are ignored."""
        if self.size == 1:
            return value
        found: T = pickle.loads(self._sent(pickle.dumps(value) if self.leads else b"", 0, 1)[0])
        return found

    def each(self, value: T) -> list[T]:
        """Return the values of all ranks as a list, in the order of ranks. A value can be any object that can be pickled."""
        if self.size == 1:
            return [value]
        return [pickle.loads(content) for content in self._sent(pickle.dumps(value), self.rank, self.size)]

    def _sent(self, content: bytes, place: int, places: int) -> list[bytes]:
        """Send byte strings between all ranks (processes), and return the strings as a list, equal on every rank.
        `content` is the string of this rank. `place` is the index of `content` in the list. `places` is the length of
        the list. If every rank sends a string, `place` is the rank's number, and `places` is the number of ranks. If
        only rank 0 sends a string, every rank passes `place` = 0 and `places` = 1, and the other ranks pass b"" as
        `content`.

        All ranks must pass equal `places`. If several ranks pass one `place`, only one of them may send bytes. The
        others must pass b"".
        """
        import mlx.core as mx
        import numpy as np

        heads = np.zeros((places, LENGTH + SHORT), np.uint8)
        heads[place, :LENGTH] = np.frombuffer(np.int64(len(content)).tobytes(), np.uint8)
        heads[place, LENGTH : LENGTH + len(content[:SHORT])] = np.frombuffer(content[:SHORT], np.uint8)
        found = np.array(mx.distributed.all_sum(mx.array(heads), group=self.group))
        sizes: list[int] = found[:, :LENGTH].copy().view(np.int64)[:, 0].tolist()
        if max(sizes) > SHORT:
            rest = np.zeros((places, max(sizes) - SHORT), np.uint8)
            rest[place, : max(len(content) - SHORT, 0)] = np.frombuffer(content[SHORT:], np.uint8)
            found = np.concatenate([found, np.array(mx.distributed.all_sum(mx.array(rest), group=self.group))], axis=1)
        return [found[n, LENGTH : LENGTH + size].tobytes() for n, size in enumerate(sizes)]

    def part(self, count: int) -> slice:
        """Return this rank's part of a list with `count` items, as a slice. The list is divided into `size` equal
        parts, one for each rank. `count` must be a multiple of `size`, the number of ranks. For `count` = 6 and `size`
        = 2, rank 1 gets `slice(3, 6)`.
        """
        assert count % self.size == 0, (count, self.size)
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def owners(self, sizes: Sequence[int]) -> list[int]:
        """Return the rank that computes each sample of a step, as one list over all batches. `sizes` has the number of
        samples of each batch. Every batch is divided into equal parts, one for each rank, in order. For `sizes` = [4]
        and two ranks, the result is [0, 0, 1, 1].
        """
        return [place * self.size // size for size in sizes for place in range(size)]

    def share(self, batches: Sequence[Sequence[T]], sizes: Sequence[int]) -> list[list[T]]:
        """Return the samples that this rank (process) computes in one training step, as a list of lists. `batches`
        holds all samples of the step in order, as lists. All samples of one list have one shape, so a batch with two
        shapes is given as two lists. `sizes` has the number of samples of each batch. For example,
        `batches` = [["a", "b"], ["c", "d"]] and `sizes` = [4] mean one batch of four samples. Of two ranks, rank 0 gets
        [["a", "b"]] and rank 1 gets [["c", "d"]].

        Every batch is divided into equal parts, one for each rank. If `sizes` is [2, 2] in the example, each list is a
        batch. Rank 0 then gets [["a"], ["c"]], and rank 1 gets [["b"], ["d"]]. The result has the lists of `batches`
        with only this rank's samples in them. Lists that become empty are left out.
        """
        owners = iter(self.owners(sizes))
        shares = [[sample for sample in batch if next(owners) == self.rank] for batch in batches]
        return [share for share in shares if share]


def merged(values: Sequence[Sequence[T]], owners: Sequence[int]) -> list[T]:
    """Return the values of all samples of a step in the order of the samples. `values` holds one list for each rank, with
    the values of its own samples in order. `owners` has the rank of each sample.
    """
    each = [iter(own) for own in values]
    return [next(each[owner]) for owner in owners]


@functools.cache
def connect() -> Ranks:
    """Connect this process to the other ranks of its run, and return them. A process that was started alone returns at
    once. Raises ValueError if the others cannot be reached. The first call must come before the first MLX array.
    """
    if launched_rank() is None:
        return Ranks()
    import mlx.core as mx

    try:
        group = mx.distributed.init(strict=True, backend="nccl" if mx.cuda.is_available() else "any")
    except RuntimeError as error:
        raise ValueError(f"rank {launched_rank()} cannot reach the other ranks: {' '.join(str(error).split())}") from None
    return Ranks(group.rank(), group.size(), group)
