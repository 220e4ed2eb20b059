"""Draws the popularity of each layer's experts, like Fig. 8 of Twiddler (the Fiddler paper of ICLR'25)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moesched.analysis.pictures import draw_picture
from moesched.routing.profile import RoutingProfile

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_heat_map(profile: RoutingProfile, path: Path | str) -> None:
    """Draw expert popularity to a .png or .svg file: a cell per layer and expert, relative to the most popular expert.

    Raises:
        BadInput: the file has another suffix, matplotlib is not installed, or the file cannot be written.
    """
    draw_picture(partial(_draw, profile), path, "--picture")


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
