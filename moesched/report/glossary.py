"""Makes the glossary of a report page, for people who read such a page for the first time."""

from __future__ import annotations

from moesched.report.markup import element, text

WORDS = {
    "lane": "A queue of tasks that run one after another: a processor's, or one direction of a link.",
    "prefill, decode step": "The prefill computes all prompts; each decode step then computes one token a request.",
    "micro-batch": "Requests that share a kernel.",
    "critical path": "The chain of tasks that determined the end of the run: each of them waited for the one before.",
    "bottleneck": "The part of the critical path whose relief would shorten the run most.",
    "data": "Cause of idle time: a task computed, or moved, what the next one reads.",
    "lane (as a cause)": "Cause of idle time: that task was in the queue of its own lane.",
    "budget": "Cause of idle time: no room, since the weights to overwrite were still in use.",
    "router": "Cause of idle time: the policy awaited the choice of experts.",
    "rank": "Cause of idle time: another rank came later to an exchange.",
    "policy, host": "Causes of idle time: the policy's own Python ran; the driver ran, or a thread woke up.",
    "finished": "Cause of idle time: the lane had no further task.",
    "pool": "Room in a memory that pages of weights share.",
    "hit, miss": "A use that found its page in the pool, or on its way there; a use that had to fetch it.",
    "wasted": "A page that was fetched, and left before anything read it.",
    "predicted, measured": "Times of a model of the machine, on a virtual clock; times of a run on the machine.",
    "roofline": "The FLOP/s that a processor allows at a number of FLOPs per byte: bandwidth or peak limits them.",
}


def glossary() -> str:
    """Return the HTML of the page's folded list of words with their meanings."""
    pairs = (
        element("div", element("dt", text(word)), element("dd", text(meaning)))
        for word, meaning in WORDS.items()
    )
    return element("details", element("summary", "Words"), element("dl", *pairs), id="glossary")
