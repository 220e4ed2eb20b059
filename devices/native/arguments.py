"""Classes of ctypes for the C structs in which native calls get their arguments."""

from __future__ import annotations

import ctypes

_NUMBER, _POINTER, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class Norm(ctypes.Structure):
    """The arguments of a norm in C: its weight, its epsilon, and whether to subtract the mean (`Norm` of norm.h)."""

    _fields_ = (
        ("weight", _POINTER),
        ("in_float32", _NUMBER),
        ("epsilon", _REAL),
        ("subtracts_mean", _NUMBER),
    )


class Tokens(ctypes.Structure):
    """The arguments in C of an embedding lookup, with rotary angles for the tokens (`Tokens` of embedding.c)."""

    _fields_ = (
        *((name, _NUMBER) for name in ("tokens", "hidden", "turning")),
        *((name, _REAL) for name in ("magnitude", "factor")),
        *(
            (name, _POINTER)
            for name in ("ids", "positions", "embedding", "frequencies", "x", "cosines", "sines")
        ),
    )


class Inputs(ctypes.Structure):
    """The arguments in C of norm, projection to q, k and v, and rotation (`Inputs` of attention_inputs.c)."""

    _fields_ = (
        *((name, _NUMBER) for name in ("tokens", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, _NUMBER) for name in ("turning", "interleaved")),
        ("x", _POINTER),
        ("norm", Norm),
        ("projections", _NUMBER),
        ("weights", _POINTER),
        *((name, Norm) for name in ("query_norm", "key_norm")),
        *((name, _NUMBER) for name in ("query_normed", "key_normed")),
        ("bias", _POINTER),
        ("clip", _REAL),
        *((name, _POINTER) for name in ("cosines", "sines", "queries", "keys", "values")),
    )


class Attend(ctypes.Structure):
    """The arguments in C of decode attention over a KV cache in blocks (`Attend` of attention.h)."""

    _fields_ = (
        *(
            (name, _NUMBER)
            for name in ("number_bytes", "sequences", "heads", "kv_heads", "head_dim", "window")
        ),
        *((name, _NUMBER) for name in ("block_size", "query_stride", "new_stride")),
        ("scale", _REAL),
        *((name, _POINTER) for name in ("lengths", "blocks", "keys", "values", "queries", "new_keys")),
        *((name, _POINTER) for name in ("new_values", "sinks", "out")),
    )


class NewRows(ctypes.Structure):
    """The arguments in C to copy keys and values of new tokens to slots of a KV cache (`NewRows` of kv_rows.c)."""

    _fields_ = (
        *((name, _NUMBER) for name in ("tokens", "row_bytes")),
        *((name, _POINTER) for name in ("slots", "keys", "values", "new_keys", "new_values")),
    )


class Prompts(ctypes.Structure):
    """The arguments in C to attend from all new tokens of equally long prompts (`Prompts` of prompt_attention.c)."""

    _fields_ = (
        *((name, _NUMBER) for name in ("sequences", "queries", "length", "heads", "kv_heads", "head_dim")),
        *((name, _NUMBER) for name in ("window", "sequence_stride", "token_stride", "head_stride")),
        ("scale", _REAL),
        *((name, _POINTER) for name in ("keys", "values", "new_queries", "sinks", "out")),
    )


class ExpertKind(ctypes.Structure):
    """The arguments in C that the experts of a layer have in common (`ExpertKind` of experts.h)."""

    _fields_ = (("transposed", _NUMBER), ("limit", _REAL), ("alpha", _REAL))


class ExpertWeights(ctypes.Structure):
    """The matrices and biases of an expert in C (`ExpertWeights` of experts.h)."""

    _fields_ = tuple((name, _POINTER) for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"))


class OneExpert(ctypes.Structure):
    """The arguments in C of one expert that runs alone: sizes, kind and weights (`OneExpert` of experts.h)."""

    _fields_ = (
        *((name, _NUMBER) for name in ("hidden", "width")),
        ("kind", ExpertKind),
        ("weights", ExpertWeights),
    )


class Layer(ctypes.Structure):
    """The arguments in C of a layer's output projection, router, experts and their sum (`Layer` of moe_layer.c)."""

    _fields_ = (
        *((name, _NUMBER) for name in ("tokens", "hidden", "attended_width", "experts", "top_k", "width")),
        *((name, _NUMBER) for name in ("groups", "kept_groups", "sum_to_one")),
        *((name, _REAL) for name in ("scale", "residual_factor")),
        ("shared_width", _NUMBER),
        ("shared_scale", _REAL),
        *((name, _POINTER) for name in ("correction", "router_bias", "attended", "residual")),
        *((name, _POINTER) for name in ("output_weights", "output_bias")),
        ("norm", Norm),
        ("router", _POINTER),
        ("kind", ExpertKind),
        *((name, _POINTER) for name in ("expert_weights", "shared_weights", "projected", "x")),
        *(
            (name, _POINTER)
            for name in ("logits", "scores", "chosen", "weights", "rows", "sorted", "counts", "out")
        ),
    )


class Output(Layer):
    """The arguments in C of a layer's output projection alone: no other field is set."""


class Head(ctypes.Structure):
    """The arguments in C of last norm, LM head and choice of the likeliest tokens (`Head` of logits.c)."""

    _fields_ = (
        *((name, _NUMBER) for name in ("rows", "hidden", "vocabulary")),
        ("factor", _REAL),
        *((name, _POINTER) for name in ("x", "chosen")),
        ("norm", Norm),
        *((name, _POINTER) for name in ("weights", "logits", "likeliest")),
    )
