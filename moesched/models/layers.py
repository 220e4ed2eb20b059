"""Kinds of layers: a model is a pattern of layers, and a layer has a kind of attention and a feed-forward network.

Each kind of attention answers the same questions: its tensors, the widths of the data that passes through it, what it
keeps of earlier tokens, and its FLOPs. Widths are in elements.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from moesched.models.kv_blocks import window_tokens
from moesched.models.networks import FeedForward
from moesched.models.rotary import Rotary
from moesched.models.tensor_shapes import Shape

HeadNorm = Literal["head", "projection"]

FLOAT_BYTES = 4

Formats = tuple[tuple[str, str], ...]
"""Tensors that keep their storage format whatever the dtype of the computation, each with the format's name."""


class GroupedAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Softmax attention whose query heads share key-value heads (GQA, Ainslie et al. 2023).

    Attributes:
        window: most tokens that a token attends to; None for all before it.
        rotary: the rotary embedding of queries and keys.
        qk_norm: RMS norm of queries and keys: of each head, or of the whole projection; None for none.
        clip: the largest magnitude of queries, keys and values; None does not clip.
        biases: the projections that have a bias: those of the letters "qkvo" that it contains.
        sinks: whether each head has a learned logit that no token belongs to.
        scale: multiplies products of queries and keys; None for one over the square root of head_dim.
        gated: whether the output is multiplied by a gate, which the query projection computes.
        keys_are_values: whether one projection computes keys and values.
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

    @property
    def score_scale(self) -> float:
        """The number that multiplies products of queries and keys."""
        scale: float = self.head_dim**-0.5 if self.scale is None else self.scale
        return scale

    @property
    def query_width(self) -> int:
        """Elements of a token's query: heads times head_dim."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Elements of a token's key: KV heads times head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Elements of a token's query, key, value, and gate if it has one."""
        return (1 + self.gated) * self.query_width + 2 * self.key_width

    @property
    def attended_width(self) -> int:
        """Elements of a token's attention output."""
        return self.query_width

    @property
    def cache_width(self) -> int:
        """Elements that the cache keeps of a token: key and value."""
        return 2 * self.key_width

    @property
    def most_cached(self) -> int | None:
        """Most tokens that the cache keeps of a sequence; None for all."""
        return None if self.window is None else window_tokens(self.window)

    @property
    def state_bytes(self) -> int:
        """Bytes that are kept of a sequence whatever its length: none."""
        return 0

    @property
    def cached_heads(self) -> int:
        """Number of heads of the cache, which are read one by one."""
        return self.kv_heads

    @property
    def step_flops(self) -> float:
        """FLOPs for each pair of a new token and a cached one, in decode."""
        return 4.0 * self.query_width

    @property
    def prompt_flops(self) -> float:
        """FLOPs for each pair of tokens, in prefill."""
        return 4.0 * self.query_width

    def shapes_before(self, hidden: int) -> dict[str, Shape]:
        """Shapes of the tensors that are used before attention, by name."""
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
        """Shapes of the tensors of the output projection, by name."""
        shapes: dict[str, Shape] = {"o": (hidden, self.query_width)}
        return shapes | ({"o_bias": (hidden,)} if "o" in self.biases else {})

    def split(self, ranks: int) -> GroupedAttention:
        """The attention of one of `ranks` ranks; if there are fewer key-value heads than ranks, ranks have copies."""
        return replace(self, heads=self.heads // ranks, kv_heads=max(1, self.kv_heads // ranks))


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): the cache has one compressed vector per token.

    In decode, queries are brought to the latent space, and heads attend to the latent vectors themselves. In prefill
    the latent vectors are expanded to keys and values. Either way, the weights of the expansion are read once.

    Attributes:
        query_rank: width of the compressed queries; None where queries are not compressed.
        rank: width of the compressed keys and values.
        plain, rotary: widths of a key without and with rotary embedding; the latter is common to all heads.
        value: width of a value.
    """

    heads: int
    query_rank: int | None
    rank: int
    plain: int
    rotary: int
    value: int

    @property
    def qkv_width(self) -> int:
        """Elements of a token's query and latent vector."""
        return self.heads * (self.plain + self.rotary) + self.rank + self.rotary

    @property
    def attended_width(self) -> int:
        """Elements of a token's attention output."""
        return self.heads * self.value

    @property
    def cache_width(self) -> int:
        """Elements that the cache keeps of a token: latent vector and rotary key."""
        return self.rank + self.rotary

    @property
    def most_cached(self) -> None:
        """Most tokens that the cache keeps of a sequence: all."""
        return None

    @property
    def state_bytes(self) -> int:
        """Bytes that are kept of a sequence whatever its length: none."""
        return 0

    @property
    def cached_heads(self) -> int:
        """Number of heads of the cache, which are read one by one."""
        return 1

    @property
    def step_flops(self) -> float:
        """FLOPs for each pair of a new token and a cached one, in the latent space."""
        return 2.0 * self.heads * (2 * self.rank + self.rotary)

    @property
    def prompt_flops(self) -> float:
        """FLOPs for each pair of tokens, with expanded keys and values."""
        return 2.0 * self.heads * (self.plain + self.rotary + self.value)

    def shapes_before(self, hidden: int) -> dict[str, Shape]:
        """Shapes of the tensors used before attention, by name; those of the expansion are used in decode, too."""
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
        """Shapes of the tensors of the output projection, by name."""
        return {"o": (hidden, self.attended_width)}

    def split(self, ranks: int) -> LatentAttention:
        """The attention of one of `ranks` ranks, each of which has the whole latent cache."""
        return replace(self, heads=self.heads // ranks)


class LinearAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): a state of fixed size instead of a cache that grows.

    Attributes:
        key_heads, value_heads: numbers of heads of queries and keys, and of values.
        key, value: width of a key and of a value.
        convolution: number of tokens that the convolution before attention sees.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    convolution: int = 4

    @property
    def heads(self) -> int:
        """Number of heads of the attention output."""
        return self.value_heads

    @property
    def mixed_width(self) -> int:
        """Elements of a token's query, key and value, which pass the convolution."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    @property
    def qkv_width(self) -> int:
        """Elements of a token's query, key, value and gate, with the decay and the rate of each head."""
        return self.mixed_width + self.attended_width + 2 * self.value_heads

    @property
    def attended_width(self) -> int:
        """Elements of a token's attention output."""
        return self.value_heads * self.value

    @property
    def cache_width(self) -> int:
        """Elements that the cache keeps of a token: none."""
        return 0

    @property
    def most_cached(self) -> None:
        """Most tokens that the cache keeps of a sequence: none are counted."""
        return None

    @property
    def state_bytes(self) -> int:
        """Bytes that are kept of a sequence: a matrix per head, and the convolution's last tokens, in float32."""
        matrices = self.value_heads * self.key * self.value
        return (matrices + self.mixed_width * (self.convolution - 1)) * FLOAT_BYTES

    @property
    def cached_heads(self) -> int:
        """Number of heads of the state, which are read one by one."""
        return self.value_heads

    @property
    def token_flops(self) -> float:
        """FLOPs for each token: decay, prediction, update and reading of the state."""
        state = self.value_heads * self.key * self.value
        return 7.0 * state + 2.0 * self.mixed_width * self.convolution

    def shapes_before(self, hidden: int) -> dict[str, Shape]:
        """Shapes of the tensors that are used before attention, by name."""
        return {
            "qkv": (self.mixed_width, hidden),
            "gate": (self.attended_width, hidden),
            "decays": (2 * self.value_heads, hidden),
            "convolution": (self.mixed_width * self.convolution,),
            "decay_bias": (2 * self.value_heads,),
            "output_norm": (self.value,),
        }

    def shapes_after(self, hidden: int) -> dict[str, Shape]:
        """Shapes of the tensors of the output projection, by name."""
        return {"o": (hidden, self.attended_width)}

    def split(self, ranks: int) -> LinearAttention:
        """The attention of one of `ranks` ranks."""
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)


Attention = GroupedAttention | LatentAttention | LinearAttention


class Layer(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A layer's attention and feed-forward network.

    Attributes:
        norms: number of norms of the hidden state.
        formats: the storage formats of coded tensors, and of norms and routers that stay in float32, by
            `tensor_in_layer`; all others have the dtype of the computation.
    """

    attention: Attention
    feed_forward: FeedForward
    norms: int = 2
    formats: Formats = ()

    @property
    def grouped(self) -> GroupedAttention:
        """The layer's attention, checked to be of the kind that devices run."""
        assert isinstance(self.attention, GroupedAttention), "no device has kernels for other kinds"
        return self.attention

    def varied(self, **settings: Any) -> Layer:
        """The layer with other settings of its attention, or else of its feed-forward network."""
        of_attention = {
            name: settings.pop(name) for name in self.attention.__struct_fields__ if name in settings
        }
        return replace(
            self,
            attention=replace(self.attention, **of_attention),
            feed_forward=replace(self.feed_forward, **settings),
        )

    def split(self, ranks: int) -> Layer:
        """The layer of one of `ranks` ranks."""
        return replace(
            self, attention=self.attention.split(ranks), feed_forward=self.feed_forward.split(ranks)
        )


def representative(pattern: tuple[Layer, ...], count: int) -> tuple[int, ...]:
    """The numbers of `count` layers in which each kind has about its share of the pattern, and at least one layer.

    They are the first ones of each kind, in order. If `count` is less than the number of kinds, the most frequent kinds
    have one each.
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
