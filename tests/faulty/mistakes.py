"""Policies with one mistake each. `#!` marks the line that must be named, and begins what must be said of it."""
from __future__ import annotations

import asyncio
import threading

COPY = {"weights": []}


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


class Routes(Streams):
    """The same, expert by expert; nothing is wrong with it either."""

    async def experts(self, step, i, j):
        for expert in await step.route(i, j):
            step.run_expert(i, expert, j)
        step.combine(i, j)


# ---------------------------------------------------------------- the plan


class NamesMemoriesAsTheMachineDoes(Streams):
    """A machine's own names of memories are no mistake."""

    def plan(self, plan):
        plan.place_kv("gpu")
        self.pool = plan.pool("gpu", "layers", 2 * len(plan.layout.layer(0)), plan.layout.pages)


class UnknownMemory(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.pool("vram", "more", 2, plan.layout.pages)  #! PolicyError: pool: 'vram' is no memory


class UnknownMemoryToKeepIn(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.keep(plan.layout.dense(0), "vram")  #! PolicyError: keep: 'vram' is no memory


class UnknownMemoryForKV(Streams):
    def plan(self, plan):
        plan.place_kv("vram")  #! PolicyError: place_kv: 'vram' is no memory


class UnknownReplacement(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.pool("accelerator", "more", 2, plan.layout.pages, "LRU")  #! PolicyError: pool: replacement is 'LRU'


class UnknownDiscipline(Streams):
    def plan(self, plan):
        plan.discipline = "fifo"  #! PolicyError: discipline is 'fifo'


class HalfASlot(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.pool("accelerator", "more", 2.5, plan.layout.pages)  #! PolicyError: pool: more has 2.5 slots


class FilledBeyondItsSlots(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        pages = plan.layout.layer(0)
        self.pool = plan.pool("accelerator", "layers", len(pages) - 1, pages, filled=pages)  #! PolicyError: pool: layers


class KeepsNumbers(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.keep([0, 1])  #! PolicyError: keep: 0 is no page


class KeepsOnePage(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.keep(plan.layout.pages[0])  #! PolicyError: keep: give a list of pages


class KeepsTwice(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        plan.keep(plan.layout.pages)
        plan.keep(plan.layout.dense(1))  #! PolicyError: keep: page L1 dense #0 stays in


class TooManySlots(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        self.pool = plan.pool("accelerator", "layers", 10**9, plan.layout.pages)  #! pool layers of 1,000,000,000 slots


class PlacesNoKV(Streams):
    def plan(self, plan):  #! PolicyError: the plan has no place for the KV cache
        self.pool = plan.pool("accelerator", "layers", 40, plan.layout.pages)


class PlacesKVTwice(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.place_kv("host")  #! PolicyError: place_kv: the KV cache of mb0 is the accelerator's already


class PlacesKVOfAMicroBatchThatIsNotThere(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator", [0, 7])  #! PolicyError: place_kv: there is no mb7


class PlansAsynchronously(Streams):
    async def plan(self, plan):  #! PolicyError: plan of PlansAsynchronously is `async def`
        super().plan(plan)


class PlansWithoutThePlan(Streams):
    def plan(self):  #! TypeError: PlansWithoutThePlan.plan() takes 1 positional argument but 2 were given
        pass


class StumblesInThePlan(Streams):
    def plan(self, plan):
        super().plan(plan)
        self.hot = COPY["experts"]  #! KeyError: 'experts'


class ChangesThePlan(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.layers = range(1)  #! PolicyError: layers of a Plan cannot be changed


class SplitsNodes(Streams):
    def plan(self, plan):
        super().plan(plan)
        plan.place_experts([[0, 1], [2, 3]])  #! PolicyError: place_experts: the placement is for 2 nodes, but there are 1


# ---------------------------------------------------------------- steps


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
            step.pre_attention(i + 1, j)  #! OutOfOrder: there are no weights of layer


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
        step.post_attention(i, j)  #! OutOfOrder: post_attention(L0, mb0) needs mb0 at


class OmitsEmbed(Streams):
    async def layer(self, step, i, j):
        step.pre_attention(i, j)  #! OutOfOrder: pre_attention(L0, mb0) needs mb0 at
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


# ---------------------------------------------------------------- pages


class BringsNothing(Streams):
    def bring(self, step, i):
        pass

    async def layer(self, step, i, j):
        step.embed(j)
        step.pre_attention(i, j)  #! NotResident: page L0 dense #0 is not in gpu


class BringsALayerTwice(Streams):
    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool)
        step.fetch(step.pages(i), self.pool)  #! PolicyError: page L0 dense #0 is already in gpu


class BringsNumbers(Streams):
    def bring(self, step, i):
        step.fetch([i], self.pool)  #! PolicyError: fetch: 0 is no page


class BringsOnePage(Streams):
    def bring(self, step, i):
        step.fetch(step.pages(i)[0], self.pool)  #! PolicyError: fetch: give a list of pages


class BringsToNoPool(Streams):
    def bring(self, step, i):
        step.fetch(step.pages(i), "accelerator")  #! PolicyError: fetch: 'accelerator' is no pool


class BringsNoPages(Streams):
    def bring(self, step, i):
        step.fetch([], self.pool)  #! PolicyError: fetch: no pages to move into pool layers


class BringsFromAPoolThatHasNothing(Streams):
    def plan(self, plan):
        super().plan(plan)
        self.pinned = plan.pool("pinned", "staging", 4, plan.layout.pages)

    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool, source=self.pinned)  #! NotResident: fetch: page L0 dense #0 is not in pool


class OverfillsItsPool(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        self.pool = plan.pool("accelerator", "layers", 1, plan.layout.pages)

    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool)  #! OverBudget: fetch:


class FillsAPoolThatReplacesNothing(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        self.pool = plan.pool("accelerator", "layers", len(plan.layout.layer(0)), plan.layout.pages, "none")

    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool)  #! OverBudget: pool layers in


class BringsExpertsToSlotsOfDensePages(Streams):
    def plan(self, plan):
        super().plan(plan)
        self.small = plan.pool("accelerator", "small", 8, [min(plan.layout.pages, key=lambda page: page.nbytes)])

    def bring(self, step, i):
        step.fetch([max(step.pages(i), key=lambda page: page.nbytes)], self.small)  #! PolicyError: fetch: page L0


class EvictsWhatIsNotThere(Streams):
    def bring(self, step, i):
        step.evict(step.pages(i), self.pool)  #! NotResident: evict: page L0 dense #0 is not in pool layers


class EvictsWhatStays(Streams):
    def plan(self, plan):
        plan.place_kv("accelerator")
        self.pool = plan.keep(plan.layout.pages)

    def bring(self, step, i):
        step.evict(step.pages(i), self.pool)  #! PolicyError: evict: page L0 dense #0


class CancelsHalfAFetch(Streams):
    def bring(self, step, i):
        step.fetch(step.pages(i), self.pool)
        step.cancel(step.pages(i)[:1], self.pool)  #! PolicyError: cancel: these pages are not what one fetch brings


# ---------------------------------------------------------------- Python


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
