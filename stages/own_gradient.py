"""Operations with a gradient of their own, which is computed on the stream of the operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import mlx.core as mx

Gradient = TypeVar("Gradient", bound=Callable[..., Any])
Given = ParamSpec("Given")
Result = TypeVar("Result")


class OwnGradient(Generic[Given, Result]):
    """A decorator like `mx.custom_function`. The gradient is computed on the stream on which the function was called."""

    def __init__(self, function: Callable[Given, Result]) -> None:
        self.function = function
        self.gradient: Callable[..., Any] | None = None

    def vjp(self, gradient: Gradient) -> Gradient:
        """`gradient(primals, cotangents, outputs)` returns the gradients of the primals. As in MLX, a single one is no tuple."""
        self.gradient = gradient
        return gradient

    def __call__(self, *arguments: Given.args, **named: Given.kwargs) -> Result:
        gradient = self.gradient
        assert gradient and not named, "an operation with its own gradient must define it, and takes no argument by its name"
        traced: Any = mx.custom_function(self.function)
        # MLX builds the gradient of its own operations on their streams, but that of a custom_function on the stream that is
        # the default when the gradient is built. On a CPU each stream has a thread.
        stream = mx.default_stream(mx.cpu)

        def backward(*found: Any) -> Any:
            with mx.stream(stream):
                return gradient(*found)

        # All operations of a GPU are on one stream.
        traced.vjp(backward if mx.default_device() == mx.cpu else gradient)
        made: Result = traced(*arguments)
        return made
