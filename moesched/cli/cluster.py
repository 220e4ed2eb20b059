"""`moesched launch`, `moesched node` and `moesched keygen`: run a cluster, be one node of it, make its keys."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter

from moesched.cli import options
from moesched.cli.generation_options import GenerationArguments
from moesched.cli.output import print_json, print_lines, say
from moesched.inputs.defaults import JOIN_SECONDS

CLUSTER = Group("Cluster", sort_key=1)

LAUNCH_HELP = options.paragraphs(
    "Generate text on several machines, which a cluster file describes.",
    "Starts a node on each machine with the system's ssh. Under torchrun, mpirun or mlx.launch, which start "
    "one process per machine themselves, rank 0 launches and every process becomes a node.",
    "Every machine needs moesched, the model and the cluster file, at the same paths unless the cluster "
    "file gives others.",
    options.BROKEN_LINES,
)

LAUNCH_EPILOGUE = """Examples:

  moesched launch models/dbrx --hosts cluster.toml --policy ep_router_aided \\
      --prompt "Return the"
  moesched launch models/dbrx --hosts cluster.toml --policy ep_router_aided \\
      --prompt-ids "1,2" --dry-run
  mpirun --host mac-0,mac-1 moesched launch models/dbrx --hosts cluster.toml \\
      --policy ep_router_aided --prompt "Return the" """

NODE_HELP = options.paragraphs(
    "Run one node of a cluster: wait for the launcher, take part in its runs, and end with it.",
    "`moesched launch` starts the nodes. Use this command to bring back a node that was lost.",
)

NODE_EPILOGUE = """Examples:

  moesched node models/dbrx --cluster cluster.toml --rank 1"""

KEYGEN_HELP = options.paragraphs(
    "Make a pair of keys: moesched.key, to copy into the cluster file, and moesched.secret, which stays on "
    "this machine.",
    "Existing keys are kept.",
)

KEYGEN_EPILOGUE = """Examples:

  moesched keygen
  moesched keygen --out keys/mac-1"""

ClusterFile = Annotated[
    Path,
    Parameter(
        group=CLUSTER,
        metavar="FILE",
        help="Cluster file with nodes, addresses and keys: see docs/cluster.md.",
    ),
]
KeyFile = Annotated[
    Path | None,
    Parameter(group=CLUSTER, metavar="FILE", help="Secret key file. By default ~/.moesched/moesched.secret."),
]


def add_to(app: App) -> None:
    """Add the commands to the application."""
    app.command(launch, name="launch", help=LAUNCH_HELP, help_epilogue=LAUNCH_EPILOGUE, sort_key=8)
    app.command(node, name="node", help=NODE_HELP, help_epilogue=NODE_EPILOGUE, sort_key=8)
    app.command(keygen, name="keygen", help=KEYGEN_HELP, help_epilogue=KEYGEN_EPILOGUE, sort_key=8)


def keygen(
    *,
    out: Annotated[
        Path | None, Parameter(metavar="FOLDER", help="Folder for the keys. By default ~/.moesched.")
    ] = None,
    json: options.Json = False,
) -> None:
    """See KEYGEN_HELP."""
    from moesched.cluster.curve.keys import SECRET_NAME, default_folder, write_keys

    folder = out or default_folder()
    keys = write_keys(folder)
    if json:
        print_json({"key": keys.public, "secret_file": str(folder / SECRET_NAME)})
    else:
        print_lines([f'key = "{keys.public}"', ""])
        say(f"the secret one is in {folder / SECRET_NAME}, which only you can read")


def node(
    model_dir: Annotated[Path, Parameter(help="Folder of the model on this machine.")],
    /,
    *,
    cluster: ClusterFile,
    rank: Annotated[
        options.Whole,
        Parameter(group=CLUSTER, metavar="R", help="Number of this node in the cluster file, from 0."),
    ],
    key: KeyFile = None,
    patience: Annotated[
        float, Parameter(group=CLUSTER, metavar="SECONDS", help="Seconds to wait for the launcher.")
    ] = JOIN_SECONDS,
    ends_with_stdin: Annotated[
        bool,
        Parameter(
            group=CLUSTER,
            negative="",
            help="End when standard input is closed, and so with the program that started this node.",
        ),
    ] = False,
) -> None:
    """See NODE_HELP."""
    from moesched.system.children import end_with_parent

    if ends_with_stdin:
        end_with_parent()
    from moesched.cluster.node import run_node

    run_node(cluster, rank, model_dir, key=key, patience=patience)


def launch(
    model_dir: options.ModelDir,
    /,
    *,
    hosts: ClusterFile,
    given: GenerationArguments,
    transport: options.Transport = None,
    key: KeyFile = None,
    dry_run: Annotated[
        bool,
        Parameter(
            group=CLUSTER, negative="", help="Print the commands that would start the nodes, and exit."
        ),
    ] = False,
) -> int:
    """See LAUNCH_HELP."""
    from moesched.cluster.cluster_file import load_cluster
    from moesched.cluster.cluster_jobs import run_cluster, run_with_given_ranks
    from moesched.cluster.launch_env import rank_given
    from moesched.cluster.members import node_arguments, ssh_command

    cluster = load_cluster(hosts)
    if dry_run:
        commands = [
            shlex.join(ssh_command(host, node_arguments(hosts, host, model_dir.resolve())))
            for host in cluster.hosts
        ]
        if given.json:
            print_json({"commands": commands})
        else:
            print_lines(commands)
        return 0
    arguments: dict[str, Any] = {"cluster_file": hosts, "key": key}
    if transport is not None:
        arguments["transport"] = transport
    rank = rank_given(os.environ, len(cluster.hosts))
    if rank is None:
        return given.generate(model_dir, run_cluster, **arguments)
    if rank:
        own = None if cluster.host(rank).secret else key
        node(model_dir, cluster=hosts, rank=rank, key=own)
        return 0
    return given.generate(model_dir, run_with_given_ranks, **arguments)
