"""The MLX device: runs the tasks of a schedule on a machine with one memory, such as Apple silicon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

try:
    import mlx.core as mx
except ImportError as error:
    text = f"{error}: pip install 'moesched[mlx]', on macOS or Linux"
    raise ModuleNotFoundError(text, name="mlx") from error
import numpy.typing as npt

from moesched.drivers.lanes import LaneKind
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.models.tensors import global_shapes
from moesched.requests.batch import cached_tokens
from moesched.requests.sampling import Sampling
from moesched.seams import RoutingObserver, Transport
from moesched.steps.plan import Plan
from moesched.tasks import Collective, PageTransfer, Task

from ..shared.bad_weights import describe_first_bad_weight
from ..shared.node_exchanges import NodeVerbs
from ..shared.page_reader import PageReader
from ..shared.token_ids import check_token_ids
from .attention import MlxAttention
from .kernels import Array
from .kv_cache import RequestsKV
from .machine import WiredPages, require_unified, with_metal
from .memory import ARRAY_DTYPES, shared
from .micro_batch import MlxBatch, batches_of
from .moe_layer import MlxMoELayer
from .next_tokens import Head, MlxNextTokens
from .node_side import MlxNodeSide
from .thread import OneThread
from .weights import MlxWeights

KEPT_BACK_BYTES = 64_000_000
"""What MLX keeps of memory that kernels gave back."""


class MlxDevice:
    """Runs batches of one model on MLX, one after the other: on Apple silicon with Metal, on Linux on the processor.

    Files are read straight into the memory of MLX arrays. One thread builds and evaluates them, for all lanes; a task
    has ended when what it leaves is evaluated. Beam search and watching activations are the torch device's.

    Args:
        keep_logits: remember every step's logits (S, V) by micro-batch, in `logits`.
        direct: read past the page cache where the system allows it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: WeightLayout,
        *,
        keep_logits: bool = False,
        direct: bool = True,
    ) -> None:
        self.config = checkpoint.config
        self.layout = layout
        self.logits: list[tuple[tuple[int, ...], npt.NDArray[Any]]] = []
        self._keep_logits = keep_logits
        self._reader = PageReader(checkpoint, layout, direct)
        self._weights = MlxWeights(self._reader, layout)
        self._thread = OneThread("mlx")
        self._wired = WiredPages.here()
        self._cache_limit: int | None = None
        self._globals: dict[str, Array] = {}
        self._observer: RoutingObserver | None = None
        self._transport: Transport | None = None
        self._verbs: dict[str, Callable[[Any], Any]] = {}
        self._exchanges: Mapping[str, Callable[[Any], Any]] = {}

    @staticmethod
    def machine(host: Machine) -> Machine:
        """This machine, with its GPU where there is Metal."""
        return with_metal(host)

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Whether a machine can be this one. Raises BadInput where it cannot."""
        require_unified(machine)

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """Every lane is a worker thread: those that compute wait for the one thread that does."""
        return {}

    @property
    def streams(self) -> None:
        """There are none."""

    @property
    def bytes_read(self) -> int:
        """Bytes read from the checkpoint's files so far."""
        return self._reader.bytes_read

    def slot_bytes(self, page: Page) -> int:
        """Bytes that a page takes in a slot."""
        return self._reader.bytes_in_slot(page)

    def observe_routing(self, observer: RoutingObserver) -> None:
        """Tell somebody which experts the routers choose, from the next batch on."""
        self._observer = observer

    def join(self, rank: int, transport: Transport, first: Any) -> None:
        """Work as one of several nodes from now on, with the experts that a batch's plan gives it."""
        self._transport = transport

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Allocate all that the plan says, and take in the prompts' token ids; weights that stay are kept.

        Raises:
            BadInput: a token id is outside the vocabulary, or a beam search is asked for.
        """
        if plan.batch.beams > 1:
            raise BadInput("device mlx has no beam search: use --beams 1, or --device torch")
        check_token_ids(prompts, self.config.vocabulary)
        self._thread.call(self._begin, plan, prompts, sampling)

    def execute(self, task: Task) -> Any:
        """Run one task: reads and exchanges on the calling thread, all else on the device's own."""
        if isinstance(task, PageTransfer):
            return self._bring(task)
        if isinstance(task, Collective):
            return self._exchanges[task.verb](task)
        return self._thread.call(self._run, task)

    def stand_by(self) -> int:
        """Use every array of weights a little, for Metal to keep them wired while nothing else does; returns how many.

        This is the standby calculation between requests of RACS'24, section 4.2, which sums all weights: the driver
        wires a whole array for one element of it.
        """
        return self._thread.call(self._stand_by)

    async def aclose(self) -> None:
        """Free the arrays, give back what was set for the process, close the checkpoint's files."""
        self._thread.call(self._let_go)
        self._thread.close()
        self._reader.close()

    # -- on the device's thread ----------------------------------------------------------------------

    def _run(self, task: Task) -> Any:
        return self._verbs[task.verb](task)

    def _stand_by(self) -> int:
        arrays = [*self._globals.values(), *self._weights.arrays()]
        mx.eval([array.reshape(-1)[:1] + 0 for array in arrays])
        return len(arrays)

    def _begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        self._verbs, self._exchanges = {}, {}  # and with them all that the batch before had
        self._limit_memory(plan)
        self._weights.begin(
            plan.weights.pools, [page for pool in plan.weights.resident for page in pool.pages()]
        )
        batches = batches_of(plan.batch.micro_batches, plan.chunks, prompts)
        first = plan.batch.first_request
        moe = MlxMoELayer(self.config, batches, self._weights.show, self._observer, first)
        self._verbs |= moe.verbs
        project_output = None
        if plan.nodes.attends:
            project_output = self._begin_to_attend(plan, batches, moe, sampling)
        if plan.nodes.count > 1:
            assert self._transport is not None, "a device that is to be one of several nodes has to join them"
            sample = self._verbs.get("sample")
            side = MlxNodeSide(plan, batches, moe, project_output)
            nodes = NodeVerbs(plan, self._transport, side, sample)
            self._verbs |= nodes.verbs
            self._exchanges = nodes.exchanges

    def _begin_to_attend(
        self, plan: Plan, batches: Sequence[MlxBatch], moe: MlxMoELayer, sampling: Sampling
    ) -> Callable[[Task], None]:
        """Get ready for all but the experts; returns what projects attention's output."""
        if not self._globals:
            self._globals = {name: self._read_global(name) for name in global_shapes(self.config)}
        embedding_VD = self._globals["embedding"]
        attention = MlxAttention(
            self.config, batches, self._weights.show, embedding_VD, self._open_cache(plan)
        )
        tokens = MlxNextTokens(
            self.config,
            batches,
            Head(self._globals["final_norm"], self._globals.get("lm_head", embedding_VD)),
            sampling,
            plan.batch.first_request,
            self.logits if self._keep_logits else None,
            partial(describe_first_bad_weight, self._reader, self.layout),
        )
        self._verbs |= {
            **attention.verbs,
            **tokens.verbs,
            "post_attention": _after(attention.project_output, moe.run_all),
            "route": _after(attention.project_output, moe.choose_experts),
        }
        return attention.project_output

    def _open_cache(self, plan: Plan) -> RequestsKV:
        prompts, new_tokens = plan.batch.prompts, plan.batch.new_tokens
        lengths = [cached_tokens(prompt + new_tokens) for prompt in prompts]
        return RequestsKV(self.config, lengths, ARRAY_DTYPES[self.layout.dtype])

    def _limit_memory(self, plan: Plan) -> None:
        """Have MLX keep wired what the plan takes, and hold back no more of what kernels gave back than a little."""
        self._wired.set(plan.memory("accelerator").used)
        before = mx.set_cache_limit(KEPT_BACK_BYTES)
        if self._cache_limit is None:
            self._cache_limit = before

    def _let_go(self) -> None:
        self._verbs, self._exchanges = {}, {}
        self._globals = {}
        self._weights.close()
        self._wired.give_back()
        if self._cache_limit is not None:
            mx.set_cache_limit(self._cache_limit)
        mx.clear_cache()

    def _read_global(self, name: str) -> Array:
        array, tensor = shared(global_shapes(self.config)[name], self.layout.dtype)
        self._reader.read_tensor_into(name, tensor.view(-1))
        return array

    # -- on the thread of the lane that reads --------------------------------------------------------

    def _bring(self, task: PageTransfer) -> None:
        for page, slot in zip(task.pages, task.slots, strict=True):
            if slot.fixed:
                self._weights.load(page)
            else:
                self._weights.fetch(page, slot)


def _after(first: Callable[[Task], None], then: Callable[[Task], Any]) -> Callable[[Task], Any]:
    """One verb that is two."""

    def both(task: Task) -> Any:
        first(task)
        return then(task)

    return both
