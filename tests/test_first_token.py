"""`moesched run` imports few modules before its first token, and does not search for garbage until then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from small_models import small_model

RUNS = """
import gc, json, sys
from moesched.policies.resident import Resident

class Watched(Resident):
    async def prefill(self, step):
        await super().prefill(step)
        Watched.modules = sorted(sys.modules)

sys.argv = ["moesched", "run", sys.argv[1], "--policy", "__main__:Watched"]
sys.argv += ["--prompt-ids", "1,2", "--max-new-tokens", "1"]
from moesched.__main__ import main
code = main()
print()
found = [gc.get_stats()[2]["collections"], gc.get_freeze_count(), Watched.modules, sorted(sys.modules)]
print(json.dumps([code, *found]))
"""


class Ended(msgspec.Struct, array_like=True):
    """A run's exit code, the collector's full searches, the objects that it will not search again, and its modules.

    Attributes:
        first_modules: those that were loaded before the first token.
    """

    code: int
    searches: int
    frozen: int
    first_modules: list[str]
    modules: list[str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    model = small_model(tmp_path_factory.mktemp("models") / "small")
    command = [sys.executable, "-c", RUNS, str(model)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path("/"))
    return msgspec.json.decode(said.stderr.splitlines()[-1], type=Ended)


def test_a_run_loads_nothing_that_only_others_need(ended: Ended) -> None:
    assert ended.code == 0
    assert not {
        "structlog", "highspy", "moesched.report.page", "tokenizers", "zmq", "matplotlib", "sympy",
        "torch._dynamo", "torch._inductor", "transformers", "moesched.calibration.calibrate",
        "moesched.cluster.node", "moesched.jobs.simulate_model", "moesched.planner.rivals",
        "moesched.sweeps.sweep",
    }.intersection(ended.modules)  # fmt: skip


def test_a_run_loads_what_explains_it_after_its_first_token(ended: Ended) -> None:
    assert "moesched.analysis.explanation" in set(ended.modules) - set(ended.first_modules)


def test_a_run_searches_all_objects_for_garbage_hardly_ever_and_not_at_its_end(ended: Ended) -> None:
    assert ended.searches <= 1
    assert ended.frozen > 100_000
