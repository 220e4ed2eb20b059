"""The operations that `moesched calibrate` times on the torch device: kernels and file reads, on made-up data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path

import torch

from moesched.models.stored_formats import STORED_FORMATS
from moesched.models.tensor_sizes import COLUMNS

from ..kernels.samples import coded_block
from ..kernels.timed_products import TimedProducts
from ..products.crossover import forget
from ..shared.arena import Arena, aligned_bytes, round_down
from ..shared.coded import CodedRows
from ..shared.direct_file import BlockRead, DirectFile, parts_of
from ..shared.page_reader import DTYPES
from .disk_reads import DiskReads

Call = Callable[[], object]

COLD_BYTES = 96 << 20  # used between two uses of the same bytes, so that no cache still holds them
MOST_COPIES = 128


class TorchProbe:
    """Makes functions for timing: most methods return one that runs an operation of the torch device on the CPU.

    Successive products use several copies of the weights in turn. So the weights are in no cache, as in a model.

    Args:
        threads: number of threads of the kernels.

    Attributes:
        dtypes: the dtypes that this machine can compute in.
    """

    dtypes = ("bfloat16", "float32")

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._readers = DiskReads()
        self._files: dict[Path, DirectFile] = {}
        forget()
        self._products = TimedProducts(threads)

    def close(self) -> None:
        """End the threads, and close the files."""
        self._products.close()
        self._readers.close()
        for file in self._files.values():
            file.close()

    def ready(self) -> AbstractContextManager[object]:
        """Return the context manager that a thread must enter before it calls the operations."""
        return torch.inference_mode()

    def packs(self, dtype: str) -> bool:
        """Test whether the device packs resident weights of this dtype in oneDNN's order."""
        return dtype == "bfloat16" and self._products.packing_pays

    def product(
        self, dtype: str, outputs: int, inputs: int, *, stored: str = "", packed: bool = False
    ) -> Callable[[int], Call]:
        """Make matrices of shape (outputs, inputs), to time products of rows with them.

        Args:
            dtype: dtype of the rows, and of matrices that are not quantised.
            stored: quantised storage format of the matrices, `COLUMNS` for matrices stored transposed, or "" for row by
                row.
            packed: True if torch multiplies by packed matrices, which must be stored row by row. Native kernels, which
                multiply few rows in bfloat16, always get plain matrices.

        Returns:
            a function that takes a number of rows, and returns a function that multiplies as many rows by one matrix.
        """
        kind = DTYPES[dtype]
        if stored == COLUMNS:
            row_1N = torch.full((1, outputs), 0.01, dtype=kind)
            return self._products.of_columns([matrix_DN.T for matrix_DN in _cold_matrices(row_1N, inputs)])
        if stored:
            row = coded_block(torch.full((1, inputs), 0.01), STORED_FORMATS[stored])
            coded = [CodedRows(raw_NB, row.format) for raw_NB in _cold_matrices(row.raw_NB, outputs)]
            return self._products.of_coded_rows(coded, inputs, kind)
        row_1D = torch.full((1, inputs), 0.01, dtype=kind)
        return self._products.of_rows(_cold_matrices(row_1D, outputs), packed=packed)

    def read(self, path: Path, nbytes: int, pieces: int) -> Call:
        """Return a function that reads pieces of a file, all at the same time, as the device reads pages into slots.

        Args:
            nbytes: number of bytes of each piece.
            pieces: number of pieces.
        """
        if path not in self._files:
            self._files[path] = DirectFile(path)
        file = self._files[path]
        pool = Arena(pieces, nbytes)  # in huge pages, which small pieces of their own would not get
        slots = [pool.slot(index).numpy().data for index in range(pieces)]
        offsets = cycle(range(0, round_down(path.stat().st_size - nbytes) + 1, nbytes))
        return lambda: self._readers.run(
            [BlockRead(file, *part) for slot in slots for part in parts_of(slot, next(offsets), nbytes)]
        )

    def stream(self, nbytes: int) -> Call:
        """Return a function that reads `nbytes` bytes of memory once."""
        numbers = torch.ones(nbytes // 8, dtype=torch.float64)
        return lambda: numbers.sum()

    def copy(self, nbytes: int) -> Call:
        """Return a function that copies `nbytes` bytes between parts of memory that are in no cache."""
        sources = cycle([torch.ones(nbytes, dtype=torch.uint8) for _ in range(_copies(2 * nbytes))])
        targets = cycle([torch.ones(nbytes, dtype=torch.uint8) for _ in range(_copies(2 * nbytes))])
        return lambda: next(targets).copy_(next(sources))


def _cold_matrices(row_1D: torch.Tensor, outputs: int) -> list[torch.Tensor]:
    """Make several equal matrices, together too large for the caches, in huge pages like a model's weights.

    Args:
        row_1D: the row that all rows of the matrices are copies of.
        outputs: number of rows of each matrix.
    """
    nbytes = outputs * row_1D.nbytes
    shape = outputs, row_1D.shape[1]
    return [
        aligned_bytes(nbytes).view(row_1D.dtype).view(shape).copy_(row_1D) for _ in range(_copies(nbytes))
    ]


def _copies(nbytes: int) -> int:
    return max(2, min(MOST_COPIES, -(-COLD_BYTES // nbytes)))
