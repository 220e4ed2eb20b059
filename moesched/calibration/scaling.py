"""Costs in a dtype that was not measured, scaled from those in bfloat16.

Work on weights is scaled by how much longer products of the same matrices take in the other dtype, which is measured.
Attention takes as long over as many tokens, and moving rows takes as long for as many bytes.
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
"""The products that each kind of work on weights consists of."""
RESIDENT = "resident "


class ProductRatio:
    """The time of products in one dtype relative to bfloat16, by the weights' size and the rows."""

    def __init__(self, operations: Iterable[CostPoint], dtype: DType) -> None:
        found: dict[tuple[str, str], list[CostPoint]] = {}
        for each in operations:
            found.setdefault((each.operation, each.dtype), []).append(each)
        self._surfaces = {key: Surface(points) for key, points in found.items()}
        self._dtype = dtype
        self._wider = ITEM_BYTES[dtype] / ITEM_BYTES[SOURCE]

    def __call__(self, nbytes: float, rows: float, *, resident: bool) -> float:
        """The ratio for a matrix that has `nbytes` bytes in bfloat16."""
        scaled = self._surface(self._dtype, resident)(nbytes * self._wider, rows)
        return scaled / self._surface(SOURCE, resident)(nbytes, rows)

    def _surface(self, dtype: str, resident: bool) -> Surface:
        """Of weights that stay where a device rearranges these, else of all."""
        plain = self._surfaces[PRODUCT, dtype]
        return self._surfaces.get((RESIDENT_PRODUCT, dtype), plain) if resident else plain


def scaled_points(
    points: Iterable[CostPoint], operations: Sequence[CostPoint], dtype: DType
) -> list[CostPoint]:
    """The costs in a dtype, from those measured in bfloat16.

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
