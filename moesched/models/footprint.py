"""What a batch's activations take of a memory: what stays from layer to layer, what only within one, and workspace.

T tokens of a micro-batch, D hidden size, Q and K the widths of queries and keys, I expert size, k experts per token,
S sequences, V vocabulary, b bytes per element.
"""

from __future__ import annotations

from moesched.models.operations import Operations

EXPERT_TILE = 512
"""An expert takes no more rows than that at once, so that its workspace does not grow with the micro-batch."""
EXPERTS_AT_ONCE = 2
"""So many experts' workspaces count: devices run an expert on each core, with rows for two tiles between them."""
QUERY_TILE = 512
"""So many queries share a mask, where tokens are attended to that others were cached before."""
_FLOAT = 4


def staying_bytes(operations: Operations, tokens: int) -> int:
    """What a micro-batch keeps from layer to layer: hidden states, and the angles of its positions."""
    return tokens * (operations.hidden_bytes + 2 * _FLOAT * operations.config.head_dim)


def layer_bytes(operations: Operations, tokens: int) -> int:
    """What a micro-batch has within a layer: queries, keys, values, attention's output, the experts' rows."""
    top_k = operations.config.top_k
    rows = top_k * (2 * operations.hidden_bytes + 3 * 8)
    return tokens * (operations.qkv_bytes + operations.attention_bytes + rows)


def exchanged_bytes(operations: Operations) -> int:
    """What a token takes on its way between nodes: its part of a sum and the sum, or a row with its choices."""
    return 2 * operations.row_and_choices_bytes


def workspace_bytes(operations: Operations, tokens: int, sequences: int) -> int:
    """The most that one kernel takes beside its input and output: b or, where it computes in float32, 4 bytes each."""
    config, element = operations.config, operations.element
    hidden, query, keys = config.hidden, operations.query_width, operations.key_width
    mixed = _FLOAT + element
    projected = query + 2 * keys
    norm = hidden * (2 * _FLOAT + element)
    project = hidden * mixed + projected * mixed
    rotate = projected * element + (query + keys) * (2 * _FLOAT + 2 * element)
    attend = 2 * query * element + projected * element
    output = (query + hidden) * mixed
    combine = hidden * (config.top_k * element + _FLOAT + element)
    by_token = tokens * max(norm, project, rotate, attend, output + norm, combine)
    logits = sequences * config.vocabulary * (2 * _FLOAT + mixed)
    return max(by_token, expert_workspace_bytes(operations, tokens), logits)


def mask_bytes(tokens: int, cached: int) -> int:
    """What says which of so many cached tokens a tile of queries sees, as one byte and as a float each."""
    return min(tokens, QUERY_TILE) * cached * (1 + _FLOAT)


def expert_workspace_bytes(operations: Operations, tokens: int) -> int:
    """What the experts' kernels take beside their rows and outputs, however many tokens there are."""
    config, element = operations.config, operations.element
    rows = min(tokens * config.top_k, EXPERTS_AT_ONCE * EXPERT_TILE)
    return rows * (2 * config.hidden * (_FLOAT + element) + config.intermediate * (_FLOAT + 2 * element))


def host_rows_bytes(operations: Operations, tokens: int) -> int:
    """What a micro-batch has on the host for experts that run there: hidden states, the experts' rows and outputs."""
    top_k = operations.config.top_k
    return tokens * ((1 + 2 * top_k) * operations.hidden_bytes + 8 * top_k)
