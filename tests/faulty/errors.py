"""Errors of Python, and lost control: one mistake in each policy. `#!` marks the line that must be named, and begins what must be said of it."""
from __future__ import annotations

import threading

from sound import Streams

COPY = {"weights": []}


class Stumbles(Streams):
    async def decode(self, step):
        hot = COPY["experts"]  #! KeyError: 'experts'
        await self.prefill(step)
        return hot


class StumblesDeepWithin(Streams):
    async def decode(self, step):
        await self.first(step)

    async def first(self, step):
        self.second(step.layers)

    def second(self, layers):
        return layers[99]  #! IndexError: range object index out of range


class DividesByZero(Streams):
    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool, urgent=1 / i > 2)  #! ZeroDivisionError: division by zero


class NeverReturnsFromItself(Streams):
    def bring(self, step, i):
        self.bring(step, i)  #! RecursionError: maximum recursion depth exceeded


class Leaves(Streams):
    async def decode(self, step):
        raise SystemExit(0)  #! PolicyError: the policy raised SystemExit(0)


class ChangesTheStep(Streams):
    async def decode(self, step):
        step.layers = step.layers[:2]  #! PolicyError: layers of a


class UsesAnOldStep(Streams):
    async def prefill(self, step):
        self.step = step
        await super().prefill(step)

    async def decode(self, step):
        self.step.embed(0)  #! PolicyError: embed: prefill step 0 is over


class UsesAnotherThread(Streams):
    async def decode(self, step):
        problems = []

        def work():
            try:
                step.embed(0)  #! PolicyError: embed: called on thread
            except Exception as error:
                problems.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        raise problems[0]


class SubmitsForEver(Streams):
    async def decode(self, step):
        while True:
            step.fetch(step.dense_pages(0), self.pool)  #! PolicyError:
            step.evict(step.dense_pages(0), self.pool)


class FailsInAGroup(Streams):
    async def decode(self, step):
        try:
            COPY["experts"]  #! KeyError: 'experts'
        except KeyError as error:
            raise ExceptionGroup("of the layers", [error])


class FailsTwiceInAGroup(Streams):
    async def decode(self, step):
        errors = []
        for name in ("experts", "router"):
            try:
                COPY[name]
            except KeyError as error:
                errors.append(error)
        raise ExceptionGroup("of the layers", errors)  #! ExceptionGroup: of the layers (2 sub-exceptions)
