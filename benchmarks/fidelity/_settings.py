"""The settings of fidelity.py, as fidelity.toml has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.peers import families
from moesched.models.coded_models import coded_as
from moesched.models.config import DType, ModelConfig
from moesched.models.shapes import SHAPES


class Case(NamedTuple):
    """A policy with room for a share of the weights, and a number of requests."""

    policy: str
    share: float
    batch_size: int


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Setting in which policies are compared; the file of settings explains the fields."""

    shape: dict[str, Any] = {}
    dtype: DType
    share: float | dict[str, float]
    batch_size: int | list[int]
    micro_batch_size: int
    new_tokens: int
    prompts: tuple[int, int]
    weights: str = ""
    published: str = ""

    @property
    def observed(self) -> bool:
        """Whether the simulation takes the choices of experts from a run."""
        return bool(self.weights or self.published)

    @property
    def config(self) -> ModelConfig:
        """The model."""
        if self.published:
            return families.shape_of(self.published)
        config = SHAPES["mixtral-0.8b"].varied(**self.shape)
        return coded_as(config, self.weights) if self.weights else config

    def cases(self, policies: Sequence[str]) -> list[Case]:
        """Every policy with every batch size; only those policies that have a share of their own, where any has."""
        shares = self.share if isinstance(self.share, dict) else dict.fromkeys(policies, self.share)
        return [Case(name, share, size) for name, share in shares.items() for size in self.batch_sizes]

    @property
    def batch_sizes(self) -> list[int]:
        """Numbers of requests."""
        return self.batch_size if isinstance(self.batch_size, list) else [self.batch_size]

    def name_of(self, case: Case) -> str:
        """The name of a case in the result file."""
        return case.policy if isinstance(self.batch_size, int) else f"{case.policy}, batch {case.batch_size}"


SETTINGS = msgspec.toml.decode(
    Path(__file__).with_name("fidelity.toml").read_bytes(), type=dict[str, Setting]
)
CODED = [name for name, setting in SETTINGS.items() if setting.weights]
PUBLISHED = [name for name, setting in SETTINGS.items() if setting.published]
