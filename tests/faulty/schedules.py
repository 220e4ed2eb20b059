"""Schedules of a step: one mistake in each policy. `#!` marks the line that must be named, and begins what must be said of it."""
from __future__ import annotations

import asyncio

from sound import Routes, Streams


class NotAsync(Streams):
    def decode(self, step):  #! PolicyError: decode of NotAsync gave None, no coroutine: define it `async def`
        pass


class Yields(Streams):
    async def decode(self, step):  #! PolicyError: decode of Yields has a `yield`
        await self.prefill(step)
        yield step


class ForgetsToAwaitItsOwn(Streams):
    async def decode(self, step):
        self.prefill(step)  #! PolicyError: Streams.prefill was called and not awaited


class ForgetsToAwaitOneLayer(Streams):
    async def prefill(self, step):
        for i in step.layers:
            self.bring(step, i)
            for j in step.micro_batches:
                self.layer(step, i, j)  #! PolicyError: Streams.layer was called and not awaited


class ForgetsToAwaitTheRouter(Routes):
    async def experts(self, step, i, j):
        for expert in step.route(i, j):  #! TypeError: what route L0 mb0 returned is a handle
            step.run_expert(i, expert, j)


class ForgetsToAwaitTheRoutersItems(Routes):
    async def experts(self, step, i, j):
        for expert, _ in step.route(i, j).items():  #! AttributeError: 'Decision' object has no attribute 'items'
            step.run_expert(i, expert, j)


class ForgetsToAwaitTheRoutersCounts(Routes):
    async def experts(self, step, i, j):
        counts = step.route(i, j)
        if counts[0]:  #! TypeError: what route L0 mb0 returned is a handle
            step.run_expert(i, 0, j)


class RunsExpertsBeforeTheyAreKnown(Routes):
    async def experts(self, step, i, j):
        step.route(i, j)
        step.run_expert(i, 0, j)  #! OutOfOrder: run_expert: await route(0, 0) before its experts


class Sleeps(Streams):
    async def decode(self, step):
        await asyncio.sleep(0)  #! PolicyError: a policy may await the handles of its tasks only


class SleepsInThePrefill(Streams):
    async def prefill(self, step):
        await asyncio.sleep(1)  #! PolicyError: a policy may await the handles of its tasks only


class WaitsForAnEventInThePrefill(Streams):
    async def prefill(self, step):
        await asyncio.Event().wait()  #! PolicyError: a policy may await the handles of its tasks only


class FailsInALaterStep(Streams):
    async def decode(self, step):
        if step.index == 2:
            raise ValueError("no table")  #! ValueError: no table
        await self.prefill(step)


class WaitsForAQueue(Streams):
    async def decode(self, step):
        await asyncio.Queue().get()  #! PolicyError: a policy may await the handles of its tasks only


class SetsATimeout(Streams):
    async def decode(self, step):
        async with asyncio.timeout(60):  #! PolicyError: a policy may await the handles of its tasks only
            await self.prefill(step)


class ResumesTooEarly(Routes):
    async def experts(self, step, i, j):
        child = self.routed(step, i, j)
        child.send(None)
        child.send(None)

    async def routed(self, step, i, j):
        return await step.route(i, j)  #! PolicyError: <Decision


class AwaitsAList(Streams):
    async def decode(self, step):
        await [step.embed(j) for j in step.micro_batches]  #! TypeError: object list can't be used in 'await' expression


class AwaitsNothing(Streams):
    async def decode(self, step):
        await step.promote([], self.pool)  #! TypeError: object NoneType can't be used in 'await' expression


class AwaitsATaskOfItsOwn(Streams):
    async def decode(self, step):
        task = step.embed(0)
        await type(task)(task.lane, task.work, "embed", -1, 0, -1)  #! PolicyError: <Kernel


class SwapsArguments(Streams):
    async def experts(self, step, i, j):
        step.post_attention(j, i)  #! OutOfOrder: post_attention(L1, mb0) needs mb0 at


class MicroBatchTooFar(Streams):
    async def experts(self, step, i, j):
        step.post_attention(i, j + 5)  #! OutOfOrder: post_attention: there is no mb5


class NegativeMicroBatch(Streams):
    async def experts(self, step, i, j):
        step.post_attention(i, j - 1)  #! OutOfOrder: post_attention: there is no mb-1


class MicroBatchByName(Streams):
    async def experts(self, step, i, j):
        step.post_attention(i, f"mb{j}")  #! OutOfOrder: post_attention: there is no micro-batch 'mb0'


class LayerTooFar(Streams):
    async def layer(self, step, i, j):
        await super().layer(step, i, j)
        if i == step.layers[-1]:
            step.pre_attention(i + 1, j)  #! OutOfOrder: pre_attention: the model has no L


class LayerByName(Streams):
    async def experts(self, step, i, j):
        step.post_attention(f"L{i}", j)  #! OutOfOrder: post_attention: the model has no layer 'L0'


class MissesArgument(Streams):
    async def experts(self, step, i, j):
        step.post_attention(i)  #! TypeError: Step.post_attention() missing 1 required positional argument: 'micro_batch'


class TypingMistake(Streams):
    async def experts(self, step, i, j):
        step.post_atention(i, j)  #! AttributeError: 'Step' object has no attribute 'post_atention': did you mean 'post_attention'?


class AttendsTooEarly(Streams):
    async def layer(self, step, i, j):
        if i == 0:
            step.embed(j)
        step.attention(i, j)  #! OutOfOrder: attention(L0, mb0) needs mb0 at


class OmitsAttention(Streams):
    async def layer(self, step, i, j):
        if i == 0:
            step.embed(j)
        step.pre_attention(i, j)
        step.post_attention(i, j)  #! OutOfOrder: post_attention(L0, mb0) needs mb0 at step 0 L0 attended, but it is at step 0 L0 qkv: attention(0, 0) or offload_qkv(0, 0) comes next


class OmitsEmbed(Streams):
    async def layer(self, step, i, j):
        step.pre_attention(i, j)  #! OutOfOrder: pre_attention(L0, mb0) needs mb0 at step 0 L0 input, but it is at the start: embed(0) comes next
        step.attention(i, j)
        step.post_attention(i, j)


class SamplesTooEarly(Streams):
    async def experts(self, step, i, j):
        await super().experts(step, i, j)
        step.sample(j)  #! OutOfOrder: sample(mb0) needs mb0 at


class SamplesTwice(Streams):
    async def prefill(self, step):
        await super().prefill(step)
        step.sample(0)  #! OutOfOrder: sample(mb0) needs mb0 at


class OmitsSample(Streams):
    async def decode(self, step):  #! OutOfOrder: decode step 1 ended before mb0 was sampled
        for i in step.layers:
            self.bring(step, i)
            for j in step.micro_batches:
                await self.layer(step, i, j)


class OmitsAMicroBatch(Streams):
    async def prefill(self, step):  #! OutOfOrder: prefill step 0 ended before mb1 was sampled
        for i in step.layers:
            self.bring(step, i)
            await self.layer(step, i, 0)
        step.sample(0)


class OmitsAnExpert(Routes):
    async def experts(self, step, i, j):
        first, *_ = await step.route(i, j)
        step.run_expert(i, first, j)
        step.combine(i, j)  #! OutOfOrder: combine: L0 mb0 was routed to E


class RunsAnExpertTwice(Routes):
    async def experts(self, step, i, j):
        for expert in await step.route(i, j):
            step.run_expert(i, expert, j)
        step.run_expert(i, expert, j)  #! OutOfOrder: run_expert: L0 mb0 has no tokens for E


class RunsExpertsThatHaveNoTokens(Routes):
    async def experts(self, step, i, j):
        await step.route(i, j)
        for expert in range(99):
            step.run_expert(i, expert, j)  #! OutOfOrder: run_expert: L0 mb0 has no tokens for E


class RunsExpertsOnAnUnknownProcessor(Routes):
    async def experts(self, step, i, j):
        for expert in await step.route(i, j):
            step.run_expert(i, expert, j, at="tpu")  #! PolicyError: run_expert: no processor is 'tpu'


class RunsExpertsOnAnUnpreparedHost(Routes):
    async def experts(self, step, i, j):
        for expert in await step.route(i, j):
            step.run_expert(i, expert, j, at="host")  #! OutOfOrder: run_expert: L0 mb0 is not on the host


class ChangesWhatTheRouterSaid(Routes):
    async def experts(self, step, i, j):
        routed = await step.route(i, j)
        routed.pop(0, None)  #! PolicyError: what a plan or a task gives is read-only
