"""Settings for choosing tokens."""

from __future__ import annotations

from typing import Annotated

from moesched.errors import BadInput
from moesched.keywords import documented
from moesched.options import Option, Options

MOST_BEAMS = 256
MOST_PENALTY = 4
"""Limit of the exponent of a sequence's length, so that the power fits into a float32."""

SAMPLING = "Sampling"
BEAMS = "Beam search"
"""Headings of the options' groups in help texts."""

Beams = Annotated[
    int,
    Option(
        "Keep the N likeliest sequences per prompt. 1 disables beam search.",
        "N",
        group=BEAMS,
        ge=1,
        le=MOST_BEAMS,
    ),
]


@documented
class Sampling(Options):
    """Settings for choosing tokens: greedy at temperature 0, otherwise random by softmax(logits / temperature).

    Raises:
        BadInput: a value is out of range; the message names the setting.
    """

    temperature: Annotated[
        float,
        Option("0 takes the likeliest token; higher values sample from more tokens.", group=SAMPLING, ge=0),
    ] = 0.0
    top_k: Annotated[
        int | None,
        Option("Sample from the K likeliest tokens only.", "K", group=SAMPLING, ge=1),
    ] = None
    top_p: Annotated[
        float,
        Option(
            "Sample from the smallest set of tokens whose probabilities add up to P; ties with the last are included.",
            "P",
            group=SAMPLING,
            gt=0,
            le=1,
        ),
    ] = 1.0
    seed: Annotated[
        int,
        Option("Seed of the random numbers for sampling.", group=SAMPLING, ge=0, le=2**64 - 1),
    ] = 0
    beams: Beams = 1
    length_penalty: Annotated[
        float,
        Option(
            "A sequence's score is its log probability divided by its length to this power.",
            "X",
            group=BEAMS,
            ge=-MOST_PENALTY,
            le=MOST_PENALTY,
        ),
    ] = 1.0
    early_stopping: Annotated[
        bool, Option("Stop a prompt's search once N of its sequences have ended.", group=BEAMS)
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beams > 1 and self.temperature:
            raise BadInput(
                f"--temperature is {self.temperature}, but beam search is deterministic: omit one of the two"
            )
