"""The routing of simulations whose requests join and leave, counted from the choices of single tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moesched.requests.rows import Rows
from moesched.routing.choices import ExpertChoices, Integers, counted

KEPT_STEPS = 2
"""Number of steps of each micro-batch whose tokens are kept: one runs while the next one is submitted."""


class ServedRouting:
    """The `Routing` of a simulation whose requests join and leave: it looks up each token's experts and counts them.

    Args:
        choices: the source of the experts of single tokens.
    """

    def __init__(self, choices: ExpertChoices) -> None:
        self._choices = choices
        self._tokens: dict[int, dict[int, tuple[Integers, Integers]]] = {}
        """The request and the position of each token, by micro-batch and step."""

    def begin(self, step: int, rows: Mapping[int, Rows]) -> None:
        """Keep a step's rows, from which `choose` finds the step's tokens; call this before the step is submitted.

        Args:
            step: the number of the run's step.
            rows: the new tokens of each request in the step, by micro-batch.
        """
        for micro_batch, its_rows in rows.items():
            steps = self._tokens.setdefault(micro_batch, {})
            steps[step] = _tokens_of(its_rows)
            if len(steps) > KEPT_STEPS:
                del steps[min(steps)]

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """Return the number of the micro-batch's tokens that choose each expert of a layer, by expert id, ascending.

        Experts that no token chooses are left out. `tokens` is not used.

        Args:
            step: the number of the run's step, as given to `begin`.
        """
        requests_T, positions_T = self._tokens[micro_batch][step]
        return counted(self._choices, layer, requests_T, positions_T)


def _tokens_of(rows: Rows) -> tuple[Integers, Integers]:
    tokens = [row.tokens for row in rows.rows]
    requests_T = np.repeat([row.request for row in rows.rows], tokens)
    positions_T = np.concatenate([np.arange(row.start, row.start + row.tokens) for row in rows.rows])
    return requests_T, positions_T
