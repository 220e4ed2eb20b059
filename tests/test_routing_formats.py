"""Routing traces of other tools: read as what they say, replayed alike, and refused by place when broken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moesched
from moesched.inputs.lookup import find_shape
from moesched.models.shapes import SHAPES
from moesched.routing.files import read_routing_file
from moesched.routing.profile import RoutingProfile, write_profile
from moesched.routing.trace import RoutingTrace
from routing_traces import (
    MODEL,
    read_trace,
    records_of,
    refusal,
    routed,
    write_megatron,
    write_npy,
    write_npz,
    write_own,
    write_records,
    write_rows,
)
from tables import table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "routing.md"

ONE = routed([5], layers=2, experts=4, top_k=2)
TWO = routed([4, 3], layers=2, experts=4, top_k=2)
Write = Callable[[RoutingTrace, Path], Path]
OF_REQUESTS: list[Write] = [write_own, write_npz, write_megatron, write_rows]
WRITERS: list[Write] = [*OF_REQUESTS, write_npy]


# -- what is read


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_says_the_same_of_one_request_whatever_the_name_of_its_file(
    tmp_path: Path, write: Write
) -> None:
    found = read_trace(write(ONE, tmp_path).rename(tmp_path / "routing.txt"))
    assert (found.chosen == ONE.chosen).all()
    assert found.chosen.dtype == np.uint8
    assert found.request_tokens.tolist() == [5]
    assert found.shape == (2, 4, 2)


@pytest.mark.parametrize("write", OF_REQUESTS)
def test_every_format_with_requests_keeps_them_apart(tmp_path: Path, write: Write) -> None:
    found = read_trace(write(TWO, tmp_path))
    assert (found.chosen == TWO.chosen).all()
    assert found.request_tokens.tolist() == [4, 3]


def test_a_profile_is_recognised_whatever_its_name(tmp_path: Path) -> None:
    write_profile(ONE.profile(), tmp_path / "counts.npz")
    assert isinstance(read_routing_file(tmp_path / "counts.npz", MODEL), RoutingProfile)


def test_the_same_choices_give_the_same_simulated_run_in_each_format(tmp_path: Path) -> None:
    config = SHAPES["mixtral-0.8b"]
    trace = routed([9], layers=config.layers, experts=config.routed.experts, top_k=config.routed.top_k)

    def simulated(routing: str | None) -> dict[str, Any]:
        report = moesched.simulate_model(
            "mixtral-0.8b", machine="t4", policy="examples.on_demand:OnDemand", workload=[[1, 2, 3]],
            gen=6, batch_size=1, routing=routing, band=False,
        ).as_dict()  # fmt: skip
        return {name: value for name, value in report.items() if name != "wall_seconds"}

    reports = [simulated(str(write(trace, tmp_path))) for write in WRITERS]
    assert all(report == reports[0] for report in reports)
    assert simulated(None)["simulated_seconds"] != reports[0]["simulated_seconds"]


def test_the_command_prints_another_tools_trace_and_writes_it_as_its_own(
    command: Any, tmp_path: Path
) -> None:
    config = SHAPES["mixtral-0.8b"]
    trace = routed([6, 4], layers=config.layers, experts=config.routed.experts, top_k=config.routed.top_k)
    own = ("profile-routing", "mixtral-0.8b", "--routing", write_own(trace, tmp_path))
    foreign = ("profile-routing", "mixtral-0.8b", "--routing", write_megatron(trace, tmp_path))
    said = command(*foreign, "--out", tmp_path / "again.npz")
    assert said.out.split("\n", 2)[2] == command(*own).out.split("\n", 2)[2]
    again = read_trace(tmp_path / "again.npz", config)
    assert (again.chosen == trace.chosen).all()
    assert again.prompt_tokens.tolist() == trace.prompt_tokens.tolist()


# -- what the page shows


def test_the_examples_of_the_page_are_the_same_trace_and_its_command_replays_them_alike(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(python|jsonl|csv)\n(.*?)```", page, re.DOTALL))
    [simulate] = re.findall(r"^\$ moesched (simulate .* --routing) request\.npy$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    exec(blocks["python"], {})
    Path("routing.jsonl").write_text(blocks["jsonl"])
    Path("routing.csv").write_text(blocks["csv"])
    files = ("request.npy", "requests.npz", "routing.jsonl", "routing.csv")
    traces = [read_trace(Path(file), find_shape("examples/tiny-mixtral")) for file in files]
    assert traces[0].chosen[0].tolist() == [[3, 5], [1, 7], [0, 2], [4, 6]]
    assert all((trace.chosen == traces[0].chosen).all() for trace in traces)
    assert [trace.request_tokens.tolist() for trace in traces] == [[3]] * 4
    seconds = {
        json.loads(command(*simulate.split(), file, "--json").out)["simulated_seconds"] for file in files
    }
    assert len(seconds) == 1


# -- vLLM


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i2", "u2", "i4", "u8"])
def test_integers_of_any_type_and_order_are_read(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", np.asfortranarray(ONE.chosen.astype(dtype)))
    assert (read_trace(tmp_path / "a.npy").chosen == ONE.chosen).all()


def test_a_prompt_apart_from_its_generated_tokens_is_one_request(tmp_path: Path) -> None:
    generated, prompt = ONE.chosen[3:], ONE.chosen[:3]
    np.savez_compressed(tmp_path / "a.npz", routed_experts=generated, prompt_routed_experts=prompt)
    found = read_trace(tmp_path / "a.npz")
    assert (found.chosen == ONE.chosen).all()
    assert (found.request_tokens.tolist(), found.prompt_tokens.tolist()) == ([5], [3])


def changed(token: int, layer: int, experts: list[int]) -> Any:
    array = ONE.chosen.astype(np.int16)
    array[token, layer] = experts
    return array


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (changed(3, 1, [2, 4]), ", token 3, layer 1: there is no expert 4, as small has experts 0 to 3: give a trace"),
        (changed(4, 0, [-1, 2]), ", token 4, layer 0: there is no expert -1, as small has experts 0 to 3"),
        (changed(0, 0, [0, 0]), ", token 0, layer 0: expert 0 is chosen twice: give 2 different experts, or remove"),
        (ONE.chosen.repeat(2, axis=1), ": its number of layers is 4, but small has 2: give a trace of that model"),
        (ONE.chosen[:, :1], ": its number of layers is 1, but small has 2: give a trace of that model"),
        (ONE.chosen[..., :1], ": a token has 1 experts, but small has top 2: give a trace of that model"),
        (ONE.chosen[:0], " has shape (0, 2, 2) of uint8: give a trace, integers (tokens, layers, top_k)"),
        (ONE.chosen[0], " has shape (2, 2) of uint8: give a trace, integers (tokens, layers, top_k)"),
        (np.array("x"), " has shape () of str32: give a trace, integers"),
        (ONE.chosen.astype(float), " has shape (5, 2, 2) of 'float64': write an array of integers"),
        (np.array([None]), " has shape (1,) of 'object': write an array of integers"),
    ],
)  # fmt: skip
def test_a_bad_array_is_refused_by_token_and_layer(tmp_path: Path, array: Any, told: str) -> None:
    np.save(tmp_path / "a.npy", array)
    assert refusal(tmp_path / "a.npy").startswith(told)
    np.savez(tmp_path / "a.npz", array)
    if array.dtype != object:
        assert refusal(tmp_path / "a.npz").startswith(f", array 'arr_0'{told}")


def test_an_array_that_was_cut_off_or_has_more_is_refused(tmp_path: Path) -> None:
    file = write_npy(ONE, tmp_path)
    file.write_bytes(file.read_bytes()[:-7])
    assert refusal(file) == (
        " has 33 bytes of values, but its shape (5, 2, 2) of int16 needs 40: it was cut off or damaged; copy it again"
    )
    file.write_bytes(file.read_bytes() + bytes(8))
    assert refusal(file).startswith(" has 41 bytes of values, but its shape (5, 2, 2) of int16 needs 40")
    file.write_bytes(file.read_bytes()[:50])
    assert refusal(file) == " is not an array of numpy's: write it with `numpy.save`"


@pytest.mark.parametrize("shape", ["(-5, -2, 2)", "(10**30, 2, 2)", "(0, 10000000000000000000000, 2)", "5"])
def test_a_header_that_no_array_has_is_refused(tmp_path: Path, shape: str) -> None:
    file = write_npy(ONE, tmp_path)
    file.write_bytes(file.read_bytes().replace(b"(5, 2, 2), }".ljust(50), f"{shape}, }}".encode().ljust(50)))
    assert refusal(file)


def test_arrays_of_another_kind_are_refused(tmp_path: Path) -> None:
    file = write_own(ONE, tmp_path)
    np.savez(file, **ONE._asdict(), other=ONE.chosen)
    assert refusal(file) == " is neither a trace of moesched nor arrays of vLLM: give one of them"
    np.savez(file, chosen=ONE.chosen)
    assert refusal(file).startswith(" is damaged: it has no array request_tokens: make it again")


def test_more_arrays_than_any_trace_has_are_refused(tmp_path: Path) -> None:
    file = write_npz(ONE, tmp_path)
    file.write_bytes(file.read_bytes() + b"PK\1\2" * 10_000)
    assert refusal(file) == " has more than 10,000 arrays: split it into files with fewer"


# -- Megatron


def edited(lines: list[int], change: dict[str, Any] | str | None) -> list[dict[str, Any]]:
    """The records of TWO (8 passes of 2 layers), of which some lines are changed, come again, or are gone."""
    found = []
    for number, record in enumerate(records_of(TWO), 1):
        if number not in lines:
            found.append(record)
        elif isinstance(change, dict):
            found.append({key: value for key, value in (record | change).items() if value is not None})
        else:
            found += [record] * (2 if change else 0)
    return found


def test_a_pass_is_known_by_its_step_its_rank_and_a_layer_that_comes_again(tmp_path: Path) -> None:
    records = records_of(TWO)
    for record in records:
        record["step"] = 7  # as in training, where a step has several micro-batches
    twice = [*records, *({**record, "rank": 1} for record in records)]
    found = read_trace(write_records(twice, tmp_path))
    assert (found.chosen == np.concatenate([TWO.chosen, TWO.chosen])).all()
    assert found.request_tokens.tolist() == [4, 3, 4, 3]
    assert found.prompt_tokens.tolist() == [3, 2, 3, 2]


def test_layers_count_from_the_lowest_and_other_blocks_are_left_out(tmp_path: Path) -> None:
    records = [{**record, "layer": record["layer"] + 3} for record in records_of(TWO)]
    other = [{**record, "block": "mtp", "mtp_idx": 0, "layer": 0} for record in records]
    mixed = [each for pair in zip(records, other, strict=True) for each in pair]
    assert (read_trace(write_records(mixed, tmp_path)).chosen == TWO.chosen).all()
    assert refusal(write_records(other, tmp_path)).startswith(" has no record of the block 'decoder'")


@pytest.mark.parametrize(("lines", "change", "told"), table("broken_files.md", "Megatron's records"))
def test_a_bad_record_is_refused_by_its_line(
    tmp_path: Path, lines: list[int], change: Any, told: str
) -> None:
    assert refusal(write_records(edited(lines, change), tmp_path)).startswith(told)


def test_a_record_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    file = write_megatron(TWO, tmp_path)
    file.write_text(file.read_text()[:-20])
    assert refusal(file) == (
        ":8 is not a record of Megatron's router trace: Input data was truncated; if the file was cut off, remove the "
        "lines of its last step"
    )


def test_a_line_with_more_values_than_any_pass_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"top_indices": ' + "[" * 4_000_001)
    assert refusal(tmp_path / "a.jsonl").startswith(
        ":1 is not a record of Megatron's router trace: it has about 4,000,002"
    )


# -- CSV


def test_rows_may_have_spaces_comments_and_the_line_ends_of_windows(tmp_path: Path) -> None:
    rows = [f"{layer}, {token} ,{a}  {b}" for (token, layer), (a, b) in _rows_of(ONE)]
    text = "\ufeff# a comment\n\nlayer, token, experts\n" + "# more\n".join(
        f"{row}\n" for row in reversed(rows)
    )
    (tmp_path / "a.csv").write_bytes(text.replace("\n", "\r\n").encode())
    assert (read_trace(tmp_path / "a.csv").chosen == ONE.chosen).all()


def _rows_of(trace: RoutingTrace) -> list[tuple[tuple[int, int], list[int]]]:
    tokens, layers, _ = trace.chosen.shape
    places = [(token, layer) for token in range(tokens) for layer in range(layers)]
    return [(place, trace.chosen[place].tolist()) for place in places]


ROWS = "layer,token,experts\n0,0,0 1\n1,0,2 3\n0,1,0 2\n1,1,1 3\n"


@pytest.mark.parametrize(("old", "new", "told"), table("broken_files.md", "Routing traces"))
def test_a_bad_row_is_refused_by_its_line_or_place(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert ROWS.count(old) == 1
    (tmp_path / "a.csv").write_text(ROWS.replace(old, new))
    assert refusal(tmp_path / "a.csv").startswith(told)


@pytest.mark.parametrize(
    ("requests", "told"),
    [
        ([0, 2], " has no row for layer 0 of token 0 of request 1"),
        ([1, 2], " has no row for layer 0 of token 0 of request 0"),
        ([0, 999_999_999], " has no row for layer 0 of token 0 of request 1"),
    ],
)
def test_a_request_that_is_missing_is_named(tmp_path: Path, requests: list[int], told: str) -> None:
    rows = "".join(f"{request},{layer},0,0 1\n" for request in requests for layer in range(2))
    (tmp_path / "a.csv").write_text("request,layer,token,experts\n" + rows)
    assert refusal(tmp_path / "a.csv").startswith(told)


def test_more_rows_than_fit_are_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(ROWS + "\n" * 2_000_000)
    assert refusal(tmp_path / "a.csv") == " has more than 2,000,000 lines: split it, or write an .npz file"


# -- none of them


@pytest.mark.parametrize(
    "content", [b"", b"\0\1\2", b"[[1, 2]]", b"a,b,c\n1,2,3\n", b"# only\n", b"\x1b[2J" + b"x" * 9999]
)
def test_what_is_no_routing_is_refused_with_what_can_be_given(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    said = refusal(tmp_path / "a")
    assert said.startswith(" is not a profile or trace of routing, as it begins with ")
    assert said.endswith(
        "give what `moesched profile-routing` writes, vLLM's routed experts (.npy, .npz), Megatron's router trace "
        "(.jsonl) or a CSV with the header layer,token,experts or layer,expert,count"
    )


@pytest.mark.parametrize("write", WRITERS)
def test_a_trace_takes_no_settings(command: Any, tmp_path: Path, write: Write) -> None:
    shape = SHAPES["mixtral-0.8b"]
    file = write(
        routed([3], layers=shape.layers, experts=shape.routed.experts, top_k=shape.routed.top_k), tmp_path
    )
    said = command("profile-routing", "mixtral-0.8b", "--routing", file, "--routing-set", "locality=0.5")
    assert (said.code, said.out) == (2, "")
    assert said.err == f"moesched: routing {file} is a trace, which takes no settings: omit --routing-set\n"


@pytest.mark.parametrize(("tokens", "unused"), [(6, 0), (8, 0), (9, 1), (300, 292)])
def test_a_trace_that_is_longer_than_the_run_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: int, unused: int
) -> None:
    config = SHAPES["mixtral-0.8b"]
    trace = routed([tokens], layers=config.layers, experts=config.routed.experts, top_k=config.routed.top_k)
    moesched.simulate_model(
        "mixtral-0.8b", machine="t4", policy="expert_cache", workload=[[1, 2, 3]], gen=6, batch_size=1, band=False,
        routing=str(write_own(trace, tmp_path)),
    )  # fmt: skip
    said = capsys.readouterr().err
    assert (f"unused_tokens={unused}\n" in said) == (unused > 0)
