"""Tensor parallelism: divides a model among equal ranks (Megatron-LM; MoE-Lightning, section 4.3).

Every rank has a share of the attention heads, of each expert's inner width and of the LM head's rows, and a full copy
of the norms, the router and the embedding. The output projection of attention and the experts then give partial sums,
to be added over all ranks, and the LM head gives a part of the logits.
"""

from __future__ import annotations

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.models.checkpoint import Checkpoint, Columns, StoredTensor
from moesched.models.config import ModelConfig
from moesched.models.reading import runs
from moesched.models.tensors import is_transposed, tensor_shapes

BY_COLUMNS = ("o", "down")
"""Matrices that are divided by columns, their inputs, unless they are stored transposed; others are divided by rows."""


def cut_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return the configuration of one of `ranks` equal ranks.

    Raises:
        BadInput: the model cannot be divided into that many equal parts.
    """
    if runs(config) and config.attention.qk_norm == "projection" and ranks > 1:
        raise BadInput(
            f"{config.name} cannot be divided among {ranks} accelerators, since its queries and keys are normalised "
            "over all heads together: use --tensor-parallel 1"
        )
    for what, size in _cut_sizes(config).items():
        if size % ranks:
            fitting = [
                n for n in range(1, ranks) if not any(each % n for each in _cut_sizes(config).values())
            ]
            raise BadInput(
                f"{config.name} cannot be divided among {ranks} accelerators, since it has {size} {what}: "
                f"use --tensor-parallel {' or '.join(map(str, fitting))}"
            )
    return replace(
        config,
        pattern=tuple(layer.split(ranks) for layer in config.pattern),
        ranks=ranks,
    )


def cut_checkpoint(checkpoint: Checkpoint, rank: int, ranks: int) -> Checkpoint:
    """Locate one rank's share of a whole checkpoint in its files; ranks count from 0.

    Raises:
        BadInput: the model cannot be divided into that many equal parts.
    """
    config = cut_config(checkpoint.config, ranks)
    whole, shapes = tensor_shapes(checkpoint.config), tensor_shapes(config)
    tensors = {}
    for name, stored in checkpoint.tensors.items():
        if shapes[name] == whole[name]:
            tensors[name] = stored
        elif name.rpartition(".")[2] in BY_COLUMNS and not is_transposed(config, name):
            tensors[name] = _columns(name, stored, rank, ranks)
        else:
            tensors[name] = _rows(stored, rank, ranks)
    return replace(checkpoint, config=config, tensors=tensors)


def _cut_sizes(config: ModelConfig) -> dict[str, int]:
    heads = config.typical_layer.attention.heads
    key_value = {"key-value heads": config.attention.kv_heads} if runs(config) else {}
    return {
        "attention heads": heads,
        **key_value,
        "inputs of each expert's down projection": config.routed.intermediate,
        "tokens in its vocabulary": config.vocabulary,
    }


def _rows(stored: StoredTensor, rank: int, ranks: int) -> StoredTensor:
    rows, nbytes = stored.shape[0] // ranks, stored.nbytes // ranks
    return replace(
        stored, offset=stored.offset + rank * nbytes, shape=(rows, *stored.shape[1:]), nbytes=nbytes
    )


def _columns(name: str, stored: StoredTensor, rank: int, ranks: int) -> StoredTensor:
    rows, columns = stored.shape
    share = columns // ranks
    if share % stored.format.block:
        raise BadInput(
            f"{name} has rows of {columns} weights in {stored.format.name}, which cannot be divided among {ranks} "
            f"accelerators in whole blocks of {stored.format.block}: use --tensor-parallel 1"
        )
    return replace(
        stored, shape=(rows, share), nbytes=stored.nbytes // ranks, columns=Columns(rank * share, columns)
    )
