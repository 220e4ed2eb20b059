"""Storage formats of weights for simulation: bytes per weight by the role of a tensor, and the speed of kernels.

Bytes include scales and all else that a block of weights has. The formats of llama.cpp are as in its files: a name such
as q4_k_m stands for several block formats, by the role of a tensor (`llama_tensor_get_type` in its quantize tool).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

Role = Literal["matrix", "down", "value", "expert", "expert_down", "embedding", "head", "small"]
"""Roles of tensors. Small ones are norms, biases and routers; value and down are matrices that mixed formats favour."""

EXPERT_ROLES: tuple[Role, ...] = ("expert", "expert_down")

BLOCK = 256
"""Weights of a k-quant's block; rows that are no multiple of it take the next larger format with blocks of 32."""

_BF16, _F32 = 2.0, 4.0
_Q8_0, _Q5_1, _Q5_0, _Q4_0 = 34 / 32, 24 / 32, 22 / 32, 18 / 32
_Q6_K, _Q5_K, _Q4_K = 210 / 256, 176 / 256, 144 / 256
"""Bytes of a block divided by its number of weights, from ggml-common.h of llama.cpp."""
_INSTEAD = {_Q6_K: _Q8_0, _Q5_K: _Q5_1, _Q4_K: _Q5_0}


class Format(msgspec.Struct, frozen=True):
    """A storage format of a whole model, for simulation: bytes per weight by a tensor's role, and the speed of kernels.

    Attributes:
        weights: for each role of a tensor, such as "expert" or "head", bytes per weight.
        odd_rows: for each role, bytes per weight if the length of rows is not a multiple of `BLOCK`.
        kernel_rate: share of the processor's FLOP/s, in the dtype of the computation, that matrix products with weights
            of this format reach; below 1 where kernels first convert the weights.
        why: the reason for the rate, in words.
    """

    name: str
    weights: Mapping[Role, float]
    odd_rows: Mapping[Role, float]
    kernel_rate: float
    why: str

    def bytes_per_weight(self, role: Role, row: int) -> float:
        """Return the bytes per weight of a tensor.

        Args:
            role: role of the tensor.
            row: number of weights of a row.
        """
        return (self.odd_rows if row % BLOCK else self.weights)[role]

    def rate(self, role: Role) -> float:
        """Return the share of a processor's FLOP/s that matrix products with tensors of a role reach.

        The share is 1 for roles whose weights have 16 bits.
        """
        return self.kernel_rate if self.weights[role] < _BF16 else 1.0


def _format(name: str, each: float, rate: float, why: str, **other: float) -> Format:
    """Return a format in which matrices have `each` bytes per weight, and embedding, LM head and small tensors 2.

    Args:
        rate: share of a processor's FLOP/s that products reach.
        why: the reason for the rate, in words.
        other: bytes per weight of roles that differ, by role.
    """
    weights: dict[Any, float] = dict.fromkeys(("matrix", "down", "value", "expert", "expert_down"), each)
    weights |= dict.fromkeys(("embedding", "head", "small"), _BF16) | other
    return Format(name, weights, weights, rate, why)


def _llama_cpp(name: str, each: float, rate: float, why: str, *, head: float, favoured: float) -> Format:
    """Return a format of llama.cpp, in which half of the value and down matrices have `favoured` bytes per weight.

    llama.cpp's function `use_more_bits` chooses that half.

    Args:
        each: bytes per weight of most matrices.
        rate: share of a processor's FLOP/s that products reach.
        why: the reason for the rate, in words.
        head: bytes per weight of the LM head.
        favoured: bytes per weight of half of the value and down matrices.
    """

    def weights(formats: Mapping[float, float]) -> dict[Role, float]:
        one, better = formats.get(each, each), formats.get(favoured, favoured)
        mixed = (one + better) / 2
        return {
            "matrix": one,
            "expert": one,
            "down": mixed,
            "value": mixed,
            "expert_down": mixed,
            "embedding": one,
            "head": formats.get(head, head),
            "small": _F32,
        }

    return Format(name, weights({}), weights(_INSTEAD), rate, why)


CODED_RATES: Mapping[str, float] = MappingProxyType(
    {
        "q8_0": 0.9,
        "q4_0": 0.9,
        "q5_0": 0.9,
        "q5_1": 0.9,
        "q4_k": 0.8,
        "q5_k": 0.7,
        "q6_k": 0.7,
        "mxfp4": 0.8,
    }
)
"""Kernel rates of single coded formats, on processors whose products with them were not measured."""
_CONVERTS = "default: kernels convert blocks to 16 bits or 8-bit integers in their inner loop"

GROUPS = (32, 64, 128)
"""Numbers of weights that share a scale and a zero point in formats of integers."""
EXPERTS_ONLY = "_experts"
"""Ending of the names of formats in which only experts are quantised, and all other weights have 16 bits."""


def integer_format(bits: int, group: int) -> str:
    """Return the name of the format of `bits`-bit integers in which `group` weights share a scale."""
    return f"int{bits}" if group == GROUPS[-1] else f"int{bits}_g{group}"


def _integers(bits: int, group: int) -> Format:
    why = f"default: groups of {group}, converted ahead of the product"
    return _format(integer_format(bits, group), bits / 8 + 2.5 / group, 0.9, why)


def _experts_only(each: Format) -> Format:
    """Return a format in which experts are stored as in the format `each`, and all other weights in 16 bits."""
    weights: dict[Role, float] = {
        role: size if role in EXPERT_ROLES else _BF16 for role, size in each.weights.items()
    }
    return Format(each.name + EXPERTS_ONLY, weights, weights, each.kernel_rate, each.why)


_CHOSEN = (
    _format("bf16", _BF16, 1.0, "the dtype of the computation"),
    _format("fp8", 1 + 4 / 128**2, 1.0, "default: products in 8 bits are not assumed, only their bytes"),
    _llama_cpp("q8_0", _Q8_0, CODED_RATES["q8_0"], _CONVERTS, head=_Q8_0, favoured=_Q8_0),
    _llama_cpp("q6_k", _Q6_K, CODED_RATES["q6_k"], _CONVERTS, head=_Q6_K, favoured=_Q6_K),
    _llama_cpp("q5_k", _Q5_K, CODED_RATES["q5_k"], _CONVERTS, head=_Q6_K, favoured=_Q6_K),
    _llama_cpp("q4_k_m", _Q4_K, CODED_RATES["q4_k"], _CONVERTS, head=_Q6_K, favoured=_Q6_K),
    _llama_cpp("q4_0", _Q4_0, CODED_RATES["q4_0"], _CONVERTS, head=_Q6_K, favoured=_Q4_0),
    _format(
        "mxfp4",
        _BF16,
        CODED_RATES["mxfp4"],
        "default: kernels convert blocks of 32 to 16 bits",
        expert=17 / 32,
        expert_down=17 / 32,
    ),
    _integers(8, 128),
    _integers(4, 128),
)
_READ = [_integers(bits, group) for bits in (8, 4) for group in GROUPS[:-1]]
_STORED = (*_CHOSEN, *_READ)

FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        *_STORED,
        *(_experts_only(each) for each in _STORED if each.name.startswith(("int", "fp8"))),
    )
}
"""All formats, by name."""
CHOICES = tuple(each.name for each in _CHOSEN)
"""Formats that users choose among; the others are only read from config.json."""


def role_of(tensor: str) -> Role:
    """Return the role of a tensor, given its canonical name or the last part of that name."""
    parts = tensor.split(".")
    name = parts[-1]
    if name == "embedding" or name == "lm_head":
        return "embedding" if name == "embedding" else "head"
    if name in _SMALL or name.endswith(("_norm", "_bias")):
        return "small"
    if "experts" in parts:
        return "expert_down" if name == "down" else "expert"
    return _FAVOURED.get(name, "matrix")


_SMALL = {"final_norm", "router", "sinks", "convolution", "shared_weight", "decays"}
_FAVOURED: dict[str, Role] = {"v": "value", "shared_down": "down"}
