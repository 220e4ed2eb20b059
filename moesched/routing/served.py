"""The routing of requests that join and leave, by the choices of single tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moesched.requests.rows import Rows
from moesched.routing.choices import ExpertChoices, Integers, counted

KEPT_STEPS = 2
"""Steps of a place whose rows are kept: one runs while the next one is submitted."""


class ServedRouting:
    """The `Routing` of a run whose requests join and leave, by the choices of single tokens."""

    def __init__(self, choices: ExpertChoices) -> None:
        self._choices = choices
        self._tokens: dict[int, dict[int, tuple[Integers, Integers]]] = {}
        """By place and step, the request and the position of each token."""

    def begin(self, step: int, rows: Mapping[int, Rows]) -> None:
        """Note the rows of a step, by place, before it is submitted."""
        for place, its_rows in rows.items():
            steps = self._tokens.setdefault(place, {})
            steps[step] = _tokens_of(its_rows)
            if len(steps) > KEPT_STEPS:
                del steps[min(steps)]

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """Count the tokens of each expert that gets any, in ascending order of expert.

        step: the number of the run's step.
        """
        requests_T, positions_T = self._tokens[micro_batch][step]
        return counted(self._choices, layer, requests_T, positions_T)


def _tokens_of(rows: Rows) -> tuple[Integers, Integers]:
    tokens = [row.tokens for row in rows.rows]
    requests_T = np.repeat([row.request for row in rows.rows], tokens)
    positions_T = np.concatenate([np.arange(row.start, row.start + row.tokens) for row in rows.rows])
    return requests_T, positions_T
