"""Description of feed-forward networks: routed experts, their router, and shared experts, which every token uses."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from moesched.models.tensor_shapes import Shape

Score = Literal["softmax", "sigmoid"]

SUM_EPSILON = 1e-20
"""Number added to the sum by which a token's sigmoid scores are divided, so that scores of 0 give weights of 0."""


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """The rule by which a token's experts are chosen: those with the highest scores.

    Attributes:
        score: the function from router logits to scores.
        corrected: whether a bias per expert is added to the scores for the choice, but not for the experts' weights.
        normalised: whether the weights of a token's experts are their scores divided by the sum of these scores.
        scale: factor of the experts' weights.
        groups: number of groups of experts, equal in size. A group's score is the sum of its two best scores.
        kept_groups: number of groups that a token chooses its experts from: those with the best scores.
    """

    score: Score = "softmax"
    corrected: bool = False
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1


class Activation(msgspec.Struct, frozen=True, kw_only=True):
    """The activation of an expert, a function of the outputs of its gate and up matrices: silu(gate) * up.

    Attributes:
        alpha: factor of the gate in the sigmoid of gpt-oss's activation.
        limit: None for silu(gate) * up. With a number, the activation is that of gpt-oss instead:
            gate * sigmoid(alpha * gate) * (up + 1), with gate clipped from above at the limit, and up from both sides.
    """

    alpha: float = 1.0
    limit: float | None = None


SILU = Activation()


class FeedForward(msgspec.Struct, frozen=True, kw_only=True):
    """The feed-forward network of a layer: routed experts, a shared network that every token uses, or both.

    Attributes:
        experts: number of routed experts; 0 in a layer without experts. A single expert has no router.
        top_k: number of experts that a token chooses.
        intermediate: inner width of each expert.
        shared: inner width of the shared network (all shared experts together, or a dense layer's); 0 for none.
        shared_scale: factor of the shared network's output.
        biases: whether experts and router have biases.
        alternating: whether gate and up are one matrix, "gate_up", whose even rows are gate's and odd rows up's.
        transposed_down: whether checkpoints store the experts' down and gate_up matrices as (inputs, outputs).
        activation: the activation of experts.
        weighted: whether the shared network's output is multiplied by a gate of its own.
        router: the rule by which experts are chosen.
    """

    experts: int = 0
    top_k: int = 0
    intermediate: int = 0
    shared: int = 0
    shared_scale: float = 1.0
    biases: bool = False
    alternating: bool = False
    transposed_down: bool = False
    activation: Activation = SILU
    weighted: bool = False
    router: Router = Router()

    def shapes(self, hidden: int) -> dict[str, Shape]:
        """Return the shapes of tensors that every token uses, by name; `hidden` is the hidden size."""
        shapes: dict[str, Shape] = {}
        if self.experts > 1:
            shapes["router"] = (self.experts, hidden)
            if self.biases or self.router.corrected:
                shapes["router_bias"] = (self.experts,)
        if self.shared:
            shapes |= {
                "shared_gate": (self.shared, hidden),
                "shared_down": (hidden, self.shared),
                "shared_up": (self.shared, hidden),
            }
        return shapes | ({"shared_weight": (hidden,)} if self.weighted else {})

    @property
    def is_usual(self) -> bool:
        """True if an expert has three matrices and computes down @ (silu(gate @ x) * (up @ x))."""
        return not self.biases and not self.alternating and self.activation == SILU

    def expert_shapes(self, hidden: int) -> dict[str, Shape]:
        """Return the shapes of one expert's tensors, by name, in the usual order; `hidden` is the hidden size."""
        width = self.intermediate
        down = (width, hidden) if self.transposed_down else (hidden, width)
        if not self.alternating:
            shapes: dict[str, Shape] = {"gate": (width, hidden), "down": down, "up": (width, hidden)}
        else:
            both = (hidden, 2 * width) if self.transposed_down else (2 * width, hidden)
            shapes = {"gate_up": both, "down": down}
        if self.biases:
            names = ("gate_up",) if self.alternating else ("gate", "up")
            shapes |= {f"{name}_bias": (2 * width // len(names),) for name in names}
            shapes["down_bias"] = (hidden,)
        return shapes

    def split(self, ranks: int) -> FeedForward:
        """Return the part of the feed-forward network that one of `ranks` tensor-parallel ranks has."""
        return replace(self, intermediate=self.intermediate // ranks, shared=self.shared // ranks)
