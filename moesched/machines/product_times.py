"""Interpolates measured times of matrix products, and derives the costs of coded (quantised) weights."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from moesched.machines.machine import CostPoint
from moesched.machines.surfaces import Surface
from moesched.models.config import ITEM_BYTES
from moesched.models.stored_formats import STORED_FORMATS, nearest_by_bits
from moesched.models.tensor_sizes import COLUMNS
from moesched.work import WorkPart

PRODUCT, RESIDENT_PRODUCT = "product", "resident product"
RESIDENT = "resident "
"""Prefix of the names of operations on weights that stay in memory."""


class ProductTimes:
    """Times of matrix products on a processor, interpolated between the measured sizes of matrices and numbers of rows.

    Args:
        points: costs measured on one processor; points of other operations are ignored.
    """

    def __init__(self, points: Iterable[CostPoint]) -> None:
        found: dict[tuple[str, str, str], list[CostPoint]] = {}
        for each in points:
            if each.operation in (PRODUCT, RESIDENT_PRODUCT):
                found.setdefault((each.operation, each.dtype, each.format), []).append(each)
        self._surfaces = {key: Surface(measured) for key, measured in found.items()}

    def formats(self, dtype: str) -> list[str]:
        """Return the coded (quantised) formats whose products in a dtype were measured.

        The result is empty if products with plain weights were not measured in that dtype.
        """
        found = [stored for kind, measured, stored in self._surfaces if (kind, measured) == (PRODUCT, dtype)]
        return [stored for stored in found if stored and stored != COLUMNS] if "" in found else []

    def has(self, dtype: str) -> bool:
        """Test whether products with unquantised, untransposed matrices were measured in a dtype."""
        return (PRODUCT, dtype, "") in self._surfaces

    def has_columns(self, dtype: str) -> bool:
        """Test whether products with transposed matrices were measured in a dtype."""
        return (PRODUCT, dtype, COLUMNS) in self._surfaces

    def call_seconds(self, dtype: str) -> float:
        """Return the seconds that a call of a product takes for one row and a matrix of next to no weights.

        For each format, the times of the two smallest matrices are extrapolated to size 0. The result is the median of
        these noisy figures, but at most half of the shortest measured time. It is 0 if only one size was measured.
        """
        alike = [surface for (_, measured, _), surface in self._surfaces.items() if measured == dtype]
        if not alike:
            return 0.0
        shortest = min(surface(surface.smallest, 1) for surface in alike)
        return max(0.0, min(shortest / 2, median(surface.at_no_size(1) for surface in alike)))

    def seconds(
        self, dtype: str, weights: float, rows: float, *, stored: str = "", resident: bool = False
    ) -> float:
        """Return the seconds of a matrix product.

        Args:
            dtype: dtype of activations and of plain weights.
            weights: number of weights of the matrix.
            rows: number of rows of activations.
            stored: quantised format of the weights; `COLUMNS` for plain transposed weights, empty for other plain
                weights.
            resident: whether the weights stay in memory, where a device may rearrange them for faster products. If
                True, the times measured for resident weights are used where there are any.
        """
        kinds = (RESIDENT_PRODUCT, PRODUCT) if resident else (PRODUCT,)
        surface = next(
            self._surfaces[kind, dtype, stored] for kind in kinds if (kind, dtype, stored) in self._surfaces
        )
        return surface(weights * _bytes_per_weight(stored, dtype), rows)


class CodedCosts:
    """Costs of work on coded (quantised) weights, relative to work on equally many plain weights.

    The costs follow from the measured times of products, after `call` seconds were subtracted from each time. All
    matrices of a `WorkPart` count as one matrix, since a call of the native kernels multiplies by all of them. A format
    that was not measured takes the times of the format with the nearest number of bits per weight.

    Args:
        points: costs measured on one processor.
        dtype: dtype of the computation.
        call: the fixed seconds that a call of a product takes, whatever its weights.
    """

    def __init__(self, points: Iterable[CostPoint], dtype: str, call: float = 0.0) -> None:
        self._times = ProductTimes(points)
        self._dtype = dtype
        self._call = call
        self._measured = self._times.formats(dtype)

    def plain(self, part: WorkPart) -> tuple[WorkPart, float]:
        """Return a part with plain instead of coded weights, and the factor by which coded weights take longer.

        If no products with coded weights were measured, the part is returned unchanged, with the factor 1.
        """
        if not part.coded or not self._measured:
            return part, 1.0
        weights = {stored: nbytes / _bytes_per_weight(stored, self._dtype) for stored, nbytes in part.coded}
        each = ITEM_BYTES[self._dtype]
        plain = (part.size - sum(nbytes for _, nbytes in part.coded)) / each
        total = plain + sum(weights.values())
        resident = part.operation.startswith(RESIDENT)
        ratio = plain / total + sum(
            count / total * self._ratio(stored, total, part.rows, resident=resident)
            for stored, count in weights.items()
        )
        return part._replace(size=total * each, coded=()), ratio

    def _ratio(self, stored: str, weights: float, rows: float, *, resident: bool) -> float:
        """Return the ratio of a product's time with weights in a storage format to its time with as many plain weights.

        Both times are without the fixed seconds of a call. The result is 1 for transposed plain weights whose products
        were not measured.

        Args:
            stored: the storage format.
            weights: number of weights of the matrix.
            rows: number of rows of activations.
            resident: whether the weights stay in memory.
        """
        if stored == COLUMNS and not self._times.has_columns(self._dtype):
            return 1.0
        measured = stored if stored == COLUMNS else nearest_by_bits(stored, self._measured)
        coded = self._times.seconds(self._dtype, weights, rows, stored=measured, resident=resident)
        plain = self._times.seconds(self._dtype, weights, rows, resident=resident)
        return (coded - self._call) / (plain - self._call)


def _bytes_per_weight(stored: str, dtype: str) -> float:
    return STORED_FORMATS[dtype if stored in ("", COLUMNS) else stored].bytes_per_weight
