"""Operations with a gradient of their own. MLX computes the gradient on the stream of the operation.

A stream is a queue of operations. On a CPU, each stream has a thread. MLX builds the gradient of its own operations on their
streams. It builds the gradient of an `mx.custom_function` on the stream that is the default when the gradient is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx

Gradient = TypeVar("Gradient", bound=Callable[..., Any])


class OwnGradient:
    """A function of arrays with a gradient of its own. Use it like `mx.custom_function`: the class decorates the function,
    and its method `vjp` decorates the gradient. The gradient is computed on the stream on which the function was called.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.gradient: Callable[..., Any] | None = None

    def vjp(self, gradient: Gradient) -> Gradient:
        """Register `gradient` as the function that computes the gradient of the decorated function, and return
        `gradient`. Use the method as a decorator: if `@OwnGradient` decorates `forward`, `@forward.vjp` decorates the
        function `gradient`. MLX calls `gradient(primals, cotangents, outputs)`. `primals` are the arguments of
        `forward`, and `outputs` are its results. `cotangents` are the gradients of the loss with respect to `outputs`.
        `gradient` must return the gradients with respect to `primals`, in their order.

        If `forward` has one argument, `primals` is this argument itself, not a tuple. If `forward` returns one array,
        `cotangents` and `outputs` are single arrays too.
        """
        self.gradient = gradient
        return gradient

    def __call__(self, *arguments: mx.array) -> Any:
        """Call the function that `@OwnGradient` decorates, and return its result. `*arguments` are the arrays to call
        the function with. If MLX later differentiates the result, it uses the gradient function that was given to
        `vjp`. Raises AssertionError if no gradient function was given.

        The gradient is computed on the stream (queue of operations) that is the default stream during this call.
        """
        gradient = self.gradient
        assert gradient, "an operation with its own gradient must define it"
        traced: Any = mx.custom_function(self.function)
        if mx.default_device() != mx.cpu:  # all operations of a GPU are on one stream
            traced.vjp(gradient)
            return traced(*arguments)
        stream = mx.default_stream(mx.cpu)

        def backward(*found: Any) -> Any:
            with mx.stream(stream):
                return gradient(*found)

        traced.vjp(backward)
        return traced(*arguments)
