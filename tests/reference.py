"""A whole forward pass over a checkpoint, in plain loops: how the kernels meet Hugging Face in tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from moesched.devices.kernels import attention_functions, expert_functions, functions, qkv_functions
from moesched.devices.products.linear import expert_ffn
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.devices.torch.kv_step import KVStep
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layers import GroupedAttention
from moesched.models.tensors import is_transposed

Tensor = torch.Tensor


def cut_in_three(weight: Tensor) -> list[Tensor]:
    """A matrix as blocks of uneven size, as its file has its rows."""
    return list(weight.split(-(-weight.shape[0] // 3)))


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """Tensors as safetensors reads them, by published name; copied, since it maps files that tests write anew."""
    files = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
    return {name: tensor.clone() for file in files for name, tensor in file.items()}


def read_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor by canonical name, in the dtype asked for."""
    weights = {}
    for name, stored in checkpoint.tensors.items():
        with stored.file.open("rb") as file:
            file.seek(stored.offset)
            data = bytearray(file.read(stored.nbytes))
        tensor = torch.frombuffer(data, dtype=getattr(torch, stored.format.name))
        weight = tensor.reshape(stored.shape).to(dtype)
        weights[name] = weight.T if is_transposed(checkpoint.config, name) else weight
    return weights


class Reference:
    """A model whose every weight is in memory."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        checkpoint = open_checkpoint(directory)
        self.config = checkpoint.config
        self.dtype = dtype
        self.weights = read_weights(checkpoint, dtype)

    def cache(self, blocks: int = 64, block_size: int = 4) -> BlockedKV:
        """An empty KV cache for this model, which keeps tokens that have left a window, too."""
        unlimited = self.config.varied(window=None)
        return BlockedKV(unlimited, blocks, block_size=block_size, dtype=self.dtype)

    def logits(self, cache: BlockedKV, sequences: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens[i] to sequences[i]; the logits (S, V) that follow the last of each."""
        config = self.config
        step = cache.extend(sequences, [len(new) for new in tokens])
        ids_T = torch.tensor([token for new in tokens for token in new])
        angles = qkv_functions.rotary_angles(torch.tensor(step.positions), config.attention)
        hidden_TD = functions.embed(ids_T, self.weights["embedding"])
        for layer in range(config.layers):
            hidden_TD = self.layer(layer, hidden_TD, cache, step, angles)
        last_SD = hidden_TD[step.last]
        head = self.weights["embedding" if config.tied_embeddings else "lm_head"]
        return functions.lm_head(last_SD, self.weights["final_norm"], [head], config.norm_eps, config.norm)

    def layer(
        self, layer: int, hidden_TD: Tensor, cache: BlockedKV, step: KVStep, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """One transformer layer."""
        config, prefix = self.config, f"layers.{layer}."
        attention, network = config.layer(layer).grouped, config.layer(layer).feed_forward
        weights = self.attention_weights(prefix, attention)
        q_THd, k_TKd, v_TKd = qkv_functions.project_qkv(hidden_TD, weights, angles, config, attention)
        views = cache.at(layer).extended(step, k_TKd, v_TKd)
        attended_TX = attention_functions.attention(q_THd, views, attention.window)
        hidden_TD = functions.output_projection(attended_TX, [self.weights[prefix + "o"]], hidden_TD)
        x_TD = functions.norm(hidden_TD, self.weights[prefix + "ffn_norm"], config.norm_eps, config.norm)
        if network.experts == 1:
            return hidden_TD + self.expert(layer, 0, x_TD)
        return self.experts(layer, x_TD, hidden_TD)

    def attention_weights(self, prefix: str, attention: GroupedAttention) -> dict[str, list[Tensor]]:
        """A layer's projections and its norms."""
        norms = ("attention_norm", "q_norm", "k_norm") if attention.qk_norm else ("attention_norm",)
        qkv = [self.weights[prefix + name] for name in "qkv"]
        return {"qkv": qkv, **{name: [self.weights[prefix + name]] for name in norms}}

    def experts(self, layer: int, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """Route, run each chosen expert on its rows, combine."""
        network = self.config.layer(layer).feed_forward
        experts_Tk, weights_Tk = expert_functions.route(
            x_TD, {"router": [self.weights[f"layers.{layer}.router"]]}, network
        )
        tokens_n, rows_Tk = expert_functions.sorted_by_expert(experts_Tk)
        counts = experts_Tk.flatten().bincount(minlength=network.experts).tolist()
        x_nD = x_TD.index_select(0, tokens_n)
        y_nD = torch.empty_like(x_nD)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(start, start + count)
                y_nD[rows] = self.expert(layer, expert, x_nD[rows])
                start += count
        return expert_functions.combine(y_nD, rows_Tk, weights_Tk, residual_TD)

    def expert(self, layer: int, expert: int, x_nD: Tensor) -> Tensor:
        """One expert's FFN."""
        prefix = f"layers.{layer}.experts.{expert}."
        gate, up, down = (self.weights[prefix + part] for part in ("gate", "up", "down"))
        return expert_ffn(x_nD, [gate], [up], [down])


def decisive_tokens(directory: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The tokens of a reference, which must be far from any other ones to be compared."""
    tokens, logits = generate(Reference(directory), prompts, new_tokens)
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > 1e-4
    return tokens


def generate(
    model: Reference, prompts: Sequence[Sequence[int]], steps: int
) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens of each prompt, all in one batch, and the logits (steps, S, V) that chose them."""
    cache = model.cache()
    sequences = list(range(len(prompts)))
    for sequence, prompt in zip(sequences, prompts, strict=True):
        # Every second one reserves its room, so that views and gathered copies are both used.
        cache.table.open(sequence, len(prompt) + steps if sequence % 2 else 0)
    new: Sequence[Sequence[int]] = prompts
    chosen: list[list[int]] = [[] for _ in prompts]
    logits = []
    for _ in range(steps):
        logits.append(model.logits(cache, sequences, new))
        new = logits[-1].argmax(-1, keepdim=True).tolist()
        for tokens, token in zip(chosen, new, strict=True):
            tokens += token
    return chosen, torch.stack(logits)
