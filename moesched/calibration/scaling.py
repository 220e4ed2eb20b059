"""Estimates costs in a dtype that was not measured from the costs in bfloat16.

Work on weights is scaled by the measured ratio of products of equal matrices in both dtypes. In both dtypes, attention
is assumed to take equally long for equally many tokens, and copies of rows for equally many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from moesched.calibration.task_times import point
from moesched.machines import CostPoint
from moesched.machines.calibrated import ROUTE_WITHIN
from moesched.machines.product_times import RESIDENT, ProductTimes
from moesched.models.config import ITEM_BYTES, DType

SOURCE: DType = "bfloat16"
MATRICES = {"pre_attention": 1, "route": 1, ROUTE_WITHIN: 1, "sample": 1, "expert": 3, "experts": 3}
"""Number of matrices that each kind of work on weights multiplies with."""


def scaled_points(
    points: Iterable[CostPoint], operations: Sequence[CostPoint], dtype: DType
) -> list[CostPoint]:
    """Return costs of tasks in a dtype, scaled from the costs measured in bfloat16.

    Args:
        points: measured costs of tasks.
        operations: measured times of products, in bfloat16 and in `dtype`.
    """
    products = ProductTimes(operations)
    return [_scaled(each, products, dtype) for each in points if each.dtype == SOURCE]


def _scaled(each: CostPoint, products: ProductTimes, dtype: DType) -> CostPoint:
    size, seconds = each.size, each.seconds
    wider = ITEM_BYTES[dtype] / ITEM_BYTES[SOURCE]
    matrices = MATRICES.get(each.operation.removeprefix(RESIDENT))
    if matrices is not None:
        weights = size / ITEM_BYTES[SOURCE] / matrices
        resident = each.operation.startswith(RESIDENT)
        seconds *= products.seconds(dtype, weights, each.rows, resident=resident)
        seconds /= products.seconds(SOURCE, weights, each.rows, resident=resident)
        size *= wider
    elif each.operation == "step attention":
        size *= wider
    return replace(point(each.operation, dtype, each.rows, size, seconds), scaled_from=SOURCE)
