"""Draws pictures as .png or .svg files with matplotlib, an extra: pip install 'moesched[plots]'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from moesched.errors import BadInput
from moesched.system.input_file import given_path
from moesched.system.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")


def require_picture(path: Path, option: str = "--out") -> None:
    """Check that a picture can be drawn to a file of this name.

    Args:
        option: the command-line option that named the file; if matplotlib is not installed, the error message advises
            to omit it. "" if the command always draws a picture.

    Raises:
        BadInput: the suffix is not .png or .svg, or matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise BadInput(f"cannot draw {path}: end its name in {' or '.join(FORMATS)}")
    require_matplotlib(option)


def require_matplotlib(option: str = "--out") -> None:
    """Check that matplotlib is installed.

    Args:
        option: the command-line option that asked for a picture, which the error message advises to omit; "" if the
            command always draws a picture.

    Raises:
        BadInput: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401  imported only to see whether it is installed
    except ImportError:
        remedy = "pip install 'moesched[plots]'" + (f", or omit {option}" if option else "")
        raise BadInput(f"pictures need matplotlib, which is not installed: {remedy}") from None


def draw_picture(draw: Callable[[], Figure], path: Path | str, option: str = "--out") -> None:
    """Draw a figure and write it to a .png or .svg file.

    Args:
        draw: a function that makes the figure.
        option: the command-line option that named the file, for the error message.

    Raises:
        BadInput: `require_picture` refuses the file, or the file cannot be written.
    """
    path = given_path(path, "a picture")
    require_picture(path, option)
    with drawing():
        write_picture(draw(), path)


@contextmanager
def drawing() -> Iterator[None]:
    """Return a context in which ids in .svg files are not random, so that equal figures give equal files."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "moesched"}):
        yield


def write_picture(figure: Figure, path: Path, *, dpi: int = 110) -> None:
    """Write a figure without a date, so that equal figures give equal files.

    Args:
        dpi: pixels per inch of a .png file.

    Raises:
        BadInput: the file cannot be written.
    """
    drawn = BytesIO()
    kind = path.suffix.lower()[1:]
    figure.savefig(drawn, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else {})
    with whole_file(path, "picture") as file:
        file.write(drawn.getvalue())
