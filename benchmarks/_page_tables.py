"""The tables of the pages: which result each one shows, and its columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _gpu_tables as gpu_tables
import _peer_tables as peer_tables
from _attention_tables import attention
from _expert_tables import limits, shares, times_torch
from _results import RESULTS, machine_of, stored
from _tables import Row, across, markdown, percent, plain, shown, table_of

from moesched.reproduce.report import AGREEMENT

Result = dict[str, Any]
Table = Callable[[Result], str]

# -- measured: a table for each machine ----------------------------------------------------------------------------


def measured(name: str, table: Table, part: str = "") -> str:
    """A table of a benchmark, or of a part of it, once for each machine that it was run on."""
    parts = []
    for file in sorted(RESULTS.glob(f"{name}-*.json")):
        result = stored(file)
        written = table(result)
        if written.count("\n") > 1:
            about = result.get("parts", {}).get(part, result)
            command = about.get("command", f"python benchmarks/{name}.py")
            parts.append(f"{machine(result, file)}: `{command}`\n\n{written}\n")
    return "\n".join(parts) or "Not measured yet."


def machine(result: Result, file: Path) -> str:
    """The machine of a result file in one line."""
    about = result["machine"]
    name = machine_of(file) or about["processor"]
    return about.get("description") or f"{name}, {about['cores']} cores, Python {about['python']}"


def bars(result: Result) -> str:
    """The figures of a benchmark that have a bar."""
    rows = [
        [
            name.replace("_", " "),
            f"{bar['value']:.2f}" + (f", of {bar['of']}" if "of" in bar else ""),
            bar.get("bar", ""),
            bar.get("reached"),
        ]
        for name, bar in result["summary"].items()
    ]
    return markdown(["measure", "value", "bar", "reached"], rows)


def of_settings(result: Result) -> Iterator[dict[str, Any]]:
    """The settings of the fidelity benchmark, with their names."""
    for name, setting in result["settings"].items():
        yield {**setting, "setting": name, "left out": ", ".join(setting["left_out"])}


def replays(result: Result, error: str) -> str:
    """The error of each policy's replays, setting by setting."""
    rows = [
        {"setting": setting["setting"], "policy": each["policy"], "error": each[error]}
        for setting in of_settings(result)
        for each in setting["policies"]
        if error in each
    ]
    return across(rows, ["setting"], "{policy}", "{error:+.2f}") if rows else ""


def ranks(result: Result) -> str:
    """The simulated order of schedules beside the measured one, setting by setting."""
    rows = []
    for setting in of_settings(result):
        ranking = setting["ranking"]
        same = {names[0]: len(names) for names in ranking["same_schedule"]}
        schedules = len(setting["policies"]) - sum(each - 1 for each in same.values())
        for measure in ("decode", "total"):
            order = ranking[measure]
            wrong = "; ".join(
                f"{pair['faster']} before {pair['slower']} "
                f"({pair['measured_percent']:+.1f} %, predicted {pair['predicted_percent']:+.1f} %)"
                for pair in order["discordant"]
            )
            best = {
                key: f"{order[key]} and {same[order[key]] - 1} more" if order[key] in same else order[key]
                for key in ("fastest", "chosen")
            }
            rows.append(
                {
                    **order,
                    **best,
                    "setting": setting["setting"],
                    "of": measure,
                    "n": schedules,
                    "wrong": wrong,
                }
            )
    return table_of(rows, RANKS)


RANKS = {
    "setting": "{setting}",
    "of": "{of}",
    "schedules": "{n}",
    "pairs beyond noise": "{pairs_beyond_noise}",
    "in order": "{concordant}",
    "fastest": "{fastest}",
    "chosen by the simulator": "{chosen}",
    "regret": "{regret_percent:.1f} %",
    "beyond noise": "{regret_beyond_noise_percent:.1f} %",
    "not in order": "{wrong}",
}
SETTINGS = {
    "setting": "{setting}",
    "model": "{model}",
    "machine": "{machine}",
    "room for weights": "{share_of_weights:.0%}",
    "batch": "{batch_size}",
    "micro-batch": "{micro_batch_size}",
    "new tokens": "{new_tokens}",
    "left out": "{left out}",
}
PREDICTIONS = {
    "model": "{model}",
    "policy": "{policy}",
    "batch": "{batch_size} by {micro_batch_size}",
    "decode measured, s": "{measured[decode]:.3f}",
    "predicted, s": "{predicted[decode]:.3f}",
    "error": "{error_percent[decode]:+.1f} %",
    "bar": "{bar_percent:.0f} %",
    "holds": "{holds}",
    "inside its band": "{inside}",
    "lane that is off the most": "{worst}",
}
MEMORY = {
    "run": "{run}",
    "predicted, MB": "{predicted_mb:,.0f}",
    "measured, MB": "{measured_mb:,.0f}",
    "above by, MB": "{over_mb:+.1f}",
    "holds": "{held}",
}
PERCENTILES = {"µs, p50": "{p50:.0f}", "p10": "{p10:.0f}", "p90": "{p90:.0f}", "p99": "{p99:.0f}"}


def predictions(result: Result) -> str:
    """Decode time and lanes of runs that were never seen."""
    rows = []
    for each in result["runs"]:
        lanes = {k.removeprefix("decode lane "): v for k, v in each["error_percent"].items() if "lane" in k}
        if "decode_holds" in each:
            worst = max(lanes, key=lambda name: abs(lanes[name]))
            told = {
                "holds": shown(each["decode_holds"]),
                "inside": shown(each["inside"]) if "inside" in each else "",
                "worst": f"{worst} {lanes[worst]:+.1f} %",
            }
            rows.append({**each, **told})
    return table_of(rows, PREDICTIONS)


def memory(result: Result) -> str:
    """Peak memory beside the system's high-water mark."""
    rows = [
        {
            **each,
            "predicted_mb": each["predicted"] / 1e6,
            "measured_mb": each["measured"] / 1e6,
            "held": shown(each["holds"]),
        }
        for each in result["runs"]
    ]
    return table_of(rows, MEMORY)


def all_reduce(result: Result) -> str:
    """Transports beside each other."""
    overheads = result["overhead_seconds_of_40_layers"]
    named = result["seconds"] | {
        f"{name}: overhead of the 40 exchanges of a token": each for name, each in overheads.items()
    }
    rows = [
        {"name": name, **{p: 1e6 * seconds for p, seconds in figures.items()}}
        for name, figures in named.items()
    ]
    return table_of(
        rows, {f"an all-reduce of {result['bytes']} bytes between 2 ranks": "{name}", **PERCENTILES}
    )


def previews(result: Result) -> str:
    """Accuracy of previews by the number of layers ahead, and of always naming the most popular experts."""
    decode, popular = result["decode"], result["popular"]
    layers = sorted(popular, key=int)
    rows = [
        [
            each["ahead"],
            f"{each['forecasts']:,}",
            *(f"{each[name]:.1%}" for name in ("accuracy", "chance")),
            f"{decode[0]['accuracy'] ** each['ahead']:.1%}",
            *(f"{each['by_layer'][i]:.1%}" if i in each["by_layer"] else "" for i in layers[1:]),
        ]
        for each in decode
    ]
    naming = [f"always the {result['top_k']} most popular", "", "", "", ""]
    rows.append([*naming, *(f"{popular[i]:.1%}" for i in layers[1:])])
    columns = [
        "layers ahead",
        "previews",
        "forecast",
        "at random",
        "nth power",
        *(f"of layer {i}" for i in layers[1:]),
    ]
    return markdown(columns, rows)


HOST_TIME = {
    "step": "{name}",
    "ms": "{step_ms:.2f}",
    "host's time for each task, µs": "{microseconds_per_task:.1f}",
    "its share": "{share:.1%}",
    "from attention to experts, µs": "{microseconds_between[attend to moe_layer]:.1f}",
    "from experts to the next layer, µs": "{microseconds_between[moe_layer to attention_inputs]:.1f}",
}


def host_time(result: Result) -> str:
    """The time between native calls, by the size of the batch."""
    return table_of(({"name": name, **row} for name, row in result["rows"].items()), HOST_TIME)


MEASURED: dict[str, tuple[str, Table] | tuple[str, Table, str]] = {
    "bars": ("fidelity", bars),
    "settings": ("fidelity", lambda result: table_of(of_settings(result), SETTINGS)),
    "replays": ("fidelity", partial(replays, error="replay_error_percent")),
    "bare_replays": ("fidelity", partial(replays, error="bare_replay_error_percent")),
    "ranks": ("fidelity", ranks),
    "predictions": ("prediction", predictions),
    "memory": ("peak_memory", memory),
    "all-reduce": ("all_reduce", all_reduce),
    "previews": ("preview_accuracy", previews),
    "expert_shares": ("expert_kernel", shares),
    "expert_limits": ("expert_kernel", limits),
    "expert_times_torch": ("expert_kernel", times_torch),
    "attention": ("attention_kernel", attention),
    "resident": ("peers", partial(peer_tables.rates, "resident"), "resident"),
    "page-cache": ("peers", partial(peer_tables.rates, "page_cache"), "page_cache"),
    "capped": ("peers", partial(peer_tables.rates, "capped"), "capped"),
    "expert": ("peers", peer_tables.expert, "expert"),
    "host-time": ("host_time", host_time),
    "gpu-runs": ("gpu_hour", gpu_tables.runs),
    "gpu-beside": ("gpu_hour", gpu_tables.beside),
    "gpu-choices": ("gpu_hour", gpu_tables.choices),
    "missed-bars": ("peers", peer_tables.missed),
    "peers": ("peers", peer_tables.versions),
}
"""The benchmark and the rows of every table on the pages of measurements."""


PAPERS = {
    "policy": "`{policy}`",
    "over": "`{over}`",
    "model": "{model}",
    "machine": "{machine}",
    "of": "{of}",
    "ratio": "{ratio:.2f}x",
    "the paper's claim": "{claim}",
}


def simulated(name: str, columns: Mapping[str, str]) -> str:
    """The cases of a benchmark that needs no machine."""
    return table_of(stored(RESULTS / f"{name}.json").get("cases", []), columns)


# -- reproductions: a table for each section -----------------------------------------------------------------------

CELLS = {
    "workload": "{workload}",
    "setting": "{setting}",
    "system": "{system}",
    "µ": "{micro_batch_size}",
    "N/µ": "{micro_batches}",
    "paper": "{paper}",
    "ours": "{ours}",
    "error": "{error:+.1%}",
    "": "{how}",
    "bound by": "{bound_by} {busy:.0%}",
}
RATES = {
    "rate": "{of}",
    "share of the profile's": "{share:.1%}",
    "comes to": "{gb_per_second:g} GB/s",
    "set by": "{set_by}",
}


def cells(rows: Sequence[Row]) -> str:
    """A table of the paper, cell by cell."""
    return table_of([{**row, "how": "fitted" if row["fitted"] else "predicted"} for row in rows], CELLS)


def breakdown(rows: Sequence[Row]) -> str:
    """A line for each method and who says it: the paper, then ours with the error, fitted cells in italics."""
    doubled = [
        {**row, "by": by, "cell": cell}
        for row in rows
        for by, cell in (("paper", f"{row['paper']:g}"), ("ours", ours(row)))
    ]
    return across(doubled, ["method", "nodes", "by"], "{part}", "{cell}")


def ours(row: Row) -> str:
    """Our figure and its error."""
    text = f"{row['ours']:.3g} ({percent(row['error'])})"
    return f"*{text}*" if row["fitted"] else text


def printed(rows: Sequence[Row]) -> str:
    """A line for each number of nodes; ours, with the paper's cell where that is another."""
    said = [
        {**row, "shown": row["ours"] if row["agrees"] else f"{row['ours']} (**paper: {row['paper']}**)"}
        for row in rows
    ]
    return across(said, ["nodes"], "{cell}", "{shown}")


def sustained(rows: Sequence[Row]) -> str:
    """Cells at sustained rates, with their bands."""
    columns = {
        "workload": "{workload}",
        "setting": "{setting}",
        "system": "{system}",
        "paper": "{paper:g}",
        "ours": "{ours:g} ({low:g} to {high:g})",
        "error": "{error:+.1%}",
        "at the data sheets": "{at_peak:g}",
        "bound by": "{bound_by}",
    }
    return table_of(rows, columns)


def artifact(rows: Sequence[Row]) -> str:
    """The authors' own runs, with the parts of their time."""
    columns = {
        "system": "{system}",
        "workload": "{workload}",
        "new tokens": "{new_tokens}",
        "N": "{requests}",
        "µ": "{micro_batch_size}",
        "the artifact": "{measured:g}",
        "ours": "{ours:g}",
        "error": "{error:+.1%}",
        "prefill, s": "{prefill_seconds:g}",
        "decode step, s": "{step_seconds:g}",
        "": "{sets}",
    }
    return table_of(
        [{**row, "sets": "sets a rate" if row["sets_a_rate"] else "predicted"} for row in rows], columns
    )


def turned(rows: Sequence[Row]) -> str:
    """A column for each row."""
    keys = list(rows[0])[2:]
    columns = ["", *(f"{row['assumed']}; environment {row['environment']}" for row in rows)]
    return markdown(columns, [[key.replace("_", " "), *(row[key] for row in rows)] for key in keys])


BY_LENGTH = partial(
    across,
    down=["setting", "system", "sizes_by"],
    title="{new_tokens} tokens",
    cell="{tokens_per_second:g} (µ {micro_batch_size})",
)
SECTIONS: dict[str, dict[str, Callable[[Sequence[Row]], str]]] = {
    "moe-lightning": {
        "table-4": cells,
        "table-5": cells,
        "speedups": BY_LENGTH,
        "scaling": BY_LENGTH,
        "sustained": sustained,
        "artifact": artifact,
        "policy-map": partial(
            across,
            down=["cpu_ratio"],
            title="{link_gb_per_second} GB/s",
            cell="{weights_on_cpu:.0%}, {attention_on}",
        ),
    },
    "twiddler": {
        "generation": partial(
            across, down=["environment", "policy"], title="{input}, {output}", cell="{tokens_per_second:g}"
        ),
        "prefill": partial(across, down=["environment", "policy"], title="{input}", cell="{seconds:g}"),
        "beams": partial(
            across, down=["environment", "policy"], title="{width}", cell="{tokens_per_second:g}"
        ),
        "variants": turned,
    },
    "mac-cluster": {
        "table-3": breakdown,
        "table-4": breakdown,
        "table-6": printed,
        "figure-8": partial(across, down=["network"], title="{nodes} nodes", cell="{bound:g}"),
    },
}
"""By paper and section; any other section is a line for each row."""


def reproduction(paper: str) -> dict[str, str]:
    """The tables of the page of a paper."""
    result = stored(RESULTS / f"reproduce-{paper}.json")
    tables = {
        "calibration": table_of(result["calibration"], RATES)
        if "gb_per_second" in result["calibration"][0]
        else plain(result["calibration"])
    }
    tables["agreement"] = AGREEMENT
    if result["accuracy"]:
        tables["accuracy"] = accuracy(result)
    for section in result["sections"]:
        table = SECTIONS[paper].get(section["name"], plain)
        tables[section["name"]] = "\n\n".join([table(section["rows"]), *claims(section), *section["notes"]])
    return tables


def claims(section: Result) -> list[str]:
    """Statements of the paper beside ours."""
    rows = [
        {**claim, "said": ", ".join(filter(None, [shown(claim["agrees"]), claim["because"]]))}
        for claim in section["claims"]
    ]
    columns = {
        "where": "{where}",
        "claim": "{what}",
        "paper": "{paper}",
        "ours": "{ours}",
        "agrees": "{said}",
    }
    return [table_of(rows, columns)] if rows else []


def accuracy(result: Result) -> str:
    """Errors of the predicted cells."""
    rows = [
        [
            name,
            each["cells"],
            f"{each['median_error']:.1%}",
            f"{each['pairs'] - len(each['wrong'])} of {each['pairs']}",
            "; ".join(each["wrong"]) or "-",
        ]
        for name, each in (
            ("FlexGen as its code runs", result["accuracy"]),
            ("FlexGen as Fig. 6 draws it", result["accuracy_as_drawn"]),
            ("sustained rates, no cell fitted", result["accuracy_sustained"]),
        )
    ]
    return markdown(
        ["", "predicted cells", "median absolute error", "pairs over 20 % apart in order", "not in order"],
        rows,
    )
