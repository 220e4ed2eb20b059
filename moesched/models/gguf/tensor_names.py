"""Names of tensors in GGUF files, and the canonical tensors that each one contains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from moesched.models.architectures.architecture import Stored
from moesched.models.config import ModelConfig
from moesched.models.gguf.families import GGUF_FAMILIES, GgufFamily, architecture_of
from moesched.models.tensors import dense_shapes, expert_shapes, global_shapes

DENSE = MappingProxyType({"shared_gate": "ffn_gate", "shared_down": "ffn_down", "shared_up": "ffn_up"})
"""Names of the tensors in a dense layer's network, in families whose other layers have routed experts."""
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "token_embd",
        "final_norm": "output_norm",
        "lm_head": "output",
        "attention_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "sinks": "attn_sinks",
        "o": "attn_output",
        "ffn_norm": "ffn_norm",
        "router": "ffn_gate_inp",
        "router_bias": "exp_probs_b",
        "shared_gate": "ffn_gate_shexp",
        "shared_down": "ffn_down_shexp",
        "shared_up": "ffn_up_shexp",
        "gate": "ffn_gate",
        "down": "ffn_down",
        "up": "ffn_up",
    }
)
"""Names of tensors in GGUF files, without layer and ending, by the last part of their canonical names.

A bias that is not here has the name of its matrix.
"""


def as_in_gguf(config: ModelConfig) -> ModelConfig:
    """Return a copy of the configuration, with the layout of matrices that GGUF files have.

    The gate and up matrices of experts are separate, no matrix is transposed, and the rows of query and key matrices
    have the order of the family's files.

    Raises:
        BadInput: the model's family has no GGUF files.
    """
    interleaved = GGUF_FAMILIES[architecture_of(config)].interleaved
    layers = (
        layer.varied(rotary=replace(layer.grouped.rotary, interleaved=interleaved))
        for layer in config.pattern
    )
    return replace(config, pattern=tuple(layers)).varied(alternating=False, transposed_down=False)


def gguf_tensors(family: GgufFamily, config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors in GGUF files; matrices of one kind, such as gate, of all experts of a layer are one tensor.

    Args:
        config: configuration that `as_in_gguf` returned.
    """
    common = {**NAMES, **family.names}
    for name in global_shapes(config):
        yield Stored(f"{common[name]}.weight", [name])
    for layer in range(config.layers):
        network = config.layer(layer).feed_forward
        names = common if network.experts else common | DENSE
        theirs, ours = f"blk.{layer}.", f"layers.{layer}."
        parts = [name.removeprefix(ours) for name in dense_shapes(config, layer)]
        for name, fused in family.fused.items():
            yield Stored(f"{theirs}{name}.weight", [ours + part for part in fused])
            parts = [part for part in parts if part not in fused]
        for part in parts:
            name, ending = _name(names, part)
            yield Stored(f"{theirs}{name}.{ending}", [ours + part])
        for part in network.expert_shapes(config.hidden) if network.experts else ():
            name, ending = _name(names, part)
            stacked = [f"{ours}experts.{expert}.{part}" for expert in range(network.experts)]
            if len(stacked) == 1:
                yield Stored(f"{theirs}{name}.{ending}", stacked)
            else:
                yield Stored(f"{theirs}{name}_exps.{ending}", stacked, stacks=len(stacked))


def _name(names: Mapping[str, str], part: str) -> tuple[str, str]:
    """Return (name, ending) of a layer's tensor in GGUF files, without the layer; the ending is "weight" or "bias".

    Args:
        names: names in GGUF files, without layer and ending, by the last part of canonical names.
        part: the last part of the tensor's canonical name.
    """
    matrix = part.removesuffix("_bias")
    return names.get(part) or names[matrix], "weight" if part == matrix else "bias"


def single_expert_tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors of experts as GGUF files of early 2024 have them: one for each matrix of each expert."""
    for layer in range(config.layers):
        for expert in range(config.layer(layer).feed_forward.experts):
            for name in expert_shapes(config, layer, expert):
                part, ending = _name(NAMES, name.rpartition(".")[2])
                yield Stored(f"blk.{layer}.{part}.{expert}.{ending}", [name])
