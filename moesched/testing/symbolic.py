"""A device that computes on symbols: every value is a number made of the values that it came from, and nothing else.

Two runs end with the same symbols only if every task read what it was meant to read. The device also notes when
each piece of data was read and written, and refuses a task that touched one while another task was changing it.
It runs under both drivers, needs no weights, and takes microseconds a task: a schedule can be tested without a model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from random import Random
from typing import Any

from moesched.drivers.lanes import LaneKind
from moesched.machines.group import numbered
from moesched.models.config import ModelConfig
from moesched.models.layout import Page, WeightLayout
from moesched.requests.batch import Batch
from moesched.requests.sampling import Sampling
from moesched.seams import Device, Transport
from moesched.steps.memory import Slot, View
from moesched.steps.node_tasks import ROWS, SUM, TOKENS
from moesched.steps.plan import Plan
from moesched.tasks import HostKernel, PageTransfer, Task

Key = Hashable
"""What names a piece of data: a slot, or words and numbers such as ("hidden", 2)."""

VOCABULARY = 50_000


class Clash(AssertionError):
    """A task read or wrote data while another task was changing it."""


class SymbolicDevice:
    """Runs a batch of one model on symbols.

    Args:
        fails: says of a task whether it is to fail; by default none does.
    """

    def __init__(self, fails: Callable[[Task], bool] | None = None) -> None:
        self._fails = fails or (lambda task: False)
        self._lock = threading.Lock()
        self._ticks = count()
        self._data: dict[Key, int] = {}
        self._written: dict[Key, int] = {}
        self._read: dict[Key, int] = {}
        self._board: dict[Hashable, dict[int, Any]] = {}

    def join(self, rank: int, transport: Transport | None, first: Device) -> None:
        """Become one of several nodes of this process; exchanges go through the first one, without a transport."""
        assert isinstance(first, SymbolicDevice)
        self._board, self._lock = first._board, first._lock

    @property
    def layout(self) -> WeightLayout:
        """The layout of the batch's plan."""
        return self._plan.layout

    @property
    def streams(self) -> None:
        """There are none."""

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """Worker threads, all of them."""
        return {}

    def slot_bytes(self, page: Page) -> int:
        """Bytes that a page takes in a slot."""
        return page.nbytes

    def begin(
        self, plan: Plan, prompts: Sequence[Sequence[int]] = (), sampling: Sampling | None = None
    ) -> None:
        """Forget the batch before. Symbols stand for the prompts, whatever their tokens are."""
        self._config = plan.layout.config
        self._plan = plan
        self._batch = plan.batch
        self._chunks = plan.chunks
        self._unified = plan.machine.unified
        self._offloads_kv = set() if plan.machine.unified else set(plan.kv.held_by("host"))
        self._memory_of = {
            numbered("accelerator", stage): memory.name for stage, memory in enumerate(plan.accelerators)
        }
        for slot in plan.weights.home.slots if plan.weights.home else ():
            self._data[slot] = slot.page.id if slot.page is not None else 0
        for index, requests in enumerate(plan.batch.micro_batches):
            self._data["tokens", index] = first_tokens(requests)
        for index, chunk in plan.chunks.items():
            self._data["prompt", index] = first_tokens(chunk.requests, chunk.starts)

    def execute(self, task: Task) -> Any:
        """Run one task; its value is known and its writes are seen at its end."""
        access = _Access(self, task)
        if self._fails(task):
            raise RuntimeError(f"{task.label} was told to fail")
        value = getattr(self, f"_{task.verb}")(task, access)
        access.close()
        return value

    async def aclose(self) -> None:
        """Nothing is held."""

    # -- weights -----------------------------------------------------------------------------------

    def _load(self, task: PageTransfer, data: _Access) -> None:
        for page, slot in zip(task.pages, task.slots, strict=True):
            data.write(slot, page.id)

    def _fetch(self, task: PageTransfer, data: _Access) -> None:
        sources: Sequence[Slot | None] = task.operands or [None] * len(task.pages)
        for page, slot, source in zip(task.pages, task.slots, sources, strict=True):
            data.write(slot, page.id if source is None else data.read(source))

    _copy_to_pinned = _fetch

    # -- a micro-batch through a layer -------------------------------------------------------------

    def _embed(self, task: Task, data: _Access) -> None:
        j = task.micro_batch
        held = data.read(("tokens" if task.step else "prompt", j))
        data.write(self._hidden(task), embed(held))
        starts = () if task.step else self._chunks[j].starts
        data.write(("positions", j), positions(task.step, starts))

    def _pass_hidden(self, task: Task, data: _Access) -> None:
        source, destination = task.operands
        data.write(("hidden", task.micro_batch, destination), data.read(("hidden", task.micro_batch, source)))

    def _pre_attention(self, task: Task, data: _Access) -> None:
        j = task.micro_batch
        hidden = data.read(self._hidden(task))
        data.write(("qkv", j), project(task.layer, hidden, data.weights(task.operands)))

    def _offload_qkv(self, task: Task, data: _Access) -> None:
        j = task.micro_batch
        data.write(("qkv on the host", j), data.read(("qkv", j)))

    def _attention(self, task: Task, data: _Access) -> None:
        i, j = task.layer, task.micro_batch
        qkv = data.read(("qkv", j))
        offloads = self._whole(task) in self._offloads_kv
        slot = task.operands if offloads else None
        key: Key = ("kv", i, self._whole(task)) if slot is None else ("kv slot", slot)
        if offloads and not task.step:
            key = ("kv at hand", self._whole(task))
        held = 0 if offloads and not task.step and self._chunks[j].before < 0 else data.read(key)
        cache = append(held, qkv, data.read(("positions", j)))
        data.write(key, cache)
        data.write(("attention", j), attend(i, qkv, cache))

    def _load_kv(self, task: Task, data: _Access) -> None:
        data.read(("positions", task.micro_batch))
        data.write(("kv slot", task.operands), data.read(("kv", task.layer, task.micro_batch)))

    def _offload_kv(self, task: Task, data: _Access) -> None:
        key = ("kv", task.layer, self._whole(task))
        j = task.micro_batch
        data.write(key, append(data.read(key), data.read(("qkv", j)), data.read(("positions", j))))

    def _cpu_attention(self, task: Task, data: _Access) -> None:
        i, j = task.layer, task.micro_batch
        qkv = data.read(("qkv" if self._unified else "qkv on the host", j))
        key = ("kv", i, self._whole(task))
        cache = append(data.read(key), qkv, data.read(("positions", j)))
        data.write(key, cache)
        data.write(("attention" if self._unified else "attention on the host", j), attend(i, qkv, cache))

    def _load_hidden(self, task: Task, data: _Access) -> None:
        j = task.micro_batch
        data.write(("attention", j), data.read(("attention on the host", j)))

    def _post_attention(self, task: Task, data: _Access) -> None:
        weights = data.weights(task.operands)
        hidden, routed = self._routed(task, data, weights)
        outputs = [expert(task.layer, e, hidden, weights[e]) for e in routed]
        data.write(self._hidden(task), combine(hidden, outputs))

    def _route(self, task: Task, data: _Access) -> dict[int, int]:
        if not self._plan.nodes.attends:
            return choose_experts(self._config, data.read(("normed", task.micro_batch)), self._tokens(task))
        hidden, routed = self._routed(task, data, data.weights(task.operands))
        data.write(self._hidden(task), hidden)
        data.write(("normed", task.micro_batch), hidden)
        self._post(task, ROWS, hidden)
        return routed

    def _preview_route(self, task: Task, data: _Access) -> dict[int, int]:
        hidden, weights = data.read(self._hidden(task)), data.weights(task.operands)[-1]
        return choose_experts(
            self._config, symbol("preview", task.layer, hidden, weights), self._tokens(task)
        )

    def _offload_routed(self, task: Task, data: _Access) -> None:
        j = task.micro_batch
        data.write(("normed on the host", j), data.read(("normed", j)))

    def _load_routed(self, task: Task, data: _Access) -> None:
        j = task.micro_batch
        for e in task.operands:
            data.write(("output", e, j), data.read(("output on the host", e, j)))

    def _run_expert(self, task: Task, data: _Access) -> None:
        where = " on the host" if isinstance(task, HostKernel) and not self._unified else ""
        hidden = data.read((f"normed{where}", task.micro_batch))
        weights = data.weights(task.operands)[task.expert]
        output = expert(task.layer, task.expert, hidden, weights)
        data.write((f"output{where}", task.expert, task.micro_batch), output)

    def _warm_expert(self, task: Task, data: _Access) -> None:
        data.weights(task.operands)

    def _partial_sum(self, task: Task, data: _Access) -> None:
        own = [expert for expert, node in task.operands.items() if node == self._plan.nodes.index]
        self._post(task, SUM, {e: data.read(("output", e, task.micro_batch)) for e in own})

    def _all_reduce(self, task: Task, data: _Access) -> None:
        for outputs in self._posted(task):
            for e, output in outputs.items():
                data.write(("output", e, task.micro_batch), output)

    def _gather(self, task: Task, data: _Access) -> None:
        if self._plan.nodes.attends:
            self._all_reduce(task, data)

    def _broadcast(self, task: Task, data: _Access) -> None:
        name = "normed" if task.operands == ROWS else "tokens"
        if self._plan.nodes.attends:
            data.read((name, task.micro_batch))
        else:
            data.write((name, task.micro_batch), self._posted(task)[0])

    def _combine(self, task: Task, data: _Access) -> None:
        j = task.micro_batch
        hidden = data.read(self._hidden(task))
        routed = choose_experts(self._config, hidden, self._tokens(task))
        data.write(self._hidden(task), combine(hidden, [data.read(("output", e, j)) for e in routed]))

    def _sample(self, task: Task, data: _Access) -> list[int]:
        if not self._plan.nodes.attends:
            told: Any = data.read(("tokens", task.micro_batch))
            return list(told)
        key = ("tokens", self._whole(task))
        requests = (
            self._batch.micro_batches[task.micro_batch] if task.step else self._chunks[task.micro_batch].ends
        )
        tokens = sample(data.read(self._hidden(task)), requests)
        data.write(key, symbol("tokens", data.read(key), *tokens))
        self._post(task, TOKENS, tokens)
        return tokens

    # -- helpers -----------------------------------------------------------------------------------

    def _post(self, task: Task, what: str, value: Any) -> None:
        """Leave for the other nodes what this one brings to an exchange."""
        with self._lock:
            about = (what, task.step, task.layer, task.micro_batch)
            self._board.setdefault(about, {})[self._plan.nodes.index] = value

    def _posted(self, task: Task) -> list[Any]:
        """The values brought to the exchange, in the order of the nodes."""
        with self._lock:
            posted = self._board[task.operands, task.step, task.layer, task.micro_batch]
            return [posted[node] for node in sorted(posted)]

    def _hidden(self, task: Task) -> Key:
        """The hidden state in the memory of the accelerator that a kernel runs on."""
        return "hidden", task.micro_batch, self._memory_of[task.lane.name]

    def _tokens(self, task: Task) -> int:
        if task.step:
            return len(self._batch.micro_batches[task.micro_batch])
        return sum(self._chunks[task.micro_batch].tokens)

    def _whole(self, task: Task) -> int:
        """The micro-batch of decoding that a task's chunk is part of."""
        return task.micro_batch if task.step else self._chunks[task.micro_batch].micro_batch

    def _routed(self, task: Task, data: _Access, weights: Mapping[int, int]) -> tuple[int, dict[int, int]]:
        j = task.micro_batch
        hidden = project_output(
            task.layer, data.read(("attention", j)), data.read(self._hidden(task)), weights[-1]
        )
        return hidden, choose_experts(self._config, hidden, self._tokens(task))


class _Access:
    """The reads and writes of one task, with their times. Writes take effect when it closes."""

    def __init__(self, device: SymbolicDevice, task: Task) -> None:
        self._device = device
        self._task = task
        self._start = task.start if task.end >= 0 else next(device._ticks)
        self._reads: set[Key] = set()
        self._writes: dict[Key, int] = {}

    def read(self, key: Key) -> int:
        """The present value; 0 where nothing was written yet."""
        self._reads.add(key)
        return self._device._data.get(key, 0)

    def write(self, key: Key, value: int) -> None:
        """Leave a value."""
        self._writes[key] = value

    def weights(self, view: View[Any]) -> dict[int, int]:
        """A symbol of the pages that a view shows, by expert; -1 is the dense part."""
        held: dict[int, list[int]] = {}
        for page, slot in zip(view.pages, view.slots, strict=True):
            held.setdefault(page.expert, []).append(self.read(slot))
        return {part: symbol("weights", *pages) for part, pages in held.items()}

    def close(self) -> None:
        """Check that nobody changed what the task read, nor used what it wrote, while it ran; then write."""
        device = self._device
        with device._lock:
            end = self._task.end if self._task.end >= 0 else next(device._ticks)
            for key in self._reads | self._writes.keys():
                if device._written.get(key, -1) > self._start:
                    raise Clash(f"{self._task.label} uses {key} while another task changes it")
            for key in self._writes:
                if device._read.get(key, -1) > self._start:
                    raise Clash(f"{self._task.label} changes {key} while another task reads it")
            for key in self._reads:
                device._read[key] = max(end, device._read.get(key, -1))
            for key, value in self._writes.items():
                device._written[key] = end
                device._data[key] = value


# -- the model, on symbols -------------------------------------------------------------------------


def symbol(*parts: int | str) -> int:
    """A number made of its parts, in their order."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest())


def first_tokens(requests: Iterable[int], starts: Iterable[int] = ()) -> int:
    """The prompts of a micro-batch; of a chunk, what begins with these tokens of each."""
    return symbol("prompts", *requests, "from", *starts)


def embed(tokens: int) -> int:
    """Tokens to hidden state."""
    return symbol("embed", tokens)


def project(layer: int, hidden: int, weights: Mapping[int, int]) -> int:
    """Hidden state to queries, keys and values."""
    return symbol("qkv", layer, hidden, weights[-1])


def positions(step: int, starts: Iterable[int] = ()) -> int:
    """The positions of a step's tokens in the cache; in prefill each prompt continues at its start."""
    return symbol("positions", step, *starts)


def append(cache: int, qkv: int, where: int) -> int:
    """A cache with more keys and values in it."""
    return symbol("cache", cache, qkv, where)


def attend(layer: int, qkv: int, cache: int) -> int:
    """Attention over a cache."""
    return symbol("attention", layer, qkv, cache)


def project_output(layer: int, attention: int, hidden: int, weights: int) -> int:
    """Attention's output projection and the residual."""
    return symbol("output", layer, attention, hidden, weights)


def choose_experts(config: ModelConfig, hidden: int, tokens: int) -> dict[int, int]:
    """The number of tokens of each expert that gets any, in ascending order of expert."""
    random = Random(hidden)
    counts = [0] * config.experts
    for _ in range(tokens):
        for chosen in random.sample(range(config.experts), config.top_k):
            counts[chosen] += 1
    return {number: tokens for number, tokens in enumerate(counts) if tokens}


def expert(layer: int, number: int, hidden: int, weights: int) -> int:
    """One expert's output."""
    return symbol("expert", layer, number, hidden, weights)


def combine(hidden: int, outputs: Sequence[int]) -> int:
    """The experts' outputs, in their order, and the residual."""
    return symbol("combine", hidden, *outputs)


def sample(hidden: int, requests: Iterable[int]) -> list[int]:
    """A token for each request."""
    return [symbol("token", hidden, request) % VOCABULARY for request in requests]


def expected_tokens(plan: Plan) -> list[list[int]]:
    """The tokens that every schedule of a plan must produce, by request: the model, run without a schedule."""
    tokens: list[list[int]] = [[] for _ in plan.batch.prompts]
    for requests in plan.batch.micro_batches:
        for fresh in _generate(plan, plan.batch, requests):
            for request, token in fresh.items():
                tokens[request].append(token)
    return tokens


def _generate(plan: Plan, batch: Batch, requests: tuple[int, ...]) -> Iterable[dict[int, int]]:
    layout = plan.layout
    cache = dict.fromkeys(plan.layers, 0)
    held = first_tokens(requests)
    number = batch.micro_batches.index(requests)
    prefill = [(0, chunk) for chunk in plan.chunks.values() if chunk.micro_batch == number]
    for index, chunk in [*prefill, *((index, None) for index in range(1, batch.new_tokens))]:
        count_ = len(requests) if chunk is None else sum(chunk.tokens)
        starts = () if chunk is None else chunk.starts
        hidden = embed(held if chunk is None else first_tokens(chunk.requests, starts))
        for i in plan.layers:
            dense = symbol("weights", *(page.id for page in layout.dense(i)))
            qkv = project(i, hidden, {-1: dense})
            cache[i] = append(cache[i], qkv, positions(index, starts))
            hidden = project_output(i, attend(i, qkv, cache[i]), hidden, dense)
            outputs = [
                expert(i, e, hidden, symbol("weights", *(page.id for page in layout.expert(i, e))))
                for e in choose_experts(layout.config, hidden, count_)
            ]
            hidden = combine(hidden, outputs)
        ending = requests if chunk is None else chunk.ends
        if ending:
            sampled = sample(hidden, ending)
            held = symbol("tokens", held, *sampled)
            yield dict(zip(ending, sampled, strict=True))
