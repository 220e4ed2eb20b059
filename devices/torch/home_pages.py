"""Pages at home in the host's memory, where the accelerator has a memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moesched.models.layout import Page
from moesched.steps.plan import Plan

from ..products.linear import Tensor
from ..shared.arena import aligned_bytes
from ..shared.page_reader import PageReader


class HomePages:
    """The bytes of pages in the host's memory: pages that stay from one batch to the next are read once."""

    def __init__(self, reader: PageReader) -> None:
        self._reader = reader
        self._bytes: dict[int, Tensor] = {}

    def __getitem__(self, page: Page) -> Tensor:
        return self._bytes[page.id]

    def get(self, page: Page) -> Tensor | None:
        """The bytes of a page; None where it is not here."""
        return self._bytes.get(page.id)

    def begin(self, plan: Plan) -> None:
        """Free pages that are not at home in this plan, and read those at home that are not in memory yet."""
        self.retain(pages := _at_home(plan))
        self._bytes |= {
            page.id: read_page(self._reader, page) for page in pages if page.id not in self._bytes
        }

    def retain(self, pages: Iterable[Page]) -> None:
        """Free all pages but these."""
        self._bytes = {page.id: self[page] for page in pages if page.id in self._bytes}


def read_page(reader: PageReader, page: Page) -> Tensor:
    """The bytes of a page, in memory of its own."""
    memory = aligned_bytes(reader.bytes_in_slot(page))
    reader.read(page, memory)
    return memory


def _at_home(plan: Plan) -> Sequence[Page]:
    """All pages that stream where weights live in the host's memory, else those that it keeps."""
    fast, host = plan.memory("accelerator"), plan.memory("host")
    if plan.weights.home is not None:
        return plan.weights.home.pages()
    if plan.machine.roles.weights == host.name:
        staying = {page.id for pool in plan.weights.resident if pool.memory is fast for page in pool.pages()}
        return [page for page in plan.nodes.pages(plan.layout) if page.id not in staying]
    return [page for pool in plan.weights.resident if pool.memory is host for page in pool.pages()]
