"""All that reads something from outside, each with a valid example: files, messages and frames."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from clusters import cluster
from gguf_headers import byte_pairs, gpt_oss, mixtral
from moesched.analysis.compared_runs import read_run, replayed_run
from moesched.analysis.explanation import explain
from moesched.cluster.cluster_file import cluster_toml, load_cluster
from moesched.cluster.curve.keys import make_keys, read_keys
from moesched.cluster.launch_env import rank_given
from moesched.cluster.messages import JoinRequest, Refused, Unreadable, pack, read_launcher, read_node
from moesched.errors import BadInput, TransportError
from moesched.inputs.chat_template import find_chat_template
from moesched.inputs.prompts import encode_prompts, read_prompts
from moesched.inputs.tokenizer import Tokenizer, find_tokenizer
from moesched.jobs.report import JobReport
from moesched.jobs.simulate_model import simulate_model
from moesched.machines import load_machine
from moesched.machines.cost import cost_model
from moesched.machines.group import written_out
from moesched.machines.networks import load_network
from moesched.machines.toml_library import profile_text
from moesched.machines.toml_text import machine_toml
from moesched.models.checkpoint import open_checkpoint
from moesched.models.headers import header_copy
from moesched.models.published import published_config
from moesched.models.reading import read_config
from moesched.models.rotary import LongRope, Rotary, Yarn
from moesched.models.shapes import SHAPES
from moesched.models.tensors import tensor_shapes
from moesched.plugins import make_policy
from moesched.report import write_run_page
from moesched.requests.rows import Row, Rows
from moesched.requests.workloads import load_workload
from moesched.routing.files import read_routing_file
from moesched.routing.profile import RoutingProfile, read_routing_profile, write_profile
from moesched.routing.trace import RecordedChoices, RoutingTrace
from moesched.runs.notices import pack_notice, read_notice
from moesched.server.bodies import read_body
from moesched.server.errors import ApiError
from moesched.server.fields import ChatRequest, CompletionRequest
from moesched.server.messages import BadServerFrame, Frames, Logprob, ToFront, Token
from moesched.server.messages import frame as server_frame
from moesched.sweeps.axes import Sweep, merged, read_sweep
from moesched.sweeps.store import Store
from moesched.trace import write_trace
from moesched.trace.recording import Roof
from moesched.transports.frames import BadFrame, Frame, Kind, unpack
from moesched.transports.frames import pack as pack_frame
from routing_traces import routed, write_megatron, write_npy, write_npz, write_own, write_rows
from runs import virtual_run
from small_models import SMALL, byte_tokenizer
from stored_checkpoints import published, write, write_sharded
from stored_mxfp4 import published_gpt_oss

SWEEP = """policy = "all"
machine = ["t4", "l4"]
batch_size = [1, 8]
padded = true
[settings]
ahead = [1, 2]
[budgets]
gpu = "12GB"
[price]
t4 = 0.35
"""

RESULT = """{"key":"a","inputs":{"machine":"t4","batch_size":1},"failure":null,"peak_bytes":{"gpu":1},\
"plan":{"batch_size":1,"new_tokens":2},"throughput_tokens_per_second":2.5,"simulated_seconds":1.0}
"""


class Parser(NamedTuple):
    """A parser of one file.

    Attributes:
        example: makes a valid file in an empty folder, perhaps with others beside it, and returns its path.
        read: parses the file and does what commands do at once with the result.
        refusal: raised for a file that is not valid.
    """

    example: Callable[[Path], Path]
    read: Callable[[Path], object]
    refusal: type[Exception] = BadInput


class Bench:
    """A parser beside a file of its own, to be overwritten."""

    def __init__(self, name: str, folder: Path) -> None:
        self.parser = PARSERS[name]
        self.file = self.parser.example(folder)
        self.example = self.file.read_bytes()

    def accepts(self, data: bytes) -> bool:
        """Test whether the parser takes these bytes; otherwise it refuses them with a message."""
        self.file.write_bytes(data)
        try:
            self.parser.read(self.file)
        except self.parser.refusal as error:
            assert str(error).strip()
            return False
        return True


def _text(name: str, content: Callable[[], str | bytes]) -> Callable[[Path], Path]:
    """An example that is one file."""

    def make(folder: Path) -> Path:
        text = content()
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder / name

    return make


def _profile(package: str, name: str) -> Callable[[Path], Path]:
    return _text("profile.toml", lambda: profile_text(package, "profile", name))


YARN = Rotary(
    theta=1e6,
    width=64,
    scaling=Yarn(factor=4.0, original_max_position_embeddings=32768, mscale=1.0, mscale_all_dim=0.7),
)

LONGROPE = Rotary(
    scaling=LongRope(
        factor=4.0,
        long_factor=(4.0,) * 64,
        short_factor=(1.0,) * 64,
        max_position_embeddings=32768,
        original_max_position_embeddings=8192,
    )
)


def _config(shape: str, **settings: Any) -> Callable[[Path], Path]:
    config = SHAPES[shape].varied(**settings)
    return _text("config.json", lambda: json.dumps(published_config(config), indent=1))


def _generation(folder: Path) -> Path:
    _config("mixtral-8x7b")(folder)
    return _text("generation_config.json", lambda: '{"bos_token_id": 1, "eos_token_id": [2, 7]}')(folder)


def _read_config(file: Path) -> None:
    config = read_config(file.parent)
    tensor_shapes(config)
    config.attention.rotary.slowed(config.attention.head_dim)


def _index(folder: Path) -> Path:
    return write_sharded(folder, published()) / "model.safetensors.index.json"


def _header_copy(folder: Path) -> Path:
    index = _index(folder)
    shard = sorted(folder.rglob("*.safetensors"))[0]
    data = shard.read_bytes()
    copy = header_copy(index.parent / shard.name)
    copy.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    shard.unlink()
    return copy


def _read_gguf(file: Path) -> None:
    open_checkpoint(file)
    find_chat_template(file)
    if (tokenizer := find_tokenizer(file)) is not None:
        tokenizer.decode(tokenizer.encode("a text, and " + "a" * 40))


def _tokenizer(folder: Path) -> Path:
    return byte_tokenizer(folder)


def _read_tokenizer(file: Path) -> None:
    tokenizer = Tokenizer(file)
    tokenizer.decode(tokenizer.encode("a text, and " + "a" * 40))


def _read_prompts(file: Path) -> None:
    with suppress(BadInput):
        read_prompts(file)
    encode_prompts(read_prompts(file, str), _bytes_as_tokens(), SMALL, 3)


@cache
def _bytes_as_tokens() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer(byte_tokenizer(Path(folder)))


def _read_machine(file: Path) -> None:
    machine = load_machine(str(file))
    machine_toml(machine)
    written_out(machine, machine.accelerator_group.count)
    cost_model(machine, "float32")


def _read_workload(file: Path) -> None:
    workload = load_workload(str(file))
    workload.lengths(100)
    assert workload.longest > 0


def _routing_profile(folder: Path) -> Path:
    counts = ((3, 1, 2, 0, 0, 0, 0, 0),) * 8
    profile = RoutingProfile(model="mixtral-0.8b", layers=8, experts=8, top_k=2, tokens=3, counts=counts)
    write_profile(profile, folder / "profile.csv")
    return folder / "profile.csv"


ROUTED = routed([3, 2], layers=8, experts=8, top_k=2)
ROUTED_MODEL = SHAPES["mixtral-0.8b"]


def _routing_trace(write: Callable[[RoutingTrace, Path], Path]) -> Callable[[Path], Path]:
    return lambda folder: write(ROUTED, folder)


def _read_routing_trace(file: Path) -> None:
    trace = read_routing_file(file, ROUTED_MODEL)
    assert isinstance(trace, RoutingTrace)
    trace.profile()
    RecordedChoices(trace).of_tokens(0, np.arange(3), np.arange(3))


def _trace(folder: Path) -> Path:
    cached = make_policy("lru_offload", {"offload_per_layer": 6})
    run = virtual_run(cached, requests=1, micro_batch_size=1, new_tokens=2)
    about = replace(run.about, roofs={"gpu": Roof(flops=65e12, bandwidth=320e9)})
    write_trace(folder / "trace.json", run.recording, about)
    return folder / "trace.json"


def _packed_trace(folder: Path) -> Path:
    file = _trace(folder)
    file.write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    return file


def _read_run(file: Path) -> None:
    run = read_run(file)
    if run.trace is not None:
        replayed_run(run)
        explanation = explain(run.trace.recording, run.trace.about)
        write_run_page(file.with_suffix(".html"), *run.trace, explanation=explanation)


@cache
def _simulated() -> JobReport:
    return simulate_model(
        "mixtral-0.8b", machine="t4", policy="resident", workload="uniform", batch_size=1, gen=2
    )


def _report(folder: Path) -> Path:
    return _text("report.json", lambda: json.dumps(_simulated().as_dict()))(folder)


def _key(folder: Path) -> Path:
    file = _text("moesched.secret", lambda: make_keys().secret + "\n")(folder)
    file.chmod(0o600)
    return file


def _join() -> bytes:
    return pack(JoinRequest(protocol=2, version="1", rank=1, model="m", process=7))


def _frame() -> bytes:
    values = np.arange(6, dtype=np.float32)
    return bytes(
        pack_frame(Frame(Kind.ALL_REDUCE, Kind.ALL_REDUCE, 1, shape=(2, 3), text="sum", values=values))
    )


def _read_results(file: Path) -> None:
    with Store(file) as store:
        assert b"".join(store.whole_lines(store.lines)).count(b"\n") == len(store.lines)


PARSERS: dict[str, Parser] = {
    "config.json": Parser(_config("mixtral-8x7b"), _read_config),
    "config.json of dbrx": Parser(_config("dbrx"), _read_config),
    "config.json of mixtral-8x7b, LongRoPE": Parser(_config("mixtral-8x7b", rotary=LONGROPE), _read_config),
    "config.json of glm-4.5, YaRN": Parser(_config("glm-4.5", rotary=YARN), _read_config),
    "config.json of gpt-oss-20b": Parser(_config("gpt-oss-20b"), _read_config),
    "config.json of granite-3.0-1b-a400m": Parser(_config("granite-3.0-1b-a400m"), _read_config),
    "generation_config.json": Parser(_generation, _read_config),
    "index of shards": Parser(_index, lambda file: open_checkpoint(file.parent)),
    "header of an absent file": Parser(_header_copy, lambda file: open_checkpoint(file.parent, partial=True)),
    "safetensors": Parser(
        lambda folder: write(folder, published()) / "model.safetensors",
        lambda file: open_checkpoint(file.parent),
    ),
    "safetensors, codes and scales": Parser(published_gpt_oss, lambda file: open_checkpoint(file.parent)),
    "GGUF, byte pairs": Parser(lambda folder: byte_pairs().write(folder / "m.gguf"), _read_gguf),
    "GGUF, SentencePiece": Parser(lambda folder: mixtral().write(folder / "m.gguf"), _read_gguf),
    "GGUF, gpt-oss": Parser(lambda folder: gpt_oss().write(folder / "m.gguf"), _read_gguf),
    "tokenizer.json": Parser(_tokenizer, _read_tokenizer),
    "tokenizer_config.json": Parser(
        _text("tokenizer_config.json", lambda: '{"chat_template": "a", "bos_token": {"content": "<s>"}}'),
        lambda file: find_chat_template(file.parent),
    ),
    "chat template": Parser(
        _text("chat_template.jinja", lambda: "{{ messages }}"), lambda file: find_chat_template(file.parent)
    ),
    "prompts": Parser(
        _text("prompts.jsonl", lambda: '{"prompt": "a text"}\n{"prompt_ids": [1, 2, 3]}\n'), _read_prompts
    ),
    "machine": Parser(_profile("moesched.machines", "rtx6000"), _read_machine),
    "network": Parser(_profile("moesched.machines.networks", "10gbe"), lambda file: load_network(str(file))),
    "workload": Parser(_profile("moesched.requests.workloads", "mtbench"), _read_workload),
    "cluster": Parser(_text("cluster.toml", lambda: cluster_toml(cluster())), load_cluster),
    "routing profile": Parser(_routing_profile, read_routing_profile),
    "routing trace": Parser(_routing_trace(write_own), _read_routing_trace),
    "routing trace, .npy of vLLM": Parser(_routing_trace(write_npy), _read_routing_trace),
    "routing trace, .npz of vLLM": Parser(_routing_trace(write_npz), _read_routing_trace),
    "routing trace of Megatron": Parser(_routing_trace(write_megatron), _read_routing_trace),
    "routing trace, rows": Parser(_routing_trace(write_rows), _read_routing_trace),
    "sweep": Parser(_text("sweep.toml", lambda: SWEEP), lambda file: merged(read_sweep(file), Sweep({}))),
    "results of a sweep": Parser(_text("results.jsonl", lambda: 2 * RESULT), _read_results),
    "trace": Parser(_trace, _read_run),
    "packed trace": Parser(_packed_trace, _read_run),
    "report": Parser(_report, _read_run),
    "secret key": Parser(_key, read_keys),
    "MLX_HOSTFILE": Parser(
        _text("hosts.json", lambda: '[["127.0.0.1:5000"], ["127.0.0.1:5001"]]'),
        lambda file: rank_given({"MLX_RANK": "1", "MLX_HOSTFILE": str(file)}, 2),
    ),
    "message of a node": Parser(_text("m", _join), lambda file: read_node(file.read_bytes()), Unreadable),
    "message of a launcher": Parser(
        _text("m", lambda: pack(Refused(reason="another version"))),
        lambda file: read_launcher(file.read_bytes()),
        Unreadable,
    ),
    "rows of a step": Parser(
        _text("m", lambda: pack_notice({0: Rows("decode", (Row(7, 4, 1, ids=[3]),), (5,))})),
        lambda file: read_notice(file.read_bytes()),
        TransportError,
    ),
    "frame": Parser(_text("frame", _frame), lambda file: unpack(file.read_bytes()), BadFrame),
    "request for a completion": Parser(
        _text("body", lambda: '{"model": "m", "prompt": [[1, 2], [3]], "stop": ["a"], "temperature": 0.5}'),
        lambda file: read_body(file.read_bytes(), CompletionRequest, "m").stops,
        ApiError,
    ),
    "request for a chat": Parser(
        _text("body", lambda: '{"model": "m", "messages": [{"role": "user", "content": [{"text": "a"}]}]}'),
        lambda file: read_body(file.read_bytes(), ChatRequest, "m").stops,
        ApiError,
    ),
    "messages of an engine": Parser(
        _text("m", lambda: server_frame([Token(1, 2, "stop", Logprob(-1.0, [(2, -1.0)]))])),
        lambda file: list(Frames(ToFront).feed(file.read_bytes())),
        BadServerFrame,
    ),
}
