"""The table of kernels: the first row that takes a case computes it, also one from outside the tree."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import moesched
from benchmarks.shared.small_runs import ONE_MEMORY, generate
from faulty_kernels import (
    Abstract,
    Broken,
    Dependent,
    Doubling,
    FirstExperts,
    Foreign,
    Forgetful,
    Greedy,
    Hasty,
    Misspelt,
    Mistaken,
    Nameless,
    Narrow,
    NotFinite,
    Partial,
    Plain,
    Raising,
    Restless,
    Router,
    Silent,
)
from kernel_tables import kernels_of
from moesched.devices.kernels import samples
from moesched.devices.kernels.check import check_kernel, cpu_resources
from moesched.devices.kernels.expert_of_products import ExpertOfProducts
from moesched.devices.kernels.layer_weights import Weights
from moesched.devices.kernels.seam import OPERATIONS, ROWS, Bound, Case
from moesched.devices.kernels.table import KernelTable
from moesched.devices.kernels.torch_kernels import guarded
from moesched.devices.kernels.workspace import Scratch, Workspace
from moesched.devices.torch.device import TorchDevice
from moesched.errors import BadInput, KernelFailed, MoeschedError
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from others_packages import install
from small_models import SMALL, small_model

OWN = Path(__file__).parent.parent / "examples" / "own_kernel.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "small", layers=2)


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Checkpoint:
    return open_checkpoint(model)


def run_with(checkpoint: Checkpoint, *own: str | type) -> tuple[torch.Tensor, dict[str, list[str]]]:
    """The logits of a small model in float32, and the kernels that ran."""
    device = TorchDevice(
        checkpoint, weight_layout(checkpoint.config, "float32"), keep_logits=True, own_kernels=own
    )
    policy, prompts = make_policy("resident"), [[5, 6, 7], [8, 9]]
    ran = generate(device, policy, ONE_MEMORY, prompts, new_tokens=3, micro_batch_size=2, keep_open=True)
    used = {name: list(names) for name, names in device.kernels.items()}
    device.close()
    return ran.logits_RSV, used


def test_the_first_row_that_takes_a_case_computes_it() -> None:
    table = KernelTable([Plain(None), *kernels_of(SMALL, None, torch.float32).table.rows])
    names = {
        rows: table.require(Case("expert", rows, frozenset(), "float32", "cpu", SMALL.layer(0))).name
        for rows in (4, 5)
    }
    assert names == {4: "plain", 5: "torch"}


def test_a_case_that_no_row_takes_is_refused_with_the_reason_of_each() -> None:
    table = KernelTable([Plain(None)])
    with pytest.raises(
        MoeschedError, match=r"no kernel takes expert of 9 rows of float32 on cpu: plain: it takes up to 4"
    ):
        table.bind(Case("expert", 9, frozenset(), "float32", "cpu"))


def test_two_rows_with_one_name_and_a_row_of_no_operation_are_refused() -> None:
    with pytest.raises(BadInput, match="kernel plain: two kernels for expert have this name: rename one"):
        KernelTable([Plain(None), Plain(None)])

    class Lost(Plain):
        operation = "expret"

    with pytest.raises(BadInput, match="kernel plain: there is no operation 'expret': give one of embed, "):
        KernelTable([Lost(None)])


def test_a_bound_kernel_stays_bound_to_its_weights() -> None:
    weights = Weights({"o": [torch.randn(SMALL.hidden, SMALL.attention.attended_width)]}, SMALL.layer(0))
    kernels = kernels_of(SMALL, None, torch.float32)
    first, second = (kernels.bound("output_projection", weights, Workspace(3)) for _ in range(2))
    assert first is second


def test_memory_for_results_is_written_to_in_inference_mode_and_outside_of_it() -> None:
    memory = Workspace(3)
    with torch.inference_mode():
        made = memory.tensor("kept", 3, dtype=torch.float32, zero=True)
        shared = memory.scratch.tensor("shared", 3, dtype=torch.float32, device=torch.device("cpu"))
        shared.zero_()
    assert (made.add_(1) + shared.add_(1)).tolist() == [2.0] * 3


@pytest.mark.parametrize("memory", [Workspace(3), Workspace(3).scratch])
def test_kernels_that_use_a_name_for_two_dtypes_each_get_their_own(memory: Workspace | Scratch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert memory.tensor("hidden", 3, dtype=dtype).dtype == dtype


def test_a_kernel_from_a_file_runs_in_front_of_the_others_and_the_report_names_it(
    checkpoint: Checkpoint,
) -> None:
    theirs, _ = run_with(checkpoint)
    ours, used = run_with(checkpoint, f"{OWN}:RowByRow")
    assert "row by row" in used["expert"]
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert not torch.equal(ours, theirs), "the kernel has no effect"


def test_the_kernels_of_a_run_are_named_by_operation(checkpoint: Checkpoint) -> None:
    _, used = run_with(checkpoint)
    assert list(used) == [name for name in OPERATIONS if name in used]
    assert used["expert"] == ["torch"]


def test_the_example_keeps_its_promises() -> None:
    assert check_kernel(f"{OWN}:RowByRow") > 0


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (Hasty, r"kernel hasty \(expert of 1 rows of float32 .*\): mean squared error .* of torch "),
        (Dependent, r"kernel dependent \(expert of 2 rows .*\): row 0 alone has other bits"),
        (Restless, r"kernel restless \(.*\): a second call with the same inputs has other bits"),
        (Greedy, r"kernel greedy \(.*\): it wrote to one of its inputs or weights"),
        (Doubling, r"kernel doubling \(.*\): it wrote to one of its inputs or weights"),
        (Partial, r"kernel partial \(.*\): some results are not finite, or were not written"),
        (Router, r"kernel router \(.*\): experts are numbered 0 to 5, and the result names \[1000, 1001\]"),
    ],
)
def test_a_kernel_that_breaks_a_promise_is_found_out(kernel: type, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_kernel(kernel)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (
            Raising,
            r"kernel raising \(expert of .*\): its call raised ZeroDivisionError: division by zero; .*",
        ),
        (
            Mistaken,
            r"kernel mistaken \(.*\): bind raised KeyError: 'o_proj'; its weights are o \(D, X\); of some .*",
        ),
        (
            Forgetful,
            r"kernel forgetful \(.*\): bind returned None: return a function \(attended_TX, residual_TD\) -> hidden_TD",
        ),
        (
            Silent,
            r"kernel silent \(expert of .*\): refusal returned None: return a text, empty if it takes it",
        ),
        (Foreign, r"kernel foreign \(output_projection of .*\): result 0 is of type ndarray instead of .*"),
        (
            Narrow,
            r"kernel narrow \(output_projection of .*\): result 0 is \[\d+, 31\] of torch.float32 instead .*",
        ),
    ],
)
def test_a_kernel_that_fails_in_a_run_is_named_with_its_case(model: Path, kernel: type, said: str) -> None:
    report = moesched.run_model(
        model, [[5, 6, 7]], max_new_tokens=3, dtype="float32", device_settings={"own_kernels": kernel}
    )
    assert report.failure is not None
    assert re.fullmatch(said, report.failure)


def test_a_class_that_is_no_kernel_is_refused(checkpoint: Checkpoint) -> None:
    class Loose:
        def __init__(self, resources: Any) -> None: ...

        def refusal(self, case: Case) -> str:
            return ""

        def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
            return lambda: None

    with pytest.raises(
        BadInput, match=r"Loose is not a kernel: derive it from moesched.devices.kernels.seam"
    ):
        run_with(checkpoint, Loose)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (Nameless, r"^kernel .*:Nameless has no `takes`: give its class one, a text"),
        (Broken, r"^kernel .*:Broken cannot be made of \(resources\): OSError: no such library"),
        (Abstract, r"^kernel .*:Abstract cannot be made of \(resources\): TypeError: .* method '?bind"),
        (Misspelt, r"^kernel narrow: there is no operation 'experto': give one of embed, "),
    ],
)
def test_a_kernel_that_cannot_be_made_is_refused_by_name(kernel: type, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_kernel(kernel)


def test_a_kernel_with_parameters_to_train_keeps_no_record_of_its_calls_for_that() -> None:
    class Trained(Narrow):
        def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
            factor = torch.nn.Parameter(torch.ones(()))
            return lambda attended_TX, residual_TD: residual_TD * factor

    kernel = guarded(Trained, cpu_resources(SMALL, torch.float32, None))
    project = kernel.bind(Case("output_projection", 2, frozenset(), "float32", "cpu"), {}, None)
    assert not project(torch.ones(2, 1), torch.ones(2, SMALL.hidden)).requires_grad


def test_a_router_may_return_a_plain_tuple(checkpoint: Checkpoint) -> None:
    _, used = run_with(checkpoint, FirstExperts)
    assert "router" in used["route"]


def test_a_kernel_whose_numbers_are_not_finite_is_suspected_where_plain_torch_has_good_ones(
    model: Path,
) -> None:
    with pytest.raises(moesched.MoeschedError, match="are when the step is computed again"):
        moesched.run_model(
            model,
            [[5, 6, 7]],
            max_new_tokens=3,
            dtype="float32",
            device_settings={"own_kernels": NotFinite},
        )


def test_an_expert_keeps_no_tensors_for_each_number_of_rows_that_it_had() -> None:
    layer = SMALL.layer(0)
    biased = replace(layer, feed_forward=replace(layer.feed_forward, biases=True))
    config = replace(SMALL, pattern=(biased,))
    case = Case("expert", 1, frozenset({ROWS}), "float32", "cpu", biased)
    weights, (x_nD,), *_ = samples.MAKERS["expert"](config, torch.float32, 60, samples.Cut(1))
    kernel = ExpertOfProducts(cpu_resources(config, torch.float32, None))
    run, y_nD = kernel.bind(case, weights, None), torch.empty_like(x_nD)
    kept = []
    for rows in range(1, 61):
        run(x_nD[:rows], y_nD[:rows])
        kept.append(sum(type(each) is torch.Tensor for each in gc.get_objects()) if rows in (30, 60) else 0)
    assert kept[29] == kept[59]


def test_weights_keep_a_limited_number_of_the_kernels_bound_to_them() -> None:
    weights = samples.MAKERS["route"](SMALL, torch.float32, 1, samples.Cut(1)).weights
    kernels = kernels_of(SMALL, None, torch.float32)
    kept = {kernels.bound("route", weights, Workspace(rows)) for rows in range(1, 1500)} & {
        *weights.bounds.values()
    }
    assert 400 < len(kept) == len(weights.bounds) < 1100


def test_operations_that_need_a_cache_are_not_checked_alone() -> None:
    class Attending(Narrow):
        operation = "attention"

    with pytest.raises(KernelFailed, match="attention is not checked alone: use check_device"):
        check_kernel(Attending)


def test_the_page_names_every_operation_as_the_table_has_it() -> None:
    page = (OWN.parent.parent / "docs" / "kernels.md").read_text(encoding="utf-8")
    for operation in OPERATIONS.values():
        weights = operation.weights or "none"
        assert f"| `{operation.name}` | {operation.summary} | {operation.call} | {weights} |" in page


def test_operations_name_the_weights_that_their_kernels_get() -> None:
    for name, make in samples.MAKERS.items():
        for tensor in make(SMALL, torch.float32, 1, samples.Cut(1)).weights:
            assert re.search(rf"\b{tensor}\b", OPERATIONS[name].weights), f"{name}: {tensor}"


def test_every_operation_has_a_kernel_that_takes_it_or_parts_that_do() -> None:
    rows = {row.operation for row in kernels_of(SMALL, None).table.rows}
    for operation in OPERATIONS.values():
        assert operation.name in rows or set(operation.parts) <= rows


def test_list_shows_the_kernels_with_what_they_take_and_why_not(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "kernels", row_by_row="own_kernel:RowByRow", lost="not_installed:Lost")
    monkeypatch.syspath_prepend(OWN.parent)
    entries = command("list", "kernels", "--json").json["kernels"]
    [lost] = [entry for entry in entries if entry["name"] == "lost"]
    assert "No module named 'not_installed'" in lost["problem"]
    experts = [entry for entry in entries if entry["operation"] == "expert"]
    assert [experts[0]["name"], experts[-1]["name"]] == ["row by row", "products"]
    assert experts[0]["takes"] == "up to 8 rows of float32 on a CPU"
    assert "cuda" in experts[-1]["devices"]
