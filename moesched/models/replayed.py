"""Bytes that a GPU keeps for kernels that are replayed: results by micro-batch, what tasks share, and graphs.

A replay reads and writes the memory of the captured call, which therefore stays.
"""

from __future__ import annotations

from collections.abc import Collection

from moesched.models.footprint import KEPT_ROWS
from moesched.models.operations import Operations

PART_TOKENS = 512
"""Tokens of the parts into which attention cuts a sequence; each is the work of one program of a GPU kernel."""
MOST_GRAPHS = 512
"""Most graphs that are kept at a time."""
MOST_TABLES = 1024
"""Most tables of row blocks that are kept on the GPU: few, since streamed weights come back to the same addresses."""
SERVED_MEMORIES = 4
"""Memories for results that a micro-batch keeps where requests join and leave, one a number of rows; elsewhere one."""
GRAPH_BYTES = 64 << 10
"""Assumed bytes of a graph of a few kernels, which CUDA allocates."""
_GRAPHS_OF_A_LAYER, _GRAPHS_OF_A_STEP = 4, 2
_BLOCKS_OF_A_MATRIX, _BLOCK_BYTES = 3, 16
_NUMBER, _SMALL, _FLOAT = 8, 4, 4
_GROWING = 2
"""Factor for memory that grows: the smaller one stays until the last layer uses the larger one."""


def kept_bytes(operations: Operations, rows: int, blocks: int, *, loads: bool) -> int:
    """Bytes of results that a micro-batch keeps, beside hidden states and angles; 0 if it has too many rows.

    Args:
        rows: the micro-batch's new tokens in a step.
        blocks: blocks of its KV cache.
        loads: whether keys and values of the host are loaded, so that each layer has a list of blocks.
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
    """Bytes of memory that kernels of all micro-batches share, and of tables with the addresses of row blocks.

    Args:
        kept: numbers of rows for which this memory is allocated, one after the other. A larger one does not replace a
            smaller one, which captured kernels still use.
        decode: the most rows of a decode step, times the number of allocations for them.
        longest: tokens of the longest sequence at its end.
    """
    of_layers = {_scratch_of_a_row(kind) for kind in operations.kinds.values()}
    logits = operations.config.vocabulary * _FLOAT
    attended = decode * max(_parts_of_a_row(kind, longest) for kind in operations.kinds.values())
    return sum(kept) * (sum(of_layers) + logits) + attended + _tables(operations)


def graph_bytes(layers: int, steps: int) -> int:
    """Assumed bytes of the graphs of a number of decode steps."""
    of_a_step = layers * _GRAPHS_OF_A_LAYER + _GRAPHS_OF_A_STEP
    return GRAPH_BYTES * min(MOST_GRAPHS, of_a_step * steps)


def _scratch_of_a_row(operations: Operations) -> int:
    network = operations.layer.feed_forward
    inner = network.intermediate * (operations.element + _FLOAT)  # with activations, which may be observed
    choice = 2 * _NUMBER + _FLOAT + _SMALL + operations.hidden_bytes + inner
    return 2 * operations.hidden_bytes + network.top_k * choice + network.experts * _FLOAT


def _parts_of_a_row(operations: Operations, longest: int) -> int:
    """Bytes of the parts of a sequence: in float32 the values of each head, its peak and its sum."""
    parts = 1 << max(0, -(-longest // PART_TOKENS) - 1).bit_length()
    width = operations.query_width + 2 * operations.layer.attention.heads
    return _GROWING * parts * _FLOAT * width


def _tables(operations: Operations) -> int:
    """Bytes of all tables of row blocks; half of the tables are those of stacks of experts."""
    matrices = operations.config.routed.experts + 1
    return MOST_TABLES * matrices * _BLOCKS_OF_A_MATRIX * _BLOCK_BYTES // 2
