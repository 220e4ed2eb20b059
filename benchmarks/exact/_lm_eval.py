"""lm-eval as a program in an environment of its own, offline, and the answers that it logs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.peers.environment import Peer
from benchmarks.peers.protocol import PeerFailed

LM_EVAL = Peer("lm-eval", module="", requirements=("lm_eval[api]==0.4.13",))


class Answer(NamedTuple):
    """An answer to one question.

    Attributes:
        said: the text; or the likeliest choice, and for each choice whether it is what greedy decoding gives.
        log_likelihoods: of each choice, or of a whole text.
    """

    said: list[Any]
    log_likelihoods: list[float]


def python(peer: Peer = LM_EVAL) -> Path:
    """The interpreter that has lm-eval, which is installed at first.

    Raises:
        SystemExit: it cannot be installed.
    """
    try:
        return peer.python()
    except PeerFailed as reason:
        [requirement] = peer.requirements
        remedy = f"try again where `pip install '{requirement}'` works"
        raise SystemExit(f"{peer.name} is {reason}; {remedy}") from None


def answers(
    folder: Path, tasks: Collection[str], model: str, settings: Mapping[str, object], options: Sequence[str]
) -> dict[str, list[Answer]]:
    """The answers to the tasks of a folder, by task, of a kind of model with some settings.

    Raises:
        SystemExit: lm-eval failed.
    """
    given = ",".join(f"{name}={value}" for name, value in settings.items())
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    with TemporaryDirectory(dir=folder) as out:
        command = [str(python()), "-m", "lm_eval", "run", "--model", model, "--model_args", given, *options]
        command += ["--include_path", str(folder), "--tasks", ",".join(tasks)]
        command += ["--output_path", out, "--log_samples"]
        ended = subprocess.run(
            command, env={**os.environ, **offline}, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise SystemExit(f"lm-eval, {model}: {ended.stderr.strip().splitlines()[-1]}")
        return {task: logged(task, next(Path(out).glob(f"*/samples_{task}_2*.jsonl"))) for task in tasks}


def logged(task: str, file: Path) -> list[Answer]:
    """The answers of a file of samples, in the order of the questions."""
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    return [answer(task, each["filtered_resps"]) for each in sorted(samples, key=lambda each: each["doc_id"])]


def answer(task: str, responses: Sequence[Any]) -> Answer:
    """The answer of a sample, whose form depends on the task."""
    if task == "generate_until":
        return Answer([*responses], [])
    if task == "loglikelihood_rolling":
        return Answer([], [float(each) for each in responses])
    log_likelihoods = [float(each) for each, _ in responses]
    likeliest = log_likelihoods.index(max(log_likelihoods))
    return Answer([likeliest, *(greedy for _, greedy in responses)], log_likelihoods)
