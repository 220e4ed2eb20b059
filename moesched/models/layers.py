"""Description of layers: a model is a pattern of layers, each with a kind of attention and a feed-forward network.

Every kind of attention gives its tensors, the widths of its queries, keys and outputs, the size of its cache, and its
FLOPs. Widths are in elements.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from moesched.models.kv_blocks import window_tokens
from moesched.models.networks import FeedForward
from moesched.models.rotary import Rotary
from moesched.models.tensor_shapes import Shape

HeadNorm = Literal["head", "projection"]

FLOAT_BYTES = 4

Formats = tuple[tuple[str, str], ...]
"""Pairs (tensor, storage format) of tensors that stay in this format, whatever the dtype of the computation."""


class GroupedAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Softmax attention whose query heads share key-value heads (GQA, Ainslie et al. 2023).

    Attributes:
        window: the largest number of tokens that a token attends to, itself included; None for no limit.
        rotary: the rotary embedding of queries and keys.
        qk_norm: RMS norm of queries and keys, over each head or over the whole projection; None for no norm.
        clip: the largest absolute value of queries, keys and values; larger ones are clipped; None does not clip.
        biases: letters of the projections that have a bias, some of "qkvo".
        sinks: whether each head has an attention sink: a learned logit that belongs to no token.
        scale: factor of the products of queries and keys; None for one over the square root of head_dim.
        gated: whether the output is multiplied by a gate, which the query projection computes.
        keys_are_values: whether one projection computes both keys and values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    rotary: Rotary = Rotary()
    qk_norm: HeadNorm | None = None
    clip: float | None = None
    biases: str = ""
    sinks: bool = False
    scale: float | None = None
    gated: bool = False
    keys_are_values: bool = False
    state_bytes: ClassVar[int] = 0
    """Bytes of state that a layer keeps of a sequence whatever its length; 0, since there is only a cache."""

    @property
    def score_scale(self) -> float:
        """Factor of the products of queries and keys."""
        scale: float = self.head_dim**-0.5 if self.scale is None else self.scale
        return scale

    @property
    def query_width(self) -> int:
        """Number of elements of a token's query: heads times head_dim."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Number of elements of a token's key: KV heads times head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Number of elements of a token's query, key and value, and of its gate if attention is gated."""
        return (1 + self.gated) * self.query_width + 2 * self.key_width

    @property
    def attended_width(self) -> int:
        """Number of elements of a token's attention output."""
        return self.query_width

    @property
    def cache_width(self) -> int:
        """Number of elements that the KV cache keeps of each token: its key and value."""
        return 2 * self.key_width

    @property
    def most_cached(self) -> int | None:
        """Largest number of tokens that the KV cache keeps of a sequence; None for all."""
        return None if self.window is None else window_tokens(self.window)

    @property
    def cached_heads(self) -> int:
        """Number of heads of the KV cache; kernels read the cache head by head."""
        return self.kv_heads

    @property
    def step_flops(self) -> float:
        """FLOPs of attention in decode for each pair of a new token and a cached token."""
        return 4.0 * self.query_width

    @property
    def prompt_flops(self) -> float:
        """FLOPs of attention in prefill for each pair of tokens of which one attends to the other."""
        return 4.0 * self.query_width

    def shapes_before(self, hidden: int) -> dict[str, Shape]:
        """Return the shapes of tensors that are used before attention, by name; `hidden` is the hidden size."""
        query, key = self.query_width, self.key_width
        widths = {"q": (1 + self.gated) * query, "k": key}
        if not self.keys_are_values:
            widths["v"] = key
        shapes: dict[str, Shape] = {name: (width, hidden) for name, width in widths.items()}
        shapes |= {f"{name}_bias": (width,) for name, width in widths.items() if name in self.biases}
        if self.qk_norm:
            together = self.qk_norm == "projection"
            shapes["q_norm"] = (query if together else self.head_dim,)
            shapes["k_norm"] = (key if together else self.head_dim,)
        if self.sinks:
            shapes["sinks"] = (self.heads,)
        return shapes

    def shapes_after(self, hidden: int) -> dict[str, Shape]:
        """Return the shapes of the output projection's tensors, by name; `hidden` is the hidden size."""
        shapes: dict[str, Shape] = {"o": (hidden, self.query_width)}
        return shapes | ({"o_bias": (hidden,)} if "o" in self.biases else {})

    def split(self, ranks: int) -> GroupedAttention:
        """Return the attention of one of `ranks` tensor-parallel ranks.

        If there are fewer key-value heads than ranks, several ranks have a copy of the same head.
        """
        return replace(self, heads=self.heads // ranks, kv_heads=max(1, self.kv_heads // ranks))


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): the cache has one compressed vector per token.

    In decode, queries are projected to the latent space, and heads attend to the latent vectors themselves. In prefill,
    the latent vectors are expanded to keys and values. Either way, the weights that expand them are read once for all
    tokens together.

    Attributes:
        query_rank: width of the compressed queries; None if queries are not compressed.
        rank: width of the latent vector, from which keys and values are expanded.
        plain: width of the part of a head's key without rotary embedding.
        rotary: width of the part of a key with rotary embedding, which all heads share.
        value: width of a head's value.
    """

    heads: int
    query_rank: int | None
    rank: int
    plain: int
    rotary: int
    value: int
    most_cached: ClassVar[None] = None
    """Largest number of tokens that the cache keeps of a sequence; None, since it keeps all."""
    state_bytes: ClassVar[int] = 0
    """Bytes of state that a layer keeps of a sequence whatever its length; 0, since there is only a cache."""
    cached_heads: ClassVar[int] = 1
    """Number of heads of the cache; 1, since all heads share the latent vectors."""

    @property
    def qkv_width(self) -> int:
        """Number of elements of a token's query, latent vector and rotary key."""
        return self.heads * (self.plain + self.rotary) + self.rank + self.rotary

    @property
    def attended_width(self) -> int:
        """Number of elements of a token's attention output."""
        return self.heads * self.value

    @property
    def cache_width(self) -> int:
        """Number of elements that the cache keeps of each token: its latent vector and rotary key."""
        return self.rank + self.rotary

    @property
    def step_flops(self) -> float:
        """FLOPs in decode for each pair of a new token and a cached token, computed on latent vectors."""
        return 2.0 * self.heads * (2 * self.rank + self.rotary)

    @property
    def prompt_flops(self) -> float:
        """FLOPs in prefill for each pair of tokens, computed on expanded keys and values."""
        return 2.0 * self.heads * (self.plain + self.rotary + self.value)

    def shapes_before(self, hidden: int) -> dict[str, Shape]:
        """Return the shapes of tensors that are used before attention, by name; `hidden` is the hidden size.

        The tensors include the projection that expands latent vectors, which is also used in decode.
        """
        query = self.heads * (self.plain + self.rotary)
        shapes: dict[str, Shape] = {"q": (query, hidden)}
        if self.query_rank is not None:
            shapes = {
                "q_a": (self.query_rank, hidden),
                "q_a_norm": (self.query_rank,),
                "q": (query, self.query_rank),
            }
        return shapes | {
            "kv_a": (self.rank + self.rotary, hidden),
            "kv_a_norm": (self.rank,),
            "kv": (self.heads * (self.plain + self.value), self.rank),
        }

    def shapes_after(self, hidden: int) -> dict[str, Shape]:
        """Return the shapes of the output projection's tensors, by name; `hidden` is the hidden size."""
        return {"o": (hidden, self.attended_width)}

    def split(self, ranks: int) -> LatentAttention:
        """Return the attention of one of `ranks` tensor-parallel ranks; each rank has the whole latent cache."""
        return replace(self, heads=self.heads // ranks)


class LinearAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): a state of fixed size instead of a cache that grows.

    Attributes:
        key_heads: number of heads of queries, and of keys.
        value_heads: number of heads of values.
        key: width of a head's key.
        value: width of a head's value.
        convolution: number of tokens that the convolution before attention combines.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    convolution: int = 4
    cache_width: ClassVar[int] = 0
    """Number of elements that a cache keeps of each token; 0, since there is only a state."""
    most_cached: ClassVar[None] = None
    """Largest number of tokens that a cache keeps of a sequence; None, since no tokens are cached."""

    @property
    def heads(self) -> int:
        """Number of heads of the attention output."""
        return self.value_heads

    @property
    def mixed_width(self) -> int:
        """Number of elements of a token's query, key and value, which are the inputs of the convolution."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    @property
    def qkv_width(self) -> int:
        """Number of elements of a token's query, key, value and gate, and of each head's decay and update rate."""
        return self.mixed_width + self.attended_width + 2 * self.value_heads

    @property
    def attended_width(self) -> int:
        """Number of elements of a token's attention output."""
        return self.value_heads * self.value

    @property
    def state_bytes(self) -> int:
        """Bytes of state that a layer keeps of a sequence, in float32.

        The state is a matrix per head, and the last inputs of the convolution.
        """
        matrices = self.value_heads * self.key * self.value
        return (matrices + self.mixed_width * (self.convolution - 1)) * FLOAT_BYTES

    @property
    def cached_heads(self) -> int:
        """Number of heads of the state; kernels read the state head by head."""
        return self.value_heads

    @property
    def token_flops(self) -> float:
        """FLOPs for each token: decay, prediction, update and reading of the state, and the convolution."""
        state = self.value_heads * self.key * self.value
        return 7.0 * state + 2.0 * self.mixed_width * self.convolution

    def shapes_before(self, hidden: int) -> dict[str, Shape]:
        """Return the shapes of tensors that are used before attention, by name; `hidden` is the hidden size."""
        return {
            "qkv": (self.mixed_width, hidden),
            "gate": (self.attended_width, hidden),
            "decays": (2 * self.value_heads, hidden),
            "convolution": (self.mixed_width * self.convolution,),
            "decay_bias": (2 * self.value_heads,),
            "output_norm": (self.value,),
        }

    def shapes_after(self, hidden: int) -> dict[str, Shape]:
        """Return the shapes of the output projection's tensors, by name; `hidden` is the hidden size."""
        return {"o": (hidden, self.attended_width)}

    def split(self, ranks: int) -> LinearAttention:
        """Return the attention of one of `ranks` tensor-parallel ranks."""
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)


Attention = GroupedAttention | LatentAttention | LinearAttention


class Layer(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A layer's attention and feed-forward network.

    Attributes:
        norms: number of norms of the hidden state.
        formats: pairs (name, storage format) of tensors that keep this format in memory, whatever the dtype of the
            computation; names are as `tensor_in_layer` returns them.
    """

    attention: Attention
    feed_forward: FeedForward
    norms: int = 2
    formats: Formats = ()

    @property
    def grouped(self) -> GroupedAttention:
        """The layer's attention, if it is grouped, the only kind that devices run; any other raises AssertionError."""
        assert isinstance(self.attention, GroupedAttention), "no device has kernels for other kinds"
        return self.attention

    def varied(self, **settings: Any) -> Layer:
        """Return a copy of the layer with other settings.

        Args:
            settings: new values of fields of its attention and of its feed-forward network. If both have a field of
                the same name, attention's changes.
        """
        of_attention = {
            name: settings.pop(name) for name in self.attention.__struct_fields__ if name in settings
        }
        return replace(
            self,
            attention=replace(self.attention, **of_attention),
            feed_forward=replace(self.feed_forward, **settings),
        )

    def split(self, ranks: int) -> Layer:
        """Return the part of the layer that one of `ranks` tensor-parallel ranks has."""
        return replace(
            self, attention=self.attention.split(ranks), feed_forward=self.feed_forward.split(ranks)
        )


def representative(pattern: tuple[Layer, ...], count: int) -> tuple[int, ...]:
    """Choose `count` layers, so that each kind has about its share of the pattern; return their numbers.

    The first layers of each kind are chosen, and at least one of each kind. If there are more kinds than `count`, only
    the most frequent kinds have a layer.
    """
    where: dict[Layer, list[int]] = {}
    for number, layer in enumerate(pattern):
        where.setdefault(layer, []).append(number)
    kinds = sorted(where.values(), key=len, reverse=True)[:count]
    taken = [1] * len(kinds)
    for _ in range(min(count, len(pattern)) - len(kinds)):
        short = [
            len(of_kind) * count / len(pattern) - have for of_kind, have in zip(kinds, taken, strict=True)
        ]
        room = [n for n, of_kind in enumerate(kinds) if taken[n] < len(of_kind)]
        taken[max(room, key=short.__getitem__)] += 1
    return tuple(sorted(n for of_kind, have in zip(kinds, taken, strict=True) for n in of_kind[:have]))
