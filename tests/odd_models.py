"""Models of odd sizes, in whose bits another order of sums shows, and the tokens and logits that they give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from benchmarks.shared.small_runs import ONE_MEMORY, Generated, generate
from moesched.devices.torch.device import TorchDevice
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.coded_models import coded_as
from moesched.models.config import ModelConfig
from moesched.models.layers import GroupedAttention, Layer
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.networks import Activation, FeedForward, Router
from moesched.models.random_model import write_random_model
from moesched.models.rotary import Rotary, Yarn
from moesched.plugins import make_policy
from moesched.seams import LaneKind, Streams
from streams import FakeStreams

# Odd sizes: float32 products of operands that lie otherwise in memory then differ in their last bits.
# The window is shorter than one of the prompts and longer than the others.
MIXTRAL = ModelConfig(
    name="mixtral",
    pattern=(
        Layer(
            attention=GroupedAttention(heads=5, kv_heads=1, head_dim=18, window=4),
            feed_forward=FeedForward(intermediate=44, experts=4, top_k=2),
        ),
    )
    * 3,
    hidden=30,
    vocabulary=97,
    norm_eps=1e-5,
    max_positions=256,
    tied_embeddings=False,
    stop_tokens=(),
    dtype="float32",
)
DBRX = MIXTRAL.varied(
    name="dbrx", layers=4, hidden=90, window=None, norm="layer", clip=0.2, form="dbrx", transposed_down=True
)
OLMOE = MIXTRAL.varied(
    name="olmoe", layers=4, experts=7, top_k=4, hidden=90, window=None, qk_norm="projection",
    router=Router(normalised=False), form="olmoe",
)  # fmt: skip
MINIMAX = MIXTRAL.varied(
    name="minimax",
    layers=4,
    experts=7,
    top_k=4,
    hidden=90,
    window=None,
    qk_norm="projection",
    rotary=Rotary(width=10),
    router=Router(score="sigmoid", corrected=True),
    form="minimax_m2",
)
# A dense layer, then layers with a network that every token uses.
_GLM = MIXTRAL.varied(
    name="glm",
    experts=8,
    top_k=3,
    intermediate=25,
    shared=50,
    hidden=90,
    window=None,
    biases="qkv",
    rotary=Rotary(width=10),
    router=Router(score="sigmoid", corrected=True, scale=1.5, groups=4, kept_groups=2),
    form="glm4_moe",
)
_DENSE = replace(_GLM.typical_layer, feed_forward=FeedForward(shared=70))
GLM = replace(_GLM, pattern=(_DENSE, *_GLM.pattern, _GLM.typical_layer))
# Windows in turn, sinks, and experts with biases and a limit, stored as gpt-oss's.
_SINKS = MIXTRAL.varied(
    hidden=90,
    biases="qkvo",
    sinks=True,
    rotary=Rotary(scaling=Yarn(factor=4.0, truncate=False, original_max_position_embeddings=16)),
).typical_layer
_BIASED = FeedForward(
    experts=7,
    top_k=3,
    intermediate=25,
    biases=True,
    alternating=True,
    transposed_down=True,
    activation=Activation(alpha=1.7, limit=0.01),
)
GPT_OSS = replace(
    MIXTRAL.varied(name="gpt-oss", hidden=90, form="gpt_oss"),
    pattern=(replace(_SINKS, feed_forward=_BIASED), replace(_SINKS, feed_forward=_BIASED).varied(window=None))
    * 2,
)
# Factors on embeddings, scores, residual and logits.
GRANITE = replace(
    MIXTRAL.varied(
        name="granite", layers=4, experts=7, top_k=3, intermediate=25, hidden=90, window=None, scale=0.3,
        router=Router(scale=0.7), form="granite_moe",
    ),
    embedding_factor=3.0,
    residual_factor=0.7,
    logits_factor=0.4,
)  # fmt: skip
# Heads as attention kernels of GPUs take them.
WIDE = MIXTRAL.varied(
    name="wide", hidden=64, intermediate=96, heads=2, head_dim=128, vocabulary=128, window=None
)


def coded(name: str, layers: int = 5) -> ModelConfig:
    """A model in coded formats: rows of `down` are no multiples of 256, those of `o` not of 32."""
    sizes = MIXTRAL.varied(name=name, layers=layers, hidden=256, intermediate=96, window=None)
    return coded_as(sizes, name)


# Layers have four coded formats each, and plain matrices.
CODED, CODED_IN_FIVE_BITS = coded("q4_k_m"), coded("q5_k_m")
# Small pages hold a few rows each: matrices come in several blocks, those that lie transposed too.
PAGE_BYTES = {"mixtral": None, "even": None, "wide": None, "dbrx": 12_000, "olmoe": 12_000, "minimax": 12_000}
PROMPTS = [[5, 6, 7], [90], [1, 2, 3, 4, 5, 6, 7], [8, 9]]


def stored(config: ModelConfig, folder: Path) -> Checkpoint:
    """A model of random weights, written below `folder`."""
    return open_checkpoint(write_random_model(config, folder / config.name, seed=3, dtype="float32"))


def layout_of(config: ModelConfig, dtype: str) -> WeightLayout:
    return weight_layout(config, dtype, PAGE_BYTES.get(config.name, 24_000))


class Reference(NamedTuple):
    """A model, and the tokens and logits of `PROMPTS` with all weights in memory."""

    checkpoint: Checkpoint
    layout: WeightLayout
    expected: Generated

    @classmethod
    def of(cls, model: tuple[ModelConfig, str], folder: Path) -> Reference:
        """model: a config and the dtype of the run. folder: where the model is written."""
        config, dtype = model
        checkpoint, layout = stored(config, folder), layout_of(config, dtype)
        device = TorchDevice(checkpoint, layout, keep_logits=True)
        expected = generate(
            device, make_policy("resident"), ONE_MEMORY, PROMPTS, new_tokens=4, micro_batch_size=2
        )
        return cls(checkpoint, layout, expected)


def name_of(model: tuple[ModelConfig, str]) -> str:
    config, dtype = model
    return f"{config.name}, {dtype}"


class Streamed(TorchDevice):
    """The torch device with lanes that are streams, as on CUDA."""

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout, *, keep_logits: bool) -> None:
        super().__init__(checkpoint, layout, keep_logits=keep_logits)
        self.fake = FakeStreams(self.execute)

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        return {"accelerator": "stream", "host->gpu": "stream", "gpu->host": "stream"}

    @property
    def streams(self) -> Streams | None:
        return self.fake
