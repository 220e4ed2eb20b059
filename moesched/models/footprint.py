"""Bytes of memory of a micro-batch's activations: across layers, within a layer, and as workspace of kernels."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.models.kv_blocks import tokens_beside
from moesched.models.operations import Operations

KEPT_ROWS = 128
"""Most rows with which a micro-batch keeps its memory for results from layer to layer; prompts would need too much."""
TOKEN_TILE = 256
"""Most tokens that a CPU normalises, rotates, or combines at once; bounds the workspace of prompts. A GPU takes all
tokens at once, since each tile would start several kernels."""
EXPERT_TILE = 512
"""Largest number of rows that an expert's kernel processes at once; bounds its workspace for any micro-batch."""
EXPERTS_AT_ONCE = 2
"""Tiles of workspace in use at once: devices that run one expert per core share two tiles of rows among the cores."""
CODED_ROWS = 64
"""Largest number of rows that a kernel multiplies by coded weights at once."""
CODED_TILE = 1 << 17
"""Most codes, and most sums of groups, that a product with coded weights has in float32 at once, to fit a core's cache.
"""
UNPACKED_TILE = 1 << 21
"""Largest number of weights that a GPU unpacks at once for a product."""
_UNPACKING = 14
"""Bytes of workspace for each unpacked weight: stored number, code, and the weight in float32 and in the dtype of the
computation.
"""
SCORED_ROWS = 16
"""Most rows of a prompt whose logits are computed together, for log probabilities: for 16 rows, a CPU reads the LM head
in place; for 64 rows, it would copy the LM head first."""
QUERY_TILE = 512
"""Largest number of queries that share an attention mask, in a chunk of a prompt whose earlier tokens are cached."""
_FLOAT = 4


def staying_bytes(operations: Operations, tokens: int) -> int:
    """Return the bytes that a micro-batch of `tokens` tokens keeps from layer to layer.

    The bytes hold hidden states, and the cosines and sines of the rotary embedding.
    """
    attention = operations.config.typical_layer.attention
    head = attention.attended_width // attention.heads
    return tokens * (operations.hidden_bytes + 2 * _FLOAT * head)


def layer_bytes(operations: Operations, tokens: int) -> int:
    """Return the bytes that a micro-batch of `tokens` tokens needs within a layer.

    The bytes hold queries, keys, values, attention output, and the inputs and outputs of experts.
    """
    top_k, shared = operations.config.routed.top_k, _shared(operations)
    rows = top_k * (2 * operations.hidden_bytes + 3 * 8)
    if shared:
        rows += operations.hidden_bytes + (top_k + 2) * (8 + _FLOAT)
    widest = max(kind.qkv_bytes + kind.attention_bytes for kind in operations.kinds.values())
    return tokens * (widest + rows)


def exchanged_bytes(operations: Operations) -> int:
    """Return the bytes per token of memory for exchanges between nodes, in one layer.

    The memory has room for two arrays. A token's part of each is its input for experts, and the numbers and weights of
    its experts. Smaller arrays use the same memory: a partial sum of expert outputs, and the whole sum.
    """
    return 2 * operations.row_and_choices_bytes


def workspace_bytes(operations: Operations, tokens: int, sequences: int, *, on_gpu: bool) -> int:
    """Return the bytes of the largest workspace that a kernel needs in addition to its input and output.

    Args:
        tokens: number of tokens of the micro-batch.
        sequences: number of sequences, whose logits are computed.
        on_gpu: whether the kernels are for a GPU, which takes all tokens at once.
    """
    config, element = operations.config, operations.element
    hidden = config.hidden
    query = max(kind.query_width for kind in operations.kinds.values())
    keys_values = max(kind.key_value_width for kind in operations.kinds.values())
    mixed = _FLOAT + element
    projected = query + keys_values
    norm = hidden * (2 * _FLOAT + element)
    project = hidden * mixed + projected * mixed
    rotate = projected * element + (query + keys_values // 2) * (2 * _FLOAT + 2 * element)
    attend = 2 * query * element + projected * element
    output = (query + hidden) * mixed
    choices = config.routed.top_k + bool(_shared(operations))
    combine = hidden * (choices * element + _FLOAT)
    if on_gpu:
        by_token = tokens * max(norm, project, rotate, attend, output + norm, combine + hidden * element)
    else:
        tile = min(tokens, TOKEN_TILE) * max(norm, rotate + projected * element, combine)
        by_token = max(tokens * max(project, attend, output), tokens * (hidden + projected) * element + tile)
    logits = sequences * config.vocabulary * (2 * _FLOAT + mixed)
    return max(by_token, _expert_rows_bytes(operations, tokens), logits) + _coded_bytes(operations)


def _coded_bytes(operations: Operations) -> int:
    """Return the bytes of the float32 workspace of matrix products with coded (quantised) weights.

    The workspace holds three things: input rows, with the upper and the lower bits of each number apart; the codes of
    some rows of weights; and the sums of products for the groups of weights.
    """
    if not operations.config.coded_formats:
        return 0
    return EXPERTS_AT_ONCE * _FLOAT * (5 * CODED_ROWS * _widest(operations) + 4 * CODED_TILE)


def unpacked_bytes(operations: Operations) -> int:
    """Return the bytes of workspace in which a GPU decodes rows of coded weights before a matrix product."""
    if not operations.config.coded_formats:
        return 0
    widest = _widest(operations)
    return _UNPACKING * min(UNPACKED_TILE, widest * max(widest, operations.config.vocabulary))


def _widest(operations: Operations) -> int:
    """Return the number of weights in the longest row of any matrix."""
    return max(
        max(
            operations.config.hidden,
            kind.query_width,
            kind.layer.feed_forward.intermediate,
            kind.layer.feed_forward.shared,
        )
        for kind in operations.kinds.values()
    )


def mask_bytes(tokens: int, cached: int) -> int:
    """Return the bytes of the largest attention mask, which is for at most `QUERY_TILE` queries.

    The mask has one byte and one float for each pair of a query and a cached token.

    Args:
        tokens: number of new tokens, each of which has a query.
        cached: number of cached tokens.
    """
    return min(tokens, QUERY_TILE) * cached * (1 + _FLOAT)


def beside_cache_bytes(
    operations: Operations, starts: Sequence[int], tokens: Sequence[int], scattered: int = 0
) -> int:
    """Return the bytes of a chunk of prompts' keys and values outside the KV cache, in the layer that has the most.

    Args:
        starts, tokens: for each request, its number of tokens before the chunk and in the chunk. Used for layers with
            a sliding window.
        scattered: the most tokens whose keys and values are gathered from scattered blocks of the cache. Used for
            layers without a window.
    """
    return max(
        kind.kv_bytes * (scattered if most is None else tokens_beside(starts, tokens, most))
        for kind in operations.kinds.values()
        for most in [kind.layer.attention.most_cached]
    )


def expert_workspace_bytes(operations: Operations, tokens: int) -> int:
    """Return the bytes of workspace that the experts' kernels need in addition to their input rows and outputs.

    Args:
        tokens: number of tokens of the micro-batch; experts process at most a tile of rows at once.
    """
    return _expert_rows_bytes(operations, tokens) + _coded_bytes(operations)


def _shared(operations: Operations) -> int:
    """Return the inner width of the widest shared network, which every token uses; 0 if no layer has one."""
    return max(kind.layer.feed_forward.shared for kind in operations.kinds.values())


def _expert_rows_bytes(operations: Operations, tokens: int) -> int:
    config, element = operations.config, operations.element
    rows = min(tokens * config.routed.top_k, EXPERTS_AT_ONCE * EXPERT_TILE)
    networks = [kind.layer.feed_forward for kind in operations.kinds.values()]
    width = max(_shared(operations), *(each.intermediate for each in networks))
    return rows * (2 * config.hidden * (_FLOAT + element) + width * (_FLOAT + 2 * element))
