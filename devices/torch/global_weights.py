"""The weights outside the layers, which belong to no page: the embedding, the final norm and the LM head."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moesched.models.config import ModelConfig

from ..kernels.layer_weights import Weights
from ..shared.coded import Block, plain_block
from ..shared.page_reader import PageReader
from .compute import Compute
from .copies import HOST


class GlobalWeights(NamedTuple):
    """The weights outside the layers, on the accelerator.

    Attributes:
        embedding: the embedding matrix.
        head: the weights of the final norm; and the LM head in row blocks, one for each core that computes logits.
    """

    embedding: Weights
    head: Weights


def read_global_weights(
    config: ModelConfig, reader: PageReader, compute: Compute, rank: int
) -> GlobalWeights:
    """Read the weights outside the layers from the files to the accelerator.

    This also gives the attention kernels in `compute` the attention sinks of all layers, since these kernels read no
    pages. If the embedding is also the LM head, the head has only this rank's rows of the embedding.

    rank: number of this rank, from 0.
    """

    def read(name: str) -> Block:
        block: Block = reader.read_tensor(name)
        return block.to(compute.accelerator)

    embedding_VD, norm_D = read("embedding"), read("final_norm")
    team = compute.kernels.team
    pieces = team.cores if team else 1
    if config.tied_embeddings:
        blocks: list[Block] = list(embedding_VD.chunk(config.ranks)[rank].chunk(pieces))
    else:
        blocks = list(read("lm_head").chunk(pieces))
        if compute.kernels.arranges:
            blocks = [compute.kernels.arranged("lm_head", block, compute.accelerator) for block in blocks]
    head = Weights({"final_norm": [norm_D], "lm_head": blocks})
    for number, layer in enumerate(config.pattern):
        if layer.grouped.sinks:
            sinks_H = plain_block(read(f"layers.{number}.sinks"), torch.float32).float()
            for device in {compute.accelerator, HOST}:
                beside = Weights({"sinks": [sinks_H.to(device)]}, layer)
                compute.kernels.beside_attention[number, device.type] = beside
    return GlobalWeights(Weights({"embedding": [embedding_VD]}), head)
