"""Policies that the faulty ones derive from; nothing is wrong with them."""
from __future__ import annotations

import numpy as np


class Streams:
    """Streams whole layers through a pool of two; nothing is wrong with it."""

    def plan(self, plan):
        plan.place_kv("accelerator")
        layers = [list(plan.layout.layer(i)) for i in plan.layers]
        self.pool = plan.pool("accelerator", "layers", 2 * max(map(len, layers)), plan.layout.pages)

    async def prefill(self, step):
        for i in step.layers:
            self.bring(step, i)
            for j in step.micro_batches:
                await self.layer(step, i, j)
        for j in step.micro_batches:
            step.sample(j)

    async def decode(self, step):
        await self.prefill(step)

    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool)

    async def layer(self, step, i, j):
        if i == 0:
            step.embed(j)
        step.pre_attention(i, j)
        step.attention(i, j)
        await self.experts(step, i, j)

    async def experts(self, step, i, j):
        step.post_attention(i, j)


class Prints(Streams):
    """Says what it does, which is no mistake."""

    async def decode(self, step):
        print("decoding", step.index)
        await self.prefill(step)


class BringsArraysAndGenerators(Streams):
    """Brings a layer's pages as an array of numpy, and as a generator; nothing is wrong with it either."""

    def bring(self, step, i):
        pages = step.pages(i)
        step.fetch(np.array(pages) if i % 2 else (page for page in pages), self.pool)


class Routes(Streams):
    """The same, expert by expert; nothing is wrong with it either."""

    async def experts(self, step, i, j):
        for expert in await step.route(i, j):
            step.run_expert(i, expert, j)
        step.combine(i, j)


class CleansUp(Routes):
    """Ends a layer in a `finally` that awaits, which is no mistake."""

    async def experts(self, step, i, j):
        routed = step.route(i, j)
        try:
            await routed
        finally:
            for expert in await routed:
                step.run_expert(i, expert, j)
            step.combine(i, j)
