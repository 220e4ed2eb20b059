"""The sections of a reproduction as pictures. Drawing needs matplotlib, an extra: pip install 'moesched[plots]'."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesched.analysis.pictures import FORMATS, drawing, require_matplotlib, write_picture
from moesched.errors import BadInput
from moesched.reproduce.report import Reproduction, Section, Value
from moesched.system.input_file import is_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER, OURS, FITTED = "#9aa5b1", "#1f5fa8", "#7fb069"
COLORS = ("#1f5fa8", "#c0392b", "#2e8b57", "#e08a00", "#7b4ea3", "#8c6d46", "#333333", "#d16ba5")

Row = dict[str, Value]


def require_folder(folder: Path) -> None:
    """Require that pictures can be drawn into a folder.

    Raises:
        BadInput: it is not a folder, or matplotlib is not installed.
    """
    if not is_folder(folder):
        raise BadInput(f"cannot draw into {folder}: it is not a folder: create it first")
    require_matplotlib()


def picture_files(paper: str, folder: Path) -> list[Path]:
    """The files of all pictures of a paper's sections; none where the paper is unknown."""
    return [
        _picture_file(paper, section, folder, ending)
        for section in DRAWINGS.get(paper, {})
        for ending in FORMATS
    ]


def draw_reproduction(report: Reproduction, folder: Path) -> list[Path]:
    """Draw each section that is more than a table as PAPER-SECTION.png and .svg; returns the files.

    Raises:
        BadInput: `folder` is not a folder, matplotlib is not installed, or a file cannot be written.
    """
    require_folder(folder)
    written = []
    for section in report.sections:
        draw = DRAWINGS[report.paper].get(section.name)
        if draw is None:
            continue
        with drawing():
            figure = draw(section)
            for ending in FORMATS:
                path = _picture_file(report.paper, section.name, folder, ending)
                write_picture(figure, path)
                written.append(path)
    return written


def _picture_file(paper: str, section: str, folder: Path, ending: str) -> Path:
    return folder / f"{paper}-{section}{ending}"


def _tables(section: Section) -> Figure:
    """Bars of the paper and of ours, column by column."""
    columns = list(dict.fromkeys((row["workload"], row["setting"]) for row in section.rows))
    figure, all_axes = _figure(len(columns), section.title, each=4.2)
    for axes, (workload, setting) in zip(all_axes, columns, strict=True):
        rows = [row for row in section.rows if (row["workload"], row["setting"]) == (workload, setting)]
        places = range(len(rows))
        axes.bar([x - 0.2 for x in places], [row["paper"] for row in rows], 0.4, color=PAPER, label="paper")
        colors = [FITTED if row["fitted"] else OURS for row in rows]
        axes.bar([x + 0.2 for x in places], [row["ours"] for row in rows], 0.4, color=colors)
        axes.set_xticks(list(places), [str(row["system"]).replace(", ", ",\n") for row in rows], fontsize=7)
        axes.set_title(f"{workload}, {setting}", fontsize=10)
        axes.set_ylabel("tokens/s")
    all_axes[0].bar([0], [0], color=OURS, label="ours, predicted")
    all_axes[0].bar([0], [0], color=FITTED, label="ours, fitted")
    _legend_below(all_axes[0])
    return figure


def _generations(section: Section) -> Figure:
    """Throughput by generation length, a line for each system."""
    settings = list(dict.fromkeys(row["setting"] for row in section.rows))
    figure, all_axes = _figure(len(settings), section.title, each=4.8)
    for axes, setting in zip(all_axes, settings, strict=True):
        _lines(
            axes,
            (row for row in section.rows if row["setting"] == setting),
            lambda row: f"{row['system']}, {row['sizes_by']}",
            "new_tokens",
            "tokens_per_second",
        )
        lengths = [int(row["new_tokens"] or 0) for row in section.rows]
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_yscale("log")
        axes.set_title(str(setting), fontsize=10)
        axes.set_xlabel("tokens to generate")
    all_axes[0].set_ylabel("tokens/s")
    return figure


def _attention(section: Section) -> Figure:
    figure, (axes,) = _figure(1, section.title, each=7)
    for what, style in (("cpu_attention", "-"), ("moving_kv", "--")):
        _lines(axes, section.rows, _with_context(what), "micro_batch_size", f"{what}_ms", style)
    _lines(axes, section.rows, lambda row: "experts", "micro_batch_size", "experts_ms", ":")
    axes.set_yscale("log")
    axes.set_xlabel("µ")
    axes.set_ylabel("ms for one layer")
    return figure


def _with_context(what: str) -> Callable[[Row], str]:
    return lambda row: f"{what.replace('_', ' ')}, context {row['context']}"


def _memory(section: Section) -> Figure:
    figure, (axes,) = _figure(1, section.title, each=7)
    _lines(axes, section.rows, lambda row: str(row["system"]), "host_gb", "tokens_per_second")
    axes.set_xlabel("host memory, GB")
    axes.set_ylabel("tokens/s")
    return figure


def _map(section: Section) -> Figure:
    """The share of the weights that is offloaded; red points where attention is on the CPU."""
    figure, (axes,) = _figure(1, section.title, each=7)
    xs = [row["link_gb_per_second"] for row in section.rows]
    ys = [row["cpu_ratio"] for row in section.rows]
    shares = axes.scatter(
        xs, ys, c=[row["weights_on_cpu"] for row in section.rows], s=420, marker="s", cmap="Blues", vmin=0
    )
    attending = [
        (x, y) for x, y, row in zip(xs, ys, section.rows, strict=True) if row["attention_on"] == "cpu"
    ]
    axes.plot([x for x, _ in attending], [y for _, y in attending], "o", color="#c0392b")
    axes.set_yscale("log")
    axes.set_xlabel("link, GB/s (red: attention on the CPU)")
    axes.set_ylabel("times the base CPU")
    figure.colorbar(shares, ax=axes, label="share of the weights offloaded")
    return figure


def _by_environment(x: str, y: str, axis: str, ticks: str | None = None) -> Callable[[Section], Figure]:
    """Lines through the rows of each policy, with one plot per environment.

    Args:
        ticks: a second key, whose value is part of each x label.
    """

    def draw(section: Section) -> Figure:
        environments = list(dict.fromkeys(row["environment"] for row in section.rows))
        figure, all_axes = _figure(len(environments), section.title, each=5.2)
        for axes, environment in zip(all_axes, environments, strict=True):
            rows = [row for row in section.rows if row["environment"] == environment]
            names = list(dict.fromkeys(_tick(row, x, ticks) for row in rows))
            placed = [{**row, "place": names.index(_tick(row, x, ticks))} for row in rows]
            _lines(axes, placed, lambda row: str(row["policy"]), "place", y)
            axes.set_xticks(range(len(names)), names, fontsize=7, rotation=45 if ticks else 0)
            axes.set_yscale("log")
            axes.set_title(f"environment {environment}", fontsize=10)
            axes.set_xlabel(axis)
        all_axes[0].set_ylabel(y.replace("_", " "))
        return figure

    return draw


def _tick(row: Row, x: str, ticks: str | None) -> str:
    return str(row[x]) if ticks is None else f"{row[x]}, {row[ticks]}"


def _expert_times(section: Section) -> Figure:
    """Time of one expert by its tokens, and of copying it."""
    environments = list(dict.fromkeys(row["environment"] for row in section.rows))
    figure, all_axes = _figure(len(environments), section.title, each=5.2)
    for axes, environment in zip(all_axes, environments, strict=True):
        rows = [row for row in section.rows if row["environment"] == environment]
        for number, what in enumerate(("cpu_ms", "gpu_ms", "weight_copy_ms", "activation_copy_ms")):
            axes.plot(
                [row["tokens"] for row in rows],
                [row[what] for row in rows],
                marker="o",
                ms=3,
                color=COLORS[number],
                label=what.removesuffix("_ms").replace("_", " "),
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"environment {environment}", fontsize=10)
        axes.set_xlabel("tokens of the expert")
        axes.grid(linewidth=0.4, alpha=0.6)
    all_axes[0].set_ylabel("ms")
    _legend_below(all_axes[0])
    return figure


def _breakdowns(section: Section) -> Figure:
    """Parts of a token's time: the paper's bar and ours for each row of the table."""
    figure, (axes,) = _figure(1, section.title, each=8)
    names = list(dict.fromkeys((row["method"], row["nodes"]) for row in section.rows))
    for at, (who, hatch) in enumerate((("paper", ""), ("ours", "//"))):
        bottoms = [0.0] * len(names)
        for number, part in enumerate(("moe", "comm", "misc")):
            values = [
                float(row[who] or 0)
                for name in names
                for row in section.rows
                if (row["method"], row["nodes"], row["part"]) == (*name, part)
            ]
            axes.bar(
                [x + 0.4 * at - 0.2 for x in range(len(names))],
                values,
                0.36,
                bottom=bottoms,
                color=COLORS[number],
                alpha=1.0 if at else 0.5,
                hatch=hatch,
                label=f"{part}, {who}",
            )
            bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    axes.set_xticks(range(len(names)), [f"{method}, {nodes} nodes" for method, nodes in names])
    axes.set_ylabel("seconds of a token")
    _legend_below(axes)
    return figure


def _by_nodes(name: str, y: str, axis: str) -> Callable[[Section], Figure]:
    """Lines over the number of nodes."""

    def draw(section: Section) -> Figure:
        figure, (axes,) = _figure(1, section.title, each=7)
        _lines(axes, section.rows, lambda row: str(row[name]), "nodes", y)
        axes.set_xlabel("nodes")
        axes.set_ylabel(axis)
        return figure

    return draw


def _packing(section: Section) -> Figure:
    """A sample's time by the wait after each layer: Fig. 4."""
    figure, (axes,) = _figure(1, section.title, each=7)
    points = [
        {"what": what, "wait_ms": row["wait_ms"], "ms": row[f"{what}_ms"]}
        for what in ("unstacked", "prestacked")
        for row in section.rows
    ]
    _lines(axes, points, lambda row: str(row["what"]), "wait_ms", "ms")
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_yscale("log")
    axes.set_xlabel("wait, ms")
    axes.set_ylabel("ms")
    return figure


DRAWINGS: dict[str, dict[str, Callable[[Section], Figure]]] = {
    "moe-lightning": {
        "table-4": _tables,
        "table-5": _tables,
        "speedups": _generations,
        "scaling": _generations,
        "cpu-attention": _attention,
        "cpu-memory": _memory,
        "policy-map": _map,
    },
    "twiddler": {
        "microbenchmarks": _expert_times,
        "generation": _by_environment("input", "tokens_per_second", "tokens in, out", "output"),
        "prefill": _by_environment("input", "seconds", "tokens of the prompt"),
        "beams": _by_environment("width", "tokens_per_second", "beams"),
    },
    "mac-cluster": {
        "table-3": _breakdowns,
        "table-4": _breakdowns,
        "figure-8": _by_nodes("network", "bound", "tokens/s"),
        "balanced": _by_nodes("machine", "ratio", "ep_balanced over P-LR-D"),
        "packing": _packing,
    },
}
"""By paper and section."""


def _figure(count: int, title: str, each: float) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, each * count), 4.6), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _legend_below(axes: Any) -> None:
    """A legend below an axis, where it hides nothing."""
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2, frameon=False)


def _lines(
    axes: Any, rows: Iterable[Row], name: Callable[[Row], str], x: str, y: str, style: str = "-"
) -> None:
    """A line through the rows of each name."""
    lines: dict[str, list[tuple[Any, Any]]] = {}
    for row in rows:
        lines.setdefault(name(row), []).append((row[x], row[y]))
    for number, (label, points) in enumerate(lines.items()):
        axes.plot(*zip(*points, strict=True), style, marker="o", ms=3, color=COLORS[number], label=label)
    _legend_below(axes)
    axes.grid(linewidth=0.4, alpha=0.6)
