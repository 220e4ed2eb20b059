"""The search of a checkpoint for the first tensor that contains an infinity or NaN."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from moesched.models.layout import WeightLayout

from .arena import aligned_bytes
from .coded import plain_block
from .page_reader import PageReader


def describe_first_bad_weight(reader: PageReader, layout: WeightLayout) -> str:
    """Find a checkpoint's first tensor with an infinity or NaN; returns its description for an error's text.

    If all weights are finite, the description says so, and names an activation as the cause. The search needs memory
    for one page, or for one tensor outside the layers.
    """
    return first_bad(_weights(reader, layout)) or "none of the weights, so an activation"


def first_bad(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of the first tensor with a number that is not finite; None if all are finite.

    tensors: pairs of a name and a tensor.
    """
    return next((name for name, tensor in tensors if not bool(torch.isfinite(tensor).all())), None)


def _weights(reader: PageReader, layout: WeightLayout) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("embedding", "final_norm"):
        yield f"weight {name}", plain_block(reader.read_tensor(name), reader.dtype)
    for page in layout.pages:
        memory = aligned_bytes(reader.bytes_in_slot(page))
        reader.read(page, memory)
        for name, blocks in reader.views(memory, page).items():
            yield from ((f"weight {name}", plain_block(block, reader.dtype)) for block in blocks)
    if not layout.config.tied_embeddings:
        yield "weight lm_head", plain_block(reader.read_tensor("lm_head"), reader.dtype)
