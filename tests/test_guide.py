"""Every page does what it says, block by block, and the guide's figures are those that commands printed."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from doc_blocks import Block, agrees, blocks, outputs
from doc_reader import Reader, read_only, unknown_in_sentences

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "policies.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLLOWED = [page for page in PAGES if any(block.runs for block in blocks(page))]
ONLY_READ = [block for page in PAGES for block in blocks(page) if not block.runs]
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
        if block.runs:
            reader.follow(block)


@pytest.mark.parametrize("block", ONLY_READ, ids=lambda block: block.where)
def test_a_block_that_the_tests_do_not_run_names_commands_and_options_that_exist(block: Block) -> None:
    read_only(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_command_within_a_sentence_has_options_that_exist(page: Path) -> None:
    assert unknown_in_sentences(page) == []


@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.stem)
def test_every_file_that_a_page_shows_is_used_by_a_later_block(page: Path) -> None:
    shown = blocks(page)
    unused = [
        block.file
        for number, block in enumerate(shown)
        if block.file and not any(Path(block.file).stem in later.text for later in shown[number + 1 :])
    ]
    assert unused == []


def test_the_guide_says_what_its_blocks_need_that_the_tests_do_not_run() -> None:
    assert [block.why_not for block in blocks(GUIDE) if not block.runs] == [
        "needs the network",
        "needs CUDA",
        "needs ssh",
    ]


def test_every_figure_of_the_guide_is_one_that_a_command_prints() -> None:
    text = re.sub(r"^```.*?^```", "", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert {figure for figure in FIGURE.findall(text) if figure not in outputs(GUIDE)} == set()


def test_the_entry_point_names_a_policy_of_the_tutorial() -> None:
    [shown] = [block.text for block in blocks(GUIDE) if block.language == "toml"]
    [named] = tomllib.loads(shown)["project"]["entry-points"]["moesched.policies"].values()
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
