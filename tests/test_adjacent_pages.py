"""Pages that stay lie together on the accelerator: whole matrices, fewer calls, and the same bits as streamed ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from benchmarks.shared.small_runs import Generated, same_bits
from moesched.devices.lagging.device import LaggingDevice, LaggingGpu
from moesched.devices.products.linear import joined
from moesched.devices.shared.coded import rows_of
from moesched.devices.shared.page_reader import PageReader
from moesched.devices.torch.adjacent_pages import AdjacentPages
from moesched.devices.torch.compute import Compute
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import Page, weight_layout
from moesched.models.random_model import write_random_model
from odd_models import MIXTRAL, OLMOE
from odd_runs import one_batch

SIZES = {
    "layers": 3, "hidden": 256, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "experts": 4,
    "top_k": 2,
}  # fmt: skip
PLAIN = MIXTRAL.varied(**SIZES)
NORMED = OLMOE.varied(**SIZES)
PAGE_BYTES = 129 * 256 * 4 + 4096
"""Room for 128 rows of a matrix, and for vectors beside them: all matrices but keys and values are cut in two."""
LAYOUT = weight_layout(PLAIN, "float32", PAGE_BYTES)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("models")
    return {
        config.name: open_checkpoint(write_random_model(config, folder / config.name, dtype="float32"))
        for config in (PLAIN, NORMED)
    }


def ran(
    checkpoint: Checkpoint, gpu: LaggingGpu, policy: str, lengths: Sequence[int], new_tokens: int
) -> Generated:
    layout = weight_layout(checkpoint.config, "float32", PAGE_BYTES)
    device = LaggingDevice(checkpoint, layout, keep_logits=True, gpu=gpu)
    prompts = [list(range(1, length + 1)) for length in lengths]
    weights = 0.8 if policy != "resident" else 2.0
    return one_batch(
        device, policy, weights=weights, prompts=prompts, new_tokens=new_tokens, size=len(prompts)
    )


@pytest.mark.parametrize(("model", "batch"), [("mixtral", 1), ("olmoe", 16), ("mixtral", 64)])
def test_a_decode_step_with_resident_weights_makes_no_cat(
    checkpoints: dict[str, Checkpoint], model: str, batch: int
) -> None:
    calls = []
    for new_tokens in (1, 2):
        gpu = LaggingGpu()
        ran(checkpoints[model], gpu, "resident", [1 + request % 3 for request in range(batch)], new_tokens)
        calls.append(gpu.operations.calls)
    after_prefill = calls[1] - calls[0]
    assert after_prefill["linear"] >= 2 * PLAIN.layers
    assert after_prefill["cat"] == 0


@pytest.mark.parametrize("policy", ["layer_streaming", "cgopipe", "expert_streaming"])
def test_matrices_that_stay_whole_and_streamed_parts_give_the_same_bits(
    checkpoints: dict[str, Checkpoint], policy: str
) -> None:
    lengths = [3, 1, 3, 2]
    whole = ran(checkpoints["mixtral"], LaggingGpu(), "resident", lengths, 3)
    streamed = ran(checkpoints["mixtral"], LaggingGpu(), policy, lengths, 3)
    assert streamed.streamed_pages > whole.streamed_pages == 0
    assert streamed.tokens == whole.tokens
    assert same_bits(streamed.logits_RSV, whole.logits_RSV)


# ---------------------------------------------------------------- in memory


@pytest.fixture
def reader(checkpoints: dict[str, Checkpoint]) -> Iterator[PageReader]:
    checkpoint = checkpoints["mixtral"]
    with PageReader(checkpoint, LAYOUT) as reader:
        yield reader


def adjacent(reader: PageReader) -> AdjacentPages:
    return AdjacentPages(reader, Compute("cpu", LAYOUT, "torch", pin=False, threads=1))


def kept(pages: AdjacentPages, reader: PageReader, those: Sequence[Page]) -> dict[str, list[torch.Tensor]]:
    """Let pages of a layer stay, and load them; returns their row blocks by the last part of their names."""
    pages.retain(those)
    pages.allocate(those)
    found: dict[str, list[torch.Tensor]] = {}
    for page in those:
        memory = reader.new_memory(reader.bytes_in_slot(page))
        reader.read(page, memory)
        for name, blocks in pages.copied(page, memory).items():
            found.setdefault(name.rpartition(".")[2], []).extend(map(rows_of, blocks))
    return found


def test_a_matrix_that_stays_is_one_block_as_are_queries_keys_and_values(reader: PageReader) -> None:
    expert = kept(adjacent(reader), reader, LAYOUT.expert(1, 2))
    for part in ("gate", "up", "down"):
        assert len(expert[part]) == 2
        (whole,) = map(rows_of, joined(expert[part]))
        assert torch.equal(whole, reader.read_tensor(f"layers.1.experts.2.{part}"))
    dense = kept(adjacent(reader), reader, LAYOUT.dense(0))
    (whole,) = map(rows_of, joined([block for name in "qkv" for block in dense[name]]))
    assert torch.equal(whole, torch.cat([reader.read_tensor(f"layers.0.{name}") for name in "qkv"]))
    _, *others = LAYOUT.expert(0, 0)
    expert = kept(adjacent(reader), reader, others)
    assert [len(joined(expert[part])) for part in ("gate", "down", "up")] == [1, 1, 1], (
        "neighbours are joined"
    )
    assert torch.equal(expert["gate"][0], reader.read_tensor("layers.0.experts.0.gate")[128:])


def test_an_expert_is_kept_if_it_stays_as_it_is_and_freed_if_one_of_its_pages_goes(
    reader: PageReader,
) -> None:
    pages = adjacent(reader)
    one, other = LAYOUT.expert(0, 0), LAYOUT.expert(0, 1)
    place = kept(pages, reader, [*one, *other])["gate"][0].data_ptr()
    assert pages.retain([*one, *other[1:]]) == {page.id for page in one}
    pages.allocate([*one, *other[1:]])
    assert kept(pages, reader, one)["gate"][0].data_ptr() == place


def test_blocks_are_joined_only_behind_a_multiple_of_128_rows_in_the_same_allocation() -> None:
    memory = torch.arange(1024.0).view(256, 4)
    assert [len(block) for block in joined([memory[:128], memory[128:130], memory[130:]])] == [130, 126]
    assert [len(block) for block in joined([memory[:128], memory[130:]])] == [128, 126]
    assert [len(block) for block in joined([memory[:128], memory[128:].clone()])] == [128, 128]
    assert torch.equal(rows_of(joined([memory[:128], memory[128:]])[0]), memory)
    columns = [memory[:128].T, memory[128:].T]  # of a matrix that lies transposed
    assert [rows_of(block).shape for block in joined(columns)] == [(4, 128), (4, 128)]
