"""`moesched simulate`: what it predicts of one machine and of several, prints and refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from commands import ONLY_FIGURES, RUN_KEYS, SIMULATE, refused
from moesched.trace import check_trace, read_trace

pytestmark = pytest.mark.usefixtures("as_users_run")


def test_simulate_prints_one_json_object_with_what_was_promised(command: Any) -> None:
    said = command(*SIMULATE, "--policy", "cgopipe", "--batch-size", 8, "--gen", 3, "--json")
    assert said.code == 0
    assert said.json.keys() >= RUN_KEYS - {"tokens", "text"} | {"tasks", "simulated_seconds", "wall_seconds"}
    assert not said.json.keys() & {"tokens", "text"}
    assert said.json["plan"]["batch_size"] == 8
    assert said.json["plan"]["new_tokens"] == 3
    assert len(said.json["step_seconds"]) == 3
    assert said.json["simulated_seconds"] > 0


def test_one_new_token_has_no_decode_rate_and_a_split_kv_cache_its_share(command: Any) -> None:
    sizes = ("--batch-size", 8, "--micro-batch-size", 8, "--gen", 1, "--set", "kv_on_gpu=0.5")
    said = command(*SIMULATE, "--policy", "cgopipe", *sizes)
    assert "50% of the KV cache on the accelerator, the rest on the host" in said.out
    assert not re.search("^decode", said.out, re.MULTILINE)


def test_the_same_seed_predicts_the_same(command: Any) -> None:
    wanted = (*SIMULATE, "--policy", "adversarial", "--batch-size", 4, "--gen", 2, "--json")
    first, again, other = (command(*wanted, "--seed", seed).json for seed in (1, 1, 2))
    assert first["simulated_seconds"] == again["simulated_seconds"] != other["simulated_seconds"]


def test_sizes_that_are_not_given_fit(command: Any) -> None:
    said = command(*SIMULATE, "--policy", "layer_streaming", "--gen", 2, "--budget", "gpu=900MB", "--json")
    assert said.json["peak_bytes"]["gpu"] <= 900_000_000
    assert 1 < said.json["plan"]["batch_size"] < 1024
    refused(
        command(*SIMULATE, "--policy", "layer_streaming", "--budget", "gpu=200MB", "--json"), "does not fit"
    )


def test_a_folder_needs_no_weights_to_be_simulated(command: Any, no_text: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((no_text / "config.json").read_text())
    wanted = ("simulate", "--model", tmp_path, "--machine", "t4", "--policy", "resident", "--workload")
    (tmp_path / "short.toml").write_text('name = "short"\nnew_tokens = [4]\nprompt_tokens = [3, 9]\n')
    assert command(*wanted, tmp_path / "short.toml", "--json").json["plan"]["batch_size"] == 2
    refused(command(*wanted, "uniform"), "a prompt of 128 tokens and 32 new ones are more than the context")


def test_without_a_policy_simulate_takes_the_planner_s_choice(
    command: Any, no_text: Path, tmp_path: Path
) -> None:
    workload = tmp_path / "drawn.toml"
    workload.write_text('name = "drawn"\nnew_tokens = [2]\nprompts = {average = 90, largest = 90}\n')
    of = ("simulate", "--model", no_text, "--machine", "t4", "--workload", workload, "--budget", "gpu=1MB")
    wanted = (*of, *ONLY_FIGURES, "--json")
    best, small, some = (
        command(*wanted, *size).json
        for size in ((), ("--micro-batch-size", 1, "--beams", 2), ("--batch-size", 2))
    )
    named = command(*wanted, "--policy", some["policy"], "--batch-size", 2).json
    for open_number in (best, small):
        assert open_number["chosen_at"] == pytest.approx(
            open_number["throughput_tokens_per_second"], rel=0.01
        )
    assert small["plan"]["micro_batch_size"] == 1
    assert some["chosen_at"] > 0
    assert named["chosen_at"] is None
    assert some["step_seconds"] == named["step_seconds"]


def test_a_file_of_prompts_is_a_workload(command: Any, no_text: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [1, 2]}\n{"prompt_ids": [3]}\n')
    wanted = ("simulate", "--model", no_text, "--machine", "t4", "--policy", "cgopipe", "--workload", file)
    whole = command(*wanted, "--gen", 2, "--json")
    assert (whole.code, whole.json["plan"]["batch_size"]) == (0, 2)
    file.write_text(file.read_text() + "{\n")
    partly = command(*wanted, "--gen", 2, "--json")
    assert (partly.code, partly.json["step_seconds"]) == (2, whole.json["step_seconds"])
    assert re.fullmatch(r"moesched: .*prompts\.jsonl:3: [^\n]*skipped[^\n]*\n", partly.err)


def test_padded_requests_of_several_batches_are_traced_and_printed(command: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    options = "--policy flexgen --gen 2 --requests 5 --batch-size 3 --padded --trace"
    said = command(*SIMULATE, *options.split(), trace)
    assert "2 new tokens, padded, 2 batches" in said.out
    assert [check_trace(trace), check_trace(tmp_path / "trace.batch2.json")] == [[], []]


def test_a_prediction_is_traced_and_compared_with_itself(command: Any, tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.json", tmp_path / "report.json"
    wanted = (*SIMULATE, "--policy", "cgopipe", "--batch-size", 4, "--gen", 2)
    said = command(*wanted, "--trace", trace, "--report", report)
    assert "predicted on t4" in said.out
    assert str(trace) in said.out
    assert check_trace(trace) == []
    side_by_side = command("compare", report, trace, "--json").json
    assert [run["figures"] for run in side_by_side["runs"]] == ["predicted", "predicted"]
    steps = next(row for row in side_by_side["rows"] if row["name"] == "decode step")
    assert steps["values"][0] == pytest.approx(steps["values"][1])
    assert "decode step" in command("compare", report, trace).out


# -- several machines ------------------------------------------------------------------------------------------------


DBRX = ("simulate", "--model", "dbrx", "--workload", "uniform")


ONE = ("--batch-size", 1, "--gen", 2)


ETHERNET = ("--network", "10gbe")


def tokens_per_second(command: Any, policy: str, nodes: int, *options: object, gen: int = 2) -> float:
    of = ("--batch-size", 1, "--gen", gen, "--policy", policy, "--nodes", nodes)
    machine = () if "--machine" in options else ("--machine", "m2-ultra")
    said = command(*DBRX, *machine, *ETHERNET, *of, *options, *ONLY_FIGURES, "--json")
    assert (said.code, said.err) == (0, "")
    rate: float = said.json["decode_tokens_per_second"]
    return rate


def test_nodes_that_share_experts_exchange_once_a_layer(command: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    options = ("--policy", "ep_router_aided", "--nodes", 2, "--trace", trace, "--json")
    said = command(*DBRX, "--machine", "m2-ultra", *ONE, *ETHERNET, *options)
    assert (said.code, said.json["nodes"]) == (0, 2)
    assert said.json["lanes"]["network"]["busy_seconds"] >= 2 * 40 * 1e-3
    assert said.json["peak_bytes"]["unified"] <= 192e9
    assert check_trace(trace) == []
    assert {each.lane.rank for each in read_trace(trace).recording.slices} == {0, 1}


def test_the_paper_s_versions_come_in_its_order(command: Any) -> None:
    central = tokens_per_second(command, "ep_router_aided", 2, "--set", "decentralised=false")
    busy, aided = (tokens_per_second(command, policy, 2) for policy in ("ep_busy_full", "ep_router_aided"))
    assert busy < central < aided


def test_overlapping_placements_are_faster_with_the_same_memory(command: Any) -> None:
    theirs = tokens_per_second(command, "ep_router_aided", 4, gen=3)
    ours = tokens_per_second(command, "ep_balanced", 4, "--set", "experts=8", gen=3)
    assert ours > 1.05 * theirs


def test_copies_that_nobody_needs_stay_wired(command: Any) -> None:
    """With eleven experts on each of four nodes, every node runs one a layer: none has to wait for another."""
    machine = ("--machine", "m2-ultra-macos14")
    assert tokens_per_second(command, "ep_balanced", 4, *machine, gen=12) > 7
