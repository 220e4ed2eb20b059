"""Settings and fixtures of all tests: no network, reproducible property tests, GPU tests where there is a GPU."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from commands import Said

if TYPE_CHECKING:
    from fronts import Server
    from moesched.devices.lagging.device import LaggingGpu
    from moesched.models.checkpoint import Checkpoint
    from runs import Run

pytest_plugins = ["cluster_fixtures", "native_fixtures"]

# Before any test imports transformers: its models come from the tests themselves, never from a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Set in many containers. Users' commands keep their last text in buffers, and so do those of the tests.
os.environ.pop("PYTHONUNBUFFERED", None)
# Every run of a test checks the engine's transitions and the memory's books.
os.environ["MOESCHED_VALIDATE"] = "1"
# Nothing that was calibrated or kept on this machine, and nothing that tests calibrate is left there. Processes of a
# parallel run have one folder, so that kernels are measured once for all of them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["MOESCHED_CACHE"] = mkdtemp(prefix="moesched-tests-")
    atexit.register(rmtree, os.environ["MOESCHED_CACHE"], ignore_errors=True)

# Work as small as that of the tests is done sooner by one of torch's threads, and other tests need the other cores.
os.environ["OMP_NUM_THREADS"] = "1"

# Before any test imports Triton: kernels in it run by its interpreter, on the CPU, where there is no GPU.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# On AMD's processors the bits of MKL's products depend on whether operands are at multiples of 16 bytes. They are there
# on a GPU, whose imitation is compared with the host to the bit, and not in files.
if Path("/proc/cpuinfo").exists() and "AuthenticAMD" in Path("/proc/cpuinfo").read_text():
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# The options of this run are not those of the pytest that tests start.
os.environ.pop("PYTEST_ADDOPTS", None)

# A shell's background jobs ignore Ctrl-C, and those of nohup SIGHUP: so would the programs that tests start and stop.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=2_000, deadline=None, print_blob=True)
settings.load_profile("ci")


@pytest.fixture(scope="module", autouse=True)
def same_environment() -> Iterator[None]:
    """Restore what the tests of a file, or benchmarks that they run, changed in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def pytest_sessionstart() -> None:
    """End at once where a compiled part is stale: its tests would be skipped, and the others prove nothing.

    All processes that tests fork have the same modules loaded, whichever test forks the first one.
    """
    from benchmarks.shared.forked_nodes import PRELOADED
    from benchmarks.shared.fresh_process import preload
    from compiled_parts import stale

    if why := stale():
        pytest.exit(why, returncode=pytest.ExitCode.USAGE_ERROR)
    preload(*PRELOADED)


def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores, at most four: a process whose test waits for a child or a socket leaves its core."""
    return min(4, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import without the garbage collector: modules stay, and it would look at all of them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each process begin with another file, so that it finds most of them compiled by the others."""
    report = yield
    if isinstance(collector, pytest.Directory) and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        first = len(report.result) * int(worker.removeprefix("gw")) // workers
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without one; begin with the files that hold slow tests.

    A parallel run hands out files in this order; a long one at the end would leave all other processes idle.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path))
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not has_gpu():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


def pytest_collection_finish() -> None:
    """Let the garbage collector work less often, and not on torch's modules: it took a tenth of all time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module")
def as_users_run() -> Iterator[None]:
    """Runs without the checking mode, which doubles the time of long simulated runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MOESCHED_VALIDATE")
        yield


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Leave out objects of earlier files when garbage is collected, as before each batch: there are very many."""
    gc.collect()
    gc.freeze()


def has_gpu() -> bool:
    """Test whether torch can use a CUDA device; imported here, since torch takes seconds to load."""
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process."""
    from moesched.cli.main import main
    from moesched.system.standard_output import reserve_stdout

    def run(*arguments: object) -> Said:
        capfd.readouterr()
        release = reserve_stdout()
        try:
            code = main([str(each) for each in arguments])
        finally:
            release()
        return Said(code, *capfd.readouterr())

    return run


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop of asynchronous tests: that of the server."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server's front before a fake engine."""
    from fronts import front

    async with front() as server:
        yield server


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose tokens are bytes."""
    from small_models import small_model

    return small_model(tmp_path_factory.mktemp("models") / "small", text=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A small random model of odd sizes."""
    from odd_models import MIXTRAL, stored

    return stored(MIXTRAL, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def no_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model without a tokenizer, with a context of 100 tokens."""
    from small_models import small_model

    return small_model(tmp_path_factory.mktemp("models") / "no-text", max_positions=100)


@pytest.fixture(params=range(2))
def gpu(request: pytest.FixtureRequest) -> Iterator[LaggingGpu]:
    """An imitated GPU that lags by a seed, with a stream of its own."""
    from moesched.devices.lagging.device import LaggingGpu

    with LaggingGpu(seed=request.param) as gpu, gpu.streams.on(gpu.streams.new_stream()):
        yield gpu


@pytest.fixture(scope="session")
def streamed_run() -> Run:
    """A run of CGOPipe on the virtual clock, in which pages pass through pinned memory."""
    from runs import staged_run

    return staged_run()


@pytest.fixture
def streamed_trace(streamed_run: Run, tmp_path: Path) -> Path:
    """The file of that run."""
    from moesched.trace import write_trace

    path = tmp_path / "trace.json"
    write_trace(path, streamed_run.recording, streamed_run.about)
    return path
