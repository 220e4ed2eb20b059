"""Write the tables of the documentation from the result files, so that no figure is typed by hand.

    python benchmarks/_pages.py

docs/results.md is one table of claims; the other pages have words of their own around their tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from _claims import CLAIMS, Claim
from _page_tables import MEASURED, PAPERS, SECTIONS, measured, reproduction, simulated
from _results import RESULTS, ROOT, older_than_the_code, stored
from _tables import filled, markdown

DOCS = ROOT / "docs"
OLDER = " ⟳"
MACHINES = {"spr": "Xeon, Sapphire Rapids", "zen3": "EPYC, Zen 3", "zen5": "EPYC, Zen 5"}
MEASURED_PAGES = ("fidelity.md", "papers.md", "routing.md", "transports.md")


def main() -> None:
    """Write all pages."""
    for page, text in pages().items():
        page.write_text(text)
        print(page)


def pages() -> dict[Path, str]:
    """Every page as its results have it."""
    texts = {DOCS / "results.md": filled((DOCS / "results.md").read_text(), {"claims": claims()}.get)}
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
    return measured(*MEASURED[name]) if name in MEASURED else None


def claims() -> str:
    """All claims: those whose bar is missed, those whose bar is reached, those without a bar."""
    found = [line for file in sorted(RESULTS.glob("*.json")) for line in lines_of(file)]
    found.sort(key=lambda line: (None, True, False).index(line[0].reached), reverse=True)
    rows = [
        [claim.words, f"**{claim.figure}**" if claim.reached is False else claim.figure, claim.bar, *where]
        for claim, where in found
    ]
    return markdown(["claim", "figure", "bar", "machine", "date", "file"], rows)


def lines_of(file: Path) -> Iterator[tuple[Claim, list[str]]]:
    """The claims of a result file, each with its machine, its date and a link."""
    result = stored(file)
    kind, _, suffix = file.stem.partition("-")
    date = result.get("date", "") + (OLDER if older_than_the_code(result) else "")
    link = f"[{file.stem}](../benchmarks/results/{file.name})"
    for claim in CLAIMS[kind](result):
        yield claim, [MACHINES.get(suffix, "any"), date, link]


if __name__ == "__main__":
    main()
