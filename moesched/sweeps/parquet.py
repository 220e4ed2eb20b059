"""Results of a sweep as a Parquet file, written by pyarrow, an extra: pip install 'moesched[sweep]'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path

from moesched.errors import BadInput
from moesched.sweeps.figures import METRICS, MachineFacts
from moesched.sweeps.line import Line
from moesched.system.whole_file import whole_file

MOST_BYTES = 2**31 - 2
"""The most bytes that pyarrow reads as one block. It infers types from the first block, so all lines must be in it."""


def require_parquet() -> None:
    """Require that pyarrow can be imported.

    Raises:
        BadInput: pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401  imported only to see whether it is installed
    except ImportError:
        raise BadInput(
            "Parquet files need pyarrow, which is not installed: pip install 'moesched[sweep]', or omit --parquet"
        ) from None


def write_parquet(path: Path, whole: Iterable[bytes], lines: Sequence[Line], figures: MachineFacts) -> None:
    """Write results as a Parquet file: a row for each simulation, a column for each key and metric.

    Args:
        whole: the lines as bytes, with all their keys, as the file of results has them.
        lines: the same lines, parsed.
        figures: facts about machines, from which metrics are computed.

    Raises:
        BadInput: the file cannot be written, an input is of different types in two lines, or all lines exceed 2 GiB.
    """
    import pyarrow as arrow
    from pyarrow import json, parquet

    data = b"".join(whole)
    if len(data) > MOST_BYTES:
        raise BadInput(
            f"cannot write results {path}: they are {len(data):,} bytes, and a Parquet file takes {MOST_BYTES:,}: "
            "sweep fewer points, or omit --parquet; the JSON lines have all"
        )
    try:
        table = json.read_json(BytesIO(data), json.ReadOptions(block_size=len(data) + 1))
        for name in METRICS:
            table = table.append_column(
                name, arrow.array([figures.value(line, name) for line in lines], "float64")
            )
        written = BytesIO()
        parquet.write_table(table, written)
    except arrow.ArrowException as error:
        reason = " ".join(str(error).split())
        raise BadInput(
            f"cannot write results {path}: {reason}: omit --parquet; the JSON lines have all"
        ) from error
    with whole_file(path, "results") as file:
        file.write(written.getvalue())
