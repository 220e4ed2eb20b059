"""`moesched launch`, `moesched node` and `moesched keygen`: run a cluster, run one of its nodes, make its keys."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.generation_options import GenerationArguments
from moesched.cli.output import print_json, print_lines, say
from moesched.inputs.defaults import JOIN_SECONDS
from moesched.jobs.options import CLUSTER, HostsOptions
from moesched.options import Option, part_of
from moesched.system.children import end_with_parent

LAUNCH_EPILOGUE = """Examples:

  moesched launch models/dbrx --hosts cluster.toml --policy ep_router_aided \\
      --prompt "Return the"
  moesched launch models/dbrx --hosts cluster.toml --policy ep_router_aided \\
      --prompt-ids "1,2" --dry-run
  mpirun --host mac-0,mac-1 moesched launch models/dbrx --hosts cluster.toml \\
      --policy ep_router_aided --prompt "Return the" """

NODE_EPILOGUE = """Examples:

  moesched node models/dbrx --cluster cluster.toml --rank 1"""

KEYGEN_EPILOGUE = """Examples:

  moesched keygen
  moesched keygen --out keys/mac-1"""


@command(KEYGEN_EPILOGUE)
def keygen(
    *,
    out: Annotated[Path | None, Option("Folder for the keys. By default ~/.moesched.", "FOLDER")] = None,
    json: options.Json = False,
) -> None:
    """Make a pair of keys for a machine of a cluster.

    moesched.key has the public key, to copy into the cluster file; moesched.secret, with the secret key, stays on this
    machine. Existing keys are kept.
    """
    from moesched.cluster.curve.keys import SECRET_NAME, default_folder, write_keys

    folder = out or default_folder()
    keys = write_keys(folder)
    if json:
        print_json({"key": keys.public, "secret_file": str(folder / SECRET_NAME)})
    else:
        print_lines([f'key = "{keys.public}"', ""])
        say(f"the secret one is in {folder / SECRET_NAME}, which only you can read")


@command(NODE_EPILOGUE)
def node(
    model: Annotated[Path, Option("Folder or GGUF file of the model on this machine.", flag="MODEL")],
    *,
    cluster: Annotated[Path, Option("Cluster file: see docs/cluster.md.", "FILE", group=CLUSTER)],
    rank: Annotated[int, Option("Number of this node in the cluster file, from 0.", "R", group=CLUSTER)],
    key: Annotated[Path | None, Option("Secret key file, as of `launch`.", "FILE", group=CLUSTER)] = None,
    patience: Annotated[
        float, Option("Seconds to wait for the launcher.", "SECONDS", group=CLUSTER)
    ] = JOIN_SECONDS,
    ends_with_stdin: Annotated[
        bool,
        Option(
            "End when standard input is closed, and so with the program that started this node.",
            group=CLUSTER,
        ),
    ] = False,
) -> None:
    """Run one node of a cluster: wait for the launcher, take part in its run, and end with it.

    Normally `moesched launch` starts the nodes. Use this command to bring back a node that was lost.
    """
    if ends_with_stdin:
        end_with_parent()
    from moesched.cluster.node import run_node

    run_node(cluster, rank, model, key=key, patience=patience)


@command(LAUNCH_EPILOGUE)
def launch(
    hosts: HostsOptions,
    given: GenerationArguments,
    dry_run: Annotated[
        bool, Option("Print the commands that would start the nodes, and exit.", group=CLUSTER)
    ] = False,
) -> int:
    """Generate text on several machines, which a cluster file describes.

    Starts a node on each machine with the system's ssh. Under torchrun, mpirun or mlx.launch, which start one process
    per machine themselves, rank 0 launches and every process becomes a node.

    Every machine needs moesched, the model and the cluster file, at the same paths unless the cluster file gives
    others.

    Malformed lines of a prompts file are reported by number and skipped; the exit code is then 2.
    """
    from moesched.cluster.cluster_file import load_cluster
    from moesched.cluster.cluster_jobs import run_cluster, run_with_given_ranks
    from moesched.cluster.launch_env import rank_given
    from moesched.cluster.members import node_arguments, ssh_command

    file, model = hosts.cluster_file, Path(given.model)
    cluster = load_cluster(file)
    if dry_run:
        commands = [
            shlex.join(ssh_command(host, node_arguments(file, host, model.resolve())))
            for host in cluster.hosts
        ]
        if given.json:
            print_json({"commands": commands})
        else:
            print_lines(commands)
        return 0
    rank = rank_given(os.environ, len(cluster.hosts))
    if rank is None:
        return given.generate(run_cluster, **part_of(hosts, HostsOptions))
    if rank:
        own = None if cluster.host(rank).secret else hosts.key
        node(model, cluster=file, rank=rank, key=own)
        return 0
    return given.generate(run_with_given_ranks, **part_of(hosts, HostsOptions))
