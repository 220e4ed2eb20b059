"""Defaults that Python functions and commands share. This module imports nothing, so that `--help` is fast."""

from __future__ import annotations

MACHINE = "auto"
"""Name of the machine by default: this machine."""

DEVICE = "torch"

POLICY = "auto"
"""Name of the policy by default: the planner's choice."""

NEW_TOKENS = 64
"""Tokens to generate for each prompt by default."""

WORKLOAD = "mtbench"
"""Name of the workload to plan for by default."""

PREVIEW_ACCURACY = 0.8
"""Assumed probability that an expert that the router chooses was predicted one layer ahead.

The next layer's router, applied to this layer's hidden state, predicted about 80 to 90 % of Mixtral 8x7B's experts
(Eliseev and Mazur 2023, speculative loading). Other models may differ; real runs use the model's own previews.
"""

JOIN_SECONDS = 60.0
"""Seconds that all nodes of a cluster have to join the launcher."""
