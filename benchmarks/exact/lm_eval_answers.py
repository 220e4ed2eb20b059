"""Answers that lm-eval gets from the server, beside those that it gets from Hugging Face's model of the same folder.

lm-eval asks `moesched serve` by OpenAI's API, one prompt at a time and then many at once, and has Hugging Face's model
answer the same. The model is examples/tiny-mixtral with its weights in float32, so that both compute in it. Questions
are of each kind that lm-eval has, made of docstrings that the model's training held out. lm-eval is installed into an
environment of its own ($MOESCHED_PEERS).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file
from tiny_corpus import read_corpus

from benchmarks.exact._lm_eval import LM_EVAL, Answer, answers, python
from benchmarks.exact._lm_eval_tasks import SETTINGS, write_tasks
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most, none_of
from benchmarks.record.results import ROOT
from benchmarks.shared.servers import running

MODEL = ROOT / "examples" / "tiny-mixtral"
CONTEXT = 512
WAYS = {"one prompt at a time": (1, 1), "8 requests of 4 prompts at once": (8, 4)}
"""Requests at once, and the prompts of each."""
MOST_DIFFERENCE = 1e-5

Answers = dict[str, list[Answer]]


def claims(result: Result) -> Iterator[Claim]:
    """Answers that differ, and the largest difference of log-likelihoods."""
    rows = [row for way in result["ways"].values() for row in way.values()]
    words = f"lm-eval through the server, float32, {' and '.join(result['ways'])}:"
    differ, asked = (sum(row[key] for row in rows) for key in ("differ", "answers"))
    yield none_of(f"{words} answers other than Hugging Face's", differ, asked)
    largest = max(row["largest_in_parts"] for row in rows)
    words += " difference from Hugging Face's log-likelihoods, in parts of these"
    yield at_most(words, largest, MOST_DIFFERENCE, "{:.0e}")


BENCHMARK = Benchmark(__file__, __doc__, claims=claims, parts=WAYS, by_machine=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Have both answer, compare, and write what was found."""
    options = BENCHMARK.parse(arguments)
    python()  # installed before anything is computed
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = in_float32(folder / MODEL.name)
        write_tasks(folder, read_corpus().held_out)
        expected = by_hugging_face(folder, model)
        ways = {
            way: compared(by_server(folder, model, *WAYS[way]), expected)
            for way in track(options.only, "ways")
        }
    return BENCHMARK.write({"lm_eval": LM_EVAL.requirements[0], "ways": ways})


def in_float32(folder: Path) -> Path:
    """A copy of the model, with weights in float32."""
    shutil.copytree(MODEL, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    save_file({name: each.float() for name, each in load_file(weights).items()}, weights, {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float32"}))
    return folder


def by_hugging_face(folder: Path, model: Path) -> Answers:
    """The answers of Hugging Face's model.

    Its windows of a long text are as long as those that lm-eval sends to a server. Without `logits_cache`, which
    confuses questions of two tasks that differ in the last token alone.
    """
    settings = {
        "pretrained": model,
        "dtype": "float32",
        "max_length": CONTEXT - 2,
        "add_bos_token": True,
        "logits_cache": False,
    }
    return answers(folder, SETTINGS, "hf", settings, ["--device", "cpu"])


def by_server(folder: Path, model: Path, at_once: int, prompts: int) -> Answers:
    """The answers of a server; a request that it refuses is not sent again, and fails."""
    with running([sys.executable, "-m", "moesched", "serve", str(model), "--port", "0"]) as server:
        settings = {
            "model": model.name,
            "base_url": f"http://127.0.0.1:{server.port}/v1/completions",
            "tokenizer": model,
            "max_length": CONTEXT,
            "add_bos_token": True,
            "num_concurrent": at_once,
            "max_retries": 1,
        }
        return answers(folder, SETTINGS, "local-completions", settings, ["--batch_size", str(prompts)])


def compared(ours: Answers, expected: Answers) -> Result:
    """The differences between the answers of each task."""
    return {task: differences(ours[task], theirs) for task, theirs in expected.items()}


def differences(ours: Sequence[Answer], theirs: Sequence[Answer]) -> Result:
    """The number of answers, the number that differ, and the largest difference of log-likelihoods.

    The difference of one also counts in parts of it, at least of 1.
    """
    pairs = [
        pair
        for one, other in zip(ours, theirs, strict=True)
        for pair in zip(one.log_likelihoods, other.log_likelihoods, strict=True)
    ]
    return {
        "answers": len(theirs),
        "greedy": sum("True" in each.said for each in theirs),
        "differ": sum(one.said != other.said for one, other in zip(ours, theirs, strict=True)),
        "log_likelihoods": len(pairs),
        "largest": max((abs(one - other) for one, other in pairs), default=0.0),
        "largest_in_parts": max(
            (abs(one - other) / max(1.0, abs(other)) for one, other in pairs), default=0.0
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
