"""Additions that change few files, shown on a tree of links: a family, a storage format, a what-if, an option."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.shared.random_models import COMMON, hugging_face_logits, ready
from coded_checkpoints import decoded_model
from commands import SIMULATE
from doc_blocks import blocks

ROOT = Path(__file__).parent.parent
[FAMILY] = [block.text for block in blocks(ROOT / "CONTRIBUTING.md") if "QWEN3 = Architecture(" in block.text]
IMPORT = "from moesched.models.architectures.qwen3_moe import QWEN3_MOE\n"
ENTRY = '    "qwen3_moe": QWEN3_MOE,\n'

RUNS = """
import json, sys
import moesched
report = moesched.run_model(sys.argv[1], [[5, 6, 7]], max_new_tokens=6, dtype="float32", expect=False)
print(json.dumps(report.tokens[0]))
"""

Q8_0 = '    StoredFormat("q8_0", 32, 34,'
Q4_1 = '    StoredFormat("q4_1", 32, 20, Codes(Bits(4, 4, 16), zero=0, largest=15), minimum=2),\n'

WRITES = """
import sys
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
small = SHAPES["mixtral-0.8b"].varied(layers=2, hidden=64, intermediate=96, vocabulary=97)
write_random_model(small, sys.argv[1], dtype="float32", stored_as="q4_1")
"""

LINK = '    "link": Kind('
LAYER = """    "layer": Kind(
        "layer 3 x0.5",
        "half of the time",
        "layer",
        "time",
        names=lambda recording: {str(each.task.layer) for each in recording.slices},
        name_of=lambda task, lane: str(task.layer),
    ),
"""

EXPLAINS = f"""
from moesched.cli.main import main
assert main([*{SIMULATE}, "--policy", "layer_streaming", "--gen", "2", "--trace", "trace.json", "--json"]) == 0
print("explained")
assert main(["explain", "trace.json", "--what-if", "layer 3 x0.5", "--json"]) == 0
"""

LAST_OPTION = "    ] = PREVIEW_ACCURACY\n"
"""The end of an option of simulations, in `moesched/jobs/options.py`."""

NEW_OPTION = """\
    hurry: Annotated[
        float, Option("Haste of the requests. A higher one is worse.", "H", ge=0, le=1)
    ] = 0.25
"""

USES = """\
import contextlib, inspect, io
import moesched
from moesched.cli.main import main
from moesched.jobs.options import SimulationOptions
from moesched.sweeps.axes import sweep_of_options
from moesched.tasks import Task

for command in ("simulate", "sweep"):
    with contextlib.redirect_stdout(io.StringIO()) as help:
        main([command, "--help"])
    print(command, "--hurry" in help.getvalue() and "Haste of the requests." in help.getvalue())
print(sweep_of_options({"hurry": ("0.5, 1",)}).axes)
print(inspect.signature(moesched.simulate_model).parameters["hurry"])
print("    hurry: Haste of the requests." in inspect.getdoc(moesched.simulate_model))
print(SimulationOptions("m", machine="t4", policy="p", workload="w", hurry=0.5).hurry)
try:
    moesched.simulate_model("m", machine="t4", policy="p", workload="w", hurry=2)
except moesched.BadInput as error:
    print(error)
"""


def linked_tree(folder: Path, *copied: str) -> Path:
    """The package as links; these folders of it are folders of links, whose files can be replaced."""
    package = folder / "moesched"
    for name in ("", *copied):
        (package / name).mkdir()
        for source in (ROOT / "moesched" / name).iterdir():
            if str(Path(name) / source.name) not in copied:
                (package / name / source.name).symlink_to(source)
    return package


def change(file: Path, *replacements: tuple[str, str]) -> None:
    """Replace parts of a linked file."""
    text = file.read_text()
    for old, new in replacements:
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.unlink()
    file.write_text(text)


def printed(folder: Path, program: str, *arguments: object) -> str:
    """Run a program with the changed package; returns the text that it prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_a_what_if_that_explain_shows_is_a_row(tmp_path: Path) -> None:
    package = linked_tree(tmp_path, "analysis")
    change(package / "analysis" / "run_changes.py", (LINK, LAYER + LINK))
    [answer] = json.loads(printed(tmp_path, EXPLAINS).partition("explained")[2])["what_if"]
    assert answer["change"] == "layer 3 x0.5"
    assert 1 < answer["speedup"] < 1.1


def test_a_storage_format_that_runs_is_a_row(tmp_path: Path) -> None:
    package = linked_tree(tmp_path, "models")
    change(package / "models" / "stored_formats.py", (Q8_0, Q4_1 + Q8_0))
    coded = tmp_path / "coded"
    tokens = json.loads(printed(tmp_path, WRITES + RUNS, coded))
    model = decoded_model(coded, tmp_path / "decoded", "q4_1")
    assert tokens == hugging_face_logits(model, [5, 6, 7, *tokens])[2:-1].argmax(-1).tolist()


def test_a_family_that_runs_is_a_file_and_its_entry(tmp_path: Path) -> None:
    architectures = linked_tree(tmp_path, "models", "models/architectures") / "models" / "architectures"
    (architectures / "qwen3.py").write_text(FAMILY)
    change(
        architectures / "__init__.py",
        (IMPORT, "from moesched.models.architectures.qwen3 import QWEN3\n" + IMPORT),
        (ENTRY, '    "qwen3": QWEN3,\n' + ENTRY),
    )
    torch.manual_seed(1)
    sizes = {name: COMMON[name] for name in COMMON if name != "num_experts_per_tok"}
    model = ready(Qwen3ForCausalLM(Qwen3Config(**sizes, intermediate_size=48, head_dim=8)))
    model.save_pretrained(tmp_path / "model")
    tokens = json.loads(printed(tmp_path, RUNS, tmp_path / "model"))
    expected = hugging_face_logits(model, [5, 6, 7, *tokens])[2:-1].argmax(-1)
    assert tokens == expected.tolist()


def test_an_option_is_one_field_in_one_file(tmp_path: Path) -> None:
    package = linked_tree(tmp_path, "jobs")
    change(package / "jobs" / "options.py", (LAST_OPTION, LAST_OPTION + NEW_OPTION))
    assert printed(tmp_path, USES).splitlines() == [
        "simulate True",
        "sweep True",
        "{'hurry': [0.5, 1.0]}",
        "hurry: 'float' = 0.25",
        "True",
        "0.5",
        "--hurry is 2: give 0 to 1",
    ]
