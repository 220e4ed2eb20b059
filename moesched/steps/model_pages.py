"""Names of pages in messages, and checks that an argument holds pages of the run's model."""

from __future__ import annotations

from collections.abc import Iterable
from sys import maxsize

from moesched.errors import PolicyError
from moesched.models.layout import Page, WeightLayout


def describe(page: Page) -> str:
    """Return a page as text for messages: layer, expert (or "dense"), and the page's index there, as "L3 E5 #0"."""
    part = "dense" if page.expert < 0 else f"E{page.expert}"
    return f"L{page.layer} {part} #{page.index}"


def describe_all(pages: Iterable[Page]) -> str:
    """Return the pages as text for messages, by layer and expert, such as "L3 dense #0-1, E5 #0"."""
    indices: dict[tuple[int, int], list[int]] = {}
    for page in pages:
        indices.setdefault((page.layer, page.expert), []).append(page.index)
    layers: dict[int, list[str]] = {}
    for (layer, expert), found in indices.items():
        part = "dense" if expert < 0 else f"E{expert}"
        layers.setdefault(layer, []).append(f"{part} #{spans_of(found)}")
    return "; ".join(f"L{layer} {', '.join(parts)}" for layer, parts in layers.items())


def spans_of(numbers: Iterable[int]) -> str:
    """Return numbers as text in ascending order, with neighbours as a span: "0-3,5"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def require_list(verb: str, pages: Iterable[Page]) -> tuple[Page, ...]:
    """Check that `pages` is a list or another iterable of pages, and return it as a tuple.

    verb: the calling verb's name, for the message.

    Raises:
        PolicyError: `pages` is a single page or no iterable, or holds something else.
    """
    if isinstance(pages, Page):
        raise PolicyError(f"{verb}: give a list of pages, such as [{describe(pages)}], not one page")
    if not isinstance(pages, Iterable):
        raise PolicyError(f"{verb}: {pages!r} is no list of pages: take pages from plan.layout or step")
    listed = tuple(pages)
    for page in listed:
        if not isinstance(page, Page):
            raise PolicyError(f"{verb}: {page!r} is no page: take pages from plan.layout or step")
    return listed


def require_pages(verb: str, pages: Iterable[Page], layout: WeightLayout, most_bytes: int = maxsize) -> int:
    """Check that pages belong to a model, and return the sum of their bytes.

    Equal ids do not suffice: a page of another layout may have the same id, but hold other bytes.

    Args:
        verb: the calling verb's name, for messages.
        layout: the model's weights, cut into pages.
        most_bytes: the largest size that a page may have, in bytes.

    Raises:
        PolicyError: a page belongs to another model or layout, or has more than `most_bytes` bytes.
    """
    own, nbytes = layout.pages, 0
    try:
        for page in pages:
            ours = own[page.id]
            if page is not ours and page != ours:
                raise _foreign(verb, page)
            if page.nbytes > most_bytes:
                raise PolicyError(
                    f"{verb}: page {describe(page)} has {page.nbytes:,} bytes, and the largest page that the pool was "
                    f"declared for has {most_bytes:,}: name this one, too, in plan.pool"
                )
            nbytes += page.nbytes
    except IndexError:
        raise _foreign(verb, page) from None
    except (AttributeError, TypeError):
        require_list(verb, pages)
        raise
    return nbytes


def _foreign(verb: str, page: Page) -> PolicyError:
    return PolicyError(
        f"{verb}: page {describe(page)} belongs to another model or layout: take pages from plan.layout or step"
    )
