"""Policies of papers, held against the algorithms and the overlap that the papers describe."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import pytest

import moesched
from benchmarks.fidelity.papers import CASES, compared
from moesched.dispatch.adaptive_replacement import AdaptiveReplacement
from moesched.machines import load_machine
from moesched.machines.staging import staged
from moesched.models.layout import Page, weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.seams import Policy
from moesched.tasks import IDLE, HostKernel, Task, class_of
from moesched.testing import Case, policy_cases, run_on_symbols
from scripted_routing import BALANCED, SLOW_CPU, T4, Choices, Watch, run_of, simulated, with_rates

SLOW_LINK = with_rates(link=1e5, cpu=1e12)
"""An expert takes far longer to come than to run on the host."""


def places(watch: Watch) -> list[tuple[int, int, str]]:
    """Step, expert and processor of all experts, in the order of their submission."""
    ran = watch.tasks("run_expert")
    return [(task.step, task.expert, "host" if isinstance(task, HostKernel) else "gpu") for task in ran]


# -- the frequency cache of llama.cpp ------------------------------------------------------------------------------


def test_experts_in_the_cache_run_on_the_accelerator_and_all_others_on_the_host() -> None:
    watch = simulated("frequency_cache", [[[0, 1, 4, 5]]], {"experts": 2})
    assert sorted(places(watch)) == [(0, 0, "gpu"), (0, 1, "gpu"), (0, 4, "host"), (0, 5, "host")]
    assert watch.experts("fetch") == []


def test_an_expert_enters_the_cache_from_its_second_use_on_and_runs_there_from_its_third() -> None:
    watch = simulated("frequency_cache", [[[5]]] * 4, {"experts": 2}, machine=SLOW_CPU)
    assert places(watch) == [(0, 5, "host"), (1, 5, "host"), (2, 5, "gpu"), (3, 5, "gpu")]
    assert watch.experts("fetch") == [(1, 0, 5)]
    assert {class_of(task) for task in watch.tasks("fetch") if task.step >= 0} == {IDLE}


def test_one_expert_comes_at_a_time_and_runs_on_the_host_until_it_is_there() -> None:
    watch = simulated("frequency_cache", [[[4, 5]]] * 4, {"experts": 2}, machine=SLOW_LINK)
    assert watch.experts("fetch") == [(1, 0, 4), (2, 0, 5)]
    assert sorted(places(watch)) == [
        *((step, expert, "host") for step in (0, 1) for expert in (4, 5)),
        *((2, 4, "gpu"), (2, 5, "host"), (3, 4, "gpu"), (3, 5, "gpu")),
    ]


def test_a_policy_that_ran_before_begins_with_an_empty_memory() -> None:
    policy = make_policy("frequency_cache", {"experts": 2})
    fetched = [run_of(policy, [[[5]], [[5]]], machine=SLOW_LINK).experts("fetch") for _ in range(2)]
    assert fetched == [[(1, 0, 5)]] * 2


def test_the_least_frequent_class_makes_room() -> None:
    steps = [[[0]]] * 4 + [[[5]]] * 3
    watch = simulated("frequency_cache", steps, {"experts": 2}, machine=SLOW_CPU)
    # Expert 0 was used four times, expert 1 never.
    assert watch.experts("fetch") == [(5, 0, 5)]
    assert places(watch)[-1] == (6, 5, "gpu")
    again = simulated("frequency_cache", [*steps, [[0]]], {"experts": 2}, machine=SLOW_CPU)
    assert places(again)[-1] == (7, 0, "gpu")


def test_where_the_host_runs_no_experts_misses_are_fetched() -> None:
    unified = next(case for case in policy_cases() if case.machine.unified)
    watch = simulated("frequency_cache", [[[4, 5]]], {"experts": 2}, machine=unified.machine)
    assert sorted(places(watch)) == [(0, 4, "gpu"), (0, 5, "gpu")]
    assert watch.experts("fetch") == [(0, 0, 4), (0, 0, 5)]


# -- Least-Stale ---------------------------------------------------------------------------------------------------


def test_prefetched_experts_of_the_next_layer_stay_and_passed_layers_make_room() -> None:
    steps = [[[0, 1], [2, 3], [4, 5]]] * 2
    watch = simulated("least_stale", steps, {"experts": 4, "prefetches": 2}, machine=SLOW_CPU)
    fetched = watch.experts("fetch")
    # Two experts at a time: those of the layer and those of the next one are all that is needed at once.
    for step in range(2):
        for layer, chosen in enumerate(steps[step]):
            times = [each for each in fetched if each[:2] == (step, layer)]
            assert len(times) <= len(chosen), "none was evicted between its prefetch and its use"
    assert {class_of(t) for t in watch.tasks("fetch") if t.step >= 0 and t.layer} <= {IDLE, 0}


def test_least_stale_prefers_pages_of_passed_layers_where_lru_takes_those_that_come_next() -> None:
    # Three layers take turns with one expert each; a fourth expert comes in the first one.
    steps = [[[0], [0], [0]]] * 2 + [[[1], [0], [0]]] * 2
    settings = {"experts": 3, "prefetches": 0}
    watch = simulated("least_stale", steps, settings, machine=SLOW_CPU)
    at_first = {(0, 0), (1, 0), (2, 0)}
    assert [each[1:] for each in watch.experts("fetch") if each[1:] not in at_first][:1] == [(0, 1)]


# -- Fate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rooms"),
    [
        ({"shallow": 1, "offload_per_layer": 3}, [4, 0, 0, 0]),
        ({"shallow": 1, "offload_per_layer": 2}, [4, 2, 1, 1]),
        ({"shallow": 2, "offload_per_layer": 1}, [4, 4, 2, 2]),
        ({"shallow": 0, "offload_per_layer": 1}, [3, 3, 3, 3]),
        ({"shallow": 9, "offload_per_layer": 1}, [4, 4, 4, 0]),
    ],
)
def test_the_first_layers_experts_stay_and_the_others_share_the_rest(
    settings: dict[str, int], rooms: list[int]
) -> None:
    policy: Any = make_policy("fate", dict(settings))
    Case(name="fate", machine=T4, layers=4, weights=1.5).plan(policy)
    assert [len(cache) for cache in policy.cached] == rooms


def test_the_first_layer_is_never_fetched_and_the_next_one_is_foretold() -> None:
    steps = [[[0, 1], [2, 3]], [[4, 5], [0, 1]]]
    watch = simulated("fate", steps, {"offload_per_layer": 3, "buffers": 3})
    fetched = [task for task in watch.tasks("fetch") if task.step >= 0]
    assert {task.layer for task in fetched} == {1}
    assert len(watch.tasks("preview_route")) == 2


def test_a_scan_of_pages_used_once_does_not_drive_out_those_used_again() -> None:
    pages = [Page(number, 0, number, 0, (), 10) for number in range(12)]
    rule, held = AdaptiveReplacement(), {}
    for step in range(2):
        for page in pages[:2]:
            if page.id not in held:
                held[page.id] = page
                rule.used(page, step, 0)
            rule.used(page, step, 1)
    for step, page in enumerate(pages[2:], 2):
        held[page.id] = page
        rule.used(page, step, 0)
        rule.used(page, step, 1)
        if len(held) > 3:
            del held[rule.choose(held).id]
    assert {0, 1} <= held.keys()


def test_a_page_that_comes_back_too_late_shifts_the_balance_towards_its_part() -> None:
    pages = [Page(number, 0, number, 0, (), 10) for number in range(4)]
    rule = AdaptiveReplacement()
    held = {page.id: page for page in pages[:2]}
    for step in range(2):
        rule.used(pages[0], step, 0 if not step else 1)  # used again: frequent
    rule.used(pages[1], 2, 0)
    assert rule.choose(held) is pages[1]
    rule.used(pages[1], 3, 0)  # it should have stayed: pages that are used once get a place
    rule.used(pages[2], 4, 0)
    assert rule.choose({0: pages[0], 1: pages[1], 2: pages[2]}) is pages[0]


# -- HybriMoE ------------------------------------------------------------------------------------------------------


def test_experts_with_few_tokens_run_on_the_host_and_those_with_many_are_fetched() -> None:
    watch = simulated(
        "hybrimoe", [[{0: 1, 1: 9, 2: 1, 3: 8}]], {"experts": 0}, machine=BALANCED, prompts=(19,)
    )
    assert {expert for _, _, expert in watch.experts("fetch")} <= {1, 3}
    assert {expert for _, expert, place in places(watch) if place == "host"} >= {0, 2}
    assert len(places(watch)) == 4


def test_the_expert_with_the_lowest_average_score_makes_room() -> None:
    steps = [[{0: 8, 1: 1}], [{0: 8, 1: 1}], [{2: 9}], [{0: 9}]]
    watch = simulated("hybrimoe", steps, {"experts": 2, "ahead": 0}, machine=SLOW_CPU, prompts=(9,))
    # Expert 1, with the lowest score, made room for 2.
    assert watch.experts("fetch") == [(2, 0, 2)]


def test_of_the_layers_ahead_the_one_that_gains_most_is_prefetched_first() -> None:
    # In the decode step, layer 2 misses an expert with eight tokens, layer 1 one with a single token.
    steps: Choices = [[{0: 9}] * 3, [{0: 9}, {0: 8, 5: 1}, {0: 1, 5: 8}]]
    machine = with_rates(link=1e9, cpu=1e8)
    settings = {"experts": 3, "buffers": 2}
    watch = simulated("hybrimoe", steps, settings, machine=machine, prompts=(9,), pages_per_expert=6)
    prefetched = [t for t in watch.tasks("fetch") if t.step >= 0 and class_of(t) == IDLE]
    assert [(t.step, t.layer, t.expert) for t in prefetched][:1] == [(1, 2, 5)]


def test_in_prefill_where_all_experts_are_needed_nothing_is_previewed() -> None:
    watch = simulated("hybrimoe", [[{0: 9}, {5: 9}]] * 2, {"experts": 2}, prompts=(9,))
    assert {task.step for task in watch.tasks("preview_route")} == {1}


def test_nothing_is_prefetched_that_would_come_too_late() -> None:
    steps = [[[0], [5], [5], [5]]] * 2
    watch = simulated("hybrimoe", steps, {"experts": 4}, machine=SLOW_LINK)
    assert watch.tasks("preview_route") != []
    assert watch.experts("fetch") == []


def test_nothing_is_prefetched_whose_pages_would_hold_up_more_outputs_of_the_host_than_they_save() -> None:
    # An expert takes as long to come as two and a half layers, which all run on the host.
    steps = [[[4], [4], [4], [4]]] * 2
    machine = with_rates(link=1e8, cpu=2.5e8)
    watch = simulated("hybrimoe", steps, {"experts": 4}, machine=machine)
    assert {place for step, _, place in places(watch) if step} == {"host"}
    assert watch.experts("fetch") == []


@pytest.mark.parametrize(
    ("machine", "requests", "accuracy", "least", "most"),
    [
        ("l4", 1, 0.0, 0.99, 1.0),
        ("l4", 1, 0.4, 0.99, 1.0),
        ("l4", 1, 1.0, 1.05, 1.5),
        ("t4", 4, 0.65, 0.995, 1.05),
        ("t4", 8, 0.7, 0.995, 1.05),
        ("rtx6000", 1, 0.7, 0.995, 1.05),
        ("m2-ultra", 1, 0.7, 1.0, 1.0),
    ],
)
def test_previews_that_are_often_wrong_cost_next_to_nothing_and_right_ones_pay(
    machine: str, requests: int, accuracy: float, least: float, most: float
) -> None:
    rates = [
        moesched.simulate_model(
            "mixtral-8x7b",
            machine=machine,
            policy="hybrimoe",
            settings={"ahead": ahead},
            workload=moesched.given_lengths([64] * requests, 9),
            preview_accuracy=accuracy,
            band=False,
        ).decode_tokens_per_second
        for ahead in (3, 0)
    ]
    assert least <= rates[0] / rates[1] <= most


# -- MoE-Gen -------------------------------------------------------------------------------------------------------


def test_each_expert_runs_once_in_a_layer_on_the_tokens_of_all_micro_batches() -> None:
    watch = simulated("moe_gen", [[[0, 1, 5], [2, 3]]] * 2, {}, prompts=(2, 3, 1), micro_batch_size=1)
    expected = [(step, 0, e) for step in range(2) for e in (0, 1, 5)]
    expected += [(step, 1, e) for step in range(2) for e in (2, 3)]
    assert sorted(watch.experts("run_expert")) == sorted(expected)
    assert {len(task.expert_rows) for task in watch.tasks("run_expert")} == {3}


def test_attention_is_on_the_host_beside_kv_caches_that_the_accelerator_does_not_hold() -> None:
    watch = simulated("moe_gen", [[[0]]] * 3, {}, prompts=(2, 3), micro_batch_size=1)
    assert {type(task) for task in watch.tasks("cpu_attention")} == {HostKernel}
    assert {task.step for task in watch.tasks("cpu_attention")} == {1, 2}
    split = simulated("moe_gen", [[[0]]] * 3, {"kv_on_gpu": 0.5}, prompts=(2, 3), micro_batch_size=1)
    assert len(split.tasks("cpu_attention")) == 2


# -- beside what they improve on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", ["Least-Stale", "Fate"])
def test_the_papers_policy_is_faster_than_what_it_improves_on(paper: str) -> None:
    [case] = [case for case in CASES if case.paper == paper]
    *_, decode, _ = compared(case)
    assert (decode["of"], decode["ratio"] > 1.2) == ("decode", True)


# -- overlap on a T4 -------------------------------------------------------------------------------


class Watched:
    """A virtual run of a Mixtral shape on a T4: when each kind of task ran in the first decode step."""

    def __init__(self, policy: Policy, requests: int, shape: str) -> None:
        layout = weight_layout(SHAPES[shape])
        batch = split_batch([32] * requests, 3, requests // 4)
        plan = plan_run(staged(load_machine("t4"), "16GB"), layout, batch, policy)
        self.ended = run_on_symbols(policy, plan)
        self.step = [task for task in self.ended.tasks if task.step == 1]
        samples = [max(task.end for task in self._all(step, "sample")) for step in (0, 1)]
        self.start, self.end = samples

    def _all(self, step: int, verb: str) -> list[Task]:
        return [task for task in self.ended.tasks if task.step == step and task.verb == verb]

    def busy(self, *verbs: str) -> list[tuple[int, int]]:
        """The spans in which some of these verbs ran, within the step's time, merged."""
        spans = sorted(
            (max(task.start, self.start), min(task.end, self.end))
            for task in self.ended.tasks
            if task.verb in verbs and task.end > self.start and task.start < self.end
        )
        merged: list[tuple[int, int]] = []
        for start, end in spans:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged

    def share(self, *verbs: str) -> float:
        """The share of the step during which some of these verbs ran."""
        return length(self.busy(*verbs)) / (self.end - self.start)

    def hidden(self, verb: str, behind: tuple[str, ...]) -> float:
        """The share of a verb's time during which some of the others ran too."""
        mine = self.busy(verb)
        return overlap(mine, self.busy(*behind)) / length(mine)


class Watches(Protocol):
    def __call__(self, policy: str, requests: int = 120, shape: str = "mixtral-8x7b") -> Watched: ...


@pytest.fixture(scope="module")
def watched() -> Watches:
    """Watches a policy run; once, however many tests ask."""

    @cache
    def watch(policy: str, requests: int = 120, shape: str = "mixtral-8x7b") -> Watched:
        return Watched(make_policy(policy), requests, shape)

    return watch


def length(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def overlap(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in left for b in right)


GPU = ("pre_attention", "post_attention", "attention")


def test_cgopipe_hides_attention_and_activations_behind_the_weights(watched: Watches) -> None:
    run = watched("cgopipe")
    assert run.ended.tokens == run.ended.expected
    assert run.share("fetch", "load_hidden") > 0.97, "the link is never idle: I/O is the bottleneck"
    assert run.hidden("cpu_attention", ("fetch",)) > 0.9
    assert run.hidden("copy_to_pinned", ("fetch",)) > 0.9
    assert run.hidden("post_attention", ("fetch",)) > 0.9
    assert run.hidden("cpu_attention", GPU) > 0, "attention runs ahead on the CPU while the GPU works"


def test_layer_streaming_moves_the_next_layer_while_this_one_computes(watched: Watches) -> None:
    run = watched("layer_streaming", requests=40)
    assert run.ended.tokens == run.ended.expected
    assert run.share("fetch") > 0.97
    assert run.hidden("post_attention", ("fetch",)) > 0.97
    fetches = [task for task in run.step if task.verb == "fetch"]
    assert [task.layer for task in fetches] == [*range(1, 32), 0], (
        "one transfer for each layer, one layer ahead"
    )


def test_resident_moves_nothing_once_it_has_loaded(watched: Watches) -> None:
    run = watched("resident", shape="mixtral-0.8b")
    assert run.ended.tokens == run.ended.expected
    assert {task.lane.name for task in run.step} == {"accelerator"}
    assert run.share(*GPU, "embed", "sample") == 1


def test_flexgen_loads_the_next_micro_batchs_keys_and_values_while_one_computes(watched: Watches) -> None:
    run = watched("flexgen")
    assert run.ended.tokens == run.ended.expected
    loads = [(task.layer, task.micro_batch) for task in run.step if task.verb == "load_kv"]
    assert loads == [(i, j) for i in range(32) for j in range(4)]
    computed = {(task.layer, task.micro_batch): task for task in run.step if task.verb == "pre_attention"}
    for load in run.step:
        if load.verb == "load_kv" and load.micro_batch > 0:
            assert load.id < computed[load.layer, load.micro_batch - 1].id, "it is asked for one ahead"


def test_flexgen_as_published_overlaps_only_the_weights_and_those_with_one_micro_batch_of_a_layer(
    watched: Watches,
) -> None:
    overlapped, published = (watched(name) for name in ("flexgen", "flexgen_synchronous"))
    assert published.ended.tokens == published.ended.expected
    assert overlap(published.busy("load_kv"), published.busy(*GPU)) == 0
    beside_weights = {
        task.micro_batch
        for task in published.step
        if task.verb == "post_attention" and overlap([(task.start, task.end)], published.busy("fetch"))
    }
    assert beside_weights == {0}
    assert published.end - published.start > overlapped.end - overlapped.start


def test_flexgen_on_the_cpu_runs_one_micro_batch_at_a_time(watched: Watches) -> None:
    run = watched("flexgen_cpu")
    assert run.ended.tokens == run.ended.expected
    assert overlap(run.busy("cpu_attention"), run.busy(*GPU)) == 0


def test_without_paging_hidden_states_wait_behind_a_layers_weights(watched: Watches) -> None:
    paged, whole = (watched(name) for name in ("cgopipe", "fastdecode"))
    assert whole.ended.tokens == whole.ended.expected
    assert whole.hidden("cpu_attention", GPU) > 0, "attention runs ahead on the CPU all the same"
    assert [task.layer for task in whole.step if task.verb == "fetch"] == [*range(1, 32), 0]
    assert paged.end - paged.start < 0.9 * (whole.end - whole.start)


def test_at_the_same_batch_cgopipe_is_the_fastest_of_the_four_schedules_of_figure_6(watched: Watches) -> None:
    names = ("cgopipe", "fastdecode", "flexgen_cpu", "flexgen")
    runs = {name: watched(name) for name in names}
    seconds = {name: run.end - run.start for name, run in runs.items()}
    assert min(seconds, key=seconds.__getitem__) == "cgopipe"
    assert seconds["fastdecode"] <= seconds["flexgen_cpu"]


def test_cgopipe_beats_layer_streaming_where_it_has_the_same_memory(watched: Watches) -> None:
    runs = [watched(name, requests=40) for name in ("cgopipe", "layer_streaming")]
    paged, streamed = (run.end - run.start for run in runs)
    assert paged < 0.9 * streamed
