"""A wrapper for third-party kernels: an exception or a wrong result raises KernelFailed with the kernel's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from moesched.errors import KernelFailed
from moesched.models.config import ModelConfig

from .seam import OPERATIONS, Bound, Case, Kernel, RouterOutput

Tensor = torch.Tensor
Shape = tuple[int, ...]


class Guarded(Kernel):
    """Wraps a third-party kernel: an exception, or a result of a wrong shape, becomes KernelFailed.

    The kernel runs in torch's inference mode.
    """

    def __init__(self, kernel: Kernel, config: ModelConfig, dtype: torch.dtype) -> None:
        self._kernel = kernel
        self._config = config
        self._dtype = dtype
        self.operation, self.name, self.takes = kernel.operation, kernel.name, kernel.takes
        self.independent, self.made_of = kernel.independent, kernel.made_of
        self.has_threads = kernel.has_threads
        self.uses_memory = kernel.uses_memory

    def refusal(self, case: Case) -> str:
        """Return the wrapped kernel's reason for not taking a case; an empty text if it takes the case.

        Raises:
            KernelFailed: the kernel raised, or returned something else than a text.
        """
        reason = self._call(case, "refusal", self._kernel.refusal, case)
        if not isinstance(reason, str):
            raise KernelFailed(
                f"kernel {self.name} ({case}): refusal returned {reason!r}: return a text, empty if it takes it"
            )
        return reason

    def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
        """Bind the wrapped kernel; returns its function, wrapped to check the shapes and dtypes of each result.

        Raises:
            KernelFailed: `bind` of the kernel raised, or returned no function. The function that this method returns
                raises KernelFailed if a call raises or has a wrong result.
        """
        bound = self._call(case, "bind", self._kernel.bind, case, weights, memory)
        if not callable(bound):
            raise KernelFailed(
                f"kernel {self.name} ({case}): bind returned {bound!r}: return a function "
                f"{OPERATIONS[case.operation].call}"
            )

        def call(*arguments: Any) -> Any:
            result = self._call(case, "its call", bound, *arguments)
            self._check(case, arguments, result)
            return RouterOutput(*result[:4]) if case.operation == "route" else result

        return call

    def _call(self, case: Case, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with torch.inference_mode():  # as torch's own kernels run
                return function(*arguments)
        except Exception as error:  # a kernel from elsewhere may raise anything
            given = OPERATIONS[case.operation]
            words = {
                "bind": f"; its weights are {given.weights or 'none'}",
                "its call": f"; its call is {given.call}",
            }
            raise KernelFailed(
                f"kernel {self.name} ({case}): {what} raised {type(error).__name__}: {error}{words.get(what, '')}"
            ) from error

    def _check(self, case: Case, arguments: Sequence[Any], result: Any) -> None:
        """Raise KernelFailed if a call's results lack the shapes and dtypes that `_expected` yields for the call."""
        got = result if isinstance(result, Sequence) else [result]
        for number, (shape, dtype) in enumerate(self._expected(case, arguments)):
            found = got[number] if number < len(got) else None
            if not isinstance(found, Tensor) or tuple(found.shape) != shape or found.dtype != dtype:
                raise KernelFailed(
                    f"kernel {self.name} ({case}): result {number} is {_described(found)} "
                    f"instead of {list(shape)} of {dtype}: see `call` of the operation in "
                    "moesched.devices.kernels.seam"
                )

    def _expected(self, case: Case, arguments: Sequence[Any]) -> Iterator[tuple[Shape, torch.dtype]]:
        """Yield the shape and dtype that each checked result of a call must have, in order, given its arguments."""
        config, layer, dtype = self._config, case.layer, self._dtype
        match case.operation:
            case "embed":
                yield (len(arguments[0]), config.hidden), dtype
            case "attention_inputs" if layer is not None:
                for heads in (layer.grouped.heads, layer.grouped.kv_heads, layer.grouped.kv_heads):
                    yield (len(arguments[0]), heads, layer.grouped.head_dim), dtype
            case "attention" if layer is not None:
                yield (len(arguments[0][0]), layer.attention.attended_width), dtype
            case "prompt_attention" if layer is not None:
                yield (len(arguments[0]), layer.attention.attended_width), dtype
            case "output_projection" | "moe_layer":
                yield (len(arguments[0]), config.hidden), dtype
            case "route" if layer is not None:
                choices = len(arguments[0]), layer.feed_forward.top_k
                yield (len(arguments[0]), config.hidden), dtype
                yield choices, torch.int64
                yield choices, torch.float32
            case "combine":
                yield tuple(arguments[3].shape), dtype
            case "logits" | "greedy":
                yield (len(arguments[1]), config.vocabulary // config.ranks), torch.float32


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"{list(found.shape)} of {found.dtype}"
    return "missing" if found is None else f"of type {type(found).__qualname__}"
