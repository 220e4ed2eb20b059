"""The documentation names files, modules and commands that exist, and the README's policy runs."""

from __future__ import annotations

import importlib.util
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

import moesched
from doc_blocks import blocks
from moesched import dispatch, run_model, simulate_model
from moesched.cli.main import main
from moesched.machines.machine import (
    AcceleratorGroup,
    Contention,
    CostPoint,
    Interconnect,
    Link,
    Machine,
    Processor,
    Roles,
    Staging,
    Tier,
    WiredMemory,
)
from moesched.machines.networks import Network
from moesched.plugins import find
from moesched.testing import check_policy

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "tiny-mixtral"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLDERS = "moesched|devices|policies|transports|tests|examples|benchmarks|docs"
FILE = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]*[\w/]")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
ANCHOR = re.compile(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MODULE = re.compile(r"`(moesched(?:\.\w+)+)`")
PLACEHOLDER = "MACHINE"


NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]


def named_files(page: Path) -> set[str]:
    """Paths in a page, as they stand from the root of the tree."""
    found = set(FILE.findall(page.read_text(encoding="utf-8")))
    return {
        name for name in found if PLACEHOLDER not in name and ("." in Path(name).name or name.endswith("/"))
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_file_section_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = {name for name in named_files(page) if not (ROOT / name).exists()}
    missing |= {link for link in LINK.findall(text) if not (page.parent / link).exists()}
    missing |= {
        anchor
        for file, anchor in ANCHOR.findall(text)
        if anchor not in anchors(page.parent / file if file else page)
    }
    missing |= {name for name in MODULE.findall(text) if not exists(name)}
    assert not missing


def anchors(page: Path) -> set[str]:
    """The sections of a page, as links name them."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_has_one_place_in_the_site() -> None:
    shown = re.findall(r": ([\w-]+\.md)$", NAV, re.MULTILINE)
    assert sorted(shown) == sorted(page.name for page in (ROOT / "docs").glob("*.md")), (
        "edit nav in mkdocs.yml"
    )


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("reference*.md"))
    shown = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    packages = {"moesched": moesched.__all__, "moesched.dispatch": dispatch.__all__}
    public = {f"{package}.{name}" for package, names in packages.items() for name in names}
    assert {name for name in shown if name.rpartition(".")[0] in packages} == public
    assert [name for name in shown if not exists(name)] == []


MACHINE_FILE = (Machine, Processor, Tier, Link, Roles, AcceleratorGroup, Interconnect, WiredMemory, Staging)
STRUCTS = (*MACHINE_FILE, CostPoint, Contention, Network)
TABLES = (
    "processors", "memories", "links", "roles", "accelerator_group", "network", "wired_memory", "staging",
)  # fmt: skip


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_key_of_a_machine_file_is_on_its_page(struct: type[msgspec.Struct]) -> None:
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    missing = [name for name in struct.__struct_fields__ if name not in TABLES and f"`{name}`" not in page]
    assert missing == []
    assert all(re.search(rf"^`\[+{table}[\].]", page, re.MULTILINE) for table in TABLES)


def exists(name: str) -> bool:
    """Test whether a dotted name is a module, or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    if importlib.util.find_spec(module) is None:
        return False
    if hasattr(import_module(module), attribute):
        return True
    return importlib.util.find_spec(name) is not None


def section_of_design(title: str) -> str:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    return design.split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_stop_of_the_reading_order_and_every_place_to_look_is_named_by_its_file() -> None:
    for title in ("A reading order", "Where to change what"):
        for row in section_of_design(title).splitlines()[4:]:
            if row.startswith("|") and not row.startswith("| ---"):
                assert FILE.search(row), row
                code = "".join(
                    (ROOT / name).read_text() for name in FILE.findall(row) if (ROOT / name).is_file()
                )
                for name, method in re.findall(r"`([A-Z]\w+)\.(\w+)`", row):
                    assert f"class {name}" in code and f"def {method}(" in code, row


def test_the_reading_order_is_as_long_as_the_pages_say() -> None:
    section = section_of_design("A reading order")
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in set(FILE.findall(section)))
    for page in (section, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        [said] = re.findall(r"about ([\d,]+) lines", page)
        assert lines == pytest.approx(int(said.replace(",", "")), rel=0.1)


def test_the_readme_s_policy_generates_the_tokens_of_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = [block for block in blocks(ROOT / "README.md") if block.language == "python"]
    (tmp_path / "two_layers.py").write_text(code.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    command = ["run", str(MODEL), "--policy", "two_layers:TwoLayers", "--budget", "host=9MB"]
    options = ["--prompt", "Return a new", "--max-new-tokens", "8", "--trace", "out.json"]
    assert main([*command, *options]) == 0
    expected = run_model(MODEL, ["Return a new"], policy="resident", max_new_tokens=8)
    assert expected.text is not None
    assert expected.text[0] in capsys.readouterr().out
    assert check_policy(find("policies", "two_layers:TwoLayers"), clocks=["virtual"]) > 5


@pytest.fixture(scope="session")
def kit_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The code of the policy kit's page, as the name of a module."""
    code = [block.text for block in blocks(ROOT / "docs" / "policy-kit.md") if block.language == "python"]
    folder = tmp_path_factory.mktemp("kit")
    (folder / "policy_kit_page.py").write_text("\n".join(code))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import_module("policy_kit_page")
    return "policy_kit_page"


SMALL_GPU: dict[str, Any] = {
    "machine": "t4",
    "batch_size": 4,
    "micro_batch_size": 2,
    "budgets": {"gpu": "12MB"},
}
TWO_NODES: dict[str, Any] = {"machine": "m2-ultra", "batch_size": 1, "nodes": 2, "network": "10gbe"}
SHOWN: dict[str, tuple[dict[str, Any], set[str]]] = {
    "TwoBuffers": (SMALL_GPU, {"fetch", "cpu_attention"}),
    "WhereItIs": (SMALL_GPU, {"offload_routed", "load_routed"}),
    "JoinedAndHalved": (SMALL_GPU, set()),
    "FirstInFirstOut": (SMALL_GPU, {"fetch", "offload_routed"}),
    "CachedInPool": (SMALL_GPU, {"fetch"}),
    "ByScore": (SMALL_GPU, {"fetch"}),
    "Overlapping": (TWO_NODES, {"run_expert", "all_reduce"}),
}
"""Each policy of the kit's page, where it offloads or shares experts, and kinds of tasks that it has there."""


@pytest.mark.parametrize("policy", SHOWN)
def test_each_policy_of_the_kit_s_page_generates_the_tokens_of_any_other_and_offloads_or_shares(
    kit_page: str, policy: str
) -> None:
    prompts = ["Return a new", "Raise an error if"]
    ours = run_model(MODEL, prompts, policy=f"{kit_page}:{policy}", max_new_tokens=8, micro_batch_size=1)
    expected = run_model(MODEL, prompts, policy="resident", max_new_tokens=8)
    assert ours.text == expected.text
    where, kinds = SHOWN[policy]
    if kinds:
        given: dict[str, Any] = {
            "policy": f"{kit_page}:{policy}",
            "workload": "uniform",
            "gen": 4,
            "band": False,
        }
        assert kinds <= {kind.kind for kind in simulate_model(MODEL, **given, **where).kinds}


def test_the_kit_s_page_explains_every_name_of_the_kit() -> None:
    page = (ROOT / "docs" / "policy-kit.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(dispatch.__all__)
