"""The prediction of a chain of blocks without a gradient, one block at a time. `backprop` has the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from stages.tuner.adapters import lora
from stages.tuner.blockwise.backprop import compiled_functions, forward_function
from stages.tuner.blockwise.chain import Arrays, Chain, Tree
from stages.tuner.blockwise.cores import on_cores
from stages.tuner.blockwise.device import dispatch, live_memory_limit
from stages.tuner.blockwise.visit import Visit


class AdapterMismatch(ValueError):  # noqa: N818  (a mistake of the user, described in one line)
    """The adapter does not fit the model. The message begins with the name of the Linear."""


class BlockwiseForward:
    """Computes predictions of a model, with or without an adapter, block by block. Takes the inputs of `chain.enter`."""

    def __init__(
        self, chain: Chain, adapters: Arrays | None = None, scales: Mapping[str, float] | None = None, dtype: Any = None
    ) -> None:
        self.chain = chain
        arrays = {name: cast_matrix(array, dtype) for name, array in (adapters or {}).items()}
        mx.eval(arrays)
        names = [block.name for block in chain.blocks]
        self.adapters, _ = lora.split_by_block(names, arrays)
        self.scales, _ = lora.split_by_block(names, scales or {})
        self.live_bytes: int | None = None  # MLX starts no operation while so much is in use; None: no limit

    def __call__(self, **inputs: Any) -> mx.array:
        with live_memory_limit(self.live_bytes):
            chain = on_cores(self.chain, inputs)
            compiled = compiled_functions(chain)
            h, shared = chain.enter(**inputs)
            dispatch(h, shared)
            visit = Visit(chain.blocks, range(len(chain.blocks)))
            for n in visit:
                run: Callable[..., Tree] = compiled(forward_function, chain.blocks[n].kind)
                # One compiled function per kind of block; each block is handed to the device before the next is built.
                h = run(self.adapters[n], visit.weights, h, shared, self.scales[n])
                visit.dispatch(h)
            prediction: mx.array = chain.leave(h, shared)
            mx.eval(prediction)
        return prediction


def cast_matrix(array: mx.array, dtype: Any) -> mx.array:
    # A vector scales outputs and needs float32.
    return array.astype(dtype) if dtype is not None and array.ndim == 2 else array


def model_forward(model: Any, adapter: tuple[Arrays, dict[str, float]] | None, strength: float = 1.0) -> BlockwiseForward:
    """The forward pass with an adapter of (arrays, scales), times `strength`. Raises AdapterMismatch."""
    arrays, scales = adapter or ({}, {})
    check_adapter(model, arrays, scales)
    return BlockwiseForward(model, arrays, {name: scale * strength for name, scale in scales.items()}, model.dtype)


def check_adapter(model: Any, arrays: Arrays, scales: Mapping[str, float]) -> None:
    """Raises AdapterMismatch if the model lacks a Linear of the adapter or has it in another shape. Reads no weight."""
    known = model.linears()
    for name in scales:
        shape = lora.linear_shape(lora.arrays_of_linear(arrays, name))
        if known.get(name) != shape:
            expected = f"has shape {known[name]}" if name in known else "does not exist"
            raise AdapterMismatch(f"{name} has shape {shape} in the adapter, but {expected} in this one")
