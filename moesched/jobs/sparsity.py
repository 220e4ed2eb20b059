"""Counts the values that experts' SiLU leaves near zero, for any model, as Table 2 of the Twiddler paper does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from moesched.errors import BadInput
from moesched.inputs.options import WeightsOptions
from moesched.inputs.prompts import encode_prompts
from moesched.inputs.tokenizer import open_model
from moesched.jobs.device_listener import ActivationListener
from moesched.jobs.options import ProbeOptions, SparsityOptions
from moesched.jobs.report import require_complete
from moesched.jobs.session import run_model
from moesched.keywords import takes
from moesched.models.config import ModelConfig
from moesched.models.networks import SILU
from moesched.options import part_of
from moesched.routing.checks import layers_without_experts, routed_layers
from moesched.system.cells import counted_in_cell
from moesched.system.own_loop import interruptible

THRESHOLDS = (0.001, 0.01, 0.1, 1.0)
RANDOM_PROMPTS, RANDOM_TOKENS = 16, 64
"""Number and length in tokens of the random prompts, which are used if none are given."""


class SparsityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of values after the experts' SiLU that are nearer to zero than each threshold.

    Attributes:
        values: number of counted values in each layer, over all its experts.
        below: shares from 0 to 1, as [layer][threshold].
        dense: indices of the layers without experts, whose values are not counted.
        tokens: number of prompt tokens.
        random_prompts: whether the prompts were random token ids.
    """

    model: str
    dtype: str
    tokens: int
    random_prompts: bool
    thresholds: tuple[float, ...]
    values: tuple[int, ...]
    below: tuple[tuple[float, ...], ...]
    dense: tuple[int, ...] = ()
    interrupted: bool = False


@takes(SparsityOptions)
@interruptible()
def sparsity_of(given: SparsityOptions) -> SparsityReport:
    """Run prompts through a model and count the values after SiLU, over all experts that tokens were routed to.

    Raises the errors of `moesched.run_model`.
    """
    checkpoint, tokenizer = open_model(Path(given.model))
    config = checkpoint.config
    if config.routed.activation != SILU:
        raise BadInput(
            f"the experts of {config.name} have no SiLU, whose outputs are counted here: give a model of another family"
        )
    asked = random_prompts(config, given.seed) if given.prompts is None else given.prompts
    encoded = encode_prompts(asked, tokenizer, config, 1)
    tokens = sum(map(len, encoded))
    most = tokens * len(routed_layers(config)) * config.routed.top_k * config.routed.intermediate
    counter = SparsityCounter(config.layers, given.progress or counted_in_cell("values"), most)
    report = run_model(
        prompts=encoded,
        max_new_tokens=1,
        listener=ActivationListener(counter),
        tensor_parallel=1,
        **part_of(given, ProbeOptions, WeightsOptions),
    )
    require_complete(report)
    return SparsityReport(
        model=config.name,
        dtype=report.dtype,
        tokens=tokens,
        random_prompts=given.prompts is None,
        thresholds=THRESHOLDS,
        values=tuple(counter.values),
        below=counter.shares(),
        dense=tuple(layers_without_experts(config)),
        interrupted=report.interrupted,
    )


def random_prompts(config: ModelConfig, seed: int) -> list[list[int]]:
    """Return RANDOM_PROMPTS prompts of RANDOM_TOKENS ids drawn by `seed`, or of fewer ids if the context is shorter."""
    length = min(RANDOM_TOKENS, config.max_positions - 1)
    if length < 1:
        raise BadInput(f"model {config.name} has a context of {config.max_positions} tokens: no prompt fits")
    drawn = np.random.default_rng(seed % 2**64).integers(config.vocabulary, size=(RANDOM_PROMPTS, length))
    ids: list[list[int]] = drawn.tolist()
    return ids


class SparsityCounter:
    """Counts activations that are nearer to zero than each threshold.

    Args:
        layers: number of layers.
        progress: called with (values counted so far, `most`).
        most: the number of values that will be counted in all.
    """

    def __init__(
        self, layers: int, progress: Callable[[int, int], object] | None = None, most: int = 0
    ) -> None:
        self.values = [0] * layers
        self._below = [[0] * len(THRESHOLDS) for _ in range(layers)]
        self._progress = progress
        self._most = most
        self._lock = threading.Lock()

    def activated(self, layer: int, values_nI: npt.NDArray[np.float32]) -> None:
        """Count the values after SiLU of one expert of a layer, of shape (tokens, intermediate)."""
        magnitudes = np.abs(values_nI)
        below = [int(np.count_nonzero(magnitudes < threshold)) for threshold in THRESHOLDS]
        with self._lock:
            self.values[layer] += magnitudes.size
            self._below[layer] = [
                before + more for before, more in zip(self._below[layer], below, strict=True)
            ]
            if self._progress is not None:
                self._progress(sum(self.values), self._most)

    def shares(self) -> tuple[tuple[float, ...], ...]:
        """Return, as [layer][threshold], the share of a layer's values that are nearer to zero than the threshold.

        The share is 0 for a layer without values.
        """
        return tuple(
            tuple(count / max(1, values) for count in below)
            for values, below in zip(self.values, self._below, strict=True)
        )
