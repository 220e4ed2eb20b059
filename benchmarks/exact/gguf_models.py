"""Check GGUF files: logits against Hugging Face, token ids against llama.cpp's.

Logits: models of each family that runs, with random weights and norms, are written in each type that kernels read, and
in a mix as in files of Q4_K_M. In float32, ours are compared with those of Hugging Face with the weights unpacked by
llama.cpp's package; the difference counts in parts of the largest logit.

Token ids: the files `ggml-vocab-NAME.gguf` of llama.cpp's folder `models` each have texts beside them and the ids that
these have. They are too large to be kept here: give the folder (`--vocabularies`) of an unpacked source of llama.cpp.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gguf import GGMLQuantizationType
from msgspec.structs import replace

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, all_of, at_most
from benchmarks.shared.gguf_files import TypeOf, q4_k_m, quantized
from benchmarks.shared.random_models import hugging_face_logits
from benchmarks.shared.small_runs import ONE_MEMORY, generate
from gguf_models import gguf_model, unpacked_model
from moesched.devices.torch.device import TorchDevice
from moesched.inputs.gguf_tokenizer import gguf_tokenizer
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.gguf.parts import read_parts
from moesched.models.gguf.types import READABLE
from moesched.models.gguf.vocabulary import read_vocabulary
from moesched.models.layout import weight_layout
from moesched.models.networks import Activation
from moesched.plugins import make_policy
from odd_models import DBRX, GLM, GPT_OSS, GRANITE, MINIMAX, MIXTRAL, OLMOE, PROMPTS

MOST_DIFFERENCE = 1e-5
NEW_TOKENS = 4

SIZES = {"layers": 2, "hidden": 256, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_dim": 64}
"""Rows of whole blocks of every type."""
_DENSE, _ROUTED = GLM.varied(**SIZES, shared=256).pattern
FAMILIES: dict[str, ModelConfig] = {
    "mixtral": MIXTRAL.varied(**SIZES),
    "llama": MIXTRAL.varied(**SIZES, name="llama", experts=1, top_k=1, window=None, form="llama"),
    "qwen3moe": MIXTRAL.varied(**SIZES, name="qwen", qk_norm="head", window=None, form="qwen3_moe"),
    "olmoe": OLMOE.varied(**SIZES),
    "dbrx": DBRX.varied(**SIZES),
    "granitemoe": GRANITE.varied(**SIZES),
    "minimax-m2": MINIMAX.varied(**SIZES),
    "gpt-oss": GPT_OSS.cut(2).varied(**SIZES, activation=Activation(alpha=1.702, limit=7.0)),
    "glm4moe": replace(GLM, hidden=SIZES["hidden"], pattern=(_DENSE.varied(intermediate=0), _ROUTED)),
}
TYPES: dict[str, TypeOf] = {
    **{name: quantized(GGMLQuantizationType[name]) for name in READABLE},
    "Q4_K_M": q4_k_m,
}
VOCABULARIES = (
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "qwen2",
    "mpt",
    "phi-3",
    "command-r",
    "refact",
    "starcoder",
)


def claims(result: Result) -> Iterator[Claim]:
    """Logits and token ids."""
    worst = max(each["largest_difference"] for each in result["logits"])
    cases = f"GGUF files of {len(FAMILIES)} families in {len(TYPES)} types"
    words = f"difference of float32 logits from Hugging Face's, over the largest, {cases}"
    yield at_most(words, worst, MOST_DIFFERENCE, "{:.1e}")
    if tokens := result["tokens"]:
        equal, texts = (sum(each[name] for each in tokens) for name in ("equal", "texts"))
        yield all_of(f"texts with the token ids of llama.cpp, {len(tokens)} vocabularies", equal, texts)


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=FAMILIES,
    rounds=3,
    rounds_help="random models of each family and type",
    by_machine=False,
)
BENCHMARK.parser.add_argument("--vocabularies", type=Path, metavar="DIR", help="llama.cpp's folder `models`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and write what was found."""
    options = BENCHMARK.parse(arguments)
    cases = [(family, kind) for family in options.only for kind in TYPES]
    logits = [logits_of(*case, options.rounds) for case in track(cases, "logits")]
    names = () if options.vocabularies is None else VOCABULARIES
    tokens = [tokens_of(options.vocabularies, name) for name in track(names, "token ids")]
    return BENCHMARK.write({"logits": logits, "tokens": tokens})


def logits_of(family: str, kind: str, rounds: int) -> dict[str, Any]:
    """The largest difference of a family's models in a type of weights."""
    found = [difference(FAMILIES[family], TYPES[kind], seed) for seed in range(rounds)]
    return {"family": family, "type": kind, "models": rounds, "largest_difference": max(found)}


def difference(config: ModelConfig, type_of: TypeOf, seed: int) -> float:
    """The largest difference of a model's logits, over the largest logit."""
    with TemporaryDirectory() as folder:
        file = gguf_model(config, Path(folder), type_of, seed)
        checkpoint = open_checkpoint(file)
        device = TorchDevice(checkpoint, weight_layout(checkpoint.config, "float32"), keep_logits=True)
        policy = make_policy("resident")
        ours = generate(device, policy, ONE_MEMORY, PROMPTS, new_tokens=NEW_TOKENS, micro_batch_size=2)
        theirs = unpacked_model(file, config)
    largest = 0.0
    for prompt, tokens, logits_SV in zip(PROMPTS, ours.tokens, ours.logits_RSV, strict=True):
        theirs_SV = hugging_face_logits(theirs, [*prompt, *tokens])[-NEW_TOKENS - 1 : -1]
        largest = max(largest, float((logits_SV - theirs_SV).abs().max() / theirs_SV.abs().max()))
    return largest


def tokens_of(folder: Path, name: str) -> dict[str, Any]:
    """The number of a vocabulary's texts, and of those with llama.cpp's ids."""
    file = folder / f"ggml-vocab-{name}.gguf"
    tokenizer = gguf_tokenizer(file, read_vocabulary(read_parts(file)))
    texts = file.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [list(map(int, line.split())) for line in file.with_suffix(".gguf.out").read_text().split("\n")]
    equal = sum(
        tokenizer.encode(text, add_special_tokens=False).ids == wanted
        for text, wanted in zip(texts, ids, strict=True)
    )
    return {"vocabulary": name, "texts": len(texts), "equal": equal}


if __name__ == "__main__":
    sys.exit(main())
