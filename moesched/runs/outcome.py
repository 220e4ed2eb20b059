"""The raw results of a run, and the report with its figures, measured or predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

import msgspec

from moesched.machines.weights_home import WeightsHome
from moesched.runs.process_bytes import ProcessBytes, process_bytes_of
from moesched.runs.token_times import (
    MicroBatchTimes,
    RequestTimes,
    mean_of_known,
    micro_batch_times,
    request_times,
)
from moesched.seams import Emulation, Policy
from moesched.steps.memory import Memory, counts_of
from moesched.steps.plan import Plan
from moesched.steps.preview_accuracy import Compared


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Raw results of a finished run. Times are nanoseconds.

    Attributes:
        loaded: time at which the resident weights were loaded.
        step_ends: time at which each step, prefill first, had sampled its last micro-batch.
        tokens: generated tokens, by request.
        busy: busy time of each lane after loading; until the last whole step, if the run ended early.
        tasks: number of submitted tasks.
        scores: the score of the best beam, by request; empty without beam search.
        first_tokens: time of each request's first token, for requests that have one.
        sampled: for each decode step, the time at which each micro-batch that took part had its tokens.
        scheduled: number of steps that the policy scheduled; any later steps repeat the last of these.
        previews: comparisons of router previews with the router's choices, by the number of layers ahead.
        forecasts: comparisons of predictors' answers with the router's choices, by (predictor, number of layers ahead).
    """

    loaded: int
    step_ends: list[int]
    tokens: list[list[int]]
    busy: dict[str, int]
    tasks: int
    scores: list[float] = []
    first_tokens: dict[int, int] = {}
    sampled: list[dict[int, int]] = []
    scheduled: int = 0
    previews: dict[int, Compared] = {}
    forecasts: dict[tuple[str, int], Compared] = {}


class LaneUse(msgspec.Struct, frozen=True):
    """Use of a lane in all steps.

    Attributes:
        busy_seconds: time that the lane ran tasks after loading; tasks that end after the last step count, too.
        utilization: `busy_seconds` over the time from the end of loading to the end of the last step, at most 1.
    """

    busy_seconds: float
    utilization: float


class PoolUse(msgspec.Struct, frozen=True):
    """Use of a pool in all steps, in pages. A page is used once in each step that reads it.

    Attributes:
        slots: number of pages that the pool has room for.
        fetched: pages that were fetched, those whose transfer was cancelled included.
        hits: uses that found the page in the pool, or on its way there by a speculative fetch.
        misses: uses that had to fetch the page.
        wasted: fetched pages that left the pool before anything read them.
        cancelled: wasted pages whose transfer was cancelled before it moved any bytes.
    """

    name: str
    memory: str
    slots: int
    fetched: int
    hits: int
    misses: int
    wasted: int
    cancelled: int


class PreviewUse(msgspec.Struct, frozen=True):
    """Counts from comparing router previews, made a given number of layers ahead, with the router's choices.

    An expert counts once for each micro-batch and layer, however many tokens choose it. A preview is compared if its
    layer is then routed by `Step.route`.

    Attributes:
        ahead: number of layers that the previews looked ahead.
        forecasts: number of previews that were compared.
        chosen: number of experts that the router then chose.
        found: number of those experts that had been forecast.
        accuracy: share of the chosen experts that had been forecast.
    """

    ahead: int
    forecasts: int
    chosen: int
    found: int
    accuracy: float


class ForecastUse(msgspec.Struct, frozen=True):
    """Counts from comparing one predictor's answers, a given number of layers ahead, with the routers' choices.

    If the router then chose n experts, the answer's n experts with the most expected tokens count as forecast.

    Attributes:
        predictor: name of the predictor's class.
        ahead: number of layers from the micro-batch's last routed layer to the forecast one.
        forecasts: number of answers that were compared.
        chosen: number of experts that the router then chose.
        found: number of those experts that had been forecast.
        accuracy: share of the chosen experts that had been forecast.
    """

    predictor: str
    ahead: int
    forecasts: int
    chosen: int
    found: int
    accuracy: float


Use = TypeVar("Use", PreviewUse, ForecastUse)


def use_of(kind: Callable[..., Use], compared: Compared, *key: str | int) -> Use:
    """Make a report's entry on the accuracy of previews, or of a predictor, for one number of layers ahead.

    Args:
        kind: the class of the entry: `PreviewUse` or `ForecastUse`.
        compared: the numbers of forecasts, of experts that the router chose, and of those that had been forecast.
        key: the first fields of `kind`: for `ForecastUse` the predictor's name; then the number of layers ahead.
    """
    return kind(*key, *compared, ratio(compared.found, compared.chosen))


class PlanReport(msgspec.Struct, frozen=True):
    """The sizes that a run was planned with.

    Attributes:
        batch_size: number of requests.
        micro_batch_size: requests of a micro-batch.
        new_tokens: tokens to generate for each request.
        resident_pages, streamed_pages: number of pages that stay in a memory, and number of pages that are streamed.
        kv_on_gpu: share of the KV cache that is on the accelerator, counted in (micro-batch, layer) pairs.
        discipline: the order in which lanes start tasks: "ready_first" or "in_order".
        beams: beams of each request; 1 without beam search.
        prefill_chunk: largest number of prompt tokens that pass a layer together; None if prompts are not divided.
    """

    batch_size: int
    micro_batch_size: int
    new_tokens: int
    resident_pages: int
    streamed_pages: int
    kv_on_gpu: float
    discipline: str
    beams: int = 1
    prefill_chunk: int | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run, measured or predicted as `measured` says.

    Attributes:
        costs_measured: whether this is a prediction from costs that `moesched calibrate` measured, instead of from the
            rates in the machine's profile.
        wall_seconds: real time of the run; all other times are on the clock of its machine, which may be emulated.
        emulation: quality of the emulation; None for a run on real hardware or a prediction.
        tensor_parallel: number of accelerators that the model was split over. Figures of lanes, tasks and the
            accelerator's memory are for one of them, as all do equal work; other memories' peaks are for all.
        nodes: number of machines that shared the model's experts. Lanes and tasks are for the first; each memory's peak
            is the highest of all nodes.
        scores: the score of each request's best beam; None without beam search.
        warm_up_seconds: time that the device ran its kernels before the first step, to warm up; None without a warm-up.
        first_token_seconds: mean time from the end of loading to a request's first token; None without tokens.
            `prefill_seconds` is the time from the end of loading until every request has its first token.
        decode_step_seconds: mean time of a decode step; None if none ended.
        between_tokens_seconds: mean time from one token of a request to its next, averaged over the requests; None if
            no request has two tokens.
        request_times: times of each request's tokens; None if they were not simulated to the end.
        micro_batch_times: times of the tokens of each micro-batch, batch after batch.
        simulated_steps: number of steps that were scheduled and simulated; None if the report is measured. Later steps
            repeat the last of these (a policy without state of its own schedules them alike), or are extrapolated.
        failure: reason for an early end of the generation; None for a complete one.
        process_bytes: peak resident memory of the process, predicted and measured; None if nothing is known about it.
        pools: use of each pool of page slots; with several ranks or nodes, of the first one's.
        previews: accuracy of the policy's previews of the router, the nearest first; of the first rank or node.
        forecasts: accuracy of the policy's predictors, by predictor, the nearest layer first.
        weights_home: the kind of host memory that weights came from in the first batch; None if all weights stayed on
            the accelerator, or if the accelerator uses the host's memory.
        kernels: names of the kernels that ran, by operation; empty if the device has only one for each operation.
    """

    measured: bool
    policy: str
    machine: str
    model: str
    plan: PlanReport
    load_seconds: float
    prefill_seconds: float
    decode_tokens_per_second: float
    throughput_tokens_per_second: float
    step_seconds: list[float]
    peak_bytes: dict[str, int]
    lanes: dict[str, LaneUse]
    tasks: int
    wall_seconds: float
    costs_measured: bool = False
    warm_up_seconds: float | None = None
    first_token_seconds: float | None = None
    decode_step_seconds: float | None = None
    between_tokens_seconds: float | None = None
    request_times: RequestTimes | None = None
    micro_batch_times: list[MicroBatchTimes] = []
    simulated_steps: int | None = None
    simulated_seconds: float | None = None
    tokens: list[list[int]] | None = None
    scores: list[float] | None = None
    text: list[str] | None = None
    interrupted: bool = False
    failure: str | None = None
    emulation: Emulation | None = None
    tensor_parallel: int = 1
    nodes: int = 1
    process_bytes: ProcessBytes | None = None
    pools: list[PoolUse] = []
    previews: list[PreviewUse] = []
    forecasts: list[ForecastUse] = []
    weights_home: WeightsHome | None = None
    kernels: dict[str, list[str]] = {}

    @property
    def figures(self) -> str:
        """Kind of the report's figures: "measured", "emulated" or "predicted"."""
        if self.emulation is not None:
            return "emulated"
        return "measured" if self.measured else "predicted"

    @property
    def title(self) -> str:
        """Title of the report: policy, model, machine, and kind of figures."""
        return f"{self.policy} on {self.model}, {self.figures} on {self.place}"

    @property
    def place(self) -> str:
        """The machine, with its number of nodes or accelerators if several, and the slow-down if it was emulated."""
        count = self.tensor_parallel
        machine = self.machine if count == 1 else f"{self.machine}, cut over {count} accelerators"
        if self.nodes > 1:
            machine = f"{self.nodes} nodes of {self.machine}"
        if self.emulation is None:
            return machine
        prefill, decode = self.emulation.dilation.prefill, self.emulation.dilation.decode
        by = f"{decode:g}" if prefill == decode else f"{prefill:g} in prefill, {decode:g} in decode"
        return f"{machine} (emulated, time dilated by {by})"


def make_report(
    plan: Plan,
    policy: Policy,
    outcome: Outcome,
    wall_seconds: float,
    *,
    measured: bool,
    interrupted: bool = False,
    failure: str | None = None,
    peers: Sequence[Plan] = (),
) -> Report:
    """Make the report of a run.

    Args:
        plan: the plan of the run; with several ranks or nodes, the first one's.
        outcome: the run's raw results.
        wall_seconds: real time that the run took.
        measured: whether the run was on hardware; else it is a prediction.
        interrupted: whether Ctrl-C or a signal ended the run.
        failure: the reason for an early end; None for none.
        peers: the plans of the other ranks or nodes.
    """
    loaded = outcome.loaded / 1e9
    ends = [end / 1e9 for end in outcome.step_ends]
    last = ends[-1] if ends else loaded
    first = ends[0] if ends else loaded
    steps = [after - before for before, after in zip([loaded, *ends], ends, strict=False)]
    counts = [len(tokens) for tokens in outcome.tokens]
    decoded = sum(max(0, count - 1) for count in counts)
    batch = plan.batch
    times = request_times(batch, outcome.loaded, outcome.first_tokens, outcome.sampled, counts)
    return Report(
        measured=measured,
        policy=type(policy).__name__,
        machine=plan.machine.name,
        model=plan.layout.config.name,
        plan=_plan_report(plan),
        load_seconds=loaded,
        prefill_seconds=first - loaded,
        first_token_seconds=fmean(outcome.first_tokens.values()) / 1e9 - loaded
        if outcome.first_tokens
        else None,
        decode_tokens_per_second=ratio(decoded, last - first),
        throughput_tokens_per_second=ratio(sum(counts), last - loaded),
        step_seconds=steps,
        peak_bytes=_peak_bytes(plan, peers),
        tensor_parallel=plan.layout.config.ranks,
        nodes=plan.nodes.count,
        process_bytes=process_bytes_of(plan, measured=measured),
        lanes=_lane_uses(outcome.busy, last - loaded),
        tasks=outcome.tasks,
        wall_seconds=wall_seconds,
        costs_measured=not measured and bool(plan.machine.cost_table),
        decode_step_seconds=mean_of_known(steps[1:]),
        between_tokens_seconds=mean_of_known(times.between_tokens_seconds),
        request_times=times,
        micro_batch_times=micro_batch_times(batch, times),
        simulated_steps=None if measured else outcome.scheduled,
        simulated_seconds=None if measured else last,
        tokens=outcome.tokens if measured else None,
        scores=(outcome.scores or None) if measured else None,
        interrupted=interrupted,
        failure=failure,
        pools=_pool_uses(plan),
        previews=[use_of(PreviewUse, each, ahead) for ahead, each in sorted(outcome.previews.items())],
        forecasts=[use_of(ForecastUse, each, *key) for key, each in sorted(outcome.forecasts.items())],
    )


def bytes_of_all_ranks(plan: Plan, memory: Memory, nbytes: int) -> int:
    """Return the bytes of a memory to report for a run, given the bytes that one rank takes of it.

    An accelerator's memory belongs to one rank, so the result is `nbytes`. All ranks share every other memory, so the
    result is `nbytes` times the number of ranks.

    Args:
        nbytes: bytes that one rank takes of the memory.
    """
    return nbytes if memory in plan.accelerators else nbytes * plan.layout.config.ranks


def _peak_bytes(plan: Plan, peers: Sequence[Plan]) -> dict[str, int]:
    """Return the peak of each memory, the highest of all plans, counted as by `bytes_of_all_ranks`."""
    return {
        memory.name: bytes_of_all_ranks(
            plan, memory, max(each.memories[memory.name].peak for each in (plan, *peers))
        )
        for memory in plan.memories.values()
    }


def _lane_uses(busy: Mapping[str, int], seconds: float) -> dict[str, LaneUse]:
    """Return the use of each lane in a period of `seconds`, given the nanoseconds that it was busy."""
    return {
        name: LaneUse(nanoseconds / 1e9, min(1.0, ratio(nanoseconds / 1e9, seconds)))
        for name, nanoseconds in busy.items()
    }


def _pool_uses(plan: Plan) -> list[PoolUse]:
    """Return the use of each of a plan's pools."""
    return [
        PoolUse(pool.name, pool.memory.name, len(pool.slots), *counts_of(pool).now())
        for pool in plan.weights.pools
    ]


def _plan_report(plan: Plan) -> PlanReport:
    resident = sum(len(each.slots) for each in plan.weights.resident)
    return PlanReport(
        batch_size=len(plan.batch.prompts),
        micro_batch_size=max(len(requests) for requests in plan.batch.micro_batches),
        new_tokens=plan.batch.new_tokens,
        resident_pages=resident,
        streamed_pages=len(plan.nodes.pages(plan.layout)) - resident,
        kv_on_gpu=plan.kv.on_gpu,
        discipline=plan.discipline,
        beams=plan.batch.beams,
        prefill_chunk=plan.batch.prefill_chunk if plan.batch.chunked else None,
    )


def ratio(part: float, whole: float) -> float:
    """Return `part` over `whole`, such as tokens over seconds; 0 if `whole` is 0, as for a run that ended at once."""
    return part / whole if whole > 0 else 0.0
