"""Profiling: a real run over calibration data, in which every router's choices are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Unpack

from moesched.errors import BadInput, NotFinite
from moesched.inputs.lookup import NEW_TOKENS_OF_PROMPTS
from moesched.inputs.prompts import Prompt, encode_prompts, find_tokenizer
from moesched.jobs.device_listener import RoutingListener
from moesched.jobs.options import ProfilingKeywords
from moesched.jobs.run_model import run_model
from moesched.machines import Machine
from moesched.models.reading import read_config
from moesched.routing.recorder import RoutingRecorder
from moesched.routing.trace import RoutingTrace

POLICY = "expert_streaming"
"""It needs little memory, and keeps as many experts as fit."""


class Profiled(NamedTuple):
    """The trace of a profiling run, as far as it came before Ctrl-C."""

    trace: RoutingTrace
    interrupted: bool


def profile_routing(
    model: Path | str,
    prompts: Sequence[Prompt],
    *,
    policy: str = POLICY,
    machine: Machine | str = "auto",
    max_new_tokens: int = NEW_TOKENS_OF_PROMPTS,
    progress: Callable[[int, int], object] | None = None,
    **options: Unpack[ProfilingKeywords],
) -> Profiled:
    """Run prompts through a model and record which experts every token takes, prompts' and generated ones.

    Args:
        progress: told how many choices were made, tokens times layers, and how many there will be at most.
        options: sizes, budgets, dtype and device, as `moesched.run_model` takes them.

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
        machine=machine,
        max_new_tokens=max_new_tokens,
        listener=RoutingListener(recorder),
        **options,
    )
    if report.failure is not None:
        raise NotFinite(report.failure)
    # The last token of a request is sampled and never routed.
    routed = [
        length + max(0, len(tokens) - 1) for length, tokens in zip(lengths, report.tokens or [], strict=True)
    ]
    return Profiled(recorder.trace(routed, lengths), report.interrupted)
