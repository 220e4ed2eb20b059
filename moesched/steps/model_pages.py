"""Pages of a model, as messages name them, and the check that pages are those of a model."""

from __future__ import annotations

from collections.abc import Iterable

from moesched.errors import PolicyError
from moesched.models.layout import Page, WeightLayout


def describe(page: Page) -> str:
    """A page in words: its layer, its expert or the dense part, and its index there."""
    part = "dense" if page.expert < 0 else f"E{page.expert}"
    return f"L{page.layer} {part} #{page.index}"


def require_pages(verb: str, pages: Iterable[Page], layout: WeightLayout) -> int:
    """Check that pages belong to a model, and return the sum of their bytes.

    A page of another layout has other bytes under the same number.

    Raises:
        PolicyError: one of them does not.
    """
    own, nbytes = layout.pages, 0
    for page in pages:
        if not 0 <= page.id < len(own) or (page is not own[page.id] and page != own[page.id]):
            raise PolicyError(
                f"{verb}: page {describe(page)} belongs to another model or layout: take pages from plan.layout or step"
            )
        nbytes += page.nbytes
    return nbytes
