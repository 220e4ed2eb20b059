"""Train tiny-mixtral, the small Mixture-of-Experts model in this folder, on the docstrings that come with Python."""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import platform
import random
import re
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

if __name__ == "__main__":
    # Read when torch is loaded. Where others use the cores too, spinning made training up to five times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

GUIDE = """\
Train a Mixtral small enough to ship: Mixture-of-Experts, top-2 routing, grouped-query attention, about 7 million
parameters. The text is every docstring of this Python's own standard library, so nothing is downloaded. One module
in twenty is held out; all figures are measured on those, with the bfloat16 weights as they were written.

What happens, in order:
  1. docstrings are read with ast, in a fixed order, each kept once
  2. a byte-level BPE tokenizer is trained on them (any prompt can be encoded)
  3. the model trains until the time is up; the learning rate follows a cosine over that time
  4. the directory is written as Hugging Face writes it, read back and measured
  5. training.json and README.md state what was measured; exit code 1 when a bar is missed

The seed fixes weights and order of text. The number of steps depends on the machine, unless --steps gives it.
"""
EXAMPLES = """\
examples:
  python examples/train_tiny_mixtral.py --out out/mine                  the shipped recipe, under 15 minutes on 2 cores
  python examples/train_tiny_mixtral.py --out out/quick --minutes 1     a rough one, to see it work
  python examples/train_tiny_mixtral.py --out out/even --balance 0.05   experts used more evenly
"""

Model: TypeAlias = MixtralForCausalLM
TextTokenizer: TypeAlias = PreTrainedTokenizerFast

BEGIN, END = "<s>", "</s>"
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
HELD_OUT_ONE_IN = 20
PROMPT_TOKENS = 8  # of a held-out docstring, that the model goes on from

LONGEST_MINUTES = 15.0
LARGEST_BYTES = 16_000_000
LEAST_WORDS = 0.80  # share of the written words that are words of the training text
LEAST_SHARE = 0.02  # of a layer's tokens, for its least used expert
LEAST_RATIO = 1.5  # a layer's most used expert over its least used


@dataclass(frozen=True)
class Recipe:
    """Every number that shapes the model and its training."""

    vocabulary: int = 2048
    layers: int = 4
    hidden: int = 192
    intermediate: int = 288
    heads: int = 6
    kv_heads: int = 2
    experts: int = 8
    top_k: int = 2
    context: int = 512  # tokens
    batch: int = 1  # rows of one context each; in so few minutes, steps count for more than tokens a step
    peak_rate: float = 1.4e-3
    warmup: float = 0.03  # of the training
    weight_decay: float = 0.1
    balance: float = 0.006  # weight of the load-balancing loss; low, so that experts stay unequally popular
    seed: int = 1


@dataclass(frozen=True)
class Corpus:
    """Docstrings, each one once, split by module."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]

    def words(self) -> frozenset[str]:
        """The distinct words of the training text."""
        return frozenset(word for text in self.training for word in words_of(text))


# ---------------------------------------------------------------------------------------------------------------- text


def read_corpus(library: Path | None = None) -> Corpus:
    """The docstrings of the Python library in `library` (default: this interpreter's), in order of module path."""
    library = library or Path(sysconfig.get_paths()["stdlib"])
    split: dict[bool, list[str]] = {False: [], True: []}
    seen: set[str] = set()
    for module in sorted(path.relative_to(library).as_posix() for path in library.rglob("*.py")):
        if not NOT_THE_LIBRARY.isdisjoint(module.split("/")):
            continue
        fresh = [text for text in docstrings(library / module) if text not in seen]
        seen.update(fresh)
        split[is_held_out(module)] += fresh
    return Corpus(tuple(split[False]), tuple(split[True]))


def is_held_out(module: str) -> bool:
    """By a checksum of the module's path, so that the split is the same for every version of Python."""
    return zlib.crc32(module.encode()) % HELD_OUT_ONE_IN == 0


def docstrings(file: Path) -> Iterator[str]:
    """The docstrings of a file's module, classes and functions, dedented."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # some distributions ship templates and deliberately broken files
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def words_of(text: str) -> list[str]:
    """The lower-cased words of a text: unbroken runs of the letters a to z."""
    return re.findall(r"[a-z]+", text.lower())


def train_tokenizer(texts: Sequence[str], vocabulary: int, context: int) -> TextTokenizer:
    """A byte-level BPE tokenizer that puts <s> before a prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token=END, model_max_length=context
    )


def encode(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Each text as token ids, between <s> and </s>."""
    end = tokenizer.convert_tokens_to_ids(END)
    return [[*ids, end] for ids in tokenizer(list(texts), verbose=False)["input_ids"]]


# ------------------------------------------------------------------------------------------------------------ training


def new_model(recipe: Recipe) -> Model:
    """A Mixtral of the recipe's shape with seeded random weights."""
    torch.manual_seed(recipe.seed)
    config = MixtralConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
        num_local_experts=recipe.experts,
        num_experts_per_tok=recipe.top_k,
        max_position_embeddings=recipe.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        router_aux_loss_coef=recipe.balance,
        bos_token_id=0,
        eos_token_id=1,
    )
    return MixtralForCausalLM._from_config(config, attn_implementation="sdpa", experts_implementation="eager")


def batches(documents: Sequence[list[int]], recipe: Recipe) -> Iterator[torch.Tensor]:
    """Endless (batch, context + 1) token ids; every epoch lays all documents end to end in another order."""
    shuffle = random.Random(recipe.seed)
    rows: list[list[int]] = []
    while True:
        stream = [token for document in shuffle.sample(documents, len(documents)) for token in document]
        cuts = range(0, len(stream) - recipe.context, recipe.context)
        rows += [stream[cut : cut + recipe.context + 1] for cut in cuts]
        while len(rows) >= recipe.batch:
            yield torch.tensor(rows[: recipe.batch])
            del rows[: recipe.batch]


def imbalance(router_logits: Sequence[torch.Tensor], top_k: int) -> torch.Tensor:
    """Switch-style load-balancing loss, per layer and then averaged; 1 when all experts are used alike.

    Transformers' own pools the layers first, which lets one layer's crowding hide behind another's.
    """
    losses = []
    for logits in router_logits:
        experts = logits.shape[-1]
        chosen = logits.topk(top_k, dim=-1).indices.flatten()
        share = torch.bincount(chosen, minlength=experts) / chosen.numel()
        losses.append(experts * (share * logits.float().softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean()


def rate_at(progress: float, recipe: Recipe) -> float:
    """The learning rate at a point between 0 (start) and 1 (end): linear warm-up, then a cosine down to zero."""
    if progress < recipe.warmup:
        return recipe.peak_rate * progress / recipe.warmup
    return recipe.peak_rate * 0.5 * (1 + math.cos(math.pi * (progress - recipe.warmup) / (1 - recipe.warmup)))


def optimizer_of(model: Model, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW, with weight decay on matrices only."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    norms = [weight for weight in model.parameters() if weight.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
    decay = recipe.weight_decay
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), weight_decay=decay, fused=True)


def train(
    model: Model, documents: Sequence[list[int]], recipe: Recipe, minutes: float, steps: int | None
) -> dict[str, Any]:
    """Train in place for `steps`, or for `minutes` where that is None; returns what it took."""
    optimizer = optimizer_of(model, recipe)
    model.train()
    began, step = time.monotonic(), 0

    def progress() -> float:
        return step / steps if steps else (time.monotonic() - began) / (60 * minutes)

    loss_text = TextColumn("step {task.fields[step]}  loss {task.fields[loss]:.3f}")
    columns = (TextColumn("training"), BarColumn(), loss_text, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("training", total=1.0, step=0, loss=math.log(recipe.vocabulary))
        for rows in batches(documents, recipe):
            if (done := progress()) >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = rate_at(done, recipe)
            loss = train_step(model, optimizer, rows, recipe)
            step += 1
            bar.update(shown, completed=done, step=step, loss=loss)
    seconds = time.monotonic() - began
    tokens = step * recipe.batch * recipe.context
    epochs = tokens / sum(map(len, documents))
    return {"seconds": round(seconds, 1), "steps": step, "tokens": tokens, "epochs": round(epochs, 2)}


def train_step(model: Model, optimizer: torch.optim.Optimizer, rows: torch.Tensor, recipe: Recipe) -> float:
    """One optimizer step over (batch, context + 1) tokens; returns the prediction loss in nats per token."""
    with torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=rows[:, :-1], output_router_logits=True, use_cache=False)
    loss = F.cross_entropy(output.logits.float().flatten(0, 1), rows[:, 1:].flatten())
    torch.autograd.backward(loss + recipe.balance * imbalance(output.router_logits, recipe.top_k))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# ----------------------------------------------------------------------------------------------------------- measuring


def load(directory: Path) -> tuple[Model, TextTokenizer]:
    """The written model, computing in float32, and its tokenizer."""
    computing = {"dtype": torch.float32, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(directory, **computing)
    return model.eval(), AutoTokenizer.from_pretrained(directory)


def windows(document: list[int], context: int) -> Iterator[tuple[list[int], int]]:
    """A document as (tokens, first position that counts); a later window keeps half a context of what came before."""
    yield document[: context + 1], 1
    stride = context // 2
    for start in range(stride, len(document) - context - 1 + stride, stride):
        yield document[start : start + context + 1], context + 1 - stride


@torch.no_grad()
def bits_per_byte(model: Model, tokenizer: TextTokenizer, texts: Sequence[str]) -> float:
    """Bits to predict each text and its end, from its beginning and nothing else, per byte of UTF-8."""
    nats = 0.0
    for document in encode(tokenizer, texts):
        for tokens, first in windows(document, model.config.max_position_embeddings):
            ids = torch.tensor([tokens])
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, first - 1 :]
            nats += F.cross_entropy(logits.float(), ids[0, first:], reduction="sum").item()
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


@torch.no_grad()
def expert_shares(model: Model, tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[float]]:
    """For each layer, each expert's share of the (token, chosen expert) pairs over the texts."""
    config = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_local_experts)
    for document in encode(tokenizer, texts):
        ids = torch.tensor([document[: config.max_position_embeddings]])
        output = model(input_ids=ids, output_router_logits=True, use_cache=False)
        for layer, logits in enumerate(output.router_logits):
            chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
            counts[layer] += torch.bincount(chosen, minlength=config.num_local_experts)
    return (counts / counts.sum(1, keepdim=True)).tolist()


@dataclass(frozen=True)
class Sample:
    """A prompt from a held-out docstring, and what the model wrote after it."""

    prompt: str
    written: str
    ended: bool  # the model wrote </s>; otherwise its last word may be cut off

    def words(self) -> list[str]:
        """The words that the model wrote or finished, without one that the length limit cut off."""
        text = (self.prompt + self.written).lower()
        spans = [match.span() for match in re.finditer(r"[a-z]+", text)]
        if not self.ended and spans and spans[-1][1] == len(text):
            spans.pop()
        return [text[start:end] for start, end in spans if end > len(self.prompt)]


def write_samples(
    model: Model,
    tokenizer: TextTokenizer,
    texts: Sequence[str],
    count: int,
    new_tokens: int = 60,
    temperature: float = 0.7,
    seed: int = 1,
) -> list[Sample]:
    """`count` continuations of the first tokens of `texts`, taken at even distances; temperature 0 is greedy."""
    prompts = [ids[: PROMPT_TOKENS + 1] for ids in encode(tokenizer, texts) if len(ids) > PROMPT_TOKENS + 2]
    ids = torch.tensor([prompts[i * len(prompts) // count] for i in range(count)])
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens}
    if temperature:
        settings |= {"do_sample": True, "temperature": temperature, "top_k": 0}
    output = model.generate(input_ids=ids, **settings)
    samples = []
    for row in output.tolist():
        prompt, rest = row[: ids.shape[1]], row[ids.shape[1] :]
        end = rest.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in rest else None
        before, written = tokenizer.batch_decode([prompt, rest[:end]], skip_special_tokens=True)
        samples.append(Sample(before, written, ended=end is not None))
    return samples


def words_share(samples: Sequence[Sample], known: frozenset[str], shortest: int = 1) -> float:
    """The share of written words, of at least `shortest` letters, that are words of the training text."""
    written = [word for sample in samples for word in sample.words() if len(word) >= shortest]
    return sum(word in known for word in written) / max(1, len(written))


def measure(directory: Path, corpus: Corpus) -> dict[str, Any]:
    """All figures of a written model, from its files."""
    model, tokenizer = load(directory)
    known = corpus.words()
    samples = write_samples(model, tokenizer, corpus.held_out, count=40)
    greedy = write_samples(model, tokenizer, corpus.held_out, count=3, temperature=0.0)
    shares = expert_shares(model, tokenizer, corpus.held_out)
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "held_out_bits_per_byte": round(bits_per_byte(model, tokenizer, corpus.held_out), 4),
        "training_bits_per_byte": round(bits_per_byte(model, tokenizer, corpus.training[::20]), 4),
        "words": {
            "share_of_known_words": round(words_share(samples, known), 4),
            "share_of_known_words_of_4_letters_or_more": round(words_share(samples, known, shortest=4), 4),
            "written": sum(len(sample.words()) for sample in samples),
            "continuations": len(samples),
            "tokens_each": 60,
            "temperature": 0.7,
        },
        "expert_shares_on_held_out_text": [[round(share, 4) for share in layer] for layer in shares],
        "least_expert_share": round(min(map(min, shares)), 4),
        "most_over_least_by_layer": [round(max(layer) / max(min(layer), 1e-6), 2) for layer in shares],
        "greedy_samples": [asdict(sample) for sample in greedy],
        "samples": [asdict(sample) for sample in samples[::8]],
    }


def missed_bars(figures: dict[str, Any], total_bytes: int, minutes: float) -> list[str]:
    """What the model must reach and does not, one line each."""
    share = figures["words"]["share_of_known_words"]
    least, evenest = figures["least_expert_share"], min(figures["most_over_least_by_layer"])
    bars = [
        (total_bytes <= LARGEST_BYTES, f"{total_bytes} bytes, more than {LARGEST_BYTES}: a smaller recipe"),
        (minutes <= LONGEST_MINUTES, f"{minutes:.1f} minutes, more than {LONGEST_MINUTES}: lower --minutes"),
        (share >= LEAST_WORDS, f"{share:.1%} known words, less than {LEAST_WORDS:.0%}: raise --minutes"),
        (least >= LEAST_SHARE, f"an expert with {least:.1%}, less than {LEAST_SHARE:.0%}: raise --balance"),
        (evenest >= LEAST_RATIO, f"a layer at {evenest:.2f}x, less than {LEAST_RATIO}x: lower --balance"),
    ]
    return [line for reached, line in bars if not reached]


# ------------------------------------------------------------------------------------------------------------- writing


def save(model: Model, tokenizer: TextTokenizer, directory: Path) -> None:
    """Write weights in bfloat16, config and tokenizer as an ordinary Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config.pad_token_id = model.config.eos_token_id
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def size_of(directory: Path) -> int:
    """Bytes of all files directly in a directory."""
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file())


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
# tiny-mixtral

A Mixture-of-Experts language model small enough to ship: real routing, real experts, real text, so that schedules
and memory budgets can be tried without a download. It writes what looks like Python documentation and knows nothing.
This page and `training.json` are written by `examples/train_tiny_mixtral.py`, which trains the model from nothing.

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

Load it with moesched (`moesched run examples/tiny-mixtral --policy resident --prompt "Return the"`) or with
transformers (`AutoModelForCausalLM.from_pretrained("examples/tiny-mixtral")` and `AutoTokenizer`, likewise).

The text it learned from is part of Python and stands under the Python Software Foundation License.
"""


def machine_name() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def corpus_figures(corpus: Corpus) -> dict[str, Any]:
    """What the text amounts to."""
    return {
        "python": platform.python_version(),
        "training_docstrings": len(corpus.training),
        "training_bytes": sum(len(text.encode()) for text in corpus.training),
        "training_words": len(corpus.words()),
        "held_out_docstrings": len(corpus.held_out),
        "held_out_bytes": sum(len(text.encode()) for text in corpus.held_out),
    }


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=GUIDE, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shipped = Path(__file__).resolve().parent / "tiny-mixtral"
    flag = parser.add_argument
    flag("--out", type=Path, default=shipped, help="directory to write (default: the shipped one)")
    flag("--minutes", type=float, default=13.0, help="how long to train (default: %(default)s)")
    flag("--steps", type=int, help="train this many steps instead, the same on every machine")
    flag("--balance", type=float, default=Recipe.balance, help="load-balancing weight (default: %(default)s)")
    flag("--seed", type=int, default=Recipe.seed, help="of weights and text order (default: %(default)s)")
    flag("--threads", type=int, default=2, help="for torch (default: %(default)s)")
    chosen = parser.parse_args(argv)
    if chosen.minutes <= 0 or (chosen.steps is not None and chosen.steps < 1) or chosen.threads < 1:
        parser.error("--minutes, --steps and --threads must be positive")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Train, write, measure; 0 when every bar is reached."""
    chosen = arguments(argv)
    began = time.monotonic()
    torch.set_num_threads(chosen.threads)
    transformers_logging.disable_progress_bar()
    recipe = Recipe(balance=chosen.balance, seed=chosen.seed)

    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus.training, recipe.vocabulary, recipe.context)
    model = new_model(recipe)
    took = train(model, encode(tokenizer, corpus.training), recipe, chosen.minutes, chosen.steps)
    save(model, tokenizer, chosen.out)

    figures: dict[str, Any] = {"recipe": asdict(recipe), "corpus": corpus_figures(corpus)}
    figures["training"] = took | {
        "threads": chosen.threads,
        "machine": machine_name(),
        "torch": torch.__version__,
    }
    figures |= measure(chosen.out, corpus)
    minutes = (time.monotonic() - began) / 60
    figures["total_minutes_with_measuring"] = round(minutes, 2)
    (chosen.out / "README.md").write_text(readme(recipe, figures), encoding="utf-8")
    (chosen.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

    missed = missed_bars(figures, size_of(chosen.out), minutes)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    held_out = figures["held_out_bits_per_byte"]
    print(f"{chosen.out}: {held_out} bits per byte held out, {size_of(chosen.out):,} bytes")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
