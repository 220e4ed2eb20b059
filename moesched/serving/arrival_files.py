"""Requests that arrive over time, made at random with a rate, or read from a file with one request a line."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from moesched.errors import BadInput
from moesched.serving.request import Request
from moesched.system.decoding import decode_json
from moesched.system.input_file import read_input
from moesched.system.plain_text import shown

POISSON = "poisson:"
MOST_BYTES = 64_000_000
MOST_REQUESTS = 1_000_000
MOST_SECONDS = 10.0**8
REMEDY = 'write {"at": 0.5, "prompt_tokens": 100, "new_tokens": 50}'

Tokens = Annotated[int, Meta(ge=1, le=16_000_000)]


class _Line(msgspec.Struct):
    at: float
    prompt_tokens: Tokens
    new_tokens: Tokens
    user: str = ""


def random_arrivals(described: str, prompts: Sequence[int], new_tokens: int, seed: int = 0) -> list[Request]:
    """Make requests that arrive at random, independently of each other (a Poisson process).

    Args:
        described: `poisson:RATE`, in requests a second.
        prompts: prompt lengths in tokens, one for each request.
        new_tokens: tokens to generate for each.
        seed: seed of the times between arrivals.

    Raises:
        BadInput: the rate cannot be used.
    """
    rate = _rate(described)
    draw, at, requests = random.Random(seed), 0.0, []
    for number, prompt in enumerate(prompts):
        at += draw.expovariate(rate)
        requests.append(Request(number=number, prompt=prompt, new_tokens=new_tokens, arrives=round(at * 1e9)))
    return requests


def _rate(source: str) -> float:
    text = source.removeprefix(POISSON)
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 1e-6 <= rate <= 1e6:  # NaN fails, too
        raise BadInput(
            f"--arrivals has the rate {shown(text)}: give requests a second, from 0.000001 to 1,000,000, such as "
            f"{POISSON}2"
        )
    return rate


def read_arrivals(path: Path) -> list[Request]:
    """Read requests from a file.

    Args:
        path: a file with one `{"at": SECONDS, "prompt_tokens": N, "new_tokens": N, "user": NAME}` per line, in the
            order of arrival; `user` may be left out.

    Raises:
        BadInput: the file cannot be used; the message names the line.
    """
    lines = read_input(
        path, "arrivals", MOST_BYTES, remedy=f"name a file, or give {POISSON}RATE"
    ).splitlines()
    if len(lines) > MOST_REQUESTS:
        raise BadInput(f"{path} has {len(lines):,} lines, and may have {MOST_REQUESTS:,}: divide it")
    requests: list[Request] = []
    before = 0.0
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        read = decode_json(line, _Line, f"{path}:{place}", REMEDY)
        if not 0 <= read.at <= MOST_SECONDS:
            raise BadInput(f"{path}:{place}: at is {read.at}: give 0 to {MOST_SECONDS:,.0f} seconds")
        if read.at < before:
            raise BadInput(f"{path}:{place}: at is {read.at}, before the line before it: sort by the arrival")
        before = read.at
        requests.append(
            Request(
                number=len(requests),
                prompt=read.prompt_tokens,
                new_tokens=read.new_tokens,
                arrives=round(read.at * 1e9),
                user=read.user,
            )
        )
    if not requests:
        raise BadInput(f"{path} holds no requests: {REMEDY}")
    return requests
