"""Feed-forward networks: routed experts, the choice of them, and the part that every token uses."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from moesched.models.tensor_shapes import Shape

Score = Literal["softmax", "sigmoid"]


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a token's experts: those with the highest scores.

    Attributes:
        score: the function that makes scores of the router's logits.
        corrected: whether a bias per expert is added for the choice, but not for the weights of the experts.
        normalised: whether the weights of a token's experts are their scores divided by the sum of these.
        scale: multiplies the weights.
        groups: number of groups of experts, equal in size. A group's score is the sum of its two best.
        kept_groups: the number of groups, those with the best scores, that a token chooses from.
    """

    score: Score = "softmax"
    corrected: bool = False
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1


class Activation(msgspec.Struct, frozen=True, kw_only=True):
    """The function of an expert's gate and up: silu(gate) * up.

    With a limit it is that of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1). A gate above the limit counts as the
    limit, and so does an up beyond it on either side.
    """

    alpha: float = 1.0
    limit: float | None = None


SILU = Activation()


class FeedForward(msgspec.Struct, frozen=True, kw_only=True):
    """The feed-forward network of a layer: routed experts, a part that every token uses, or both.

    Attributes:
        experts: number of routed experts; 0 in a dense layer. A single one has no router.
        intermediate: inner width of each expert.
        shared: inner width of the part that every token uses: shared experts, or a dense layer's network.
        biases: whether matrices and router have biases.
        alternating: whether gate and up are one matrix, "gate_up", whose rows belong to them in turn.
        transposed_down: whether checkpoints store the experts' down matrices, and gate_up, as (inputs, outputs).
        activation: the function of gate and up.
        shared_scale: multiplies that part's output.
        weighted: whether the shared part's output is weighted by a gate of its own.
        router: the choice of experts.
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
        """Shapes of the tensors that every token uses, by name."""
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
        """True if an expert is three matrices: down @ (silu(gate @ x) * (up @ x))."""
        return not self.biases and not self.alternating and self.activation == SILU

    def expert_shapes(self, hidden: int) -> dict[str, Shape]:
        """Shapes of the tensors of one expert, by name, in their usual order in files."""
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
        """The feed-forward network of one of `ranks` ranks."""
        return replace(self, intermediate=self.intermediate // ranks, shared=self.shared // ranks)
