"""A peer for tests: it answers, gives an error, hangs or ends, as a request says."""

from __future__ import annotations

import sys
import threading

from benchmarks.peers.protocol import Answer, Message, serve


def load() -> tuple[Answer, Message]:
    if sys.argv[1:] == ["unloadable"]:
        raise OSError("no such model")
    return answer, {"versions": {"fake": "1"}}


def answer(request: Message) -> Message:
    sys.stdout.write("a library's own words\n")  # must not be taken for an answer
    match request["setting"]["do"]:
        case "raise":
            raise ValueError("too many prompts")
        case "hang":
            threading.Event().wait()
        case "end":
            sys.exit("out of memory")
    return {"echo": request["number"]}


if __name__ == "__main__":
    serve(load)
