"""Pages that are followed step by step do what they say, and the guide's figures are those that commands printed."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from doc_blocks import Reader, agrees, blocks, outputs
from moesched.steps.verbs.table import picture

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "policies.md"
FOLLOWED = [GUIDE, ROOT / "docs" / "explain.md"]
FIGURE = re.compile(r"\b\d[\d,]*(?:\.\d+)? ?(?:tokens/s|%|GB/s|GB|MB|ms|s)(?![\w/])")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users_run")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of the reader's, whose modules nobody else sees."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.stem)
def test_a_page_can_be_followed_word_for_word(page: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reader = Reader(capfd)
    for block in blocks(page):
        if block.runs and block.language not in ("text", "toml"):
            reader.follow(block)


def test_what_the_tests_do_not_run_needs_what_they_lack() -> None:
    marked = [block.before for block in blocks(GUIDE) if not block.runs]
    needs = [re.findall(r"needs (CUDA|ssh|the network);", before) for before in marked]
    assert needs == [["the network"], ["CUDA"], ["ssh"]]


def test_every_figure_of_the_guide_is_one_that_a_command_prints() -> None:
    text = re.sub(r"^```.*?^```", "", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert {figure for figure in FIGURE.findall(text) if figure not in outputs(GUIDE)} == set()


def test_the_picture_of_a_micro_batchs_progress_is_the_one_that_the_table_gives() -> None:
    [shown] = [block.text for block in blocks(GUIDE) if block.language == "text"]
    assert shown == picture() + "\n"


def test_the_entry_point_names_a_policy_of_the_tutorial_and_a_group_that_is_searched() -> None:
    [shown] = [block.text for block in blocks(GUIDE) if block.language == "toml"]
    [(group, members)] = tomllib.loads(shown)["project"]["entry-points"].items()
    assert group in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    [named] = members.values()
    file = named.partition(":")[0].rpartition(".")[2]
    [code] = [block.text for block in blocks(GUIDE) if block.file == f"{file}.py"]
    assert f"class {named.partition(':')[2]}:" in code


@pytest.mark.parametrize(
    ("shown", "printed", "as_shown"),
    [
        ("one\n", "one\n", True),
        ("one\n", "two\n", False),
        ("one\n", "one\ntwo\n", False),
        ("…\ntwo\n", "one\ntwo\n", True),
        ("one\n…\n", "one\n", True),
        ("…\nthree\n", "one\ntwo\n", False),
        ("50.7 tokens/s\n", "50,7 tokens/s\n", False),
        ("wall … ms\n", "wall 3 ms \n", True),
        ("wall … ms\n", "wall 3 s\n", False),
    ],
)
def test_output_agrees_with_a_page_up_to_what_the_page_leaves_out(
    shown: str, printed: str, as_shown: bool
) -> None:
    assert agrees(shown, printed) == as_shown
