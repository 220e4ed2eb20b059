"""Estimates costs in a dtype that was not measured, by scaling the costs that were measured in bfloat16.

The time of work on weights is multiplied by the ratio of the times of matrix products in the two dtypes, measured with
matrices of one shape. Attention is assumed to take equally long in both dtypes for equally many tokens, and copies of
rows for equally many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from moesched.calibration.task_times import point
from moesched.machines import CostPoint
from moesched.machines.calibrated import CACHED_EXPERT, ROUTE_WITHIN
from moesched.machines.product_times import RESIDENT, ProductTimes
from moesched.models.config import ITEM_BYTES, DType

SOURCE: DType = "bfloat16"
EXPERTS = ("expert", CACHED_EXPERT, "experts")
MATRICES = dict.fromkeys(("pre_attention", "route", ROUTE_WITHIN, "sample"), 1) | dict.fromkeys(EXPERTS, 3)
"""Number of matrices that each kind of work on weights multiplies with."""


def scaled_points(
    points: Iterable[CostPoint], operations: Sequence[CostPoint], dtype: DType
) -> list[CostPoint]:
    """Estimate the costs of tasks in `dtype` by scaling their costs in bfloat16.

    Args:
        points: measured costs of tasks; those in other dtypes than bfloat16 are left out.
        operations: measured times of matrix products in bfloat16 and in `dtype`, whose ratios scale the costs.
        dtype: the dtype of the returned costs.
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
