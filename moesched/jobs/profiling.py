"""Profiling: a real run over calibration data, in which every router's choices are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moesched.errors import BadInput, NotFinite
from moesched.inputs.lookup import NEW_TOKENS_OF_PROMPTS
from moesched.inputs.prompts import Prompt, encode_prompts, find_tokenizer
from moesched.jobs.device_listener import RoutingListener
from moesched.jobs.model_jobs import run_model
from moesched.machines import Machine
from moesched.models.reading import read_config
from moesched.routing.recorder import RoutingRecorder
from moesched.routing.trace import RoutingTrace

POLICY = "expert_streaming"
"""It needs little memory, and keeps what there is room for."""


class Profiled(NamedTuple):
    """What came of a profiling run; what was recorded until then, where Ctrl-C ended it."""

    trace: RoutingTrace
    interrupted: bool


def profile_routing(
    model: Path | str,
    prompts: Sequence[Prompt],
    *,
    policy: str = POLICY,
    max_new_tokens: int = NEW_TOKENS_OF_PROMPTS,
    dtype: str | None = None,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    device: str = "torch",
    machine: Machine | str = "auto",
    budgets: Mapping[str, int | str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Profiled:
    """Run prompts through a model and record which experts every token takes, prompts' and generated ones.

    Args:
        progress: told how many choices were made, tokens times layers, and how many there will be at most.

    The other arguments and errors are those of `moesched.run_model`.
    """
    config = read_config(model)
    if config.experts == 1:
        raise BadInput(
            f"model {config.name} has one expert in a layer and no router: nothing is chosen there"
        )
    encoded = encode_prompts(prompts, find_tokenizer(Path(model)), config, max_new_tokens)
    lengths = list(map(len, encoded))
    most = config.layers * (sum(lengths) + len(lengths) * (max_new_tokens - 1))
    recorder = RoutingRecorder(config, progress, most)
    report = run_model(
        model,
        encoded,
        policy=policy,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        device=device,
        machine=machine,
        budgets=budgets,
        listener=RoutingListener(recorder),
    )
    if report.failure is not None:
        raise NotFinite(report.failure)
    # The last token of a request is sampled and never routed.
    routed = [
        length + max(0, len(tokens) - 1) for length, tokens in zip(lengths, report.tokens or [], strict=True)
    ]
    return Profiled(recorder.trace(routed, lengths), report.interrupted)
