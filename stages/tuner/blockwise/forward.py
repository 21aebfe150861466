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
    """Raised if an adapter does not fit the model. The message begins with the name of the Linear."""


class BlockwiseForward:
    """The forward pass of a model, with or without an adapter, computed block by block. Call the object with the
    model's inputs as keyword arguments. They are the same as for the model's method `enter`. The call returns the
    model's prediction as an array.

    The function of each kind of block is compiled once, where compilation is on. Each block is handed to the device
    before the next one is built. While `live_bytes` bytes or more are in use, MLX starts no further operation; None
    means no limit.
    """

    def __init__(
        self, chain: Chain, adapters: Arrays | None = None, scales: Mapping[str, float] | None = None, dtype: Any = None
    ) -> None:
        """Prepare the forward pass of a model with an adapter. `chain` is the model, a chain of blocks. `adapters` maps
        names such as "<block>.<linear>.lora_A.weight" to arrays. `scales` maps "<block>.<linear>" to the factor that
        multiplies the adapter's change of this Linear. Without an adapter, both are None. Matrices of the adapter are
        cast to `dtype`. If `dtype` is None, they keep their dtype.
        """
        self.chain = chain
        arrays = {name: cast_matrix(array, dtype) for name, array in (adapters or {}).items()}
        mx.eval(arrays)
        names = [block.name for block in chain.blocks]
        self.adapters, _ = lora.split_by_block(names, arrays)
        self.scales, _ = lora.split_by_block(names, scales or {})
        self.live_bytes: int | None = None

    def __call__(self, **inputs: Any) -> mx.array:
        """Compute the prediction of the model and return it as an array. Pass the model's inputs as keyword arguments
        (`**inputs`). Their names are those of the arguments of the model's method `enter`. For example, if the model
        has the method `enter(ids, real)`, call `forward(ids=ids, real=real)`. The call waits until the device has
        computed the result.
        """
        with live_memory_limit(self.live_bytes):
            chain = on_cores(self.chain, inputs)
            compiled = compiled_functions(chain)
            h, shared = chain.enter(**inputs)
            dispatch(h, shared)
            visit = Visit(chain.blocks, range(len(chain.blocks)))
            for n in visit:
                run: Callable[..., Tree] = compiled(forward_function, chain.blocks[n].kind)
                h = run(self.adapters[n], visit.weights, h, shared, self.scales[n])
                visit.dispatch(h)
            prediction: mx.array = chain.leave(h, shared)
            mx.eval(prediction)
        return prediction


def cast_matrix(array: mx.array, dtype: Any) -> mx.array:
    """Return a LoRA matrix in `dtype`. Arrays with fewer than two axes, and all arrays if `dtype` is None, stay as they are.

    A vector scales outputs and needs float32.
    """
    return array.astype(dtype) if dtype is not None and array.ndim == 2 else array


def model_forward(model: Any, adapter: tuple[Arrays, dict[str, float]] | None, strength: float = 1.0) -> BlockwiseForward:
    """Return an object that computes predictions of `model`, block by block. `adapter` is a pair (arrays by name, scale
    of each Linear), or None for no adapter. `strength` multiplies the scales. Raises AdapterMismatch if a Linear of the
    adapter is missing in the model or has another shape.
    """
    arrays, scales = adapter or ({}, {})
    check_adapter(model, arrays, scales)
    return BlockwiseForward(model, arrays, {name: scale * strength for name, scale in scales.items()}, model.dtype)


def check_adapter(model: Any, arrays: Arrays, scales: Mapping[str, float]) -> None:
    """Raise AdapterMismatch if a Linear of an adapter is missing in `model` or has another shape. `arrays` maps names such as
    "<linear>.lora_A.weight" to arrays. `scales` has a key for each Linear. No weight of `model` is read.
    """
    known = model.linears()
    for name in scales:
        shape = lora.linear_shape(lora.arrays_of_linear(arrays, name))
        if known.get(name) != shape:
            expected = f"has shape {known[name]}" if name in known else "does not exist"
            raise AdapterMismatch(f"{name} has shape {shape} in the adapter, but {expected} in this one")
