"""The weights that are in no page: the embedding, the last norm, the LM head."""

from __future__ import annotations

from typing import NamedTuple

from moesched.models.config import ModelConfig

from ..products.linear import Tensor
from ..shared.page_reader import PageReader
from .compute import Compute


class Head(NamedTuple):
    """The LM head: its row blocks, one for each core that may share them, and the norm before it."""

    norm_D: Tensor
    blocks: list[Tensor]


class GlobalWeights(NamedTuple):
    """The weights in no page, on the accelerator."""

    embedding_VD: Tensor
    head: Head


def read_global_weights(
    config: ModelConfig, reader: PageReader, compute: Compute, rank: int
) -> GlobalWeights:
    """Read the weights in no page; of a tied LM head, only the rows of this rank."""

    def read(name: str) -> Tensor:
        return reader.read_tensor(name).to(compute.accelerator)

    embedding_VD, norm_D = read("embedding"), read("final_norm")
    pieces = compute.team.cores if compute.team else 1
    if config.tied_embeddings:
        blocks = list(embedding_VD.chunk(config.ranks)[rank].chunk(pieces))
    else:
        blocks = list(read("lm_head").chunk(pieces))
        if compute.arranges:
            blocks = [compute.arranged("lm_head", block) for block in blocks]
    return GlobalWeights(embedding_VD, Head(norm_D, blocks))
