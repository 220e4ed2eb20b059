"""`moesched sparsity`: how many values after SiLU are near zero, as a plain forward pass has them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F

from moesched.devices.products.linear import linear
from moesched.jobs.sparsity import THRESHOLDS, SparsityCounter, sparsity_of
from reference import Reference
from small_models import SMALL

PROMPTS = [[1, 2, 3, 4, 5], [9, 8], [7, 7, 7, 20, 30, 40, 50, 60]]


class WatchedReference(Reference):
    """Remembers what each layer's SiLU let through."""

    def expert(self, layer: int, expert: int, x_nD: Any) -> Any:
        gate = self.blocks[f"layers.{layer}.experts.{expert}.gate"]
        self.seen[layer].append(F.silu(linear(x_nD, gate)).flatten().numpy())
        return super().expert(layer, expert, x_nD)

    def values(self, prompts: list[list[int]]) -> list[Any]:
        self.seen: list[list[Any]] = [[] for _ in range(self.config.layers)]
        cache = self.cache()
        for sequence in range(len(prompts)):
            cache.table.open(sequence)
        self.logits(cache, list(range(len(prompts))), prompts)
        return [np.concatenate(parts) for parts in self.seen]


@pytest.mark.parametrize("policy", ["expert_streaming", "resident"])
def test_the_shares_are_those_of_a_plain_forward_pass(model: Path, policy: str) -> None:
    report = sparsity_of(model, PROMPTS, policy=policy)
    expected = WatchedReference(model).values(PROMPTS)
    assert report.values == tuple(len(values) for values in expected)
    assert report.values[0] == 15 * SMALL.routed.top_k * SMALL.routed.intermediate
    for below, values in zip(report.below, expected, strict=True):
        shares = [np.mean(np.abs(values) < threshold) for threshold in THRESHOLDS]
        assert below == pytest.approx(shares, abs=2 / len(values))


def test_values_are_counted_below_each_threshold() -> None:
    counter = SparsityCounter(2)
    counter.activated(1, np.array([[0.0005, -0.005], [0.05, -0.5]], np.float32))
    counter.activated(1, np.array([[2.0, -0.0009]], np.float32))
    assert counter.values == [0, 6]
    for layer, sixths in enumerate([(0, 0, 0, 0), (2, 3, 4, 5)]):
        assert counter.shares()[layer] == pytest.approx([n / 6 for n in sixths])


def test_the_command_prints_a_row_for_each_layer(command: Any, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in PROMPTS))
    said = command("sparsity", model, "--prompts", file)
    assert said.code == 0
    assert "small (float32): values after SiLU, 15 tokens of the prompts" in said.out
    rows = re.findall(r"^(\d)((?: +\d+\.\d\d%){4})$", said.out, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    found = json.loads(command("sparsity", model, "--prompts", file, "--json").out)
    assert [f"{share:.2%}" for share in found["below"][2]] == rows[2][1].split()
    assert found["thresholds"] == [0.001, 0.01, 0.1, 1.0]


def test_without_prompts_tokens_are_drawn_by_lot_and_the_seed_says_which(command: Any, model: Path) -> None:
    first, same, other = (
        json.loads(command("sparsity", model, "--seed", seed, "--json").out) for seed in (0, 0, 1)
    )
    assert first == same
    assert first["random_prompts"] is True
    assert first["tokens"] == 16 * 64
    assert first["below"] != other["below"]
