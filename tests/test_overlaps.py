"""Overlap on a T4: each schedule hides the work that its paper says it hides."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import pytest

from moesched.machines import load_machine
from moesched.machines.staging import staged
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.seams import Policy
from moesched.tasks import Task
from moesched.testing import run_on_symbols


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


class Watch(Protocol):
    def __call__(self, policy: str, requests: int = 120, shape: str = "mixtral-8x7b") -> Watched: ...


@pytest.fixture(scope="module")
def watched() -> Watch:
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


def test_cgopipe_hides_attention_and_activations_behind_the_weights(watched: Watch) -> None:
    run = watched("cgopipe")
    assert run.ended.tokens == run.ended.expected
    assert run.share("fetch", "load_hidden") > 0.97, "the link is never idle: I/O is the bottleneck"
    assert run.hidden("cpu_attention", ("fetch",)) > 0.9
    assert run.hidden("copy_to_pinned", ("fetch",)) > 0.9
    assert run.hidden("post_attention", ("fetch",)) > 0.9
    assert run.hidden("cpu_attention", GPU) > 0, "attention runs ahead on the CPU while the GPU works"


def test_layer_streaming_moves_the_next_layer_while_this_one_computes(watched: Watch) -> None:
    run = watched("layer_streaming", requests=40)
    assert run.ended.tokens == run.ended.expected
    assert run.share("fetch") > 0.97
    assert run.hidden("post_attention", ("fetch",)) > 0.97
    fetches = [task for task in run.step if task.verb == "fetch"]
    assert [task.layer for task in fetches] == [*range(1, 32), 0], (
        "one transfer for each layer, one layer ahead"
    )


def test_resident_moves_nothing_once_it_has_loaded(watched: Watch) -> None:
    run = watched("resident", shape="mixtral-0.8b")
    assert run.ended.tokens == run.ended.expected
    assert {task.lane.name for task in run.step} == {"accelerator"}
    assert run.share(*GPU, "embed", "sample") == 1


def test_flexgen_loads_the_next_micro_batchs_keys_and_values_while_one_computes(watched: Watch) -> None:
    run = watched("flexgen")
    assert run.ended.tokens == run.ended.expected
    loads = [(task.layer, task.micro_batch) for task in run.step if task.verb == "load_kv"]
    assert loads == [(i, j) for i in range(32) for j in range(4)]
    computed = {(task.layer, task.micro_batch): task for task in run.step if task.verb == "pre_attention"}
    for load in run.step:
        if load.verb == "load_kv" and load.micro_batch > 0:
            assert load.id < computed[load.layer, load.micro_batch - 1].id, "it is asked for one ahead"


def test_flexgen_as_published_overlaps_only_the_weights_and_those_with_one_micro_batch_of_a_layer(
    watched: Watch,
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


def test_flexgen_on_the_cpu_runs_one_micro_batch_at_a_time(watched: Watch) -> None:
    run = watched("flexgen_cpu")
    assert run.ended.tokens == run.ended.expected
    assert overlap(run.busy("cpu_attention"), run.busy(*GPU)) == 0


def test_without_paging_hidden_states_wait_behind_a_layers_weights(watched: Watch) -> None:
    paged, whole = (watched(name) for name in ("cgopipe", "fastdecode"))
    assert whole.ended.tokens == whole.ended.expected
    assert whole.hidden("cpu_attention", GPU) > 0, "attention runs ahead on the CPU all the same"
    assert [task.layer for task in whole.step if task.verb == "fetch"] == [*range(1, 32), 0]
    assert paged.end - paged.start < 0.9 * (whole.end - whole.start)


def test_at_the_same_batch_cgopipe_is_the_fastest_of_the_four_schedules_of_figure_6(watched: Watch) -> None:
    names = ("cgopipe", "fastdecode", "flexgen_cpu", "flexgen")
    runs = {name: watched(name) for name in names}
    seconds = {name: run.end - run.start for name, run in runs.items()}
    assert min(seconds, key=seconds.__getitem__) == "cgopipe"
    assert seconds["fastdecode"] <= seconds["flexgen_cpu"]


def test_cgopipe_beats_layer_streaming_where_it_has_the_same_memory(watched: Watch) -> None:
    runs = [watched(name, requests=40) for name in ("cgopipe", "layer_streaming")]
    paged, streamed = (run.end - run.start for run in runs)
    assert paged < 0.9 * streamed
