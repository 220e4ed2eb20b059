"""The faults that are planted in the CUDA path: each wait, event, lifetime, copy and buffer, removed or weakened."""

from __future__ import annotations

from typing import NamedTuple

TORCH, RUNNER = "devices/torch", "devices/runner"


class Mutant(NamedTuple):
    """A text in a file, and what replaces it.

    Attributes:
        file: below devices/torch, or from the root if it has a folder.
        lost: what is gone.
    """

    file: str
    lost: str
    text: str
    instead: str = "pass"

    @property
    def path(self) -> str:
        """The file, from the root."""
        return self.file if "/" in self.file else f"{TORCH}/{self.file}"


STREAMS = "cuda_streams.py"
CLOCK = "stream_clock.py"
HOST = "host_side.py"
LOADED = "loaded_kv.py"
STAGING = "staging_ring.py"
FILES = "registered_files.py"
MAPPED = "mapped_home.py"

WAITS = (
    Mutant(STREAMS, "wait for tasks on other streams", "stream.wait_event(issued.end)"),
    Mutant(STREAMS, "wait for the end of a task", "self.end.synchronize()"),
    Mutant(STREAMS, "wait for the copies of a thread's task", "            stream.synchronize()\n", ""),
    Mutant(CLOCK, "wait for the event that times are measured from", "event.synchronize()"),
    Mutant(
        "copies.py",
        "every wait for copies",
        "torch.get_device_module(device).current_stream(device).synchronize()",
    ),
    Mutant(
        "device.py",
        "wait for what a batch begins with",
        "        wait_for_copies(self._compute.accelerator)\n",
        "",
    ),
    Mutant(
        "warm_up.py",
        "wait for the warm-up before the last pages",
        "if loading.awaited <= len(load.pages):",
        "if False:",
    ),
    Mutant(
        "device.py",
        "waits of tasks on threads",
        "return self._cuda.run(task)",
        "return self._verbs[task.verb](task)",
    ),
    Mutant("at_once.py", "wait for the logits", "tensor.cpu()", 'tensor.to("cpu", non_blocking=True)'),
    Mutant(
        "rank_side.py",
        "wait for a rank's part",
        "part.float().cpu()",
        'part.float().to("cpu", non_blocking=True)',
    ),
    Mutant("node_side.py", "wait for a node's part", "tensor.cpu()", 'tensor.to("cpu", non_blocking=True)'),
    Mutant(
        "adjacent_pages.py",
        "wait for weights that stay",
        "block.copy_(original)",
        "block.copy_(original, non_blocking=True)",
    ),
    Mutant("moesched/drivers/lanes.py", "the lane's wait for a task", "issued.wait()"),
)

EVENTS = (
    Mutant(STREAMS, "event at a task's start", "issued.start.record(stream)"),
    Mutant(STREAMS, "event at a task's end", "issued.end.record()"),
    Mutant(
        STREAMS,
        "stream of a task",
        "with self._module.stream(stream):\n            issued",
        "if True:\n            issued",
    ),
    Mutant(
        STREAMS,
        "stream of a thread's task",
        "with self._module.stream(stream):\n            value",
        "if True:\n            value",
    ),
    Mutant(STREAMS, "memory of issued tasks", "self._issued[task.id] = issued"),
    Mutant(STREAMS, "end of that memory with a task", "del self._issued[issued.number]"),
    Mutant(STREAMS, "end of that memory with a run", "self._issued.clear()"),
    Mutant(STREAMS, "events of their own", "+= [issued.start, issued.end]", "+= [issued.start] * 2"),
    Mutant(STREAMS, "second use of events", "self._unused += [issued.start, issued.end]"),
    Mutant(STREAMS, "times of events", "enable_timing=True", "enable_timing=False"),
    Mutant(STREAMS, "sleep of threads that wait", "blocking=True", "blocking=False"),
    Mutant(STREAMS, "now, which no event is after", "min(reckoned, self._host_clock())", "reckoned"),
    Mutant(STREAMS, "time at which a task was issued", "issued_at = self._host_clock()", "issued_at = 0"),
    Mutant(STREAMS, "tasks that had begun by then", "reckoned = other.issued_at"),
    Mutant(CLOCK, "event that times are measured from", "event.record(self._stream)"),
    Mutant(CLOCK, "new event each second", "> PERIOD:", "> 10**18:"),
    Mutant(CLOCK, "rate of the GPU's clock", "max(0.5, true_rate - (host - read) / PERIOD)", "1.0"),
    Mutant(CLOCK, "second try where the host was interrupted", "if width <= NARROW:", "if True:"),
    Mutant(CLOCK, "order after earlier times", "host = max(host, reported[place - 1][1])"),
    Mutant(CLOCK, "one time for near ones", "return host_time"),
    Mutant(CLOCK, "order before later times", "host = min(host, reported[place][1])"),
)

LIFETIMES = (
    Mutant(
        "device.py",
        "end of the last batch's state",
        "            self._verbs = {}\n            gc.collect()",
        "            gc.collect()",
    ),
    Mutant("device.py", "end of the last batch's cycles", "gc.collect()  # torch", "pass  # torch"),
    Mutant("device.py", "end of the last batch's slots", "self._store.let_go()"),
    Mutant(
        "device.py",
        "streams that stay from run to run",
        "if self._cuda is None:\n            self",
        "if True:\n            self",
    ),
    Mutant(
        HOST,
        "queries until they were copied",
        'if self._accelerator.type == "cpu":\n            del state.qkv',
        "if True:\n            del state.qkv",
    ),
    Mutant(
        HOST,
        "keys until attention used them",
        "if not task.step:\n            del state.qkv",
        "if True:\n            del state.qkv",
    ),
    Mutant(
        f"{RUNNER}/attention.py",
        "attention's output until its stream drops it",
        "if not (self._keeps_attended and task.step):",
        "if True:",
    ),
    Mutant(f"{RUNNER}/attention.py", "end of queries after attention", "        del state.qkv\n", ""),
    Mutant(
        f"{RUNNER}/moe_layer.py",
        "end of rows after their sum",
        "(*operands)\n        del state.rows",
        "(*operands)",
    ),
    Mutant("states.py", "locking of the KV cache", "if lock else None", "if False else None"),
    Mutant(
        "locked_memory.py",
        "locking of slots",
        "error = int(runtime.cudaHostRegister(address, nbytes, flags))",
        "error = 0",
    ),
)

COPIES = (
    Mutant(
        "page_copies.py",
        "copy of a page to the GPU",
        "slot[offset : offset + len(piece)].copy_(piece, non_blocking=True)",
    ),
    Mutant(
        HOST,
        "copy of a page from a file",
        "read_page(store.reader, page)",
        "store.reader.new_memory(store.reader.bytes_in_slot(page))",
    ),
    Mutant(HOST, "copy of a page within the host", "store.copies.to_host(held, target)"),
    Mutant(
        LOADED,
        "copy of cached keys and values",
        "there_LKd[start:stop].copy_(cached_NKd[span.start : span.stop], non_blocking=True)",
    ),
    Mutant(
        LOADED, "new keys behind loaded ones", "keys_SLKd[:, -new:].copy_(keys_TKd[start:end].reshape(shape))"
    ),
    Mutant(
        LOADED,
        "new values behind loaded ones",
        "values_SLKd[:, -new:].copy_(values_TKd[start:end].reshape(shape))",
    ),
    Mutant(
        "device_kv.py",
        "keys of earlier chunks",
        "half[first + past : first + past + new] = fresh_TKd[start:stop]",
    ),
    Mutant("kv_cache.py", "keys in the cache", "self.slots[place, 0].index_copy_(0, step.slots_T, keys_TKd)"),
    Mutant(
        "kv_cache.py", "values in the cache", "self.slots[place, 1].index_copy_(0, step.slots_T, values_TKd)"
    ),
    Mutant(
        "kv_cache.py",
        "blocks of beams",
        "self.slots.index_copy_(2, targets, self.slots.index_select(2, sources))",
    ),
    Mutant(
        "host_experts.py",
        "copy of experts' outputs to the GPU",
        "rows.y_nD[span].copy_(y_nD[span], non_blocking=True)",
    ),
    Mutant(
        "rank_side.py",
        "copy of a sum to the GPU",
        "torch.from_numpy(total).to(part.device, part.dtype)",
        "torch.empty_like(part)",
    ),
    Mutant(
        "node_side.py",
        "copy of a sum to a node",
        "torch.from_numpy(array).to(self._accelerator)",
        "torch.empty(array.shape, device=self._accelerator)",
    ),
)

RING = "copies.py"
ROWS = "exchange_rows.py"

BUFFERS = (
    Mutant(RING, "wait for the copies from a half of the ring", "self._other_copied.synchronize()"),
    Mutant(RING, "event behind the copies from a half", "self._other_copied.record()"),
    Mutant(RING, "turns of the halves", "self._halves.rotate()"),
    Mutant(RING, "places of numbers in a half", "self._filled += len(numbers)"),
    Mutant(
        RING,
        "locking of the ring",
        'locked_if_possible(nbytes, self._device, "memory for indices")',
        "torch.zeros(nbytes, dtype=torch.uint8)",
    ),
    Mutant(
        RING,
        "copy of numbers to the GPU",
        "there[start : start + len(piece)].copy_(self._held(piece), non_blocking=True)",
    ),
    Mutant(
        "kv_offload.py",
        "wait for keys and values before they are written",
        "wait_for_copies(self._accelerator)",
    ),
    Mutant(
        "kv_offload.py",
        "second buffer of keys and values",
        "self._buffers[number % 2], (",
        "self._buffers[0], (",
    ),
    Mutant(
        "kv_offload.py", "copy of keys and values", "buffer[: len(piece)].copy_(piece, non_blocking=True)"
    ),
    Mutant(
        "kv_offload.py", "keys and values of a piece of their own", "new_TKd[start : start", "new_TKd[0 : 0"
    ),
    Mutant("kv_cache.py", "keys and values on the host", "half.index_copy_(0, slots_T, new_TKd)"),
    Mutant(
        ROWS,
        "locking of exchanged rows",
        'memory = locked_if_possible(nbytes, compute.accelerator, "memory for exchanged rows")',
        "memory = aligned_bytes(max(1, nbytes))",
    ),
    Mutant(
        ROWS,
        "locking of prompts' rows",
        "pin_memory=self._locks",
        "pin_memory=False",
    ),
    Mutant(
        ROWS,
        "rows that stay from step to step",
        "if own is not None and len(own.attended_TX) == tokens:",
        "if False:",
    ),
    Mutant(
        ROWS,
        "rows of experts that stay from step to step",
        "if own is not None and len(own.x_TD) == tokens:",
        "if False:",
    ),
    Mutant(
        ROWS,
        "rows of a micro-batch's own",
        "own = self._attention.get(micro_batch)",
        "own = self._attention.get(0)",
    ),
    Mutant(
        ROWS,
        "rows of experts of a micro-batch's own",
        "own = self._routed.get(micro_batch)",
        "own = self._routed.get(0)",
    ),
    Mutant(HOST, "copy of queries, keys and values", "on_host.copy_(there, non_blocking=True)"),
    Mutant(
        HOST,
        "native attention on the host",
        "attend(rows.qkv, state.cached(task.layer))",
        "rows.attended_TX",
    ),
    Mutant(
        HOST,
        "copy of attention's output to the GPU",
        "attended_TX.to(self._accelerator, non_blocking=True, copy=True)",
        "torch.empty_like(attended_TX, device=self._accelerator)",
    ),
    Mutant("host_experts.py", "copy of rows to the host", "on_host.x_TD.copy_(x_TD, non_blocking=True)"),
    Mutant(
        "host_experts.py",
        "copy of the rows' tokens",
        "on_host.tokens_n.copy_(rows.grouping.tokens_n, non_blocking=True)",
    ),
)

HOMES = (
    Mutant(STAGING, "wait for the copy from a slot", "copied.synchronize()"),
    Mutant(STAGING, "event after the copy from a slot", "copied.record()"),
    Mutant(STAGING, "next slot of the ring", "self._filled += 1"),
    Mutant(STAGING, "one thread at a time in the ring", "with self._lock:", "if True:"),
    Mutant(
        STAGING,
        "copy into the ring",
        "self._team.copy([(slot[at - first :][: len(each)], each) for each, at in group])",
    ),
    Mutant(STAGING, "copy from the ring", "target[first:end].copy_(slot[: end - first], non_blocking=True)"),
    Mutant(
        STAGING,
        "copy from the ring that blocks no thread",
        "target[first:end].copy_(slot[: end - first], non_blocking=True)",
        "target[first:end].copy_(slot[: end - first])",
    ),
    Mutant(
        "page_copies.py",
        "ring for memory that is not locked",
        "self.ring is not None and not held.locked",
        "False",
    ),
    Mutant("page_copies.py", "direct copy from locked memory", "and not held.locked", ""),
    Mutant(
        "device.py",
        "wait for what a failed run left, before a batch",
        "wait_for_device(self._compute.accelerator)  # a",
        "pass  # a",
    ),
    Mutant(
        "device.py",
        "wait for what a failed run left, before the end",
        "wait_for_device(self._compute.accelerator)\n        self._verbs",
        "self._verbs",
    ),
    Mutant("locked_memory.py", "end of a registration", "runtime.cudaHostUnregister(address)"),
    Mutant("locked_memory.py", "error of CUDA that locks no memory", 'raise NotLocked(f"error {error}")'),
    Mutant(FILES, "flag for memory that is only read", "PORTABLE | READ_ONLY", "PORTABLE"),
    Mutant(FILES, "start of a registration", ".bytes.data_ptr() + span.start", ".bytes.data_ptr()"),
    Mutant(FILES, "last block of a registration", "span.end - span.start", "span.end - span.start - BLOCK"),
    Mutant(FILES, "one span for neighbours", "start <= spans[-1].end", "False"),
    Mutant(
        FILES,
        "whole blocks at the end of a span",
        "-(-(offset + nbytes) // BLOCK) * BLOCK",
        "offset + nbytes",
    ),
    Mutant(FILES, "end of registrations that are not needed", "self._registered.pop(span)()"),
    Mutant(FILES, "end of a lease", "self._files.pop(path).close()", "self._files.pop(path)"),
    Mutant(
        FILES, "reading of what the cache lacks", "self._files[path].advise(start, nbytes, POPULATE_READ)"
    ),
    Mutant(MAPPED, "question for the lease", "self._files[path].require()"),
    Mutant(MAPPED, "check of a file's length", "run.file.require(run.offset, run.needed)"),
    Mutant(
        MAPPED,
        "end of registrations after a refusal",
        "            self._files.close()\n            raise",
        "            raise",
    ),
    Mutant(
        MAPPED,
        "offset of a part in its file",
        "[run.offset : run.offset + run.nbytes]",
        "[run.offset + 4096 : run.offset + run.nbytes + 4096]",
    ),
    Mutant(MAPPED, "place of a part in its page", "Part(run.at,", "Part(0,"),
    Mutant("home_pages.py", "end of the way before", "self._free_all_but(way)"),
    Mutant("home_pages.py", "limit of locked memory", "limit is not None and way", "False and way"),
    Mutant(
        "home_pages.py",
        "locked memory for weights that the host computes with",
        "plan.declared.experts_on_host",
        "False",
    ),
    Mutant("home_pages.py", "memory of a refusal", "self._refused[name] = str(refusal)"),
    Mutant("held_pages.py", "pages that stay", "if page.id in here}", "if False}"),
)

MUTANTS = {
    f"{kind}: {mutant.lost}": mutant
    for kind, mutants in (
        ("wait", WAITS),
        ("event", EVENTS),
        ("lifetime", LIFETIMES),
        ("copy", COPIES),
        ("buffer", BUFFERS),
        ("home", HOMES),
    )
    for mutant in mutants
}
