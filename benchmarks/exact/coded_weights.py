"""Check coded weights: their readers, logits beside Hugging Face's, and equal bits under every policy.

Blocks of any bytes are unpacked by us and by ggml's package, `gguf`. Small random models of every family that runs,
with matrices in every format and mix of formats, give float32 logits, which are compared with those of Hugging Face
with the weights that `gguf` unpacked; differences are in units of the largest logit. A model in every format runs under
every policy in every way (`equal_bits.py`), and with other page sizes and numbers of cores: the logits of every step
must be those of `resident` on one memory, to the bit.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, at_most, none_of
from benchmarks.shared.equal_bits import EXPERTS, SCHEDULES
from benchmarks.shared.random_models import hugging_face_logits
from benchmarks.shared.small_runs import ONE_MEMORY, Generated, generate, same_bits
from coded_checkpoints import decoded, decoded_model, random_blocks
from moesched.devices.shared.coded import CodedRows
from moesched.devices.torch.device import TorchDevice
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.coded_models import MIXES
from moesched.models.layout import weight_layout
from moesched.models.networks import Router
from moesched.models.random_model import write_random_model
from moesched.models.stored_formats import CODED, STORED_FORMATS
from moesched.plugins import make_policy
from odd_models import DBRX, MIXTRAL, OLMOE, PROMPTS, Reference, coded

BLOCKS = 100_000
"""Blocks of each format that are unpacked."""
MOST_DIFFERENCE = 1e-5
"""Largest difference of logits, in units of the largest logit."""
PAGE_BYTES = (None, 17_000, 40_000)
THREADS = (1, 2)
DTYPES = ("float32", "bfloat16")
"""Dtypes of the computation; formats have them in turn."""
FAMILIES = {
    "mixtral": MIXTRAL,
    "dbrx": DBRX,
    "olmoe": OLMOE,
    "qwen3_moe": MIXTRAL.varied(
        form="qwen3_moe", window=None, qk_norm="head", router=Router(normalised=False)
    ),
    "llama": MIXTRAL.varied(form="llama", window=None, experts=1, top_k=1),
}


def claims(result: Result) -> Iterator[Claim]:
    """Readers, logits and bits."""
    blocks = result["blocks"]
    yield none_of(
        "blocks in coded formats that ggml unpacks otherwise", blocks["differing"], blocks["blocks"]
    )
    logits = result["logits"]
    words = "float32 logits by coded weights beside Hugging Face's, of the largest logit"
    yield at_most(words, logits["largest_difference"], MOST_DIFFERENCE, "{:.1e}")
    runs = result["runs"]
    words = "runs in coded formats whose logits differ in a bit, by policy, page size and cores"
    yield none_of(words, runs["runs_that_differ"], runs["runs"])


BENCHMARK = Benchmark(__file__, __doc__, claims=claims, parts=["blocks", "logits", "runs"], by_machine=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print what came out, write the result."""
    options = BENCHMARK.parse(arguments)
    makers = {"blocks": compare_blocks, "logits": compare_logits, "runs": compare_runs}
    return BENCHMARK.write({part: makers[part]() for part in options.only})


def compare_blocks() -> dict[str, Any]:
    """Weights that our reader and ggml's unpack from the same bytes."""
    differing = 0
    for name in track(CODED, "blocks"):
        stored = STORED_FORMATS[name]
        raw = random_blocks(stored, 1, BLOCKS)
        ours = CodedRows(torch.from_numpy(raw), stored).plain(torch.float32).numpy().view(np.int32)
        theirs = decoded(raw, name).view(np.int32)
        differing += int((ours != theirs).reshape(BLOCKS, -1).any(axis=1).sum())
    return {"blocks": BLOCKS * len(CODED), "differing": differing}


def compare_logits() -> dict[str, Any]:
    """Largest differences of logits from Hugging Face's, by family and format."""
    found: dict[str, dict[str, float]] = {family: {} for family in FAMILIES}
    for (family, config), name in track(list(product(FAMILIES.items(), MIXES)), "beside Hugging Face"):
        model = config.varied(2, hidden=256, intermediate=256, heads=4, kv_heads=2, head_dim=64)
        with tempfile.TemporaryDirectory() as made:
            folder = write_random_model(model, Path(made) / "coded", dtype="float32", stored_as=name)
            found[family][name] = difference(folder, Path(made) / "decoded")
    return {
        "largest_difference": max(max(each.values()) for each in found.values()),
        "by_family_and_format": found,
    }


def difference(folder: Path, decoded_folder: Path) -> float:
    """The largest difference of a model's logits from Hugging Face's, in units of the largest one."""
    ours = ran(open_checkpoint(folder), None)
    model = decoded_model(folder, decoded_folder)
    largest = 0.0
    for prompt, tokens, logits_SV in zip(PROMPTS, ours.tokens, ours.logits_RSV, strict=True):
        theirs_SV = hugging_face_logits(model, [*prompt, *tokens])[-len(tokens) - 1 : -1]
        largest = max(largest, float((logits_SV - theirs_SV).abs().max() / theirs_SV.abs().max()))
    return largest


def compare_runs() -> dict[str, Any]:
    """Runs by policy, page size and number of cores, beside `resident` on one memory."""
    differing, count = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name, dtype in track([*zip(MIXES, cycle(DTYPES))], "from policy to policy"):
            model = coded(name), dtype
            reference = Reference.of(model, Path(folder) / f"{name}-{dtype}")
            runs = [run for grid in (SCHEDULES, EXPERTS) for run in grid._replace(models=[model]).whole()]
            differing += [run.name for run in runs if run.differs(reference)]
            sizes = list(product(PAGE_BYTES, THREADS))
            for page_bytes, threads in sizes:
                found = ran(reference.checkpoint, page_bytes, dtype, threads)
                if not same_bits(found.logits_RSV, reference.expected.logits_RSV):
                    differing.append(f"{name}, {dtype}, pages of {page_bytes}, {threads} cores")
            count += len(runs) + len(sizes)
    return {
        "formats": list(MIXES),
        "runs": count,
        "runs_that_differ": len(differing),
        "differing": differing[:20],
    }


def ran(
    checkpoint: Checkpoint, page_bytes: int | None, dtype: str = "float32", threads: int | None = None
) -> Generated:
    """A run with all weights in memory."""
    layout = weight_layout(checkpoint.config, dtype, page_bytes)
    device = TorchDevice(checkpoint, layout, keep_logits=True, threads=threads)
    return generate(device, make_policy("resident"), ONE_MEMORY, PROMPTS, new_tokens=4, micro_batch_size=2)


if __name__ == "__main__":
    sys.exit(main())
