"""The notebook in examples/, and Ctrl-C, progress and values in the cells of a kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users_run")]

EXAMPLES = Path(__file__).parent.parent / "examples"
SECONDS = 120


class Kernel:
    """A kernel, in the folder of the examples."""

    def __init__(self, client: Any, manager: Any) -> None:
        self._client = client
        self._manager = manager

    def run(self, code: str, *, interrupt_at: str = "") -> tuple[list[dict[str, Any]], float]:
        """Run a cell. Returns its outputs and its processor's seconds, counted from the interrupt if there is one.

        Args:
            interrupt_at: the text that it prints when it is to be interrupted.
        """
        outputs: list[dict[str, Any]] = []
        since, waits = self._used(), bool(interrupt_at)

        def hear(message: Any) -> None:
            nonlocal since, waits
            outputs.append(message["content"])
            if waits and interrupt_at in message["content"].get("text", ""):
                self._manager.interrupt_kernel()
                since, waits = self._used(), False

        reply = self._client.execute_interactive(code, timeout=SECONDS, output_hook=hear)["content"]
        assert reply["status"] == "ok", reply
        return outputs, self._used() - since

    def _used(self) -> float:
        """The seconds of the processor that the kernel has used."""
        times = psutil.Process(self._manager.provisioner.pid).cpu_times()
        return float(times.user + times.system)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    manager, client = start_new_kernel(cwd=str(EXAMPLES))
    try:
        yield Kernel(client, manager)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def html_of(outputs: list[dict[str, Any]]) -> list[str]:
    return [each["data"]["text/html"] for each in outputs if "text/html" in each.get("data", {})]


def text_of(outputs: list[dict[str, Any]]) -> str:
    return "".join(each.get("text", "") for each in outputs)


def test_the_notebook_runs_and_shows_what_it_says(kernel: Kernel) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code), "it is stored without outputs"
    outputs = [output for cell in code for output in kernel.run("".join(cell["source"]))[0]]
    pages = html_of(outputs)
    assert "0 bytes read\nReturn the" in text_of(outputs)
    assert "the same text" in text_of(outputs)
    assert any("Busiest lane" in page for page in pages)
    assert any("Bottleneck: " in page and "<svg" in page for page in pages)
    assert sum(map(len, pages)) < 100_000


def test_an_interrupt_of_the_kernel_ends_a_run_with_its_tokens(kernel: Kernel) -> None:
    code = """
import moesched
class Says(moesched.Listener):
    def generated(self, request, token, text):
        if token and not hasattr(self, "said"):
            self.said = True
            print("decoding", flush=True)
sampling = moesched.Sampling(temperature=9.0)
prompts = ["Return"] * 128  # seconds of work
report = moesched.run_model("tiny-mixtral", prompts, max_new_tokens=400, sampling=sampling, listener=Says())
assert report.interrupted and 1 <= len(report.tokens[0]) < 400, report
"""
    _, seconds = kernel.run(code, interrupt_at="decoding")
    assert seconds < 1


def test_an_interrupt_of_the_kernel_ends_a_simulation(kernel: Kernel) -> None:
    code = """
import moesched
class Says(moesched.Listener):
    def planned(self, plan):
        print("simulating", flush=True)
try:
    report = moesched.simulate_model(
        "mixtral-8x7b", machine="t4", policy="on_demand:OnDemand", workload=[[1]] * 8, gen=512, batch_size=8,
        listener=Says(),
    )
    if report.interrupted:
        print("ended")
except KeyboardInterrupt:  # before it began
    print("ended")
"""
    outputs, seconds = kernel.run(code, interrupt_at="simulating")
    assert "ended" in text_of(outputs)
    assert seconds < 1


def test_progress_shows_in_the_cell(kernel: Kernel) -> None:
    code = 'import moesched\nmoesched.run_model("tiny-mixtral", ["Return"], max_new_tokens=8)'
    outputs, _ = kernel.run(code)
    shown = html_of(outputs)
    assert any(" tokens" in html for html in shown[:-1])
    assert "Busiest lane" in shown[-1]


def test_a_program_that_no_notebook_runs_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    import moesched

    moesched.run_model(EXAMPLES / "tiny-mixtral", ["Return"], max_new_tokens=2)
    assert capsys.readouterr() == ("", "")
