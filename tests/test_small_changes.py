"""Additions that change few files, shown on a tree of links: a family of models, a storage format, a what-if."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.shared.random_models import hugging_face_logits, ready
from coded_checkpoints import decoded_model, q4_0
from commands import SIMULATE

ROOT = Path(__file__).parent.parent
FOLDERS = ("", "analysis", "models", "models/architectures")
"""Folders of the package that are copied as folders of links."""

FAMILY = '''"""Qwen3: dense models whose queries and keys are normalised per head."""

from __future__ import annotations

from typing import Any

from moesched.models.architectures import llama, llama_like
from moesched.models.architectures.architecture import Architecture
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.layers import FeedForward


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    keys = file.keys(llama_like.LlamaLikeKeys)
    network = FeedForward(experts=1, top_k=1, intermediate=keys.intermediate_size)
    return llama_like.build(file, keys, "qwen3", llama_like.layer(keys, network, qk_norm="head"))


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that are particular to the architecture."""
    return llama_like.config_json(config) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": config.attention.head_dim,
        "intermediate_size": config.routed.intermediate,
    }


QWEN3 = Architecture(
    model_types=("qwen3",),
    shapes=(),
    sources={},
    read=read,
    config_json=config_json,
    tensors=llama.tensors,
    other_tensors=lambda config: iter(()),
    extra_tensors=llama_like.extra_tensors,
)
'''
IMPORT = "from moesched.models.architectures.qwen3_moe import QWEN3_MOE\n"
ENTRY = '    "qwen3_moe": QWEN3_MOE,\n'

RUNS = """
import json, sys
import moesched
report = moesched.run_model(sys.argv[1], [[5, 6, 7]], max_new_tokens=6, dtype="float32", expect=False)
print(json.dumps(report.tokens[0]))
"""

Q8_0 = '    StoredFormat("q8_0", 32, 34,'
Q4_0 = '    StoredFormat("q4_0", 32, 18, Codes(bits=4, offset=2, zero=8, largest=-8)),\n'

WRITES = """
import sys
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES
small = SHAPES["mixtral-0.8b"].varied(layers=2, hidden=64, intermediate=96, vocabulary=97)
write_random_model(small, sys.argv[1], dtype="float32", stored_as="q4_0")
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


def linked_tree(folder: Path) -> Path:
    """The package as folders of links, whose files can be replaced."""
    package = folder / "moesched"
    for name in FOLDERS:
        (package / name).mkdir()
        for source in (ROOT / "moesched" / name).iterdir():
            if str(Path(name) / source.name) not in FOLDERS:
                (package / name / source.name).symlink_to(source)
    return package


def edit(file: Path, text: str, replacement: str) -> None:
    """Replace a link by the file that it leads to, with one line changed."""
    before = file.read_text()
    assert before.count(text) == 1
    file.unlink()
    file.write_text(before.replace(text, replacement))


def printed(script: str, *arguments: Path, cwd: Path) -> str:
    """What a script prints that imports the tree of links in a folder."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_what_if_that_explain_shows_is_a_row(tmp_path: Path) -> None:
    edit(linked_tree(tmp_path) / "analysis" / "run_changes.py", LINK, LAYER + LINK)
    [answer] = json.loads(printed(EXPLAINS, cwd=tmp_path).partition("explained")[2])["what_if"]
    assert answer["change"] == "layer 3 x0.5"
    assert 1 < answer["speedup"] < 1.1


def test_a_storage_format_that_runs_is_a_row(tmp_path: Path) -> None:
    edit(linked_tree(tmp_path) / "models" / "stored_formats.py", Q8_0, Q4_0 + Q8_0)
    coded = tmp_path / "coded"
    tokens = json.loads(printed(WRITES + RUNS, coded, cwd=tmp_path))
    model = decoded_model(coded, tmp_path / "decoded", q4_0, block_bytes=18)
    assert tokens == hugging_face_logits(model, [5, 6, 7, *tokens])[2:-1].argmax(-1).tolist()


def test_a_family_that_runs_is_a_file_and_its_entry(tmp_path: Path) -> None:
    package = linked_tree(tmp_path)
    architectures = package / "models" / "architectures"
    (architectures / "qwen3.py").write_text(FAMILY)
    table = architectures / "__init__.py"
    edit(table, IMPORT, "from moesched.models.architectures.qwen3 import QWEN3\n" + IMPORT)
    edit(table, ENTRY, '    "qwen3": QWEN3,\n' + ENTRY)
    torch.manual_seed(1)
    model = ready(
        Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=97,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=256,
                initializer_range=0.3,
                tie_word_embeddings=False,
            )
        )
    )
    model.save_pretrained(tmp_path / "model")
    tokens = json.loads(printed(RUNS, tmp_path / "model", cwd=tmp_path))
    expected = hugging_face_logits(model, [5, 6, 7, *tokens])[2:-1].argmax(-1)
    assert tokens == expected.tolist()
