"""Draws how popular the experts of each layer are: the heat map of Twiddler's Fig. 8."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from moesched.errors import BadInput
from moesched.routing.profile import RoutingProfile
from moesched.trace.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")


def require_picture(path: Path) -> None:
    """Whether a heat map can be drawn into a file of this name.

    Raises:
        BadInput: its name has another ending than .png or .svg, or matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise BadInput(f"cannot draw {path}: end its name in {' or '.join(FORMATS)}")
    try:
        import matplotlib.figure  # noqa: F401  only tried
    except ImportError:
        raise BadInput(
            "pictures need matplotlib, which is not installed: pip install 'moesched[plots]', or leave --picture away"
        ) from None


def draw_heat_map(profile: RoutingProfile, path: Path | str) -> None:
    """Draw a cell for each expert of each layer, the most popular of all being 1, into a .png or .svg file.

    Raises:
        BadInput: the name has another ending, matplotlib is not installed, or the file cannot be written.
    """
    path = Path(path)
    require_picture(path)
    from matplotlib import rc_context

    drawn = BytesIO()
    kind = path.suffix.lower()[1:]
    # Without a date and with names that are not drawn by lot, the same profile gives the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "moesched"}):
        _draw(profile).savefig(drawn, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else {})
    with whole_file(path, "picture") as file:
        file.write(drawn.getvalue())


def _draw(profile: RoutingProfile) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    most = max(map(max, profile.counts)) or 1
    popularity = [[count / most for count in row] for row in profile.counts]
    size = (min(16.0, 3.5 + 0.3 * profile.experts), min(12.0, 1.6 + 0.25 * profile.layers))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        popularity, aspect="auto", cmap="viridis", vmin=0.0, vmax=1.0, interpolation="nearest"
    )
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"{profile.model}, {profile.tokens:,} tokens", fontsize=11)
    figure.colorbar(image, ax=axes, label="popularity")
    return figure
