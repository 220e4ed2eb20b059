"""The process that renders chat templates: lines of JSON in, lines of JSON out, with a time limit for each rendering.

Templates come with models, from strangers. Jinja's sandbox denies them Python's internals. Since they run in a process
of their own, endless loops and high memory use do not harm the server.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, BinaryIO

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

BYTES = 1 << 30
"""The memory that this process may take, in bytes."""


class GenerationTag(Extension):
    """The tag `{% generation %}`, by which templates mark answers for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja's class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """Read the tag, and return its body as a scope with variables of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Renderer:
    """A compiled template, in the environment that Hugging Face's transformers gives to templates.

    Args:
        text: the template.
        special: texts of special tokens, by their names in templates, such as "bos_token".

    Raises:
        TemplateError: the text is no template.
    """

    def __init__(self, text: str, special: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self._template = environment.from_string(text)
        self._special = special

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Render a conversation, up to where the model's answer begins."""
        return self._template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special
        )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as JSON with `json.dumps`; unlike Jinja's own filter, escape no characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def answer(renderer: Renderer, line: bytes) -> dict[str, str]:
    """Render the messages of a line of JSON, and return the reply: their text, or what is wrong with them."""
    try:
        return {"text": renderer.render(json.loads(line))}
    except Exception as error:  # whatever the template's code raises
        return {"fault": f"{error}" or type(error).__name__}


def serve(lines: BinaryIO, out: BinaryIO) -> None:
    """Compile the template in the first line, reply whether that worked, and render each further line's messages.

    The first line is an object: `text` and `special` as for `Renderer`, and `seconds`, the processor time that a
    rendering may take; time in which other processes run does not count. SIGPROF ends the process once a rendering
    takes longer.
    """
    first = json.loads(next(lines))
    try:
        renderer = Renderer(first["text"], first["special"])
    except TemplateSyntaxError as error:
        _reply(out, {"fault": f"line {error.lineno}: {error}"})
        return
    except Exception as error:  # of Jinja, or of Python's compiler
        _reply(out, {"fault": str(error)})
        return
    _reply(out, {"text": ""})
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, first["seconds"])
        reply = answer(renderer, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(out, reply)


def _reply(out: BinaryIO, reply: dict[str, str]) -> None:
    out.write(json.dumps(reply).encode() + b"\n")
    out.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    serve(sys.stdin.buffer, sys.stdout.buffer)
