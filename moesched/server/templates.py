"""Rendering of conversations as prompts: by the model's template in its own process, or plainly if it has none."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from moesched.errors import BadInput
from moesched.inputs.chat_template import ChatTemplate

COMMAND = (sys.executable, "-P", "-m", "moesched.server.template_worker")
MOST_LINE_BYTES = 32 << 20
"""Largest number of bytes of a prompt as a line of JSON, in which text takes up to three times its bytes in UTF-8."""
SECONDS = 2.0
"""Seconds that rendering a conversation may take."""

Messages = Sequence[dict[str, Any]]


class Renders(Protocol):
    """Renders conversations as texts of prompts.

    Attributes:
        bare: whether the texts have all special tokens already, so that none are to be added.
    """

    @property
    def bare(self) -> bool: ...

    async def render(self, messages: Messages) -> str:
        """Write a conversation, up to where the model's answer begins.

        Raises:
            BadInput: the template refuses the conversation.
        """


class PlainTemplate:
    """Renders conversations for models without a template: the texts of the messages, one on each line."""

    bare = False

    async def render(self, messages: Messages) -> str:
        """Join the texts of the messages."""
        return "\n".join(str(message["content"]) for message in messages)


class ModelTemplate:
    """A model's template, rendered by a process of its own (`moesched.server.template_worker`).

    If the process ends, because rendering took too long or the process was killed, the next rendering starts a new one.

    Args:
        seconds: the time that rendering may take.
        most_bytes: the largest number of bytes of a rendered text, as a line of JSON from the process.
    """

    bare = True

    def __init__(
        self, template: ChatTemplate, seconds: float = SECONDS, most_bytes: int = MOST_LINE_BYTES
    ) -> None:
        self._first_line = {"text": template.text, "special": template.special, "seconds": seconds}
        self._most_bytes = most_bytes
        self._turn = asyncio.Lock()
        self._worker: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the worker process, and compile the template.

        Raises:
            BadInput: the template cannot be compiled.
        """
        async with self._turn:
            await self._ready_worker()

    async def render(self, messages: Messages) -> str:
        """Write a conversation, up to where the model's answer begins.

        Raises:
            BadInput: the template raised, or took too long.
        """
        async with self._turn:
            try:
                reply = await _asked(await self._ready_worker(), messages)
            except BaseException:
                # Also if the caller is cancelled: the answer would be taken for the next one's.
                await self._end()
                raise
            if reply is None:
                await self._end()
                raise BadInput(
                    "the chat template takes too long, or too much memory, for these messages: shorten them"
                )
            if "fault" in reply:
                raise BadInput(f"the chat template does not take these messages: {reply['fault']}")
            return reply["text"]

    async def close(self) -> None:
        """End the worker process."""
        async with self._turn:
            await self._end()

    async def _ready_worker(self) -> asyncio.subprocess.Process:
        if self._worker is not None and self._worker.returncode is not None:
            await self._end()  # something killed it while it was idle
        if self._worker is None:
            self._worker = await asyncio.create_subprocess_exec(
                *COMMAND,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=self._most_bytes,
                start_new_session=True,  # Ctrl-C is for the server, which ends this process
            )
            compiled = await _asked(self._worker, self._first_line)
            if compiled is None or "fault" in compiled:
                await self._end()
                raise BadInput(
                    f"the model's chat template cannot be used: {(compiled or {}).get('fault', 'its process ended')}"
                )
        return self._worker

    async def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()


@asynccontextmanager
async def rendering(template: ChatTemplate | None) -> AsyncIterator[Renders]:
    """Provide a renderer by a model's template, or a `PlainTemplate` if `template` is None, until the context ends.

    Raises:
        BadInput: the template cannot be compiled.
    """
    if template is None:
        yield PlainTemplate()
        return
    made = ModelTemplate(template)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


async def _asked(worker: asyncio.subprocess.Process, question: object) -> dict[str, str] | None:
    """Send a question to the worker process; return its reply, None if the process ended or the reply is too long."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(question).encode() + b"\n")
        await worker.stdin.drain()
        line = await worker.stdout.readline()
    except (ConnectionError, ValueError):  # the latter for a line that is too long
        return None
    return json.loads(line) if line.endswith(b"\n") else None
