"""Weights that change while a run uses them: it does not end as if nothing had happened."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moesched
from moesched.models.checkpoint import open_checkpoint
from moesched.models.prestack import prestack_model
from moesched.runs.listeners import Listener
from small_models import small_model

PROMPTS = [[1, 2], [3], [4, 5, 6]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of its own, to be changed."""
    return small_model(tmp_path / "model")


def weights(model: Path) -> Path:
    (file,) = model.glob("*.safetensors")
    return file


def overwrite(file: Path) -> None:
    """Zeros over a part, as a broken copy leaves them."""
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(bytes(1000))


def overwrite_unseen(file: Path) -> None:
    """The same by a program that sets the time of the last write back."""
    before = file.stat()
    overwrite(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(file: Path) -> None:
    """Another file under the same name, as downloads are put in place."""
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    other.rename(file)


def extend(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"more")


def harmless(model: Path) -> None:
    weights(model).read_bytes()
    (model / "config.json").write_text((model / "config.json").read_text())


class Changes(Listener):
    """Changes the weights once a token of some request is there."""

    def __init__(self, change: Callable[[], object], request: int = 0) -> None:
        self._changes = [change]
        self._request = request

    def generated(self, request: int, token: int, text: str) -> None:
        """A request got a token."""
        if request == self._request and self._changes:
            self._changes.pop()()


def run(model: Path, listener: Listener | None = None, **options: Any) -> moesched.JobReport:
    return moesched.run_model(
        model, PROMPTS, policy="layer_streaming", max_new_tokens=4, listener=listener, **options
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (overwrite, "was written to"),
        (overwrite_unseen, "was changed"),
        (replace, "was replaced by another file"),
        (extend, r"was changed from [\d,]+ bytes to [\d,]+"),
        (Path.unlink, r"cannot be reached any more \(No such file or directory\)"),
    ],
)
def test_a_change_is_the_runs_failure_and_names_the_file_and_the_doubtful_tokens(
    model: Path, change: Callable[[Path], object], said: str
) -> None:
    file = weights(model)
    report = run(model, Changes(lambda: change(file)))
    assert report.tokens is not None
    assert any(report.tokens)
    assert report.failure is not None
    expected = rf"{file} {said} since it was opened: the tokens of requests 0 to 2 may be wrong; restore it.*"
    assert re.fullmatch(expected, report.failure), report.failure


def test_batches_after_a_change_do_not_run_and_those_before_are_not_in_doubt(model: Path) -> None:
    good = run(model, Changes(lambda: harmless(model)), batch_size=1)
    assert good.failure is None, "reading the files, or changing others, is no change"
    report = run(model, Changes(lambda: overwrite(weights(model)), request=1), batch_size=1)
    assert report.failure is not None
    assert "the tokens of request 1 may be wrong" in report.failure
    assert report.tokens is not None
    assert good.tokens is not None
    assert report.tokens[0] == good.tokens[0]
    assert report.tokens[2] == []


def test_a_change_before_the_first_batch_is_refused(model: Path) -> None:
    class AtOnce(Listener):
        def opened(self, device: Any) -> None:
            overwrite(weights(model))

    with pytest.raises(moesched.BadInput, match=r"was written to since it was opened; restore it"):
        run(model, AtOnce())


def test_the_file_that_a_link_leads_to_counts(model: Path, tmp_path: Path) -> None:
    blob = weights(model).rename(tmp_path / "blob")
    (model / blob.name).unlink(missing_ok=True)
    name = "model-00001-of-00001.safetensors"
    (model / name).symlink_to(blob)
    failure = run(model, Changes(lambda: overwrite(blob))).failure
    assert failure is not None
    assert failure.startswith(f"{model / name} was written to")


def test_a_profile_or_a_copy_of_weights_that_changed_meanwhile_is_refused(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(moesched.MoeschedError, match="was written to since it was opened"):
        moesched.profile_routing(
            model, PROMPTS, max_new_tokens=2, progress=lambda *_: overwrite(weights(model))
        )
    with pytest.raises(moesched.BadInput, match=r"was changed from .* bytes to"):
        prestack_model(model, tmp_path / "stacked", progress=lambda *_: extend(weights(model)))
    assert not (tmp_path / "stacked").exists()


def test_every_share_of_a_model_knows_its_files(model: Path) -> None:
    from moesched.models.tensor_parallel import cut_checkpoint

    checkpoint = open_checkpoint(model)
    shares = [cut_checkpoint(checkpoint, rank, 2) for rank in range(2)]
    assert [share.change() for share in shares] == [None, None]
    extend(weights(model))
    assert all(share.change() for share in shares)
