"""Costs in a dtype that was not measured, scaled from those in bfloat16.

Work on weights is scaled by the measured ratio of products of the same matrices in both dtypes. Attention is assumed to
take as long for as many tokens, and moving rows as long for as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from moesched.calibration.operation_times import PRODUCT, RESIDENT_PRODUCT
from moesched.calibration.task_times import point
from moesched.machines import CostPoint
from moesched.machines.surfaces import Surface
from moesched.models.config import ITEM_BYTES, DType

SOURCE: DType = "bfloat16"
MATRICES = {"pre_attention": 1, "route": 1, "sample": 1, "expert": 3, "experts": 3}
"""Number of matrices that each kind of work on weights multiplies with."""
RESIDENT = "resident "


class ProductRatio:
    """Time of products in one dtype over that in bfloat16, by the weights' bytes and the rows."""

    def __init__(self, operations: Iterable[CostPoint], dtype: DType) -> None:
        found: dict[tuple[str, str], list[CostPoint]] = {}
        for each in operations:
            found.setdefault((each.operation, each.dtype), []).append(each)
        self._surfaces = {key: Surface(points) for key, points in found.items()}
        self._dtype = dtype
        self._wider = ITEM_BYTES[dtype] / ITEM_BYTES[SOURCE]

    def __call__(self, nbytes: float, rows: float, *, resident: bool) -> float:
        """Return the ratio for a matrix of `nbytes` bytes in bfloat16; a device may have rearranged resident ones."""
        scaled = self._surface(self._dtype, resident)(nbytes * self._wider, rows)
        return scaled / self._surface(SOURCE, resident)(nbytes, rows)

    def _surface(self, dtype: str, resident: bool) -> Surface:
        """Return the times of products; of rearranged weights if `resident` and the device rearranges them."""
        plain = self._surfaces[PRODUCT, dtype]
        return self._surfaces.get((RESIDENT_PRODUCT, dtype), plain) if resident else plain


def scaled_points(
    points: Iterable[CostPoint], operations: Sequence[CostPoint], dtype: DType
) -> list[CostPoint]:
    """Return costs in a dtype, scaled from those measured in bfloat16.

    Args:
        points: measured costs of tasks.
        operations: measured times of products, in both dtypes.
    """
    ratio = ProductRatio(operations, dtype)
    return [_scaled(each, ratio, dtype) for each in points if each.dtype == SOURCE]


def _scaled(each: CostPoint, ratio: ProductRatio, dtype: DType) -> CostPoint:
    size, seconds = each.size, each.seconds
    wider = ITEM_BYTES[dtype] / ITEM_BYTES[SOURCE]
    matrices = MATRICES.get(each.operation.removeprefix(RESIDENT))
    if matrices is not None:
        resident = each.operation.startswith(RESIDENT)
        seconds *= ratio(size / matrices, each.rows, resident=resident)
        size *= wider
    elif each.operation == "step attention":
        size *= wider
    return replace(point(each.operation, dtype, each.rows, size, seconds), scaled_from=SOURCE)
