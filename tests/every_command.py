"""A small call of every command, and a process that makes them all, among prints of others."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

COMMANDS = (
    "simulate --model mixtral-0.8b --machine t4 --policy cgopipe --workload mtbench --gen 2 --batch-size 2 "
    "--trace a.json",
    "run model --policy resident --prompt-ids 1,2 --max-new-tokens 2 --trace b.json",
    "sweep sweep.toml --workers 1",
    "plan --model mixtral-0.8b --machine t4 --gen 2 --policy cgopipe",
    "plan --model dbrx --machine m2-ultra --nodes 2 --network 10gbe",
    "new-policy mine",
    "check resident --limit 1 --model mixtral-0.8b --machine t4 --batch-size 1",
    "prestack model stacked",
    "list policies",
    "list models",
    "list machines",
    "list parts",
    "list networks",
    "list workloads",
    "compare a.json b.json",
    "explain a.json",
    "timeline a.json --out a.svg",
    "machine --chip M2Ultra --ram 192GB",
    "doctor",
    "roofline --model mixtral-8x7b --machine t4",
    "latencies --model mixtral-8x7b --machine rtx6000",
    "reproduce mac-cluster --only packing",
    "profile-routing mixtral-8x7b --routing zipf",
    "sparsity model",
    "keygen --out keys",
    "launch model --hosts cluster.toml --policy ep_naive --dry-run",
)
"""In an order in which later ones find the files of earlier ones."""

OTHERS = {
    "calibrate": "measures for half a minute: test_terminal.py prints its result",
    "chat": "talks to a server: see test_chat_command.py",
    "random-model": "writes 300 MB: test_cli.py reads its result",
    "node": "has no result: the launcher has it, so that there is no --json",
    "serve": "serves until Ctrl-C: see test_server_process.py",
    "view": "serves until Ctrl-C: see test_view.py",
}
"""Commands without a call here, and the reason of each."""

SWEEP = """
policy = ["resident"]
machine = ["t4"]
model = ["mixtral-0.8b"]
batch_size = [1]
gen = [2]
"""


def prepare(folder: Path) -> None:
    """Write the inputs of the commands."""
    from clusters import cluster, host
    from moesched.cluster.cluster_file import cluster_toml
    from small_models import small_model

    small_model(folder / "model", text=True)
    (folder / "cluster.toml").write_text(cluster_toml(cluster(host(0, ssh="me@mac-0"), host(1))))
    (folder / "sweep.toml").write_text(SWEEP)


def print_in_every_way() -> None:
    """Print as libraries do: from Python, to the descriptor, by C's own buffer, and in a child."""
    sys.stdout.write("print\n")
    os.write(1, b"write\n")
    ctypes.CDLL(None).puts(b"puts")
    subprocess.run(["echo", "echo"], check=True)


def main() -> None:
    """Make all calls with --json; standard error then has a line with the exit code of each."""
    from moesched.cli.main import main as moesched
    from moesched.system.standard_output import reserve_stdout

    reserve_stdout()
    for command in COMMANDS:
        print_in_every_way()
        code = moesched([*command.split(), "--json"])
        sys.stderr.write(f"exit code {code}: {command}\n")


if __name__ == "__main__":
    main()
