"""The page of tiny-mixtral: its README, with the figures as measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_corpus import BEGIN, END, HELD_OUT_ONE_IN
from tiny_evaluation import PROMPT_TOKENS
from tiny_training import Recipe


def readme(recipe: Recipe, figures: dict[str, Any]) -> str:
    """The model's page, with the figures as measured."""
    corpus, training, words = figures["corpus"], figures["training"], figures["words"]
    greedy = figures["greedy_samples"][0]
    usage = "\n".join(
        f"| {layer} | {min(shares):.1%} | {max(shares):.1%} | {max(shares) / max(min(shares), 1e-6):.1f}x |"
        for layer, shares in enumerate(figures["expert_shares_on_held_out_text"])
    )
    return f"""\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# {Path(recipe.folder).name}

A Mixture-of-Experts language model small enough to ship: real routing, real experts, real text, so that schedules
and memory budgets can be tried without a download. It writes what looks like Python documentation and knows nothing.
This page and `training.json` are written by `tools/train_tiny_mixtral.py`, which trains the model from nothing.

| | |
| --- | --- |
| architecture | Mixtral: {recipe.layers} layers, hidden size {recipe.hidden}, {recipe.heads} heads and \
{recipe.kv_heads} KV heads of {recipe.hidden // recipe.heads}, {recipe.experts} experts of {recipe.intermediate}, \
top {recipe.top_k} |
| parameters | {figures["parameters"]:,}, bfloat16 |
| tokenizer | byte-level BPE, {recipe.vocabulary:,} tokens; `{BEGIN}` (id 0) begins a text, `{END}` (id 1) ends it and \
stops generation |
| context | {recipe.context} tokens |
| trained on | {corpus["training_docstrings"]:,} docstrings of the standard library of Python {corpus["python"]}, \
{corpus["training_bytes"] / 1e6:.2f} MB; one module in {HELD_OUT_ONE_IN} held out \
({corpus["held_out_docstrings"]} docstrings, {corpus["held_out_bytes"] / 1e3:.0f} kB) |
| training | {training["steps"]:,} steps, {training["epochs"]:.1f} epochs, {training["seconds"] / 60:.1f} minutes on \
{training["threads"]} threads ({training["machine"]}) |
| held-out bits per byte | {figures["held_out_bits_per_byte"]:.3f} (on training text \
{figures["training_bits_per_byte"]:.3f}) |
| written words that are words of the training text | {words["share_of_known_words"]:.1%} of {words["written"]:,} \
(temperature {words["temperature"]}; of four letters or more \
{words["share_of_known_words_of_4_letters_or_more"]:.1%}) |

How the tokens of held-out text spread over the experts of each layer (an even spread is {1 / recipe.experts:.1%}):

| layer | least used | most used | ratio |
| --- | --- | --- | --- |
{usage}

Greedy, after the first {PROMPT_TOKENS} tokens of a held-out docstring (`{greedy["prompt"].strip()}`):

```text
{greedy["prompt"]}{greedy["written"].rstrip()}
```

Load it with moesched (`moesched run {recipe.folder} --policy resident --prompt "Return the"`) or with
transformers (`AutoModelForCausalLM.from_pretrained("{recipe.folder}")` and `AutoTokenizer`, likewise).

The text it learned from is part of Python and stands under the Python Software Foundation License.
"""
