"""The rows of gpu_hour.py: what each needs and how it is measured, the cheapest first."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple

import torch

from benchmarks.gpu._accelerate import generate
from benchmarks.gpu._choices import choices
from benchmarks.gpu._claims import ORDERED
from benchmarks.gpu._cuda_probe import rates
from benchmarks.gpu._figures import of_run
from benchmarks.gpu._peers import hugging_face, llama_cpp
from benchmarks.gpu._policies import Case, in_turn
from benchmarks.gpu._preparations import LLAMA, Preparation, build_llama, write_gguf
from benchmarks.gpu._sizes import Requests, Sizes, active_bytes, flops_of_a_token, weight_bytes
from benchmarks.shared.fresh_process import command, in_fresh_process
from benchmarks.shared.kept_models import kept_model
from moesched.system.memory import available_memory

Figures = dict[str, Any]
GB = 10**9
STARTING_SECONDS = 60.0
MODEL, LARGE, PROGRAM, GGUF = "model", "large model", "llama.cpp", "model.gguf"
LAYERS_ON_THE_HOST = 2
"""Of the four: llama.cpp's option for what our policies get by memory for half of the experts."""


class Places(NamedTuple):
    """Folders of a run.

    Attributes:
        models: folder of models.
        work: folder of what is removed at the end.
        llama_source: of llama.cpp's source; None if its programs are given or it is left out.
        llama: the folder of its programs.
    """

    models: Path
    work: Path
    llama_source: Path | None
    llama: Path | None

    def of(self, name: str) -> Path:
        """The place of what a preparation makes."""
        if name == PROGRAM:
            return (self.llama or self.work / "llama.cpp" / "bin") / LLAMA
        return self.models / name.replace(" ", "-").lower()

    @property
    def machine(self) -> Path:
        """The file of a calibration."""
        return self.work / "machine.toml"


class Bench(NamedTuple):
    """Sizes and folders that rows measure with."""

    sizes: Sizes
    places: Places

    def run(
        self, seconds: float, model: str, policy: str, requests: Requests, *options: str, **budgets: int
    ) -> Figures:
        """The figures of `moesched run` on the GPU.

        model: the preparation that it comes from. budgets: bytes by memory.
        """
        given = [f"--budget={memory}={nbytes}" for memory, nbytes in budgets.items()]
        machine = ["--machine", str(self.places.machine)] if self.places.machine.exists() else []
        report = in_fresh_process(
            command,
            *("run", str(self.places.of(model)), "--device", self.sizes.device, "--policy", policy),
            *("--prompts", str(self._prompts(requests)), "--max-new-tokens", str(requests.new_tokens)),
            *("--batch-size", str(requests.batch), "--micro-batch-size", str(requests.micro_batch)),
            *(*machine, *given, *options),
            seconds=seconds,
        )
        return of_run(report)

    def make(self, seconds: float, call: Callable[..., Any], arguments: Sequence[Any], file: Path) -> float:
        """Have a file or folder made, unless it is there; returns the seconds that are left."""
        begun = time.monotonic()
        if not file.exists():
            in_fresh_process(call, *arguments, file, seconds=seconds)
        return seconds - (time.monotonic() - begun)

    def _prompts(self, requests: Requests) -> Path:
        """A file of random prompts; the same each time."""
        file = self.places.work / f"prompts-{requests.total}-{requests.prompt}.jsonl"
        chance, vocabulary = random.Random(1), self.sizes.model.vocabulary
        ids = ([chance.randrange(vocabulary) for _ in range(requests.prompt)] for _ in range(requests.total))
        file.write_text("".join(json.dumps({"prompt_ids": each}) + "\n" for each in ids))
        return file


class Row(NamedTuple):
    """Something to measure.

    Attributes:
        seconds: about as long as it takes on an H100, and more on what is slower.
        measure: gets the bench and the seconds that are left.
        after: the preparations that it needs.
        packages: those that have to be installed.
        host_bytes: of free memory; gpu_bytes: of the GPU's; disk_bytes: for the large model, unless it is there.
        on_gpus: whether it cannot be tried on a CPU.
        alone: whether it is long, and so waits until no preparation runs.
    """

    name: str
    part: str
    seconds: float
    measure: Callable[[Bench, float], Figures]
    after: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    host_bytes: float = 0
    gpu_bytes: float = 0
    disk_bytes: float = 0
    on_gpus: bool = False
    alone: bool = False

    def lacks(self, bench: Bench, gpu_bytes: float) -> str:
        """The first thing that it needs and that is not there; empty if all is."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            return f"{missing[0]} is not installed"
        if bench.sizes.small:
            return "it needs a GPU" if self.on_gpus else ""
        written = bench.places.of(LARGE).exists()
        for kind, needed, free in (
            ("the GPU", self.gpu_bytes, gpu_bytes),
            ("the host's memory", self.host_bytes, available_memory()),
            ("the disk", 0 if written else self.disk_bytes, disk_usage(bench.places.models).free),
        ):
            if needed > free:
                return f"it takes {needed / GB:.0f} GB of {kind}, which has {free / GB:.0f}"
        return ""


def preparations(bench: Bench, rows: Sequence[Row]) -> Mapping[str, Preparation]:
    """Preparations of the rows: models, and programs that can be built."""
    sizes, places = bench.sizes, bench.places
    known = {MODEL: Preparation(kept_model, (sizes.model, places.of(MODEL)))}
    if places.llama_source is not None:
        known[PROGRAM] = Preparation(build_llama, (places.llama_source, places.of(PROGRAM).parent.parent))
    elif places.llama is not None:
        known[PROGRAM] = Preparation(Path.stat, (places.of(PROGRAM),))
    if PROGRAM in known:
        known[GGUF] = Preparation(write_gguf, (places.of(MODEL), places.of(GGUF)), (MODEL,))
    needed = {name for row in rows for name in row.after}
    needed |= {name for each in needed & known.keys() for name in known[each].after}
    return {name: each for name, each in known.items() if name in needed}


# ---------------------------------------------------------------- how rows are measured


def limits(bench: Bench, seconds: float) -> Figures:
    """The rates of the link, memories and products on the spot, which are the limits of all other rows."""
    small = ("cpu", 1 << 20, 64, 64) if bench.sizes.small else ()
    return dict(in_fresh_process(rates, *small, seconds=seconds)._asdict())


def choices_of_the_device(bench: Bench, seconds: float) -> Figures:
    """The measurements of _gpu_choices.py."""
    found: Figures = in_fresh_process(choices, bench.sizes.small, bench.places.work, seconds=seconds)
    return found


def calibration(bench: Bench, seconds: float) -> Figures:
    """A calibration, so that later runs are predicted."""
    arguments = "calibrate", "--device", bench.sizes.device, "--out", str(bench.places.machine)
    found = in_fresh_process(command, *arguments, seconds=seconds)
    return {"machine": found["machine"]["description"]}


def ran(policy: str, requests: Requests, bench: Bench, seconds: float, **budgets: int) -> Figures:
    """Requests under a policy."""
    return bench.run(seconds, MODEL, policy, requests, **budgets)


def in_triton(requests: Requests, bench: Bench, seconds: float) -> Figures:
    """All weights stay, and kernels in Triton run where they take a case."""
    return bench.run(seconds, MODEL, "resident", requests, "--device-set", "triton=true")


def traced(policy: str, bench: Bench, seconds: float) -> Figures:
    """A policy whose weights stream, while a trace is written."""
    trace = "--trace", str(bench.places.work / "run.json")
    return bench.run(seconds, MODEL, policy, bench.sizes.streamed, *trace, gpu=bench.sizes.gpu)


def beside(batch: int, bench: Bench, seconds: float) -> Figures:
    """All weights stay: two batches of a size, of which the second one's prompts are read by a warm GPU."""
    sizes = bench.sizes
    requests = Requests(2 * batch, sizes.prompt, sizes.new_tokens, batch, batch)
    found = bench.run(seconds, MODEL, "resident", requests)
    rate = {
        "prefill_tokens_per_second": batch * sizes.prompt / found["prefill_seconds"]["last"],
        "decode_tokens_per_second": batch / found["decode_step_seconds"]["median"],
    }
    return {"batches": {str(batch): rate}, **found}


def policies_in_order(bench: Bench, seconds: float) -> Figures:
    """Requests under ten policies, whose weights stream."""
    sizes = bench.sizes
    cases = [Case(policy, sizes.ordered, sizes.gpu) for policy in IN_ORDER]
    places = bench.places
    machine = str(places.machine) if places.machine.exists() else "auto"
    arguments = places.of(MODEL), bench.sizes.device, machine, cases, max(0.0, seconds - STARTING_SECONDS / 6)
    found: Figures = in_fresh_process(in_turn, *arguments, seconds=seconds)
    return found


def family(name: str, bench: Bench, seconds: float) -> Figures:
    """A model of another family, all of whose weights stay, and its greedy tokens in float32 beside the CPU's."""
    left = bench.make(seconds, kept_model, (bench.sizes.family(name),), bench.places.of(name))
    found = bench.run(left, name, "resident", bench.sizes.familiar)
    tokens = [
        in_fresh_process(
            command,
            *("run", str(bench.places.of(name)), "--device", device, "--policy", "resident"),
            *("--prompt-ids", "1,2,3,4,5,6,7", "--max-new-tokens", "16", "--dtype", "float32"),
            seconds=left,
        )["tokens"]
        for device in (bench.sizes.device, "torch")
    ]
    return {"tokens_of_the_cpu": tokens[0] == tokens[1], **found}


def family_streamed(name: str, bench: Bench, seconds: float) -> Figures:
    """The same on a GPU that holds nine tenths of the weights."""
    left = bench.make(seconds, kept_model, (bench.sizes.family(name),), bench.places.of(name))
    budget = weight_bytes(bench.sizes.family(name)) * 9 // 10
    return bench.run(left, name, "layer_streaming", bench.sizes.familiar, gpu=budget)


def large(bench: Bench, seconds: float) -> Figures:
    """Many requests of a model that is far larger than the GPU's memory."""
    left = bench.make(seconds, kept_model, (bench.sizes.large,), bench.places.of(LARGE))
    return bench.run(left, LARGE, "cgopipe", bench.sizes.many, gpu=bench.sizes.large_gpu)


def large_with_accelerate(bench: Bench, seconds: float) -> Figures:
    """The same by Hugging Face's Accelerate, at its best batch."""
    sizes = bench.sizes
    arguments = sizes.large, sizes.large_gpu, sizes.many.prompt, sizes.many.new_tokens
    return dict(in_fresh_process(generate, *arguments, seconds=seconds))


def by_hugging_face(bench: Bench, seconds: float) -> Figures:
    """The batches of `beside`."""
    sizes = bench.sizes
    arguments = sizes.batches, sizes.prompt, sizes.new_tokens
    device = "cpu" if sizes.small else "cuda"
    found: Figures = in_fresh_process(
        hugging_face, bench.places.of(MODEL), device, *arguments, seconds=seconds
    )
    return found


def by_llama_cpp(bench: Bench, seconds: float) -> Figures:
    """The batches of `beside`."""
    return _llama_cpp(bench, seconds, bench.sizes.batches)


def half_by_llama_cpp(bench: Bench, seconds: float) -> Figures:
    """One request, the experts of half of the layers on the host."""
    return _llama_cpp(bench, seconds, (1,), "--n-cpu-moe", str(LAYERS_ON_THE_HOST))


def _llama_cpp(bench: Bench, seconds: float, batches: Sequence[int], *options: str) -> Figures:
    sizes, places = bench.sizes, bench.places
    arguments = places.of(PROGRAM), places.of(GGUF), batches, sizes.prompt, sizes.new_tokens
    found: Figures = in_fresh_process(llama_cpp, *arguments, *options, seconds=seconds)
    return found


# ---------------------------------------------------------------- the rows

STREAMED = ("layer_streaming", "flexgen", "cgopipe")
ON_THE_HOST = ("twiddler", "expert_cache", "layer_split")
IN_ORDER = (
    *("layer_streaming", "flexgen", "cgopipe", "fastdecode", "expert_streaming"),
    *("expert_cache", "lru_offload", "twiddler", "cpu_ffn", "layer_split"),
)
ALWAYS = "limits"
PARTS = (
    ALWAYS,
    "choices",
    "calibration",
    "resident",
    "triton",
    "streaming",
    "staging",
    "prompts",
    "half",
    "order",
    "families",
    "others",
    "large",
)


def rows(sizes: Sizes) -> Iterator[Row]:
    """All of them, the cheapest first; what several parts need comes before them."""
    model = weight_bytes(sizes.model)
    with_model: dict[str, Any] = {"after": (MODEL,), "host_bytes": 1.1 * model}
    stays: dict[str, Any] = {**with_model, "gpu_bytes": 1.2 * model}
    streams: dict[str, Any] = {**with_model, "gpu_bytes": sizes.gpu}
    yield Row("choices of the device", "choices", 15, choices_of_the_device)
    yield Row("limits", ALWAYS, 10, limits, **with_model)
    yield Row("calibration", "calibration", 40, calibration, on_gpus=True, **with_model)
    yield Row("resident, batch 64", "resident", 12, partial(ran, "resident", sizes.resident), **stays)
    yield Row("resident, batch 1", "resident", 12, partial(ran, "resident", sizes.single), **stays)
    for batch, requests in ((64, sizes.resident), (1, sizes.single)):
        name = f"resident in Triton, batch {batch}"
        yield Row(name, "triton", 30, partial(in_triton, requests), on_gpus=True, **stays)
    for policy in STREAMED:
        yield Row(policy, "streaming", 20, partial(ran, policy, sizes.streamed, gpu=sizes.gpu), **streams)
    yield Row("cgopipe, traced", "streaming", 20, partial(traced, "cgopipe"), **streams)
    for batch in sizes.batches:
        yield Row(f"prompts of 512, batch {batch}", "prompts", 15, partial(beside, batch), **stays)
    yield Row("Hugging Face", "others", 40, by_hugging_face, packages=("transformers",), **stays)
    one = Requests(1, sizes.prompt, sizes.new_tokens, 1, 1)
    for policy in ON_THE_HOST:
        yield Row(f"half, {policy}", "half", 15, partial(ran, policy, one, gpu=sizes.half), **streams)
    yield Row(ORDERED, "order", 50, policies_in_order, **streams)
    for policy in STREAMED:
        measured = partial(ran, policy, sizes.streamed, gpu=sizes.gpu, pinned=sizes.pinned)
        yield Row(f"{policy}, staged", "staging", 25, measured, **streams)
    for name in sizes.families:
        of_family = weight_bytes(sizes.family(name))
        needed: dict[str, Any] = {"host_bytes": 2.2 * of_family, "gpu_bytes": 2.4 * of_family}
        yield Row(f"{name}, resident", "families", 60, partial(family, name), **needed)
        yield Row(f"{name}, streamed", "families", 20, partial(family_streamed, name), **needed)
    in_llama = {**stays, "after": (PROGRAM, GGUF), "on_gpus": True}
    yield Row("llama.cpp", "others", 30, by_llama_cpp, **in_llama)
    yield Row("half, llama.cpp", "others", 20, half_by_llama_cpp, **in_llama)
    weights = weight_bytes(sizes.large)
    alone: dict[str, Any] = {"gpu_bytes": sizes.large_gpu, "alone": True}
    yield Row("large, cgopipe", "large", 100, large, host_bytes=1.4 * weights, disk_bytes=weights, **alone)
    yield Row(
        "large, Accelerate",
        "large",
        70,
        large_with_accelerate,
        packages=("transformers", "accelerate"),
        host_bytes=1.1 * weights,
        on_gpus=True,
        **alone,
    )


def about_models(sizes: Sizes) -> Figures:
    """The models of the rows, and what their limits follow from."""
    return {
        name: {
            "shape": config.name,
            "layers": config.layers,
            "bytes": weight_bytes(config),
            "bytes_of_a_step": {str(batch): active_bytes(config, batch) for batch in sizes.batches},
            "flops_of_a_token": flops_of_a_token(config),
        }
        for name, config in (("model", sizes.model), ("large", sizes.large))
    }


def about_gpu() -> Figures:
    """The first GPU's name and memory; asked in a process of its own, as a context takes some of it."""
    found: Figures = in_fresh_process(_first_gpu, seconds=STARTING_SECONDS)
    return found


def _first_gpu() -> Figures:
    if not torch.cuda.is_available():
        return {"name": "none", "bytes": 0}
    about = torch.cuda.get_device_properties(0)
    return {"name": about.name, "bytes": about.total_memory}
