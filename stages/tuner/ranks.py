"""Data-parallel training: the processes of one run, called ranks, and what they exchange through `mx.distributed`.

Rank 0 leads: it alone reads checkpoints, decides, writes and talks. All ranks call the same functions in the same order. If a
rank dies, the calls of the others raise RuntimeError (ring) or never return (NCCL); `latentmill launch` then ends them.

MLX takes whoever connects first for a rank. So messages are plain data, never pickles, and each is signed with a key of this
run, made from the secret that `latentmill launch` gives to its ranks. Sums of gradients are not signed.
"""

from __future__ import annotations

import functools
import hmac
import itertools
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from stages.kernels import dispatch
from stages.tuner.launched import SECRET, launched_rank, secret

T = TypeVar("T")

LENGTH, SHORT = 8, 4096  # bytes of a message's length, and of a message that one exchange carries
SIGNATURE = 32  # bytes before each message
LEAST = 16  # characters of the secret


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1
    group: Any = None  # mx.distributed.Group; None: this process trains alone
    key: bytes = field(default=b"", repr=False)  # signs the messages of this run
    numbers: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)  # of the exchanges

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
        """The value of rank 0: plain data and NumPy arrays; tuples arrive as lists."""
        if self.size == 1:
            return value
        found: T = self._exchanged(value, 0, 1)[0]
        return found

    def each(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        return self._exchanged(value, self.rank, self.size)

    def _exchanged(self, value: Any, place: int, places: int) -> list[Any]:
        """Raises ValueError for a message that was not signed with the key, for this exchange and place."""
        number = next(self.numbers)
        content = b""
        if place == self.rank:
            content = encode(value)
            content = self._signature(content, number, place) + content
        found = []
        for at, each in enumerate(self._sent(content, place, places)):
            signature, message = each[:SIGNATURE], each[SIGNATURE:]
            if not hmac.compare_digest(signature, self._signature(message, number, at)):
                raise ValueError(
                    f"a message of rank {at} is not signed by this run: another program is in its place, or {SECRET} differs"
                )
            found.append(decode(message))
        return found

    def _signature(self, content: bytes, number: int, place: int) -> bytes:
        return hmac.digest(self.key, f"{number} {place} ".encode() + content, "sha256")

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


def encode(value: Any) -> bytes:
    """JSON, its length before it, and the arrays after it."""
    arrays: list[bytes] = []

    def plain(each: Any) -> Any:
        if isinstance(each, np.generic):
            return each.item()
        if not isinstance(each, np.ndarray):
            raise TypeError(f"ranks exchange plain data, got {type(each).__name__}")
        arrays.append(each.tobytes())
        return {"array": each.dtype.str, "shape": each.shape, "start": sum(map(len, arrays[:-1]))}

    text = json.dumps(value, default=plain).encode()
    return b"".join([len(text).to_bytes(LENGTH, "little"), text, *arrays])


def decode(content: bytes) -> Any:
    start = LENGTH + int.from_bytes(content[:LENGTH], "little")

    def array(each: dict[str, Any]) -> Any:
        if each.keys() != {"array", "shape", "start"}:
            return each
        dtype, count = np.dtype(each["array"]), int(np.prod(each["shape"]))
        return np.frombuffer(content, dtype, count, start + each["start"]).reshape(each["shape"])

    return json.loads(content[LENGTH:start], object_hook=array)


@functools.cache
def connect() -> Ranks:
    """Raises ValueError if the other ranks cannot be reached or have another secret. Must come before the first MLX array."""
    if launched_rank() is None:
        return Ranks()
    known = secret()
    if len(known) < LEAST:
        raise ValueError(
            f"ranks need the variable {SECRET}, {LEAST} characters or more, the same for each: `latentmill launch` sets it"
        )
    try:
        group = mx.distributed.init(strict=True, backend="nccl" if mx.cuda.is_available() else "any")
    except RuntimeError as error:
        raise ValueError(f"rank {launched_rank()} cannot reach the other ranks: {' '.join(str(error).split())}") from None
    unsigned = Ranks(group.rank(), group.size(), group)
    # A number of each rank, used once, is in the key: messages of an earlier run are refused too.
    once = unsigned._sent(secrets.token_bytes(SIGNATURE), group.rank(), group.size())
    ranks = replace(unsigned, key=hmac.digest(known.encode(), b"".join(once), "sha256"))
    ranks.each(None)
    return ranks
