"""Native calls for whole tasks of few rows: as close to exact as torch, and a row's bits depend on no other row."""

from __future__ import annotations

import subprocess
import sysconfig
from contextlib import closing
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from kernel_tables import kernels_of
from moesched.devices.kernels import functions, qkv_functions
from moesched.devices.kernels.binder import Binder
from moesched.devices.kernels.check import check_kernel
from moesched.devices.kernels.expert_functions import sorted_by_expert
from moesched.devices.kernels.layer_weights import Weights
from moesched.devices.kernels.native_ends import NativeLogits
from moesched.devices.kernels.native_experts import NativeExpertByColumns
from moesched.devices.kernels.native_products import NativeColumns
from moesched.devices.kernels.native_rows import NATIVE
from moesched.devices.kernels.samples import MAKERS, coded_block
from moesched.devices.kernels.torch_kernels import rows_for_native
from moesched.devices.kernels.torch_rows import TORCH as TORCH_KERNELS
from moesched.devices.kernels.workspace import Workspace
from moesched.devices.native.compiled import (
    TORCH,
    VERSION,
    availability,
    check_choice,
    instruction_sets,
    load,
)
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.products.crossover import Shape
from moesched.devices.torch.expert_rows import ExpertRows
from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.footprint import KEPT_ROWS
from moesched.models.layers import Layer
from moesched.models.networks import Activation, Router
from moesched.models.stored_formats import CODED, STORED_FORMATS
from small_models import SMALL

Tensor = torch.Tensor

PLAIN = SMALL.varied(
    hidden=96, intermediate=72, heads=4, kv_heads=2, head_dim=24, experts=6, top_k=2, vocabulary=101
)


def limited(*, biases: bool = True, alternating: bool = False, transposed_down: bool = False) -> ModelConfig:
    """A model like gpt-oss: experts with a limited activation, and a bias behind attention."""
    network = replace(
        PLAIN.routed,
        biases=biases,
        alternating=alternating,
        transposed_down=transposed_down,
        activation=Activation(alpha=1.7, limit=0.5),
    )
    layer = Layer(attention=replace(PLAIN.attention, biases="o"), feed_forward=network)
    return replace(PLAIN, pattern=(layer,))


MODELS = {
    "Mixtral": PLAIN,
    "norms of heads": PLAIN.varied(qk_norm="head"),
    "norms of projections": PLAIN.varied(qk_norm="projection"),
    "LayerNorm and clipping": PLAIN.varied(norm="layer", clip=0.5),
    "weights of all experts": PLAIN.varied(router=Router(normalised=False), top_k=4),
    "one expert": PLAIN.varied(experts=1, top_k=1),
    "experts and a wider network of every token": PLAIN.varied(shared=120, shared_scale=0.5),
    "a narrow network of every token alone": PLAIN.varied(experts=0, top_k=0, shared=40),
    "limited activations": limited(biases=False),
    "limited activations, biases, gate and up one matrix": limited(alternating=True),
    "limited activations, transposed matrices": limited(alternating=True, transposed_down=True),
}


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def weights_of(config: ModelConfig) -> Weights:
    """A layer's weights; every matrix is two row blocks."""
    attention = config.attention
    queries, keys = attention.query_width, attention.key_width
    normed = {None: (1, 1), "head": (attention.head_dim,) * 2, "projection": (queries, keys)}[
        attention.qk_norm
    ]
    shapes = {
        "attention_norm": (config.hidden,),
        "ffn_norm": (config.hidden,),
        "qkv": (queries + 2 * keys, config.hidden),
        "q_norm": (normed[0],),
        "k_norm": (normed[1],),
        "o": (config.hidden, queries),
        "lm_head": (config.vocabulary, config.hidden),
        **config.routed.shapes(config.hidden),
    }
    if "o" in attention.biases:
        shapes["o_bias"] = (config.hidden,)
    shapes["final_norm"] = (config.hidden,)
    for expert in range(config.routed.experts):
        for part, shape in config.routed.expert_shapes(config.hidden).items():
            shapes[f"experts.{expert}.{part}"] = shape
    transposed = config.routed.transposed_down
    return Weights(
        {
            name: _blocks(random(*shape, seed=seed, scale=0.2), transposed and name.startswith("experts"))
            for seed, (name, shape) in enumerate(shapes.items())
        },
        config.layer(0),
    )


def _blocks(tensor: Tensor, transposed: bool) -> list[Tensor]:
    if tensor.dim() == 1 or len(tensor) < 2:
        return [tensor]
    blocks = [each.clone() for each in tensor.tensor_split([len(tensor) // 3])]
    return [block.T for block in blocks] if transposed else blocks


def inputs(kernels: Binder, hidden_TD: Tensor, weights: Weights, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Queries, keys and values, side by side."""
    qkv = kernels.bound("attention_inputs", weights, Workspace(len(hidden_TD)))(hidden_TD, angles)
    return torch.cat([part.flatten(1) for part in qkv], dim=1)


def after_attention(
    kernels: Binder, hidden_TD: Tensor, attended_TX: Tensor, weights: Weights
) -> tuple[Tensor, Tensor, dict[int, int]]:
    """The new hidden states, the experts of each token, the rows of each expert."""
    run = kernels.fused("moe_layer", weights, Workspace(len(hidden_TD)))
    assert run is not None, "a native kernel takes it"
    result: tuple[Tensor, Tensor, dict[int, int]] = run(attended_TX, hidden_TD)
    return result


def greedy(
    config: ModelConfig, native: NativeKernels, weights: Weights, hidden_TD: Tensor, rows: list[int]
) -> tuple[Tensor, list[int]]:
    """Logits of some rows, and their likeliest tokens."""
    run = kernels_of(config, native).fused("greedy", weights, Workspace(len(rows)))
    assert run is not None, "a native kernel takes it"
    result: tuple[Tensor, list[int]] = run(hidden_TD, rows)
    return result


@pytest.fixture(params=list(MODELS.values()), ids=list(MODELS))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    model: ModelConfig = request.param
    return model


def test_embeddings_are_copied_and_angles_are_those_of_torch(native: NativeKernels) -> None:
    embedding_VD = random(PLAIN.vocabulary, PLAIN.hidden, seed=1)
    ids, positions = [7, 100, 0], [0, 31, 4000]
    weights = Weights({"embedding": [embedding_VD]})
    embed = kernels_of(PLAIN, native).bound("embed", weights, Workspace(3))
    hidden_TD, angles = embed(ids, positions, [])
    assert torch.equal(hidden_TD, embedding_VD[ids])
    expected = qkv_functions.rotary_angles(torch.tensor(positions), PLAIN.attention)
    for ours, theirs in zip(angles, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


BY_COLUMNS = (NativeColumns, NativeExpertByColumns)
CHECKED, ON_TORCH = (
    [kind for kind in kinds if kind.operation in MAKERS and kind not in BY_COLUMNS]
    for kinds in (NATIVE, TORCH_KERNELS)
)


@pytest.mark.parametrize("number", range(len(CHECKED)), ids=lambda number: CHECKED[number].__name__)
def test_kernels_keep_their_promises_with_each_instruction_set(number: int, variant: str) -> None:
    coded = CODED[(number + instruction_sets().index(variant)) % len(CODED)]
    assert check_kernel(CHECKED[number], instruction_set=variant, formats=[coded]) > 0


def test_native_kernels_take_all_numbers_of_rows_that_are_asked_for() -> None:
    assert check_kernel(NativeLogits, (200,), formats=()) > 0


@pytest.mark.parametrize("rows", [1, 5, 16, 19])
def test_products_by_matrices_that_lie_transposed_are_right_and_bits_depend_on_no_cut_and_no_row(
    native: NativeKernels, rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x_TD, stored_DN = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((rows, 75), (75, 700))
    )
    whole = native.linear_by_columns(x_TD, [stored_DN.T])
    exact = x_TD.double() @ stored_DN.double()
    assert ((whole.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()
    in_blocks = [block.clone().T for block in stored_DN.split([1, 33, 41])]
    assert torch.equal(native.linear_by_columns(x_TD, in_blocks), whole)
    alone = torch.cat([native.linear_by_columns(row_D[None], [stored_DN.T]) for row_D in x_TD])
    assert torch.equal(alone, whole)


@pytest.mark.parametrize("number", range(len(ON_TORCH)), ids=lambda number: ON_TORCH[number].__name__)
def test_kernels_on_torch_keep_their_promises(number: int) -> None:
    assert check_kernel(ON_TORCH[number], formats=[CODED[number % len(CODED)]]) > 0


def test_logits_are_those_of_the_chosen_rows_and_the_largest_is_named(
    native: NativeKernels, config: ModelConfig
) -> None:
    weights, hidden_TD = weights_of(config), random(6, config.hidden, seed=53)
    norm_D, last = weights["final_norm"][0], [5, 0, 3]
    logits_SV, likeliest = greedy(config, native, weights, hidden_TD, last)
    blocks = [block.double() for block in weights["lm_head"]]
    exact = functions.lm_head(hidden_TD[last].double(), norm_D.double(), blocks, config.norm_eps, config.norm)
    assert torch.allclose(logits_SV.double(), exact.double(), atol=0.02, rtol=0.02)
    assert likeliest == logits_SV.numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize(("value", "token"), [(torch.nan, -1), (torch.inf, -1), (7.0, 0)])
def test_of_equal_logits_the_first_is_the_likeliest_and_bad_ones_have_none(
    native: NativeKernels, value: float, token: int
) -> None:
    config = replace(PLAIN, hidden=1)
    ones = torch.ones(1).bfloat16()
    weights = Weights({"final_norm": [ones], "lm_head": [torch.full((500, 1), value).bfloat16()]})
    _, likeliest = greedy(config, native, weights, ones[None], [0])
    assert likeliest == [token]


def test_a_layer_in_one_call_has_the_bits_of_its_parts(native: NativeKernels, config: ModelConfig) -> None:
    check_parts(native, config, weights_of(config))


def test_a_coded_network_of_every_token_lies_beside_plain_experts_of_any_width(native: NativeKernels) -> None:
    config = PLAIN.varied(hidden=256, shared=512)
    weights = weights_of(config)
    coded = {
        name: [coded_block(block, STORED_FORMATS["q4_k"]) for block in blocks]
        for name, blocks in weights.items()
        if name.startswith("shared_")
    }
    check_parts(native, config, Weights(weights | coded, weights.layer))


def check_parts(native: NativeKernels, config: ModelConfig, weights: Weights) -> None:
    """Compare a layer in one call with its parts, on seven tokens."""
    kernels = kernels_of(config, native)
    hidden_TD, attended_TX = (
        random(7, config.hidden, seed=54),
        random(7, config.attention.query_width, seed=55),
    )
    together, chosen_Tk, counts = after_attention(kernels, hidden_TD, attended_TX, weights)

    memory = Workspace(7)
    projected_TD = kernels.bound("output_projection", weights, memory)(attended_TX, hidden_TD)
    routed = kernels.bound("route", weights, memory)(projected_TD)
    rows, experts_Tk = ExpertRows(routed, config.routed), routed.experts_Tk
    for ours, torchs in zip(routed.order, sorted_by_expert(experts_Tk), strict=True):
        assert torch.equal(ours, torchs)
    expected = experts_Tk.flatten().bincount(minlength=config.routed.experts).tolist()
    for expert, (x_nD, y_nD) in enumerate(
        zip(rows.x_nD.split(expected), rows.y_nD.split(expected), strict=True)
    ):
        kernels.expert(weights, expert, len(x_nD))[1](x_nD, y_nD)
    if rows.shared is not None:
        kernels.expert(weights, None, 7)[1](routed.x_TD, rows.shared.y_nD)
    apart = kernels.combine(memory)(*rows.outputs(), projected_TD)

    assert torch.equal(together, apart)
    assert torch.equal(chosen_Tk, experts_Tk)
    assert counts == {expert: rows for expert, rows in enumerate(expected) if rows}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [*((name, 16) for name in MODELS), *(("Mixtral", n) for n in (129, 513, 1100))],
)
def test_a_token_has_the_same_bits_alone_and_beside_few_or_many_others(
    native: NativeKernels, name: str, tokens: int
) -> None:
    config = MODELS[name]
    kernels, weights = kernels_of(config, native), weights_of(config)
    hidden_TD = random(tokens, config.hidden, seed=64)
    attended_TX = random(tokens, config.attention.query_width, seed=65)
    angles = qkv_functions.rotary_angles(torch.arange(tokens), config.attention)
    together = inputs(kernels, hidden_TD, weights, angles)
    out_TD, _, counts = after_attention(kernels, hidden_TD, attended_TX, weights)
    assert sum(counts.values()) == tokens * config.routed.top_k
    for start, stop in ((0, 1), (3, 8), (127, 129), (511, 513), (tokens - 1, tokens)):
        rows = slice(min(start, tokens - 1), min(stop, tokens))
        own_angles = angles[0][rows], angles[1][rows]
        assert torch.equal(together[rows], inputs(kernels, hidden_TD[rows], weights, own_angles))
        own, *_ = after_attention(kernels, hidden_TD[rows], attended_TX[rows], weights)
        assert torch.equal(out_TD[rows], own)


def test_the_memory_of_prompts_is_not_kept() -> None:
    assert Workspace(KEPT_ROWS).kept
    assert not Workspace(KEPT_ROWS + 1).kept


@pytest.mark.skipif(not instruction_sets(), reason=availability())
def test_the_number_of_threads_does_not_show_in_the_bits_of_a_layer() -> None:
    config = PLAIN.varied(hidden=256, intermediate=512)  # large enough that helpers are called
    weights, hidden_TD = weights_of(config), random(7, config.hidden, seed=58)
    attended_TX = random(7, config.attention.query_width, seed=59)
    outcomes = []
    for threads in (1, 2, 5):
        with closing(NativeKernels(64, threads=threads)) as native:
            outcomes += [
                after_attention(kernels_of(config, native), hidden_TD, attended_TX, weights)[0]
                for _ in range(20)
            ]
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)


@pytest.mark.skipif(not instruction_sets(), reason=availability())
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_likeliest_token_is_found_however_threads_share_out_the_logits(threads: int) -> None:
    config = replace(PLAIN, hidden=256, vocabulary=1234)
    weights, hidden_TD = weights_of(config), random(40, config.hidden, seed=61)
    with closing(NativeKernels(64, threads=threads)) as native:
        for row in range(40):
            logits_SV, likeliest = greedy(config, native, weights, hidden_TD, [row])
            assert likeliest == logits_SV.numpy().argmax(axis=1).tolist()


def test_norms_and_a_router_may_be_in_float32(native: NativeKernels, config: ModelConfig) -> None:
    kernels, weights = kernels_of(config, native), weights_of(config)
    small = {
        name: [block.float() for block in weights[name]]
        for name in weights
        if name.endswith(("norm", "router"))
    }
    wide = Weights(weights | small, weights.layer)
    hidden_TD, attended_TX = (
        random(9, config.hidden, seed=62),
        random(9, config.attention.query_width, seed=63),
    )
    angles = qkv_functions.rotary_angles(torch.arange(9), config.attention)
    assert torch.equal(*(inputs(kernels, hidden_TD, each, angles) for each in (weights, wide)))
    (routed, wide_routed) = (
        kernels.bound("route", each, Workspace(9))(hidden_TD) for each in (weights, wide)
    )
    assert torch.equal(routed.x_TD, wide_routed.x_TD)
    assert torch.allclose(routed.logits_TE, wide_routed.logits_TE, atol=1e-2)
    out_TD, wide_TD = (after_attention(kernels, hidden_TD, attended_TX, each)[0] for each in (weights, wide))
    assert (wide_TD - out_TD).abs().max() <= 2**-5 * out_TD.abs().max()
    assert torch.equal(*(greedy(config, native, each, hidden_TD, [0, 8])[0] for each in (weights, wide)))


def test_a_nan_stays_in_its_token(native: NativeKernels) -> None:
    kernels, weights = kernels_of(PLAIN, native), weights_of(PLAIN)
    hidden_TD, attended_TX = (
        random(3, PLAIN.hidden, seed=60),
        random(3, PLAIN.attention.query_width, seed=61),
    )
    clean, *_ = after_attention(kernels, hidden_TD, attended_TX, weights)
    hidden_TD[1, 5] = torch.nan
    out_TD, experts_Tk, _ = after_attention(kernels, hidden_TD, attended_TX, weights)
    assert out_TD[1].isnan().all()
    assert torch.equal(out_TD[[0, 2]], clean[[0, 2]])
    assert len(set(experts_Tk[1].tolist())) == PLAIN.routed.top_k


def test_a_token_whose_scores_are_all_0_takes_nothing_from_its_experts(native: NativeKernels) -> None:
    config = PLAIN.varied(router=Router(score="sigmoid"))
    weights = weights_of(config)
    weights["ffn_norm"][0].fill_(1)
    for block in weights["router"]:
        block.fill_(-5)
    hidden_TD, attended_TX = torch.ones(2, 96).bfloat16(), torch.zeros(2, 96).bfloat16()
    out_TD, *_ = after_attention(kernels_of(config, native), hidden_TD, attended_TX, weights)
    assert torch.equal(out_TD, hidden_TD)


@pytest.mark.skipif(not instruction_sets(), reason=availability())
def test_rows_beyond_the_limit_and_columns_are_left_to_torch() -> None:
    weights = weights_of(PLAIN)
    columns = Weights(
        {
            name: [block.T.contiguous().T if block.dim() > 1 else block for block in blocks]
            for name, blocks in weights.items()
        },
        weights.layer,
    )
    with closing(NativeKernels(4, threads=1)) as native:
        kernels = kernels_of(PLAIN, native)
        assert kernels.fused("moe_layer", weights, Workspace(4))
        assert not kernels.fused("moe_layer", weights, Workspace(5))
        assert not kernels.fused("moe_layer", columns, Workspace(4))


# -- a library that cannot be used -----------------------------------------------------------------

COMPILER = sysconfig.get_config_var("CC").split()[0]


def compiled(folder: Path, source: str) -> Path:
    library = folder / "_kernels.so"
    command = [COMPILER, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    try:
        subprocess.run(command, input=source.encode(), check=True)
    except FileNotFoundError:
        pytest.skip(f"there is no {COMPILER}")
    return library


def test_a_damaged_library_does_not_load(tmp_path: Path) -> None:
    damaged = tmp_path / "_kernels.so"
    damaged.write_bytes(b"not a library")
    reason = load([damaged])
    assert isinstance(reason, str)
    assert reason.startswith("_kernels.so does not load (")


@pytest.mark.parametrize(
    ("source", "version"),
    [
        *((f"int moesched_version(void) {{ return {each}; }}", each) for each in (VERSION - 1, VERSION + 1)),
        ("int moesched_most_batch(void) { return 32; }", 1),
    ],
    ids=["older", "newer", "from before versions"],
)
def test_a_library_of_another_version_is_not_used(tmp_path: Path, source: str, version: int) -> None:
    assert load([compiled(tmp_path, source)]) == f"_kernels.so has version {version} instead of {VERSION}"


def test_without_a_library_the_reason_and_the_remedy_are_told() -> None:
    assert load([]) == "it was not compiled when moesched was installed"
    assert availability().startswith(
        "CPU kernels: " if instruction_sets() else "no CPU kernels, torch does without: "
    )


def test_an_instruction_set_that_the_processor_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(
        BadInput,
        match=rf"kernel is 'avx9': give one of auto, torch{''.join(f', {each}' for each in instruction_sets())}",
    ):
        check_choice("avx9")
    check_choice(TORCH)
    assert rows_for_native(TORCH, "bfloat16", Shape(512, 512), packed=False) == 0
