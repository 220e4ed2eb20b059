"""An environment of its own for every peer, which still sees what is installed here: no library is installed twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.protocol import LONGEST_REASON, Message, PeerFailed, Worker
from benchmarks.record.results import ROOT
from moesched.system.cache import cache_folder

INSTALLING_SECONDS = 1800
LOADING_SECONDS = 300

Within = Callable[[Sequence[str]], Sequence[str]]


class Peer(NamedTuple):
    """A way to run the model.

    Attributes:
        module: in this package, the program of its process.
        requirements: of pip; none for what `.[dev]` already installs.
        installing: environment variables of the installation.
        environment: environment variables of its process.
        settings: those that it is tried with; the best counts in each row.
        seconds: the time limit of each answer.
    """

    name: str
    module: str
    requirements: tuple[str, ...] = ()
    installing: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    settings: Mapping[str, Message] = {"": {}}
    seconds: float = 240.0

    def start(self, *arguments: str, within: Within = list) -> Worker:
        """Its process, in its environment, which is set up at first.

        within: makes of the process's command one that runs it elsewhere, such as under a cap.

        Raises:
            PeerFailed: it cannot be installed, or does not load.
        """
        python = self.python()
        return Worker(
            within([str(python), "-m", f"benchmarks.peers.{self.module}", *arguments]),
            {"PYTHONPATH": str(ROOT), **self.environment},
            LOADING_SECONDS,
        )

    def python(self) -> Path:
        """The interpreter of its environment."""
        if not self.requirements:
            return Path(sys.executable)
        folder = peers_folder() / re.sub("[^a-z0-9]+", "-", self.name.lower())
        installed = folder / "installed.txt"
        wanted = "\n".join(self.requirements)
        if not installed.exists() or installed.read_text() != wanted:
            self._install(folder)
            installed.write_text(wanted)
        _share(folder)
        return folder / "bin" / "python"

    def _install(self, folder: Path) -> None:
        venv.create(folder, clear=True, with_pip=True, symlinks=True)
        _share(folder)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-input"]
        constraints = ("--constraint", str(ROOT / "constraints.txt"))
        try:
            subprocess.run(
                [*pip, *constraints, *self.requirements],
                env={**os.environ, **self.installing},
                timeout=INSTALLING_SECONDS,
                check=True,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"not installed within {INSTALLING_SECONDS} s") from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip() or "pip said nothing").splitlines()[-1]
            raise PeerFailed(f"not installed: {last}"[:LONGEST_REASON]) from None


def _share(folder: Path) -> None:
    """Show an environment what is installed here; anew each time, as another checkout may have made it."""
    [packages] = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if "site-packages" in path]
    (packages / "shared.pth").write_text("\n".join([*here, str(ROOT)]))


def peers_folder() -> Path:
    """The folder of the environments: $MOESCHED_PEERS, or a folder in moesched's cache."""
    given = os.environ.get("MOESCHED_PEERS")
    return Path(given) if given else cache_folder() / "peers"
