"""Bytes of GPU memory that stay allocated for replayed CUDA graphs: micro-batches' results, scratch, and the graphs.

A replay uses the addresses of the captured call, so the memory there is not freed.
"""

from __future__ import annotations

from collections.abc import Collection

from moesched.models.footprint import KEPT_ROWS
from moesched.models.operations import Operations

PART_TOKENS = 512
"""Tokens of each part into which attention cuts a sequence; one program of a GPU kernel computes one part."""
MOST_GRAPHS = 512
"""Largest number of graphs that are kept at a time."""
MOST_TABLES = 1024
"""Most tables of weights' addresses that are kept on the GPU: few, as streamed weights return to the same addresses."""
SERVED_MEMORIES = 4
"""Number of memories for results that a micro-batch of served requests keeps, each for another number of rows."""
GRAPH_BYTES = 64 << 10
"""Assumed bytes of a graph of a few kernels, which CUDA allocates."""
_GRAPHS_OF_A_LAYER, _GRAPHS_OF_A_STEP = 4, 2
_BLOCKS_OF_A_MATRIX, _BLOCK_BYTES = 3, 16
_NUMBER, _SMALL, _FLOAT = 8, 4, 4
_GROWING = 2
"""Factor for memory that is replaced by a larger one: the old one stays until the last layer uses the new one."""


def kept_bytes(operations: Operations, rows: int, blocks: int, *, loads: bool) -> int:
    """Return the bytes of kernels' results that stay allocated for a micro-batch; 0 if it has over `KEPT_ROWS` rows.

    Hidden states that pass from layer to layer are not counted.

    Args:
        rows: the micro-batch's new tokens in a step.
        blocks: number of blocks of the micro-batch's KV cache.
        loads: whether the KV cache is loaded from the host, so that each layer has its own list of blocks.
    """
    if rows > KEPT_ROWS:
        return 0
    network = operations.config.routed
    choices = network.top_k * (_NUMBER + _FLOAT) + network.experts * _FLOAT
    listed = _GROWING * _NUMBER * (2 * rows + 2 * (2 * rows + blocks))
    layers = operations.config.layers if loads else 0
    attended = max(kind.qkv_bytes + kind.attention_bytes for kind in operations.kinds.values())
    of_layers = operations.config.layers * network.top_k * _NUMBER + _NUMBER  # and the tokens
    return rows * (attended + 2 * operations.hidden_bytes + choices + of_layers) + listed * (1 + layers)


def shared_bytes(operations: Operations, kept: Collection[int], decode: int, longest: int) -> int:
    """Return the bytes of scratch memory that all micro-batches share, and of tables of the weights' addresses.

    Args:
        kept: number of rows of each allocation of scratch memory. A larger allocation does not replace a smaller one,
            since captured kernels still use the smaller one.
        decode: total number of rows of the allocations for partial results of attention. Each of these allocations
            has as many rows as the largest decode step.
        longest: tokens of the longest sequence at its end.
    """
    of_layers = {_scratch_of_a_row(kind) for kind in operations.kinds.values()}
    logits = operations.config.vocabulary * _FLOAT
    attended = decode * max(_parts_of_a_row(kind, longest) for kind in operations.kinds.values())
    return sum(kept) * (sum(of_layers) + logits) + attended + _tables(operations)


def graph_bytes(layers: int, steps: int) -> int:
    """Return the assumed bytes of the CUDA graphs of `steps` decode steps of a model with `layers` layers."""
    of_a_step = layers * _GRAPHS_OF_A_LAYER + _GRAPHS_OF_A_STEP
    return GRAPH_BYTES * min(MOST_GRAPHS, of_a_step * steps)


def _scratch_of_a_row(operations: Operations) -> int:
    network = operations.layer.feed_forward
    inner = network.intermediate * (operations.element + _FLOAT)  # with activations, which may be observed
    choice = 2 * _NUMBER + _FLOAT + _SMALL + operations.hidden_bytes + inner
    return 2 * operations.hidden_bytes + network.top_k * choice + network.experts * _FLOAT


def _parts_of_a_row(operations: Operations, longest: int) -> int:
    """Return the bytes, for one row, of partial results (outputs, maxima, sums) of attention over `longest` tokens."""
    parts = 1 << max(0, -(-longest // PART_TOKENS) - 1).bit_length()
    width = operations.query_width + 2 * operations.layer.attention.heads
    return _GROWING * parts * _FLOAT * width


def _tables(operations: Operations) -> int:
    """Return the bytes of `MOST_TABLES` tables of weights' addresses.

    Half of the tables list one kind of matrix, such as gate, of all experts of a layer; the others list one matrix.
    """
    matrices = operations.config.routed.experts + 1
    return MOST_TABLES * matrices * _BLOCKS_OF_A_MATRIX * _BLOCK_BYTES // 2
