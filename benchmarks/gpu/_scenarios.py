"""One request under policies that decide where experts run: the scenarios, and what is told of a run."""

from __future__ import annotations

import random
from typing import NamedTuple

from moesched.requests.sampling import Sampling
from moesched.runs.outcome import Report

POLICIES = {
    "twiddler": "moesched.policies.twiddler:Twiddler",
    "twiddler_makespan": "moesched.policies.twiddler_makespan:TwiddlerMakespan",
    "lru_offload": "moesched.policies.lru_offload:LruOffload",
    "layer_split": "moesched.policies.layer_split:LayerSplit",
    "layer_streaming": "moesched.policies.layer_streaming:LayerStreaming",
}
"""By class, so that nothing need be installed."""


class Scenario(NamedTuple):
    """A request, for each of `beams` sequences."""

    prompt: int
    new_tokens: int
    beams: int = 1

    @property
    def name(self) -> str:
        """In words."""
        if self.new_tokens == 1:
            return f"prefill of {self.prompt}"
        if self.beams > 1:
            return f"{self.beams} beams, {self.prompt} in, {self.new_tokens} out"
        return f"{self.prompt} in, {self.new_tokens} out"

    @property
    def sampling(self) -> Sampling:
        """Greedy, or a search that goes on to the last token."""
        return Sampling(beams=self.beams)

    def ids(self, vocabulary: int) -> list[int]:
        """The prompt, the same for every policy."""
        chance = random.Random(self.prompt)
        return [chance.randrange(vocabulary) for _ in range(self.prompt)]

    def seconds(self, report: Report) -> dict[str, float]:
        """Time to the first token, a decode step on average, and tokens per second over all."""
        prefill, *steps = report.step_seconds
        told = {"first_token_seconds": prefill}
        if steps:
            told["step_seconds"] = sum(steps) / len(steps)
            told["tokens_per_second"] = (1 + len(steps)) / sum(report.step_seconds)
        return told
