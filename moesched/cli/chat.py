"""`moesched chat`: holds a conversation in the terminal with the model of a running server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

from moesched.cli.command import command
from moesched.cli.failures import tell
from moesched.cli.output import stderr
from moesched.errors import BadInput, MoeschedError
from moesched.options import Option
from moesched.system.plain_text import plain_text
from moesched.system.signals import Stopped, ctrl_c_interrupts
from moesched.system.standard_output import command_output

NEW = "/new"
EPILOGUE = """Examples:

  moesched serve examples/tiny-mixtral   # in another terminal
  moesched chat
  echo "Return the" | moesched chat --temperature 0 --max-tokens 40"""


@command(EPILOGUE)
def chat(
    *,
    url: Annotated[
        str, Option("Address of the server; /v1 is added if it has no path.", "URL")
    ] = "http://127.0.0.1:8000",
    api_key_file: Annotated[
        Path | None, Option("File with the server's key. By default what MOESCHED_API_KEY says.", "FILE")
    ] = None,
    temperature: Annotated[
        float, Option("0 takes the likeliest token; higher values sample from more tokens.", ge=0, le=2)
    ] = 0.7,
    max_tokens: Annotated[
        int | None, Option("Most tokens of an answer. By default as many as the server gives.", "N", ge=1)
    ] = None,
) -> int:
    """Talk with the model of a running server.

    Each line is a message. In a terminal Ctrl-C stops an answer, /new begins another conversation, Ctrl-D ends it.
    """
    from moesched.server.client import Client

    client = Client(url, key_of(api_key_file))
    model = client.model()
    conversation = Conversation(
        partial(client.chat, model=model, temperature=temperature, max_tokens=max_tokens)
    )
    if sys.stdin.isatty():
        stderr().print(
            f"{plain_text(model)} at {plain_text(url)}: Ctrl-C stops an answer, {NEW} begins anew, Ctrl-D ends",
            markup=False,
        )
        with ctrl_c_interrupts():
            talk(conversation)
        return 0
    for line in lines():
        conversation.ask(line)
    return 0


class Conversation:
    """A conversation with a model, which prints answers as they arrive.

    Args:
        chat: takes all messages so far, in OpenAI's form, and yields the pieces of the answer's text.
    """

    def __init__(self, chat: Callable[[list[dict[str, str]]], Generator[str]]) -> None:
        self._chat = chat
        self._messages: list[dict[str, str]] = []

    def begin(self) -> None:
        """Begin another conversation."""
        self._messages.clear()

    def ask(self, text: str) -> None:
        """Send a message, and print the answer as it arrives.

        If no part of an answer arrives, the message is left out of the conversation.

        Raises:
            MoeschedError: the server does not answer, or breaks off.
        """
        asked, answer = [*self._messages, {"role": "user", "content": text}], list[str]()
        ended = False
        try:
            with closing(self._chat(asked)) as pieces:
                for piece in pieces:
                    answer.append(piece)
                    write(piece)
            ended = True
        finally:
            if answer or ended:
                self._messages = [*asked, {"role": "assistant", "content": "".join(answer)}]
                write("\n")


def talk(conversation: Conversation) -> None:
    """Read lines from the terminal until Ctrl-D, and send each as a message.

    Ctrl-C or an error ends an answer, but not the conversation.

    Raises:
        Stopped: another signal asks the program to end.
    """
    while True:
        try:
            line = typed()
            if line is None:
                return
            if line.strip() == NEW:
                conversation.begin()
            elif line.strip():
                conversation.ask(line)
        except Stopped:
            raise
        except KeyboardInterrupt:
            stderr().print()
        except MoeschedError as error:
            tell(str(error))


def typed() -> str | None:
    """Read a line from the terminal, with line editing and a history; return None after Ctrl-D."""
    with suppress(ImportError):  # some builds of Python have none
        import readline  # noqa: F401  # `input` uses it
    of_descriptor_1 = sys.__stdout__ or sys.stderr  # elsewhere Python lets nobody edit a line
    try:
        with redirect_stdout(of_descriptor_1):
            return input("> ")
    except EOFError:
        stderr().print()
        return None
    except UnicodeDecodeError as error:
        raise not_utf8(error) from error


def lines() -> Iterator[str]:
    """Yield the lines of standard input that are not empty."""
    try:
        for line in sys.stdin:
            if line.strip():
                yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise not_utf8(error) from error


def not_utf8(error: UnicodeDecodeError) -> BadInput:
    """Make the error for standard input that is not UTF-8."""
    return BadInput(f"standard input is not UTF-8: {error}: write it in UTF-8")


def write(text: str) -> None:
    """Write text to standard output without delay; control characters are escaped."""
    out = command_output()
    out.write("\n".join(map(plain_text, text.split("\n"))))
    out.flush()


def key_of(file: Path | None) -> str | None:
    """Return the server's API key: from a file, by default from the environment; None if there is none.

    Raises:
        BadInput: the file cannot be read.
    """
    from moesched.server.options import environment_key, read_key

    return environment_key() if file is None else read_key(file)
