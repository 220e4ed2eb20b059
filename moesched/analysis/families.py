"""Sorts tasks into families, such as weights or experts, which have one colour each in pictures.

Colour-blind readers can tell the colours apart.
"""

from __future__ import annotations

from typing import Literal

from moesched.trace.recording import TaskInfo

Family = Literal["attention", "experts", "weights", "activations", "exchange", "choices", "other"]
"""A family of tasks, which has one colour in pictures.

"experts": expert and dense FFNs. "weights": transfers of weight pages. "activations": transfers of hidden states, keys
and values. "exchange": collectives between ranks. "choices": embedding, routers and sampling.
"""

COLOURS: dict[Family, str] = {
    "attention": "#0072B2",
    "experts": "#D55E00",
    "weights": "#009E73",
    "activations": "#56B4E9",
    "exchange": "#CC79A7",
    "choices": "#E69F00",
    "other": "#999999",
}
"""Colour of each family, from the palette of M. Okabe and K. Ito, Color Universal Design (2008)."""

MEANINGS: dict[Family, str] = {
    "attention": "attention",
    "experts": "experts and dense FFNs",
    "weights": "transfers of weights",
    "activations": "transfers of hidden states and KV cache",
    "exchange": "exchange between ranks",
    "choices": "embedding, routers, sampling",
    "other": "other",
}
"""Text of each family in a legend."""

_VERBS: dict[Family, tuple[str, ...]] = {
    "attention": ("pre_attention", "attention", "cpu_attention"),
    "experts": ("post_attention", "run_expert", "warm_expert", "partial_sum", "combine"),
    "activations": ("load_kv", "offload_kv", "offload_qkv", "load_hidden", "offload_routed", "load_routed"),
    "choices": ("embed", "route", "preview_route", "sample"),
}
_FAMILIES = {verb: family for family, verbs in _VERBS.items() for verb in verbs}


def family_of(task: TaskInfo) -> Family:
    """Return the family of a task, such as "weights" or "experts", which sets the task's colour in pictures."""
    if task.type == "Collective":
        return "exchange"
    if task.pages:
        return "weights"
    return family_of_verb(task.verb)


def family_of_verb(verb: str) -> Family:
    """Return the family (kind of work) of a verb's tasks, for tasks that neither move weights nor are collectives."""
    return _FAMILIES.get(verb, "other")
