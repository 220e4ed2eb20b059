"""The training of tiny-mixtral: its recipe, its loss and its loop."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import MixtralConfig, MixtralForCausalLM


@dataclass(frozen=True)
class Recipe:
    """Every number that shapes the model and its training, and the folder of the tree that it goes to."""

    folder: str = "examples/tiny-mixtral"
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


RECIPES = {
    "tiny-mixtral": Recipe(),
    "tiny-mixtral-256": Recipe(
        "out/tiny-mixtral-256", layers=3, hidden=256, intermediate=256, heads=8, kv_heads=2
    ),
}
"""By name; rows of the second are of 256 weights, a block of K-quants."""


def new_model(recipe: Recipe) -> MixtralForCausalLM:
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


def optimizer_of(model: MixtralForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW, with weight decay on matrices only."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    norms = [weight for weight in model.parameters() if weight.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
    decay = recipe.weight_decay
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), weight_decay=decay, fused=True)


def train(
    model: MixtralForCausalLM,
    documents: Sequence[list[int]],
    recipe: Recipe,
    minutes: float,
    steps: int | None,
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


def train_step(
    model: MixtralForCausalLM, optimizer: torch.optim.Optimizer, rows: torch.Tensor, recipe: Recipe
) -> float:
    """One optimizer step over (batch, context + 1) tokens; returns the prediction loss in nats per token."""
    with torch.autocast("cpu", torch.bfloat16):
        output = model(input_ids=rows[:, :-1], output_router_logits=True, use_cache=False)
    loss = F.cross_entropy(output.logits.float().flatten(0, 1), rows[:, 1:].flatten())
    torch.autograd.backward(loss + recipe.balance * imbalance(output.router_logits, recipe.top_k))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
