"""Writes docs/results.md from the result files, so that no figure is typed by hand.

python benchmarks/_summary.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _results import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "results.md"

INTRODUCTION = """# Results

Every figure comes from a file in `benchmarks/results/`, which its command writes together with the machine that it ran
on. The machines are shared: ratios were taken within one run, and are what to go by.
`python benchmarks/_summary.py` writes this page.
"""


def main() -> None:
    """Write the page from whichever result files there are."""
    parts = [INTRODUCTION]
    for file in sorted(RESULTS.glob("*.json")):
        result = json.loads(file.read_text())
        describe = DESCRIBERS[file.stem.partition("-")[0]]
        rows = "\n".join(f"| {row} |" for row in describe(result))
        parts.append(f"## `{file.name}`\n\n{machine(result)}: `{command(file, result)}`\n\n{rows}\n")
    PAGE.write_text("\n".join(parts))
    print(PAGE)


def machine(result: dict[str, Any]) -> str:
    """The machine in one line."""
    about = result.get("machine")
    if about is None:
        return "predicted, on no machine"
    return (
        about.get("description") or f"{about['processor']}, {about['cores']} cores, Python {about['python']}"
    )


def command(file: Path, result: dict[str, Any]) -> str:
    """The command that wrote the file."""
    kind, _, of = file.stem.partition("-")
    if kind == "reproduce":
        return f"moesched reproduce {of} --report benchmarks/results/{file.name}"
    return result.get("command", f"python benchmarks/{kind}.py")


def cluster_tokens(result: dict[str, Any]) -> Iterator[str]:
    """Processes against one process."""
    yield "model | device | policy | nodes | tokens of one process | logits alike on all nodes"
    yield "--- | --- | --- | --- | --- | ---"
    for each in result["cases"]:
        policy = f"`{each['policy']}`, {'de' if each['decentralised'] else ''}centralised"
        tokens, logits = ("yes" if each[key] else "no" for key in ("tokens_equal", "logits_equal"))
        yield f"{each['model']} | {each['device']} | {policy} | {each['nodes']} | {tokens} | {logits}"


def kill_a_node(result: dict[str, Any]) -> Iterator[str]:
    """How runs ended in which a node was killed."""
    yield "runs in which a node was killed | value"
    yield "--- | ---:"
    yield f"all | {result['runs']}"
    yield f"ended as promised within {result['limit_seconds']:g} s | {result['as_promised']}"
    for how, count in sorted(result["ended"].items()):
        yield f"ended with: {how} | {count}"
    for which, seconds in result["seconds_to_end"].items():
        yield f"seconds from the kill to the end of the run, {which} | {seconds}"


def engine(result: dict[str, Any]) -> Iterator[str]:
    """The engine's speed."""
    yield "virtual clock, CGOPipe on Mixtral-8x7B | tasks/s, median | best | times SimPy"
    yield "--- | --- | --- | ---"
    for name, rate in result["tasks_per_second"].items():
        times = result["times_simpy"].get(name, 1)
        yield f"{name} | {rate['median']:,.0f} | {rate['best']:,.0f} | {times}"
    yield "**real time, tasks that do nothing** | **µs per task, median** | **best** |"
    for name, cost in result["microseconds_per_task"].items():
        yield f"{name} | {cost['median']:.2f} | {cost['best']:.2f} |"


def offload_disk(result: dict[str, Any]) -> Iterator[str]:
    """Decoding against the disk and against Hugging Face."""
    yield "measure | value | bar | reached"
    yield "--- | --- | --- | ---"
    for name, bar in result["summary"].items():
        yield f"{name} | {bar['value']:.3f} | {bar['bar']} | {'yes' if bar['reached'] else 'no'}"
    bound = result["page_cache"].get("most_any_could_reach")
    if bound is not None:
        yield f"page cache: the most that any implementation could reach | {bound:.3f} | |"


def prediction(result: dict[str, Any]) -> Iterator[str]:
    """Predicted against measured."""
    yield "policy | micro-batch | total measured, s | total predicted, s | error"
    yield "--- | --- | --- | --- | ---"
    for each in result["runs"]:
        measured, predicted = each["measured"]["total"], each["predicted"]["total"]
        error = each["error_percent"]["total"]
        yield f"{each['policy']} | {each['micro_batch_size']} | {measured:.2f} | {predicted:.2f} | {error:+.0f} %"


def emulated(result: dict[str, Any]) -> Iterator[str]:
    """Policies on the emulated accelerator."""
    yield "sizes by / policy | batch / micro-batch | tokens/s | total, predicted's error | step, error | link busy"
    yield "--- | --- | --- | --- | --- | ---"
    for each in result["policies"]:
        plan, errors = each["plan"], each["error_percent"]
        yield (
            f"{each['case']} | {plan['batch_size']} / {plan['micro_batch_size']} "
            f"| {each['throughput_tokens_per_second']:.2f} | {errors['total']:+.1f} % | {errors['decode step']:+.1f} % "
            f"| {100 * each['link']['busy_share']:.1f} %"
        )
    for name, label in EMULATED_FINDINGS.items():
        if name in result:
            value = result[name]
            yield f"**{label}** | {value if isinstance(value, str | bool) else f'{value:.3f}'} | | | |"


EMULATED_FINDINGS = {
    "in_the_papers_order": "in the paper's order",
    "times_flexgen_with_equal_sizes": "times flexgen with equal sizes",
    "times_flexgen_with_its_published_micro_batches": "times flexgen with the sizes that the paper prints for it",
    "times_flexgen_with_the_planners_plan": "times flexgen with the planner's sizes",
    "bytes_moved_over_needed": "bytes moved over needed",
    "requests_with_equal_tokens": "requests with equal tokens in all cases",
}


def fidelity(result: dict[str, Any]) -> Iterator[str]:
    """Replays and rankings."""
    yield "measure | value | bar | reached"
    yield "--- | --- | --- | ---"
    for name, bar in result["summary"].items():
        of = f", of {bar['of']}" if "of" in bar else ""
        reached = {True: "yes", False: "no"}.get(bar.get("reached", ""), "")
        yield f"{name.replace('_', ' ')} | {bar['value']:.2f}{of} | {bar.get('bar', '')} | {reached}"


def peak_memory(result: dict[str, Any]) -> Iterator[str]:
    """Peak memory beside the system's high-water mark."""
    yield "run | predicted, MB | measured, MB | above by, MB | holds"
    yield "--- | ---: | ---: | ---: | ---"
    for each in result["runs"]:
        yield (
            f"{each['run']} | {each['predicted'] / 1e6:,.0f} | {each['measured'] / 1e6:,.0f} "
            f"| {each['over_mb']:+.1f} | {'yes' if each['holds'] else 'no'}"
        )


def reproduce(result: dict[str, Any]) -> Iterator[str]:
    """A paper's tables beside ours, or what it states."""
    accuracy = result["accuracy"]
    if accuracy is None:
        yield "where | what | paper or bar | ours | agrees"
        yield "--- | --- | --- | --- | ---"
        for claim in (claim for section in result["sections"] for claim in section["claims"]):
            agrees = "yes" if claim["agrees"] else "no"
            yield f"{claim['where']} | {claim['what']} | {claim['paper']} | {claim['ours']} | {agrees}"
        return
    right = accuracy["pairs"] - len(accuracy["wrong"])
    yield "measure | value | bar"
    yield "--- | --- | ---"
    yield f"median error of {accuracy['cells']} predicted cells | {accuracy['median_error']:.1%} | 20 %"
    yield f"pairs of cells in the paper's order, of {accuracy['pairs']} | {right} | all"


def damaged_policies(result: dict[str, Any]) -> Iterator[str]:
    """How damaged policies end."""
    yield f"{result['policies']} damaged policies | how many ended so"
    yield "--- | ---"
    for clock, ends in result["ends"].items():
        for end, count in ends.items():
            yield f"{clock}: {end} | {count}"


def random_runs(result: dict[str, Any]) -> Iterator[str]:
    """What went wrong in random runs."""
    yield f"{result['runs']} random runs: runs in which | runs"
    yield "--- | ---"
    for problem in result["runs_with"].values():
        yield f"{problem['meaning']} | {problem['runs']}"


def exactness(result: dict[str, Any]) -> Iterator[str]:
    """Against Hugging Face, and from policy to policy."""
    float32, bfloat16, policies = result["float32"], result["bfloat16"], result["policies"]
    yield f"against Hugging Face, {result['models']} | ours | bar"
    yield "--- | --- | ---"
    counted = float32["positions"] - float32["left_out"]
    yield f"float32: wrong greedy tokens, of {counted:,} | {float32['wrong_tokens']} | 0"
    yield f"float32: left out, as the first two logits are at most 1e-4 apart | {float32['left_out']} |"
    yield f"float32: largest difference of logits | {float32['largest_difference_of_logits']:.1e} |"
    yield "**bfloat16: error, in spreads of the logits** | **ours / Hugging Face's** | **ratio, at most 2** |"
    kept = bfloat16["share_with_the_experts_of_float32"]
    groups = {
        "all positions": "all_positions",
        f"where both kept float32's experts ({kept['both']:.0%})": "same_experts",
    }
    for where, key in groups.items():
        for name, error in bfloat16[key].items():
            values = f"{error['ours']:.4f} / {error['hugging_face']:.4f}"
            yield f"{name.replace('_', ' ')}, {where} | {values} | {error['ratio']:.2f}"
    for where, key in zip(groups, ("ratio_by_model", "ratio_by_model_same_experts"), strict=True):
        for name, ratio in bfloat16[key].items():
            values = f"{ratio['best']:.2f}, {ratio['median']:.2f}, {ratio['worst']:.2f}"
            yield f"{name.replace('_', ' ')}, {where}, by model: best, median, worst | | {values}"
    yield f"positions up to which float32's experts were kept | {kept['ours']:.1%} / {kept['hugging_face']:.1%} |"
    yield "**from policy to policy** | **ours** | **bar** |"
    yield (
        f"runs whose logits are not those of `resident` to the bit, of {policies['runs']} "
        f"({', '.join(policies['policies'])}; one memory and two; float32 and bfloat16; {policies['models']} models) "
        f"| {policies['runs_that_differ']} | 0"
    )


def plan_search(result: dict[str, Any]) -> Iterator[str]:
    """The planner's choice against a grid."""
    yield "machine, new tokens | chosen | tokens/s | best of the grid | tokens/s | regret"
    yield "--- | --- | --- | --- | --- | ---"
    for each in result["cases"]:
        workload = f"{each['machine']}, {each['new_tokens']}{', padded' if each['padded'] else ''}"
        sides = [
            f"{one['policy']} {one['batch_size']} / {one['micro_batch_size']} | {one['tokens_per_second']:,.1f}"
            for one in (each["chosen"], each["best_of_grid"])
        ]
        yield f"{workload} | {' | '.join(sides)} | {100 * each['regret']:.1f} %"
    yield f"**seconds of a search** | {result['search_seconds']} | | | |"


def expert_kernel(result: dict[str, Any]) -> Iterator[str]:
    """The CPU expert kernel beside torch."""
    bars = result["bars"]
    yield f"an expert, rows | stream, GB/s | kernel ({result['instructions']}) | torch | of stream | times torch"
    yield "---: | ---: | ---: | ---: | ---: | ---:"
    for rows, each in result["alone"].items():
        torch = max(each["torch_gbs"], each["torch_shared_gbs"])
        yield (
            f"{rows} | {each['stream_gbs']:.1f} | {each['kernel_gbs']:.1f} | {torch:.1f} "
            f"| {each['share_of_stream']:.0%} | {each['times_torch']:.2f}"
        )
    yield (
        f"**at least** | | | | {bars['share_of_stream_up_to_4_rows']:.0%} up to 4 rows "
        f"| {bars['times_torch_up_to_16_rows']:g} up to 16 rows"
    )
    for name, rows in result.get("others", {}).items():
        for number, each in rows.items():
            yield (
                f"{number}, {name} | {each['stream_gbs']:.1f} | {each['kernel_gbs']:.1f} | "
                f"| {each['share_of_stream']:.0%} |"
            )
    for batch in (1, 16):
        each = result.get(f"decode_{batch}")
        if each is None:
            continue
        bar = f", at least {bars['decode_ratio_at_batch_1']:g}" if batch == 1 else ""
        yield (
            f"**`mixtral-0.8b` resident, batch {batch}, tokens/s** | | {each['kernel_tokens_per_second']:.1f} "
            f"| {each['torch_tokens_per_second']:.1f} | | {each['ratio']:.2f}{bar}"
        )


def decision_time(result: dict[str, Any]) -> Iterator[str]:
    """How long policies take to decide a layer."""
    yield "policy | experts, tokens | microseconds, median | fastest of seven rounds | at most"
    yield "--- | --- | ---: | ---: | ---:"
    for policy, cases in result["policies"].items():
        for case, each in cases.items():
            fastest = each.get("fastest_round_us")  # older results have one round
            shown = "" if fastest is None else f"{fastest:.0f}"
            yield f"`{policy}` | {case} | {each['median_us']:.0f} | {shown} | {each['bar_us']:.0f}"


def dispatch(result: dict[str, Any]) -> Iterator[str]:
    """One request under policies that decide where experts run."""
    yield "where | scenario | policy | first token, s | tokens/s | first token, predicted"
    yield "--- | --- | --- | ---: | ---: | ---:"
    for each in result["cases"]:
        predicted = each["predicted"]
        error = predicted and predicted["first_token_seconds"] / each["first_token_seconds"] - 1
        rate = each.get("tokens_per_second")
        yield (
            f"{each['where']} | {each['scenario']} | `{each['policy']}` | {each['first_token_seconds']:.2f} "
            f"| {'' if rate is None else f'{rate:.2f}'} | {'' if error is None else f'{error:+.0%}'}"
        )
    equal = sum(each["tokens_equal"] for each in result["compared"])
    yield f"**scenarios with the same tokens under every policy** | {equal} of {len(result['compared'])} | | | |"


def layer_estimate(result: dict[str, Any]) -> Iterator[str]:
    """What `twiddler_makespan` expects a layer to take beside what it took."""
    yield "where | case | expected, ms | took, ms | median error | worst tenth"
    yield "--- | --- | ---: | ---: | ---: | ---:"
    for where, cases in result["cases"].items():
        for case, each in cases.items():
            yield (
                f"{where} | {case} | {each['expected_ms']:.2f} | {each['measured_ms']:.2f} "
                f"| {each['median_error']:.1%} | {each['worst_tenth']:.1%}"
            )
        yield f"**{where}, all** | | | | {result['median_error'][where]:.1%}, at most {result['bar']:.0%} |"


def makespan(result: dict[str, Any]) -> Iterator[str]:
    """`twiddler_makespan` beside others, simulated."""
    scenarios = list(next(iter(result["ratios"].values())))
    yield f"times as fast as | {' | '.join(scenarios)}"
    yield " | ".join(["---", *("---:" for _ in scenarios)])
    for rival, ratios in result["ratios"].items():
        yield f"{rival} | {' | '.join(f'{ratios[each]:.2f}' for each in scenarios)}"


def packing(result: dict[str, Any]) -> Iterator[str]:
    """Weights in many arrays beside weights in one, idle for a while between uses."""
    where = "Metal" if result["metal"] else "no Metal"
    yield f"wait, ms ({where}) | unstacked, ms | prestacked, ms | unstacked / prestacked"
    yield "---: | ---: | ---: | ---:"
    found = result["packings"]
    for wait, ratio in result["unstacked_over_prestacked"].items():
        times = [found[each]["seconds_by_wait"][wait] * 1e3 for each in ("unstacked", "prestacked")]
        yield f"{wait} | {times[0]:.2f} | {times[1]:.2f} | {ratio:.2f}"
    yield f"**median, 8 to 512** | | | {result['median_between_8_and_512_ms']:.2f}"


def command_times(result: dict[str, Any]) -> Iterator[str]:
    """How long commands take."""
    yield "command | seconds | at most"
    yield "--- | ---: | ---:"
    for each in result["commands"]:
        bar = "" if each["bar"] is None else f"{each['bar']:g}"
        yield f"`{each['command']}` | {each['seconds']:.2f} | {bar}"


def all_reduce(result: dict[str, Any]) -> Iterator[str]:
    """Transports beside each other."""
    yield f"an all-reduce of {result['bytes']} bytes between 2 ranks | µs, p50 | p10 | p90 | p99"
    yield "--- | ---: | ---: | ---: | ---:"
    for name, figure in result["seconds"].items():
        yield " | ".join([name, *(f"{figure[p] * 1e6:.0f}" for p in ("p50", "p10", "p90", "p99"))])
    for name, figure in result["overhead_seconds_of_40_layers"].items():
        places = (f"{figure[p] * 1e6:.0f}" for p in ("p50", "p10", "p90", "p99"))
        yield " | ".join([f"{name}: overhead of the 40 exchanges of a token", *places])


def fuzz_transport(result: dict[str, Any]) -> Iterator[str]:
    """Damaged frames."""
    yield "damaged frames | how many | refused, connections of noise included | exchanges meanwhile, all right"
    yield "--- | ---: | ---: | ---:"
    for name in ("from a rank with a key", "from a stranger"):
        figure = result[name]
        yield f"{name} | {figure['frames']} | {figure['refused']} | {figure['exchanges']}"


DESCRIBERS = {
    "cluster_tokens": cluster_tokens,
    "kill_a_node": kill_a_node,
    "command_times": command_times,
    "packing": packing,
    "exactness": exactness,
    "dispatch": dispatch,
    "engine": engine,
    "offload_disk": offload_disk,
    "prediction": prediction,
    "damaged_policies": damaged_policies,
    "all_reduce": all_reduce,
    "decision_time": decision_time,
    "emulated": emulated,
    "expert_kernel": expert_kernel,
    "fuzz_transport": fuzz_transport,
    "fidelity": fidelity,
    "layer_estimate": layer_estimate,
    "makespan": makespan,
    "peak_memory": peak_memory,
    "plan_search": plan_search,
    "random_runs": random_runs,
    "reproduce": reproduce,
}


if __name__ == "__main__":
    main()
