"""Questions of each kind that lm-eval has, made of texts, as tasks of lm-eval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

QUESTIONS, CHOICES = 100, 4
LONG_TEXTS, JOINED = 20, 10
"""Texts that are longer than a context, and the short ones in each."""
SETTINGS: dict[str, dict[str, Any]] = {
    "multiple_choice": {"doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}]},
    "loglikelihood": {"metric_list": [{"metric": "acc"}]},
    "loglikelihood_rolling": {"metric_list": [{"metric": "word_perplexity"}]},
    "generate_until": {
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["."], "max_gen_toks": 24},
    },
}


def write_tasks(folder: Path, texts: Sequence[str]) -> None:
    """Write the questions of each kind, and a task of lm-eval that asks them; JSON is YAML."""
    for kind, of_kind in questions(texts).items():
        data = folder / f"{kind}.jsonl"
        data.write_text("".join(f"{json.dumps(each)}\n" for each in of_kind))
        task = {
            "task": kind,
            "output_type": kind,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{begin}}",
            "doc_to_target": "{{right}}",
            **SETTINGS[kind],
        }
        (folder / f"{kind}.yaml").write_text(json.dumps(task))


def questions(texts: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Questions by kind: a text's rest among others, its next word, all of a long text, and a text to go on with."""
    begins, rests = [], []
    for words in [words for text in texts if 12 <= len(words := text.split(" ")) <= 60][:QUESTIONS]:
        middle = len(words) // 2
        begins.append(" ".join(words[:middle]))
        rests.append(" ".join(words[middle:]))
    chosen, continued = [], []
    for number, (begin, rest) in enumerate(zip(begins, rests, strict=True)):
        right = number % CHOICES
        choices = rests[number - right : number - right + CHOICES]
        chosen.append({"begin": begin, "right": right, "choices": choices})
        continued.append({"begin": begin, "right": f" {rest.split()[0]}"})
    long = [
        {"begin": "", "right": "\n\n".join(texts[first : first + JOINED])}
        for first in range(0, LONG_TEXTS * JOINED, JOINED)
    ]
    return {
        "multiple_choice": chosen,
        "loglikelihood": continued,
        "loglikelihood_rolling": long,
        "generate_until": continued,
    }
