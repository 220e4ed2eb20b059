"""`moesched serve`: answers many users at once, by OpenAI's API."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moesched.cli.command import command
from moesched.cli.failures import tell
from moesched.cli.generation_options import ThreadsArguments
from moesched.cli.output import Bar, planners_choice
from moesched.jobs.served_options import ServedOptions
from moesched.options import part_of
from moesched.server.options import FrontOptions
from moesched.system.plain_text import counted
from moesched.system.standard_output import command_output

if TYPE_CHECKING:
    from moesched.server.messages import Ready, Starting
    from moesched.server.serve import Notes

EPILOGUE = """Examples:

  moesched serve examples/tiny-mixtral
  moesched serve models/mixtral-0.8b --policy cgopipe --budget host=640MB \\
      --batch-size 16 --port 8001"""


@command(EPILOGUE)
def serve(model: ServedOptions, http: FrontOptions, cpu: ThreadsArguments) -> int:
    """Serve a model to many users at once, by OpenAI's API and with a chat in the browser.

    Without --policy, the planner chooses the one with the most predicted tokens per second when --batch-size requests
    run together. The server prints its address once the weights are loaded. After Ctrl-C or SIGTERM it takes no more
    requests, completes those that it has, and ends with exit code 0; a second signal ends it at once.
    """
    import msgspec

    from moesched.cli.results import say_where
    from moesched.server.serve import ENGINE, ServerCallbacks, serve

    model.admission_rule()  # refused here, before another process begins
    model = replace(model, device_settings=cpu.with_threads(model.device_settings))
    options = msgspec.json.encode(part_of(model, ServedOptions), enc_hook=str).decode()
    with Bar("starting", patience=0) as bar:

        def say(url: str, ready: Ready, notes: Notes) -> None:
            bar.close()
            for line in lacks(notes):
                tell(line)
            out = command_output()
            out.write(f"{ready.model} with policy {ready.policy}{chosen(ready)} at {url}\n")
            out.flush()

        def starting(what: Starting) -> None:
            bar.update(what.done, what.total, what.what)

        callbacks = ServerCallbacks(starting, say, tell_closing)
        served = serve(Path(model.model), http, [*ENGINE, options], callbacks)
    if served:
        say_where(model.trace, None)
    return 0


def tell_closing(answers: int) -> None:
    """Tell the user that the server is closing; do nothing if `answers` is 0.

    Args:
        answers: number of answers that the server still waits for.
    """
    if answers:
        tell(f"no more requests are taken; answers to come: {answers}; a second signal ends them at once")


def chosen(ready: Ready) -> str:
    """Return the words which say that the planner chose the server's policy, with its predicted rate.

    The result is empty if the user named the policy.
    """
    return planners_choice(
        ready.predicted, f" with {counted(ready.places * ready.sequences, 'request')} at once"
    )


def lacks(notes: Notes) -> list[str]:
    """Return the lines to print if the model has no tokenizer or no chat template; empty if it has both."""
    if not notes.has_tokenizer:
        return ["the model has no tokenizer: prompts and answers are the ids of tokens"]
    if not notes.has_template:
        return [
            "the model has no chat template: chats are given to it as plain text, a line for each message"
        ]
    return []
