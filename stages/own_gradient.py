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
        """Set the gradient of the function, and return `gradient`. It is called as `gradient(primals, cotangents, outputs)`.
        `primals` are the arguments of the function. `cotangents` are the gradients with respect to its `outputs`. It returns
        the gradients with respect to `primals`, in their order.
        """
        self.gradient = gradient
        return gradient

    def __call__(self, *arguments: mx.array) -> Any:
        """Call the decorated function and return its result. `arguments` are the arrays that are passed to the
        function. The gradient of this call is later computed by the function that `vjp` decorated. Raises
        AssertionError if `vjp` was not used.

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
