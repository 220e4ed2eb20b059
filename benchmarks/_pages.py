"""Write the tables of the documentation from the result files, so that no figure is typed by hand.

    python benchmarks/_pages.py

docs/results.md is one table of claims; the other pages have words of their own around their tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from _claim import Claim
from _claims import CLAIMS
from _page_tables import MEASURED, PAPERS, SECTIONS, measured, reproduction, simulated
from _results import MACHINES, RESULTS, ROOT, machine_of, older_than_the_code, stored
from _tables import filled, markdown
from _tried_table import doctors, tried
from _validation_tables import VALIDATION

DOCS = ROOT / "docs"
OLDER = " ⟳"
ANY = "any machine"
MEASURED_PAGES = (
    "expert-kernel.md",
    "fidelity.md",
    "papers.md",
    "performance.md",
    "routing.md",
    "transports.md",
    "validation.md",
)


def main() -> None:
    """Write all pages."""
    for page, text in pages().items():
        page.write_text(text)
        print(page)


def pages() -> dict[Path, str]:
    """Every page as its results have it."""
    texts = {DOCS / "results.md": filled((DOCS / "results.md").read_text(), {"claims": claims()}.get)}
    readme = ROOT / "README.md"
    texts[readme] = filled(readme.read_text(), {"tried": tried(doctors())}.get)
    for name in MEASURED_PAGES:
        texts[DOCS / name] = filled((DOCS / name).read_text(), measured_table)
    for paper in SECTIONS:
        page = DOCS / f"reproduce-{paper}.md"
        texts[page] = filled(page.read_text(), reproduction(paper).get)
    return texts


def measured_table(name: str) -> str | None:
    """A table of the pages of measurements."""
    if name == "papers":
        return simulated(name, PAPERS)
    if name in VALIDATION:
        return VALIDATION[name](stored(RESULTS / "validation.json"))
    return measured(*MEASURED[name]) if name in MEASURED else None


def claims() -> str:
    """All claims: those whose bar is missed on a machine, those whose bar is reached, those without a bar."""
    rows: dict[str, list[tuple[Claim, str, str]]] = {}
    for file in sorted(RESULTS.glob("*.json")):
        for claim, machine, cell in cells_of(file):
            rows.setdefault(claim.words, []).append((claim, machine, cell))
    ordered = sorted(rows.values(), key=lambda row: min(rank(claim) for claim, _, _ in row))
    columns = ["claim", "bar", *MACHINES.values(), ANY]
    return markdown(
        columns,
        [[row[0][0].words, row[0][0].bar, *in_columns(columns[2:], row)] for row in ordered],
    )


def cells_of(file: Path) -> Iterator[tuple[Claim, str, str]]:
    """The claims of a result file, each with its machine, and its figure with a link and the date."""
    result = stored(file)
    kind = file.stem.split("-")[0]
    date = result.get("date", "") + (OLDER if older_than_the_code(result) else "")
    for claim in CLAIMS[kind](result):
        figure = f"**{claim.figure}**" if claim.reached is False else claim.figure
        cell = f"[{figure}](../benchmarks/results/{file.name}) {date}"
        yield claim, machine_of(file) or ANY, cell


def rank(claim: Claim) -> int:
    """The place of a claim: missed bars first."""
    return (False, True, None).index(claim.reached)


def in_columns(machines: Sequence[str], row: Sequence[tuple[Claim, str, str]]) -> list[str]:
    """A row's cells by machine; empty where nothing was measured."""
    cells = {machine: cell for _, machine, cell in row}
    return [cells.get(machine, "") for machine in machines]


if __name__ == "__main__":
    main()
