"""Sizes of the tensors that pass between the operations of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from moesched.models.config import ITEM_BYTES, ModelConfig
from moesched.models.kv_blocks import kept_tokens
from moesched.models.layers import Layer
from moesched.models.tensor_shapes import Shape, elements
from moesched.models.tensors import is_transposed

COLUMNS = "columns"
"""Name that stands in place of a storage format's for plain matrices that are stored transposed."""

BytesByFormat = tuple[tuple[str, int], ...]
"""Pairs of the name of a coded storage format, or `COLUMNS`, and a number of bytes."""


class ResidentShare(NamedTuple):
    """Shares, from 0 to 1, of the weights' bytes that stay in the accelerator's memory.

    Attributes:
        dense: share of the weights that every token uses.
        experts: share of the experts' weights.
    """

    dense: float = 0.0
    experts: float = 0.0


NOTHING_RESIDENT = ResidentShare()


@dataclass(frozen=True, eq=False)
class TensorSizes:
    """Sizes of one kind of layer of a model, in one dtype: widths in elements, and bytes per token.

    Attributes:
        resident: shares of the weights that stay in the accelerator's memory.
        kind: the kind of layer; None for `ModelConfig.typical_layer`.
    """

    config: ModelConfig
    dtype: str
    resident: ResidentShare = NOTHING_RESIDENT
    kind: Layer | None = None

    @cached_property
    def layer(self) -> Layer:
        """The kind of layer that these sizes describe."""
        return self.config.typical_layer if self.kind is None else self.kind

    @cached_property
    def element(self) -> int:
        """Bytes per element of activations and caches."""
        return ITEM_BYTES[self.dtype]

    @cached_property
    def query_width(self) -> int:
        """Number of elements of a token's attention output; in grouped attention, the query has the same number."""
        return self.layer.attention.attended_width

    @cached_property
    def key_value_width(self) -> int:
        """Difference of `qkv_width` and `query_width`: in grouped attention, the width of key, value and gate."""
        return self.layer.attention.qkv_width - self.query_width

    @cached_property
    def expert_shapes(self) -> Mapping[str, Shape]:
        """The shapes of the matrices of one expert."""
        hidden, width = self.config.hidden, self.layer.feed_forward.intermediate
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        if self.layer.feed_forward.alternating:
            shapes = {"gate_up": (2 * width, hidden), "down": (hidden, width)}
        return MappingProxyType({f"experts.{part}": shape for part, shape in shapes.items()})

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of the weights of one expert."""
        return self.bytes_of(self.expert_shapes)

    def bytes_of(self, shapes: Mapping[str, Shape]) -> int:
        """Return the bytes of all tensors in `shapes` together; keys are names in a layer or outside the layers."""
        return round(
            sum(
                elements([shape]) * self.config.tensor_bytes(name, shape, self.dtype, self.layer)
                for name, shape in shapes.items()
            )
        )

    def coded_bytes(self, shapes: Mapping[str, Shape]) -> BytesByFormat:
        """Return pairs (storage format, bytes) of quantised tensors, and (`COLUMNS`, bytes) of plain transposed ones.

        Args:
            shapes: shapes of tensors, by name in the layer or outside the layers.
        """
        found: Counter[str] = Counter()
        for name, shape in shapes.items():
            kept = self.config.kept_format(name, self.layer)
            if kept is not None and kept.codes is not None:
                found[kept.name] += round(elements([shape]) * kept.bytes_per_weight)
            elif is_transposed(self.config, name):
                nbytes = self.bytes_of({name: shape})
                if nbytes == elements([shape]) * self.element:
                    found[COLUMNS] += nbytes
        return tuple(found.items())

    @cached_property
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.config.hidden * self.element

    @cached_property
    def qkv_bytes(self) -> int:
        """Bytes of one token's query, key and value."""
        return self.layer.attention.qkv_width * self.element

    @cached_property
    def attention_bytes(self) -> int:
        """Bytes of one token's attention output."""
        return self.query_width * self.element

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes that one more token adds to the KV cache of one layer: its key and value."""
        return self.layer.attention.cache_width * self.element

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of state that the layer keeps of a sequence, whatever the sequence's length."""
        return self.layer.attention.state_bytes

    def held_bytes(self, requests: Iterable[int], beams: int = 1) -> int:
        """Return the bytes of one layer's caches for requests with these numbers of cached tokens, summed over beams.

        A layer with a window keeps only the blocks of tokens in its window.
        """
        most = self.layer.attention.most_cached
        counts = [kept_tokens(count, most, beams) for count in requests]
        return sum(counts) * self.kv_bytes + len(counts) * beams * self.state_bytes

    @property
    def logits_bytes(self) -> int:
        """Bytes of one token's logits over the whole vocabulary, in float32."""
        return 4 * self.config.vocabulary

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sum of the experts' outputs for one token, in float32."""
        return 4 * self.config.hidden

    @property
    def row_and_choices_bytes(self) -> int:
        """Bytes of one token's input for experts on another node: normalised row, expert numbers and weights."""
        return 4 * (self.config.hidden + 2 * self.config.routed.top_k)
