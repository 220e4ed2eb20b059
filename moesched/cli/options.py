"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

from moesched.cli.files import Writes
from moesched.errors import BadInput
from moesched.inputs.defaults import TRANSPORT
from moesched.system.plain_text import plain_text
from moesched.units import parse_bytes

if TYPE_CHECKING:
    from moesched.inputs.prompts import Prompt


def whole_number(_: object, tokens: Sequence[Token]) -> int:
    """Convert an argument; a fraction such as 1.5 is refused, not rounded."""
    text = tokens[0].value
    if re.fullmatch(r"[+-]?[0-9]{1,20}", text) is None:
        raise ValueError(f"{plain_text(text)!r} is not a whole number.")
    return int(text)


def repeatable(*, metavar: str, help: str, **more: Any) -> Parameter:
    """An option that may be given several times; its default is in its help.

    Args:
        more: other arguments of the parameter.
    """
    return Parameter(metavar=metavar, negative="", show_default=False, help=help, **more)


Whole = Annotated[int, Parameter(converter=whole_number)]

SIZES = Group("Sizes and budgets", sort_key=2)
BEAMS = Group("Beam search", sort_key=4)
OUTPUT = Group("Output", sort_key=9)

Json = Annotated[
    bool,
    Parameter(negative="", group=OUTPUT, help="Print only one JSON object on standard output."),
]
NoBand = Annotated[
    bool,
    Parameter(negative="", help="Omit the bands of predicted figures, which take some twenty short runs."),
]
NoHelps = Annotated[
    bool,
    Parameter(negative="", help="Omit the bottleneck and what would help, which take several replays."),
]
Trace = Annotated[
    Path | None,
    Parameter(
        group=OUTPUT,
        metavar="OUT",
        help="Write a trace for ui.perfetto.dev; gzipped when the name ends in .gz.",
    ),
    Writes("trace", numbered=True),
]
Picture = Annotated[
    Path | None,
    Parameter(group=OUTPUT, metavar="OUT", help="Draw a picture; the file's name ends in .png or .svg."),
    Writes("picture"),
]
ReportFile = Annotated[
    Path | None,
    Parameter(
        group=OUTPUT,
        metavar="OUT",
        help="Write the report to a file: a page with the timeline if its name ends in .html, otherwise JSON.",
    ),
    Writes("report"),
]
Model = Annotated[
    str,
    Parameter(metavar="NAME|DIR", help="A name of `moesched list models`, or a folder with a config.json."),
]
Machine = Annotated[
    str,
    Parameter(
        metavar="NAME|FILE", help="A name of `moesched list machines`, a TOML file, or auto for this one."
    ),
]
MachineChanges = Annotated[
    tuple[str, ...],
    repeatable(
        name="--machine-set",
        metavar="WHAT=VALUE",
        help="Change the machine: link.host->gpu=24GB/s, memory.gpu.capacity=24GB, processor.gpu.flops=x2 "
        "and the like; repeatable.",
    ),
]
Policy = Annotated[
    str,
    Parameter(
        metavar="P",
        help="A name of `moesched list policies`, file.py:Class, or package.module:Class (also in the current folder).",
    ),
]
Settings = Annotated[
    tuple[str, ...],
    repeatable(
        name="--set",
        metavar="KEY=VALUE",
        help="Setting of the policy, such as ahead=3; repeatable.",
    ),
]
Budgets = Annotated[
    tuple[str, ...],
    repeatable(
        name="--budget",
        group=SIZES,
        metavar="MEM=BYTES",
        help="Limit on the bytes of weights, KV cache and buffers in a memory, such as host=600MB; "
        "repeatable. By default its whole size. Python and libraries need about 360 MB more; process=1GB "
        "limits the resident memory of the whole process, and pinned=8GB the page-locked memory of a machine with a "
        "GPU, through which weights are then copied.",
    ),
]
BatchSize = Annotated[
    Whole | None,
    Parameter(group=SIZES, metavar="N", help="Requests that run together. By default as many as fit."),
]
MicroBatchSize = Annotated[
    Whole | None,
    Parameter(
        group=SIZES, metavar="N", help="Requests that share a kernel. By default chosen by the planner."
    ),
]
PrefillChunk = Annotated[
    Whole | None,
    Parameter(
        group=SIZES,
        metavar="N",
        help="Most prompt tokens in one pass through a layer. Fewer need less memory; more use each "
        "transfer of weights for more tokens. By default all, or as many as fit.",
    ),
]
Beams = Annotated[
    Whole,
    Parameter(
        group=BEAMS, metavar="N", help="Keep the N likeliest sequences per prompt. 1 disables beam search."
    ),
]
Routing = Annotated[
    str | None,
    Parameter(
        metavar="NAME|FILE",
        help="Source of each token's experts: uniform, popularity (as uneven as Mixtral 8x7B), zipf, or "
        "a file: counts (.csv) or a trace (.npz) from `moesched profile-routing`, vLLM's routed experts (.npy, "
        ".npz), Megatron's router trace (.jsonl), or a CSV of layer,token,experts. By default uniform.",
    ),
]
RoutingSettings = Annotated[
    tuple[str, ...],
    repeatable(
        name="--routing-set",
        metavar="KEY=VALUE",
        help="Setting of the routing, such as exponent=1.2 of zipf, or locality=0.5, the probability "
        "that a token repeats the experts of the token before it; repeatable.",
    ),
]
TensorParallel = Annotated[
    Whole | None,
    Parameter(
        metavar="N",
        help="Split the model over N of the machine's equal accelerators. By default over all of them.",
    ),
]
ModelDir = Annotated[
    Path,
    Parameter(help="Hugging Face folder with config.json, safetensors files and, for text, tokenizer.json."),
]
Transport = Annotated[
    str | None,
    Parameter(
        metavar="T",
        help=f"Transport of the nodes' exchanges: a name of `moesched list transports`. By default {TRANSPORT}.",
    ),
]
Nodes = Annotated[
    Whole | None,
    Parameter(metavar="N", help="Number of these machines that share the model's experts."),
]
Network = Annotated[
    str | None,
    Parameter(
        metavar="NAME|FILE",
        help="Network between the nodes: a name of `moesched list networks`, or a TOML file. By default the "
        "machine's own.",
    ),
]
NewTokens = Annotated[
    Whole | None,
    Parameter(metavar="N", help="Tokens to generate for each prompt. By default the workload's own number."),
]
Format = Annotated[
    str | None,
    Parameter(
        metavar="FORMAT",
        help="Storage format of the weights: bf16, fp8, q8_0, q6_k, q5_k, q4_k_m, q4_0, mxfp4 or int4, as far as the "
        "model's family has it. By default the one that the model is published in.",
    ),
]
DType = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    Parameter(
        help="Number format to compute in. By default the model's own, and float16 on GPUs without bfloat16."
    ),
]


BROKEN_LINES = (
    "Malformed lines of a prompts file are reported by number and skipped; the exit code is then 2."
)


def paragraphs(*texts: str) -> str:
    """Help text; lines break at the width of the terminal."""
    return "\n\n".join(texts)


def parse_budgets(texts: Sequence[str]) -> dict[str, int]:
    """Parse budgets such as "host=600MB" into bytes by memory.

    Raises:
        BadInput: a budget is not MEM=BYTES, or a memory is given twice.
    """
    budgets: dict[str, int] = {}
    for text in texts:
        memory, equals, size = text.partition("=")
        if not equals or not memory:
            raise BadInput(f"--budget {text!r}: write MEM=BYTES, such as host=600MB")
        if memory in budgets:
            raise BadInput(f"--budget gives {memory} twice, {size!r} the second time: give it once")
        budgets[memory] = parse_bytes(size)
    return budgets


def read_prompt_file(file: Path) -> tuple[list[Prompt], int]:
    """Read a prompts file; returns its prompts, and the exit code: 2 if malformed lines were skipped.

    Raises:
        BadInput: the file has no prompt.
    """
    from moesched.cli.failures import BAD_INPUT, tell
    from moesched.inputs.prompts import read_prompts

    reported: list[str] = []
    prompts = read_prompts(file, reported.append)
    for line in reported:
        tell(line)
    return prompts, BAD_INPUT if reported else 0
