"""Makes the labels in pictures of timelines: short names of tasks, and the width of texts."""

from __future__ import annotations

import re
from functools import cache

from moesched.steps.model_pages import spans_of
from moesched.system.plain_text import plain_text
from moesched.trace.recording import TaskInfo

LABEL_POINTS = 5.5
POINTS_PER_INCH = 72.0
LONGEST_TEXT = 120
INK = "#000000"


def names_of(task: TaskInfo) -> list[str]:
    """Return the texts that may label a task in a picture, the longest first."""
    place = [
        f"{letter}{number}"
        for letter, number in (("L", task.layer), ("E", task.expert), ("mb", task.micro_batch))
        if number >= 0
    ]
    short = [f"E{task.expert}"] if task.expert >= 0 else place[-1:]
    if task.page_names:
        pages = _without_indices(task.page_names)
        several = pages != " ".join(place)
        place, short = [pages], [f"L{task.layer}"] if several else short
    # Colour and lane tell the verb of transfers and experts, but not which one it is.
    names = [] if task.page_names else [task.label]
    names += [] if task.page_names or task.expert >= 0 else [task.verb]
    names += [" ".join([task.verb, *place]), " ".join([task.verb, *short]), " ".join(place), *short]
    return sorted(dict.fromkeys(drawable(name) for name in names if name), key=label_inches, reverse=True)


def drawable(text: str) -> str:
    """Make a text safe to draw with matplotlib: on one line, shortened, and not read as a formula."""
    return " ".join(plain_text(text).split())[:LONGEST_TEXT].replace("$", r"\$")


def _without_indices(page_names: str) -> str:
    """Shorten the names of pages to experts: "L3 dense, E4-6" for "L3 dense #0, E4 #2, E5 #0-2, E6 #0-2"."""
    layers = []
    for layer in page_names.split("; "):
        name, _, parts = layer.partition(" ")
        experts = [int(number) for number in re.findall(r"E(\d{1,9})", parts)]
        dense = ["dense"] if "dense" in parts else []
        layers.append(f"{name} {', '.join([*dense, *([f'E{spans_of(experts)}'] if experts else [])])}")
    return "; ".join(layers)


def label_inches(text: str) -> float:
    """Return the width of the label `text` in a picture of a timeline, in inches."""
    return inches(text, LABEL_POINTS)


@cache
def inches(text: str, points: float) -> float:
    """Return the width, in inches, of a text in a font of `points` points."""
    from matplotlib.textpath import TextPath

    if not text:
        return 0.0
    width: float = TextPath((0, 0), text, size=points).get_extents().width
    return width / POINTS_PER_INCH


@cache
def ink_on(colour: str) -> str:
    """Return black or white, whichever has more contrast on a background colour (WCAG 2.1, relative luminance)."""
    from matplotlib.colors import to_rgb

    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else INK
