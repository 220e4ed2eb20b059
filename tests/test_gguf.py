"""Models in GGUF files: tensors, metadata, tokens, and what is said of files that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from benchmarks.shared.gguf_files import quantized
from benchmarks.shared.random_models import hugging_face_logits
from benchmarks.shared.small_runs import ONE_MEMORY, generate
from gguf_models import gguf_model, unpacked_model
from moesched.devices.torch.device import TorchDevice
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from odd_models import DBRX, MIXTRAL, OLMOE, PROMPTS

WHOLE_ROWS = MIXTRAL.varied(
    layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=32, window=None
)
MODELS = {
    "mixtral in Q8_0": (WHOLE_ROWS, Type.Q8_0),
    "mixtral in F32": (MIXTRAL, Type.F32),
    "llama in F16": (
        MIXTRAL.varied(name="llama", layers=2, experts=1, top_k=1, window=None, form="llama"),
        Type.F16,
    ),
    "qwen3moe in BF16": (
        MIXTRAL.varied(name="qwen", layers=2, qk_norm="head", tied_embeddings=True, form="qwen3_moe"),
        Type.BF16,
    ),
    "olmoe in Q8_0": (OLMOE.varied(layers=2, hidden=64, heads=4, head_dim=16, intermediate=32), Type.Q8_0),
    "dbrx in F32": (DBRX.varied(layers=2), Type.F32),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_hugging_face_with_the_unpacked_weights(
    model: tuple[ModelConfig, Type], tmp_path: Path
) -> None:
    config, kind = model
    file = gguf_model(config, tmp_path, quantized(kind))
    checkpoint = open_checkpoint(file)
    device = TorchDevice(checkpoint, weight_layout(checkpoint.config, "float32"), keep_logits=True)
    ours = generate(device, make_policy("resident"), ONE_MEMORY, PROMPTS, new_tokens=4, micro_batch_size=2)
    theirs = unpacked_model(file, config)
    for prompt, tokens, logits_SV in zip(PROMPTS, ours.tokens, ours.logits_RSV, strict=True):
        theirs_SV = hugging_face_logits(theirs, [*prompt, *tokens])[-5:-1]
        assert (logits_SV - theirs_SV).abs().max() <= 1e-5 * theirs_SV.abs().max()
