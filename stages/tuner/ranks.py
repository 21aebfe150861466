"""Data-parallel training: the processes of one run, called ranks, and what they exchange through `mx.distributed`.

Rank 0 leads: it alone reads checkpoints, decides, writes and talks. All ranks call the same functions in the same order. If a
rank dies, the calls of the others raise RuntimeError (ring) or never return (NCCL); `latentmill launch` then ends them.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from stages.kernels import dispatch
from stages.tuner.launched import launched_rank

T = TypeVar("T")

LENGTH, SHORT = 8, 4096  # bytes of a message's length, and of a message that one exchange carries


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1
    group: Any = None  # mx.distributed.Group; None: this process trains alone

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def sum(self, arrays: dict[str, Any], share: float = 1.0) -> dict[str, Any]:
        """float32 sums of `share` x array over all ranks, equal to the bit. Empties `arrays`. Alone: `arrays`, unscaled."""
        if self.size == 1:
            return arrays
        summed = {}
        for name in sorted(arrays):  # the same order in every process
            # Popped, so that a gradient is freed once its sum is dispatched.
            value = arrays.pop(name).astype(mx.float32)
            summed[name] = mx.distributed.all_sum(value if share == 1 else share * value, group=self.group)
            dispatch(summed[name])
        return summed

    def everywhere(self, flag: Any) -> Any:
        if self.size == 1:
            return flag
        count = mx.distributed.all_sum(flag.astype(mx.int32), group=self.group)
        dispatch(count)
        return count == self.size

    def gather(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays of rank 0, then those of rank 1, and so on: equally many, of equal shapes."""
        if self.size == 1:
            return list(arrays)
        found = []
        for array in arrays:
            found.append(mx.distributed.all_gather(array[None], group=self.group))
            mx.eval(found[-1])
        return [each[rank] for rank in range(self.size) for each in found]

    def agreed(self, flag: bool) -> bool:
        """The flag of rank 0."""
        if self.size == 1:
            return flag
        return bool(mx.distributed.all_sum(mx.array(int(flag and self.leads)), group=self.group).item())

    def first(self, value: T) -> T:
        """The value of rank 0, pickled."""
        if self.size == 1:
            return value
        found: T = pickle.loads(self._sent(pickle.dumps(value) if self.leads else b"", 0, 1)[0])
        return found

    def each(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        return [pickle.loads(content) for content in self._sent(pickle.dumps(value), self.rank, self.size)]

    def _sent(self, content: bytes, place: int, places: int) -> list[bytes]:
        """`places` byte strings, equal on every rank. Of the ranks that pass one `place`, all but one must pass b""."""
        # Sent as a sum in which all other ranks hold zeros. The first exchange carries lengths and short messages, so that
        # most messages need one exchange; a longer one takes a second.
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
        assert count % self.size == 0, (count, self.size)
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def owners(self, sizes: Sequence[int]) -> list[int]:
        """The rank of each sample of a step, over all batches: sizes [4], two ranks: [0, 0, 1, 1]."""
        return [place * self.size // size for size in sizes for place in range(size)]

    def share(self, batches: Sequence[Sequence[T]], sizes: Sequence[int]) -> list[list[T]]:
        """This rank's samples. `batches` may be split by shape; `sizes` counts the whole batches that are divided."""
        owners = iter(self.owners(sizes))
        shares = [[sample for sample in batch if next(owners) == self.rank] for batch in batches]
        return [share for share in shares if share]


def merged(values: Sequence[Sequence[T]], owners: Sequence[int]) -> list[T]:
    """Values of all samples in order, from the lists of the ranks and the owner of each sample."""
    each = [iter(own) for own in values]
    return [next(each[owner]) for owner in owners]


@functools.cache
def connect() -> Ranks:
    """Raises ValueError if the other ranks cannot be reached. The first call must come before the first MLX array."""
    if launched_rank() is None:
        return Ranks()
    try:
        group = mx.distributed.init(strict=True, backend="nccl" if mx.cuda.is_available() else "any")
    except RuntimeError as error:
        raise ValueError(f"rank {launched_rank()} cannot reach the other ranks: {' '.join(str(error).split())}") from None
    return Ranks(group.rank(), group.size(), group)
