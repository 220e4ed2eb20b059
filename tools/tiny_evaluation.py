"""The figures of a trained tiny-mixtral, measured on its files: bits per byte, known words, use of experts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny_corpus import Corpus, encode
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralForCausalLM, PreTrainedTokenizerFast

PROMPT_TOKENS = 8
"""Of a held-out docstring, which the model continues."""


def load(directory: Path) -> tuple[MixtralForCausalLM, PreTrainedTokenizerFast]:
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


def bits_per_byte(
    model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> float:
    """Bits to predict each text and its end, from its beginning and nothing else, per byte of UTF-8."""
    nats = nats_of(model, encode(tokenizer, texts))
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


@torch.no_grad()
def nats_of(model: MixtralForCausalLM, documents: Sequence[list[int]]) -> float:
    """Nats to predict the tokens of each document but the first, from those before."""
    nats = 0.0
    for document in documents:
        for tokens, first in windows(document, model.config.max_position_embeddings):
            ids = torch.tensor([tokens])
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, first - 1 :]
            nats += F.cross_entropy(logits.float(), ids[0, first:], reduction="sum").item()
    return nats


@torch.no_grad()
def expert_shares(
    model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> list[list[float]]:
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
    model: MixtralForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
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
