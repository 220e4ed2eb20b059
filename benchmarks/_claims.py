"""The claims of docs/results.md: each a figure of a result file, and its bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from _claim import Claim, Result, all_of, at_least, at_most, none_of, times, together
from _claims_of_devices import (
    attention_kernel,
    expert_kernel,
    host_time,
    leaks,
    mlx_evaluations,
    offload_disk,
    packing,
    peak_memory,
    soak,
)
from _claims_of_gpus import gpu_hour
from _peer_tables import bars


def all_reduce(result: Result) -> Iterator[Claim]:
    """Between two processes, over loopback."""
    words = {
        "plain_p50_seconds": "all-reduce of 24 KB, plain, submitted to the engine, median",
        "curve_p50_seconds": "all-reduce of 24 KB, encrypted, submitted to the engine, median",
        "overhead_per_token_seconds": "40 encrypted exchanges of a token, beyond its products",
    }
    bars = result["measured_and_bar"]
    for name, said in words.items():
        measured, bar = bars[name]
        yield at_most(said, 1e6 * measured, 1e6 * bar, "{:,.0f} µs")
    for name, keys in {"plain_over_bare": "plain", "curve_over_bare": "encrypted"}.items():
        if name in bars:
            measured, bar = bars[name]
            yield at_most(
                f"an exchange in the engine over one of bare sockets, {keys}", measured, bar, "{:.2f}x"
            )
    ratio, bar = bars["grpc_over_zeromq_curve"]
    yield at_least("gRPC's median over ours, encrypted", ratio, bar, "{:.1f}")


def bottlenecks(result: Result) -> Iterator[Claim]:
    """Planted causes of slowness."""
    yield all_of("planted causes that `explain` names as the bottleneck", result["named"], result["causes"])


def busy_tests(result: Result) -> Iterator[Claim]:
    """`make test` beside busy cores."""
    words = "rounds of `make test` beside two busy cores in which a test fails"
    yield none_of(words, result["failed_rounds"], result["rounds"])


def check_cost(result: Result) -> Iterator[Claim]:
    """The checks around a policy."""
    words = "checks of verbs, awaits and files, of a decode step of one request"
    yield at_most(words, 100 * result["largest_share"], 100 * result["bar"], "{:.3g} %")


def cluster_tokens(result: Result) -> Iterator[Claim]:
    """Processes against one process."""
    cases = result["cases"]
    wrong = sum(not (case["tokens_equal"] and case["logits_equal"]) for case in cases)
    yield none_of("runs of 2 to 4 processes with other tokens than one process", wrong, len(cases))


def command_times(result: Result) -> Iterator[Claim]:
    """From a command's start to its end."""
    barred = [each for each in result["commands"] if each["bar"]]
    names = " and ".join(f"`{' '.join(each['command'].split()[:2])}`" for each in barred)
    claims = [at_most("", each["seconds"], each["bar"], "{:.1f} s") for each in barred]
    yield together(f"{names}, Mixtral 8x7B on a T4", *claims)


def damaged_policies(result: Result) -> Iterator[Claim]:
    """Policies with a wrong call, or that change what they see."""
    total = sum(count for ends in result["ends"].values() for count in ends.values())
    yield none_of("damaged policies that end with wrong tokens or hang", len(result["problems"]), total)


def decision_time(result: Result) -> Iterator[Claim]:
    """The policies' own time for a layer."""
    cases = [each for policy in result["policies"].values() for each in policy.values()]
    slow = sum(each["median_us"] > each["bar_us"] for each in cases)
    words = "decisions above 50 µs a layer (8 experts) or 300 µs (128 experts), policies by batches"
    yield none_of(words, slow, len(cases))


def dispatch(result: Result) -> Iterator[Claim]:
    """One request under policies that decide where experts run."""
    equal = [each["tokens_equal"] for each in result["compared"]]
    yield all_of("scenarios of one request with the same tokens under every policy", sum(equal), len(equal))


def emulated(result: Result) -> Iterator[Claim]:
    """MoE-Lightning's Tables 4 and 5 on an emulated T4."""
    words = "emulated T4: CGOPipe, FlexGen, FlexGen with CPU attention, layer streaming in the paper's order"
    yield Claim(words, "yes" if result["in_the_papers_order"] else "no", "yes", result["in_the_papers_order"])


def engine(result: Result) -> Iterator[Claim]:
    """The engine's speed."""
    bars = {
        "building the graph": ("built", 5),
        "replaying it": ("replayed", 22),
        "with sharing": ("sharing", 4),
    }
    for words, (name, bar) in bars.items():
        rate, ratio = result["tasks_per_second"][name]["median"], result["times_simpy"][name]
        figure = f"{rate:,.0f} tasks/s, {ratio}x SimPy"
        yield Claim(f"simulation of CGOPipe, {words}", figure, f"≥ {bar}x SimPy", ratio >= bar)
    for name in ("chain on a worker thread", "chain across two worker threads"):
        yield Claim(
            f"empty tasks, {name}", f"{result['microseconds_per_task'][name]['median']:.1f} µs a task"
        )


def engine_paired(result: Result) -> Iterator[Claim]:
    """The engine's speed beside an older commit's."""
    slower = sum(row["interval"][0] > 1.03 for row in result["rows"].values())
    words = f"engine: rows surely more than 3 % slower than {result['before']}"
    yield none_of(words, slower, len(result["rows"]))


def exactness(result: Result) -> Iterator[Claim]:
    """Against Hugging Face, and from policy to policy."""
    float32, policies = result["float32"], result["policies"]
    counted = float32["positions"] - float32["left_out"]
    yield none_of("wrong greedy tokens in float32 against Hugging Face", float32["wrong_tokens"], counted)
    worst = max(each["ratio"] for each in result["bfloat16"]["all_positions"].values())
    yield at_most("error of bfloat16 logits over Hugging Face's own", worst, 2.0, "{:.2f}")
    if "beams" in result:
        beams = result["beams"]
        words = "beam searches whose best sequence is not Hugging Face's"
        yield none_of(words, beams["other_sequences"], beams["searches"])
    words = "runs of policies whose logits differ in a bit"
    yield none_of(words, policies["runs_that_differ"], policies["runs"])


def expectation(result: Result) -> Iterator[Claim]:
    """The cost of the expectation that `run` prints."""
    cases = result["cases"].values()
    words = "runs whose expectation takes at most 2 % of the run or 1 s"
    yield all_of(words, sum(case["reached"] for case in cases), len(cases))


def explaining(result: Result) -> Iterator[Claim]:
    """`explain` on large traces."""
    runs = result["runs"]
    tasks = sorted(each["tasks"] for each in runs)
    words = f"`explain` on {tasks[0]:,} to {tasks[-1]:,} tasks, worst of {len(runs)} policies and sizes"
    yield at_most(words, max(each["seconds"] for each in runs), result["bar_seconds"], "{:.1f} s")
    most = max(each["peak_bytes"] for each in runs)
    yield at_most(f"{words}: memory", most / 1e6, result["bar_bytes"] / 1e6, "{:,.0f} MB")


def fidelity(result: Result) -> Iterator[Claim]:
    """Replays and rankings."""
    summary = result["summary"]
    yield at_most(
        "replay of a real run against its time, worst policy", summary["replays"]["value"], 1.0, "{:.2f} %"
    )
    for place, words in (("disk", "real disk"), ("emulated", "emulated, durations from the cost model")):
        pairs = [summary[f"{place}_concordant_percent_{each}"] for each in ("decode", "total")]
        worst = min(pairs, key=lambda pair: float(pair["value"]))
        said = f"{worst['value']:g} % of {worst['of']} pairs"
        yield Claim(
            f"distinct schedules predicted in their order ({words})", said, "≥ 95 %", worst["reached"]
        )
        regret = max(summary[f"{place}_worst_regret_percent_{each}"]["value"] for each in ("decode", "total"))
        yield at_most(f"regret of the predicted choice, worst setting ({words})", regret, 3.0, "{:.1f} %")


def fuzz_transport(result: Result) -> Iterator[Claim]:
    """Damaged frames: the benchmark ends with an error if one changes anything."""
    senders = [each for each in result.values() if isinstance(each, dict) and "frames" in each]
    frames = sum(each["frames"] for each in senders)
    exchanges = sum(each["exchanges"] for each in senders)
    yield Claim(
        f"exchanges between {frames:,} damaged frames, each checked", f"{exchanges}", "none wrong", True
    )


def fuzz_inputs(result: Result) -> Iterator[Claim]:
    """Damaged files and messages, by parser, and damaged files of commands."""
    for kind, words in (("parsers", "files and messages"), ("commands", "files of commands")):
        found = result[kind].values()
        files, problems = (sum(each[name] for each in found) for name in ("files", "problems"))
        if files:
            yield none_of(
                f"damaged {words} that did not end in one line within 2 s and 500 MB", problems, files
            )


def html_report(result: Result) -> Iterator[Claim]:
    """The page of a run of 180,000 tasks, in headless Chromium without a GPU."""
    tasks, windows = f"page of {result['tasks']:,} tasks", result["windows"]
    yield at_most(f"{tasks}, MB", result["bytes"] / 1e6, result["bytes_bar"] / 1e6, "{:.1f}")
    widths = f"in Chromium, {', '.join(windows)} wide"
    slowest = max(each["usable_seconds"] for each in windows.values())
    yield at_most(f"{tasks} {widths}: usable after", slowest, result["usable_bar"], "{:.2f} s")
    shift = max(each["layout_shift"] for each in windows.values())
    yield at_most(f"{tasks} {widths}: cumulative layout shift", shift, result["shift_bar"], "{:.2f}")
    least = min(each[f"{what}_frames_per_second"] for each in windows.values() for what in ("zoom", "pan"))
    words = f"{tasks} {widths}: frames per second while it zooms and moves"
    yield at_least(words, least, result["frames_bar"], "{:.0f}")


def kill_a_node(result: Result) -> Iterator[Claim]:
    """A node killed at a random step."""
    words = f"runs with a killed node that end in {result['limit_seconds']:g} s with the same tokens, or by naming it"
    yield all_of(words, result["as_promised"], result["runs"])


def layer_estimate(result: Result) -> Iterator[Claim]:
    """`twiddler_makespan`'s estimate of a layer."""
    errors = result["median_error"]
    words = f"`twiddler_makespan`'s estimate of a layer, median error ({', '.join(errors)})"
    claims = [at_most("", 100 * error, 100 * result["bar"], "{:.1f} %") for error in errors.values()]
    yield together(words, *claims)


def makespan(result: Result) -> Iterator[Claim]:
    """`twiddler_makespan` beside others, simulated."""
    mean = times(result["times_twiddler_prefill_and_beams"])
    yield Claim("simulated: `twiddler_makespan` over `twiddler`, prefill and beams, mean", mean)
    least = result["times_twiddler_least"]
    yield at_least("simulated: `twiddler_makespan` over `twiddler`, least", least, 1.0, "{:.2f}x")


def opening(result: Result) -> Iterator[Claim]:
    """Of checkpoints with the headers of published ones."""
    slowest = max(result["checkpoints"], key=lambda each: float(each["open_processor_seconds"]))
    words = f"opening {slowest['checkpoint']}, {slowest['tensors_in_files']:,} tensors in {slowest['files']} files"
    yield at_most(words, 1e3 * slowest["open_processor_seconds"], 1e3 * result["bar_seconds"], "{:,.0f} ms")


def papers(result: Result) -> Iterator[Claim]:
    """Policies of papers beside those that they improve on, simulated."""
    decoding = [case for case in result["cases"] if case["of"] == "decode"]
    words = "simulated: policies of papers that decode faster than what they improve on"
    yield all_of(words, sum(case["ratio"] > 1 for case in decoding), len(decoding))


def peers(result: Result) -> Iterator[Claim]:
    """Ours beside other programs: the number of bars that are reached; the page names the others."""
    reached = [each.reached() for each in bars(result)]
    words = "bars of [beside other programs](performance.md#bars-that-are-missed) that are reached"
    yield all_of(words, sum(reached), len(reached))


def default_sizes(result: Result) -> Iterator[Claim]:
    """The planner's sizes of one policy against a grid of sizes."""
    words = (
        f"sizes that are not given below the best of a grid of 200, worst of {len(result['cases'])} settings"
    )
    yield at_most(words, 100 * result["worst_regret"], 5, "{:.1f} %")


def plan_search(result: Result) -> Iterator[Claim]:
    """The planner's choice against a grid, by objective."""
    worst = result["worst_regret"]
    if not isinstance(worst, dict):  # five policies, for throughput
        yield Claim("planner's choice below the best of a grid, worst model", f"{100 * worst:.1f} %")
        yield Claim("a search of the planner, Mixtral 8x7B", f"{result['search_seconds']:.1f} s")
        return
    for objective, regret in worst.items():
        words = f"planner's choice below the best of a grid for {objective}, worst of the models and machines"
        yield at_most(words, 100 * regret, 3, "{:.1f} %")
    yield at_most("a search of the planner, slowest", result["most_search_seconds"], 10, "{:.1f} s")


def prediction(result: Result) -> Iterator[Claim]:
    """Predicted against measured."""
    if "decode_inside_band" not in result:  # other runs, held to other bars
        return
    cases = result["cases"]
    yield all_of("unseen runs whose decode time is predicted within 10 %", result["decode_within_bar"], cases)
    yield all_of("unseen runs whose decode time is inside its band", result["decode_inside_band"], cases)
    yield all_of("unseen runs whose lanes are all within 15 %", result["lanes_within_bar"], cases)


def plan_table(result: Result) -> Iterator[Claim]:
    """`plan`'s table against `simulate` of each row."""
    words = "tables of `plan` whose first row is over 5 % slower than another, simulated"
    yield none_of(words, result["wrong_first_places"], result["ranked"])
    words = "plans that predict more than their own bound"
    yield none_of(words, result["bounds_below_predictions"], result["ranked"])
    words = f"rows of `plan` that are no estimates, against `simulate`, worst of {result['rows'] - result['estimates']}"
    yield at_most(words, 100 * result["worst_error"], 3, "{:.2g} %")


def policy_checks(result: Result) -> Iterator[Claim]:
    """The shipped policies under `moesched check`."""
    policies = result["policies"]
    faults = sum(bool(each["faults"] or each["unchecked"]) for each in policies)
    slowest = max(each["seconds"] for each in policies)
    yield together(
        "shipped policies with a fault, or a case unchecked, in `moesched check`, and the slowest",
        none_of("", faults, len(policies)),
        at_most("", slowest, result["bar_seconds"], "{:.0f} s"),
    )


LAGGING_ROWS = {
    "bits": "runs by seeds",
    "batches": "batches with the same memory",
    "errors": "errors that end a run",
    "ledger": "plans that fit",
    "spans": "times ten minutes of spans",
    "deep": "runs of 32 layers and micro-batches",
}


def lagging_device(result: Result) -> Iterator[Claim]:
    """Every policy on imitated GPUs."""
    rows = {LAGGING_ROWS[name]: row for name, row in result["rows"].items()}
    words = f"every policy on imitated GPUs, without a fault: {', '.join(rows)}"
    claims = [
        Claim(
            "", f"{row['done']:,}{'' if row['good'] else ' with faults'}", f"{row['planned']:,}", row["holds"]
        )
        for row in rows.values()
    ]
    yield together(words, *claims)


def lagging_mutants(result: Result) -> Iterator[Claim]:
    """Faults planted in the CUDA path."""
    words = "removed waits, events, lifetimes and copies of the CUDA path that the lagging device finds"
    yield all_of(words, result["found"], result["mutants"])


def preview_accuracy(result: Result) -> Iterator[Claim]:
    """Previews of the router on the model that ships."""
    decode = result["decode"]
    ahead = ", ".join(str(each["ahead"]) for each in decode)
    words = f"experts of one token that previews forecast {ahead} layers ahead, {result['model']}"
    figures = ", ".join(f"{each['accuracy']:.1%}" for each in decode)
    yield Claim(f"{words} (at random {decode[0]['chance']:.0%})", figures)


def random_runs(result: Result) -> Iterator[Claim]:
    """Random graphs and policies."""
    wrong = sum(each["runs"] for each in result["runs_with"].values())
    yield none_of("random runs with a wrong value, a hang or a broken rule", wrong, result["runs"])


def reproduce(result: Result) -> Iterator[Claim]:
    """A paper's tables beside ours."""
    found = [claim for section in result["sections"] for claim in section["claims"]]
    agree = sum(claim["agrees"] for claim in found)
    reasons = sum(claim["agrees"] and bool(claim["because"]) for claim in found)
    words = f"{result['paper']}: statements of the paper that agree"
    yield all_of(f"{words}, {reasons} of them by construction or by errors that cancel", agree, len(found))
    accuracy = result["accuracy"]
    if accuracy is not None:
        words = f"moe-lightning: median error of {accuracy['cells']} predicted cells"
        yield at_most(words, 100 * accuracy["median_error"], 20.0, "{:.1f} %")
        pairs = accuracy["pairs"]
        yield all_of(
            "moe-lightning: pairs of cells in the paper's order", pairs - len(accuracy["wrong"]), pairs
        )


def same_behaviour(result: Result) -> Iterator[Claim]:
    """Tokens, slices, edges and nanoseconds beside an older commit's."""
    words = "policies by settings that behave otherwise than in the older commit"
    yield none_of(words, len(result["different"]), result["cases"])


def signals(result: Result) -> Iterator[Claim]:
    """Commands that get a signal at a random moment."""
    killed = [case for case in result["all"] if case["signal"] == "SIGKILL"]
    others = [case for case in result["all"] if case["signal"] != "SIGKILL"]
    words = "commands with a signal at a random moment: right exit code, nothing left, reports readable"
    yield all_of(words, sum(not case["problems"] for case in others), len(others))
    words = "launchers killed at a random moment: all nodes gone within 2 s"
    yield all_of(words, sum(not case["problems"] for case in killed), len(killed))


def sweeps(result: Result) -> Iterator[Claim]:
    """1,000 points on one core and on two, and killed in between."""
    cores, killed = result.get("cores"), result.get("killed")
    if cores is not None:
        each = f"{cores['points']:,} points of {cores['milliseconds_for_a_point']:.0f} ms"
        words = f"speed of a sweep of {each} on two cores, over one core"
        yield Claim(words, times(cores["ratio"]), f"≥ {times(cores['bar'])}", cores["ratio"] >= cores["bar"])
    if killed is not None:
        words = "sweeps killed five times and resumed that lose, repeat or change a point"
        yield none_of(words, len({each.split(":")[0] for each in killed["problems"]}), killed["sweeps"])


def tutorial(result: Result) -> Iterator[Claim]:
    """The guide of policies, followed in a fresh clone."""
    steps = result["steps"]
    yield together(
        "steps of docs/policies.md in a fresh clone that print what the page shows; all, installation apart",
        all_of("", sum(step["as_shown"] for step in steps), len(steps)),
        at_most("", result["seconds"], result["bar_seconds"], "{:.0f} s"),
    )


def validation(result: Result) -> Iterator[Claim]:
    """Published rows of machines that others measured."""
    of, rows = result["summary"], result["summary"]["decode"]["rows"]
    words = "predicted decode rates that others [measured and published](validation.md)"
    yield at_most(f"{words}: median error of the sources", 100 * of["decode"]["median_error"], 25, "{:.0f} %")
    reached = [bar["reached"] for bar in result["bars"]]
    yield all_of(
        f"bars of [predictions of {rows} such rows](validation.md) that are reached",
        sum(reached),
        len(reached),
    )


def what_ifs(result: Result) -> Iterator[Claim]:
    """`explain --what-if` beside the same changes made on the virtual clock."""
    fixed, deciding = result["fixed"], result["deciding"]
    words = "what-ifs of fixed graphs"
    yield together(
        f"{words}, median and worst error",
        at_most("", fixed["median_error_percent"], 1, "{:.1f} %"),
        at_most("", fixed["worst_error_percent"], 5, "{:.1f} %"),
    )
    words = "what-ifs of policies that decide as they go"
    yield together(
        f"{words}, median error and right signs",
        at_most("", deciding["median_error_percent"], 5, "{:.1f} %"),
        all_of("", deciding["right_signs"], deciding["answers"]),
    )


CLAIMS: dict[str, Callable[[Result], Iterator[Claim]]] = {
    each.__name__: each
    for each in (
        all_reduce, attention_kernel, bottlenecks, busy_tests, check_cost, cluster_tokens, command_times,
        damaged_policies, decision_time, default_sizes, dispatch, emulated, engine, engine_paired, exactness,
        expectation, expert_kernel, explaining, fidelity, fuzz_inputs, fuzz_transport, gpu_hour, host_time,
        html_report, kill_a_node, lagging_device, lagging_mutants, layer_estimate, leaks, makespan, mlx_evaluations,
        offload_disk, opening, packing, papers, peak_memory, peers, plan_search, plan_table, policy_checks,
        prediction, preview_accuracy, random_runs, reproduce, same_behaviour, signals, soak, sweeps, tutorial,
        validation, what_ifs,
    )
}  # fmt: skip
"""By benchmark."""
