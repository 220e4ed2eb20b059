"""`moesched chat`: a conversation in the terminal with the model of a running server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from moesched.cli.command import command
from moesched.cli.output import stderr
from moesched.errors import BadInput
from moesched.options import Option
from moesched.system.plain_text import plain_text
from moesched.system.standard_output import command_output

EPILOGUE = """Examples:

  moesched serve examples/tiny-mixtral   # in another terminal
  moesched chat
  echo "Return the" | moesched chat --temperature 0 --max-tokens 40"""


@command(1, EPILOGUE)
def chat(
    *,
    url: Annotated[str, Option("Address of the server.", "URL")] = "http://127.0.0.1:8000",
    api_key_file: Annotated[
        Path | None, Option("File with the server's key. By default what MOESCHED_API_KEY says.", "FILE")
    ] = None,
    temperature: Annotated[
        float, Option("0 takes the likeliest token; higher values sample from more tokens.", ge=0, le=2)
    ] = 0.7,
    max_tokens: Annotated[int, Option("Most tokens of an answer.", "N", ge=1)] = 512,
) -> int:
    """Talk with the model of a running server. Each line is a message; Ctrl-D ends the conversation."""
    from moesched.server.client import Client

    client = Client(url, key_of(api_key_file))
    model = client.model()
    if sys.stdin.isatty():
        stderr().print(f"{plain_text(model)} at {plain_text(url)}; Ctrl-D ends this", markup=False)
    messages: list[dict[str, str]] = []
    for line in lines():
        messages.append({"role": "user", "content": line})
        pieces = client.chat(messages, model=model, temperature=temperature, max_tokens=max_tokens)
        messages.append({"role": "assistant", "content": written(pieces)})
    return 0


def lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty, on a terminal each after a mark."""
    while True:
        if sys.stdin.isatty():
            stderr().print("> ", end="", style="bold")
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise BadInput(f"standard input is not UTF-8: {error}: write it in UTF-8") from error
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def written(pieces: Iterator[str]) -> str:
    """Print the pieces of an answer as they come; returns the whole."""
    whole = []
    out = command_output()
    for piece in pieces:
        whole.append(piece)
        out.write("\n".join(map(plain_text, piece.split("\n"))))
        out.flush()
    out.write("\n")
    out.flush()
    return "".join(whole)


def key_of(file: Path | None) -> str | None:
    """The key to send, if there is one.

    Raises:
        BadInput: it cannot be read.
    """
    from moesched.server.options import KEY_VARIABLE, read_key

    return os.environ.get(KEY_VARIABLE) if file is None else read_key(file)
