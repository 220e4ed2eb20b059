"""Layout of a model's weights in pages, the units in which weights move between memories.

A page has rows of tensors: of one expert's tensors, or of those tensors of a layer that every token needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, get_args

import msgspec
from msgspec.structs import force_setattr

from moesched.errors import BadInput, PolicyError
from moesched.models.config import DType, ModelConfig
from moesched.models.tensor_shapes import Shape
from moesched.models.tensors import dense_shapes, expert_shapes, global_shapes

EXTENT_ALIGNMENT = 64  # bytes: a cache line, which also suits vector loads
DISK_BLOCK = 4096  # bytes: direct reads from disk are in multiples of this
LARGEST_DEFAULT_PAGE = 64 << 20  # bytes
KERNEL_ROWS = 128
"""Rows that kernels of GPUs take at a time; products with an odd number of rows take several times as long."""
PART_MULTIPLES = (KERNEL_ROWS, 32, 16, 8, 4, 2, 1)
"""When a matrix is cut, its parts' rows are a multiple of the first of these numbers of rows that fits into a page."""
DENSE = -1


class Extent(msgspec.Struct, frozen=True):
    """A range of rows of one tensor within a page.

    Attributes:
        tensor: canonical name of the tensor.
        rows: (first row, row after the last one).
        offset: bytes from the start of the page.
        nbytes: bytes of these rows.
    """

    tensor: str
    rows: tuple[int, int]
    offset: int
    nbytes: int


class Page(msgspec.Struct, frozen=True):
    """A unit of transfer: rows of one expert's tensors, or of those tensors of a layer that every token needs.

    Attributes:
        id: position among all pages of the model.
        expert: number of the expert in its layer; -1 for weights that every token needs.
        index: position among the pages of this expert, or of the layer's weights that every token needs.
        extents: the rows of tensors in the page.
        nbytes: bytes up to the end of the last extent.
        room: the most bytes that the page takes in a slot. Files are read in whole disk blocks, so each extent may need
            up to two blocks more than its own bytes, depending on where its tensor lies in the file.
    """

    id: int
    layer: int
    expert: int
    index: int
    extents: tuple[Extent, ...]
    nbytes: int
    room: int = 0

    def __post_init__(self) -> None:
        blocks = -(-self.nbytes // DISK_BLOCK) + 2 * len(self.extents)
        force_setattr(self, "room", blocks * DISK_BLOCK)

    def __repr__(self) -> str:
        part = "dense" if self.expert < 0 else f"E{self.expert}"
        return f"<Page L{self.layer} {part} #{self.index}: {self.nbytes:,} bytes>"


bytes_of: Callable[[Page], int] = attrgetter("nbytes")
"""Function that returns the bytes of a page; it runs in C (`attrgetter`), since planning calls it for all pages."""
room_for: Callable[[Page], int] = attrgetter("room")
"""Function that returns the bytes that a page may take in a slot, `Page.room`; like `bytes_of`, it runs in C."""


class WeightLayout(msgspec.Struct, frozen=True):
    """All pages of a model, in the order of their ids: layer by layer, first the dense part, then expert by expert.

    The dense part of a layer has the weights that every token needs.

    Attributes:
        pages: all pages.
        globals_bytes: bytes of the embedding, final norm and LM head. They are not cut into pages, since every step
            needs them.
        layer_starts: for each layer, the id of its first page; after these, the number of all pages.
        dense_pages: for each layer, the number of pages of its dense part.
        pages_per_expert: for each layer, the number of pages of one expert; 0 in a layer without experts.
    """

    config: ModelConfig
    dtype: str
    page_bytes: int
    pages: tuple[Page, ...]
    globals_bytes: int
    layer_starts: tuple[int, ...]
    dense_pages: tuple[int, ...]
    pages_per_expert: tuple[int, ...]

    def layer(self, layer: int) -> tuple[Page, ...]:
        """Return all pages of a layer; raises PolicyError if there is no such layer."""
        self._require("layer", layer)
        return self.pages[self.layer_starts[layer] : self.layer_starts[layer + 1]]

    def dense(self, layer: int) -> tuple[Page, ...]:
        """Return the pages of a layer's dense part: norms, q, k, v, o, router and shared experts.

        The result is empty for a number beyond the last layer.
        """
        if layer not in range(self.config.layers):
            return ()
        start = self.layer_starts[layer]
        return self.pages[start : start + self.dense_pages[layer]]

    def expert(self, layer: int, expert: int) -> tuple[Page, ...]:
        """Return the pages of one expert; empty for an unknown expert. Raises PolicyError for an unknown layer."""
        self._require("expert", layer)
        if expert < 0:  # it would be counted back into the dense part
            return ()
        count = self.pages_per_expert[layer]
        start = self.layer_starts[layer] + self.dense_pages[layer] + expert * count
        return self.pages[start : min(start + count, self.layer_starts[layer + 1])]

    def experts_of(self, layer: int) -> range:
        """Return the numbers of a layer's experts; empty if it has none. Raises PolicyError for an unknown layer."""
        self._require("experts_of", layer)
        return range(self.config.layer(layer).feed_forward.experts)

    @property
    def an_expert(self) -> tuple[Page, ...]:
        """The pages of an expert with the most pages; in layers with other storage formats, experts may have fewer."""
        layer = max(range(self.config.layers), key=self.pages_per_expert.__getitem__)
        return self.expert(layer, 0)

    def _require(self, method: str, layer: object) -> None:
        if layer not in range(self.config.layers):
            raise PolicyError(
                f"layout.{method}: there is no L{layer}: layers go from 0 to {self.config.layers - 1}"
            )


def weight_layout(
    config: ModelConfig, dtype: str | None = None, page_bytes: int | None = None
) -> WeightLayout:
    """Cut the model's weights into pages of at most `page_bytes` bytes.

    Tensors follow each other in a fixed order. A tensor that does not fit into the rest of a page begins the next page.
    A matrix larger than a page is cut into equal parts, of which a page has at most one. The layout depends on
    the arguments alone, and so do the blocks of rows that kernels compute.

    Args:
        dtype: dtype of the weights in memory; None for the model's own.
        page_bytes: the most bytes of a page. By default, the largest expert is one page if it has at most 64 MiB.
            A larger expert is cut into pages of at most 64 MiB, whose size is chosen to leave the least room empty in
            the slots that hold the expert.

    Raises:
        BadInput: the dtype is unknown, or a page is too small for a row.
    """
    dtype = config.dtype if dtype is None else dtype
    if dtype not in get_args(DType):
        raise BadInput(f"dtype {dtype!r} is unknown; choose one of {', '.join(get_args(DType))}")

    def tensors(shapes: dict[str, Shape]) -> list[_Tensor]:
        return [_tensor(config, dtype, name, shape) for name, shape in shapes.items()]

    if page_bytes is None:
        page_bytes = _default_page_bytes(max((tensors(shapes) for shapes in _experts(config)), key=_nbytes))
    pages: list[Page] = []
    starts, dense_pages, per_expert = [0], [], []
    for layer in range(config.layers):
        for expert in range(DENSE, config.layer(layer).feed_forward.experts):
            is_dense = expert == DENSE
            shapes = dense_shapes(config, layer) if is_dense else expert_shapes(config, layer, expert)
            before = len(pages)
            for index, extents in enumerate(_cut(tensors(shapes), page_bytes)):
                pages.append(Page(len(pages), layer, expert, index, tuple(extents), _end(extents)))
            if is_dense:
                dense_pages.append(len(pages) - before)
        per_expert.append(len(pages) - before if config.layer(layer).feed_forward.experts else 0)
        starts.append(len(pages))
    return WeightLayout(
        config=config,
        dtype=dtype,
        page_bytes=page_bytes,
        pages=tuple(pages),
        globals_bytes=sum(tensor.nbytes for tensor in tensors(global_shapes(config))),
        layer_starts=tuple(starts),
        dense_pages=tuple(dense_pages),
        pages_per_expert=tuple(per_expert),
    )


def _experts(config: ModelConfig) -> Iterator[dict[str, Shape]]:
    """Yield the shapes of one expert's tensors, by name, for each kind of layer, the last layer's kind first."""
    kinds = {layer: number for number, layer in enumerate(config.pattern)}
    return (expert_shapes(config, number, 0) for number in sorted(kinds.values(), reverse=True))


def _nbytes(tensors: Iterable[_Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class _Tensor(NamedTuple):
    """A tensor to cut into pages.

    Attributes:
        name: canonical name of the tensor.
        rows: number of rows; of a vector, number of elements.
        row_bytes: bytes of a row.
        is_vector: whether the tensor is a vector, which is never cut.
    """

    name: str
    rows: int
    row_bytes: int
    is_vector: bool

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


def _tensor(config: ModelConfig, dtype: str, name: str, shape: Shape) -> _Tensor:
    row = round(math.prod(shape[1:]) * config.tensor_bytes(name, shape, dtype))
    return _Tensor(name, shape[0], row, len(shape) == 1)


def _default_page_bytes(tensors: Sequence[_Tensor]) -> int:
    expert = 0
    for tensor in tensors:
        expert = _round_up(expert, EXTENT_ALIGNMENT) + tensor.nbytes
    if expert <= LARGEST_DEFAULT_PAGE:
        return expert
    sizes = {_end(extents) for extents in _cut(tensors, LARGEST_DEFAULT_PAGE)}
    # All slots have room for the largest page, so the best size is the one that leaves the least room empty.
    return min(
        (size for size in sizes if 2 * size >= max(sizes)),
        key=lambda size: (size * len(_cut(tensors, size)), -size),
    )


def _cut(tensors: Sequence[_Tensor], page_bytes: int) -> list[list[Extent]]:
    """Cut tensors into pages; return the extents of each page: whole tensors, and at most one part of a matrix."""
    pages: list[list[Extent]] = [[]]
    has_part = False
    for tensor in tensors:
        rows = _rows_of_a_part(tensor, page_bytes)
        is_part = rows < tensor.rows
        for start in range(0, tensor.rows, rows):
            stop = min(start + rows, tensor.rows)
            nbytes = (stop - start) * tensor.row_bytes
            offset = _round_up(_end(pages[-1]), EXTENT_ALIGNMENT)
            if offset + nbytes > page_bytes or (is_part and has_part):
                pages.append([])
                offset, has_part = 0, False
            pages[-1].append(Extent(tensor.name, (start, stop), offset, nbytes))
            has_part = has_part or is_part
    return pages


def _rows_of_a_part(tensor: _Tensor, page_bytes: int) -> int:
    """Return the rows of each part of a tensor, cut into the fewest parts that fit a page; the last may have fewer."""
    if tensor.nbytes <= page_bytes:
        return tensor.rows
    most = page_bytes // tensor.row_bytes
    if tensor.is_vector or not most:
        row_bytes = tensor.nbytes if tensor.is_vector else tensor.row_bytes
        what = f"a page of {page_bytes:,} bytes does not hold a row of {tensor.name}"
        raise BadInput(f"{what}; give at least {row_bytes:,}")
    multiple = next(rows for rows in PART_MULTIPLES if rows <= most)
    parts = -(-tensor.rows // _round_down(most, multiple))
    return _round_up(-(-tensor.rows // parts), multiple)


def _end(extents: Sequence[Extent]) -> int:
    return extents[-1].offset + extents[-1].nbytes if extents else 0


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _round_down(number: int, multiple: int) -> int:
    return number // multiple * multiple
