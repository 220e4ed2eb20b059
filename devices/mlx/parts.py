"""The parts that run a batch's verbs on MLX, put together from its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesched.requests.batch import cached_tokens
from moesched.requests.sampling import Sampling
from moesched.seams import RoutingObserver, Transport
from moesched.steps.plan import Plan

from ..shared.node_exchanges import NodeVerbs
from .attention import MlxAttention
from .evaluations import Evaluations
from .kv_cache import RequestsKV
from .memory import ARRAY_DTYPES
from .micro_batch import batches_of
from .moe_layer import MlxMoELayer
from .next_tokens import Head, Logits, MlxNextTokens
from .node_side import MlxNodeSide
from .verbs import Parts
from .weights import MlxWeights


def parts_of(
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    weights: MlxWeights,
    *,
    observer: RoutingObserver | None,
    transport: Transport | None,
    logits: Logits | None,
    first_bad: Callable[[], str],
    evaluations: Evaluations,
) -> Parts:
    """The parts of a batch, with memory for its KV cache; on the device's thread.

    Args:
        observer: receives the chosen experts; None for no observer.
        transport: to the other nodes; None on a single one.
        logits: stores the logits of every step; None to drop them.
        first_bad: names the first weight that is not finite.
        evaluations: evaluates arrays.
    """
    config, first_request = plan.layout.config, plan.batch.first_request
    batches = batches_of(plan.batch.micro_batches, plan.chunks, prompts)
    moe = MlxMoELayer(
        config, batches, weights.show, evaluations, observer, first_request, scores=plan.declared.scores
    )
    attention, tokens, node = None, None, None
    if plan.nodes.attends:
        embedding_VD = weights.globals["embedding"]
        head = Head(weights.globals["final_norm"], weights.globals.get("lm_head", embedding_VD).T)
        attention = MlxAttention(config, batches, weights.show, embedding_VD, _kv_cache(plan), evaluations)
        tokens = MlxNextTokens(
            config, batches, head, sampling, first_request, logits, first_bad, evaluations=evaluations
        )
    if plan.nodes.count > 1:
        assert transport is not None, "a device that is to be one of several nodes has to join them"
        kernels = MlxNodeSide(
            plan, batches, moe, evaluations, attention.project_output if attention else None
        )
        node = NodeVerbs(plan, transport, kernels, tokens.sample if tokens else None)
    return Parts(weights, attention, moe, tokens, node)


def _kv_cache(plan: Plan) -> RequestsKV:
    prompts, new_tokens = plan.batch.prompts, plan.batch.new_tokens
    lengths = [cached_tokens(prompt + new_tokens) for prompt in prompts]
    return RequestsKV(plan.layout.config, lengths, ARRAY_DTYPES[plan.layout.dtype])
