"""Stories of an engine's tasks, a sentence for each call and each check."""

from __future__ import annotations

from typing import Any

from engine_script import Script
from moesched.errors import TaskCancelled
from moesched.stream_edges import before_on_device
from moesched.tasks import DEMAND, IDLE, PREFETCH

URGENCIES = {"demand": DEMAND, "prefetch": PREFETCH, "idle": IDLE}


def follow(story: str) -> None:
    """Have an engine do what a story says, and check what the story says of its tasks.

    story: sentences between semicolons. `link: fetch writes w` submits a task to a lane, after `reads`, `writes`,
        `after` or an urgency; `started`, `run` and `is` check. Lanes are ready-first where no sentence such as
        `gpu in order` or `gpu stream` says otherwise.
    """
    sentences = [each.split() for each in story.split(";")]
    lanes: dict[str, Any] = {words[0][:-1]: "ready_first" for words in sentences if words[0].endswith(":")}
    for words in sentences:
        if words[1:] == ["in", "order"]:
            lanes[words[0]] = "in_order"
        elif words[1:] == ["stream"]:
            lanes[words[0]] = "stream"
    script = Script(**lanes)
    for words in sentences:
        _follow(script, words)


def _follow(script: Script, words: list[str]) -> None:
    match words:
        case [_, "in", "order"] | [_, "stream"]:
            pass
        case [lane, name, *more] if lane.endswith(":"):
            _submit(script, lane[:-1], name, more)
        case ["join", blocks, "into", block]:
            script.engine.join(script.of(blocks), script.of(block))
        case ["end", name]:
            script.finish(name)
        case ["fail", name]:
            script.fail(name)
        case ["issue", name]:
            script.issue(name)
        case ["cancel", name]:
            assert script.cancel(name)
        case ["cannot", "cancel", name]:
            assert not script.cancel(name)
        case ["lift", name]:
            script.engine.promote(script.tasks[name], DEMAND)
        case ["halt"]:
            script.engine.halt(TaskCancelled("stopped"))
        case ["over"]:
            script.engine.check_over()
        case ["started", *names]:
            assert script.started() == names
        case ["run", *names]:
            assert script.run() == names
        case [name, "is", state]:
            assert script.state(name) == state
        case [name, "waits", "for", *others]:
            assert [*before_on_device(script.tasks[name])] == [script.tasks[each] for each in others]
        case _:
            raise ValueError(" ".join(words))


def _submit(script: Script, lane: str, name: str, more: list[str]) -> None:
    given = dict(zip(more[::2], more[1::2], strict=False))
    after = [given["after"]] if "after" in given else []
    urgency = URGENCIES.get(more[-1] if more else "", DEMAND)
    script.submit(name, lane, given.get("reads", ""), given.get("writes", ""), after=after, urgency=urgency)
