"""Write the tables of the documentation from the result files, so that no figure is typed by hand: `make pages`.

docs/results.md lists the claims of all results. A table of another page comes from every result that has one of its
name; a page that is named as a result, such as reproduce-twiddler.md, has the tables of that one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages._tried_table import doctors, tried
from benchmarks.record.claims import Claim
from benchmarks.record.code import older_than_the_code
from benchmarks.record.results import OF_A_VERSION, RESULTS, ROOT, machine_of, stored
from benchmarks.record.tables import filled, markdown

DOCS = ROOT / "docs"
OLDER = " ⟳"
EMPTY = 2
"""Lines of a table without rows."""


class Result(NamedTuple):
    """A result file and what it has."""

    file: Path
    has: dict[str, Any]

    @property
    def machine(self) -> str | None:
        """The machine's title; None where the figures depend on none."""
        return machine_of(self.file)

    @property
    def of_a_version(self) -> bool:
        """True if it stays that of its commit."""
        return OF_A_VERSION in self.file.parents

    @property
    def date(self) -> str:
        """The day on which its figures were measured; the earliest where its parts have several."""
        return min(str(each["date"]) for each in self.parts)

    @property
    def commits(self) -> str:
        """The commit at which its figures were measured; several where its parts have."""
        return ", ".join(dict.fromkeys(each.get("commit", "") for each in self.parts))

    @property
    def parts(self) -> Collection[dict[str, Any]]:
        """Command, date and commit of each part that is measured by itself, or of the whole if there are no parts."""
        found: dict[str, dict[str, Any]] = self.has.get("parts", {"": self.has})
        return found.values()

    @property
    def about(self) -> dict[str, str]:
        """Columns beside a figure."""
        return {"machine": self.machine or "any", "commit": self.commits}

    def claims(self) -> Iterator[Claim]:
        """Its claims."""
        return (Claim(**claim) for claim in self.has["claims"])

    def cell(self, claim: Claim) -> str:
        """A claim's figure, bold if its bar is missed, with a link and the date."""
        figure = f"**{claim.figure}**" if claim.reached is False else claim.figure
        older = OLDER if not self.of_a_version and older_than_the_code(self.has) else ""
        return f"[{figure}](../{self.file.relative_to(ROOT)}) {self.date}{older}"

    def table(self, name: str) -> str:
        """A table; where figures depend on the machine, after a line with it and the commands."""
        lines = "\n".join(self.has["tables"][name])
        if self.machine is None:
            return lines
        part = self.has.get("parts", {}).get(name)
        here = self.has["machine"]
        where = here.get("description") or f"{self.machine}, {here['cores']} cores, Python {here['python']}"
        measured = dict.fromkeys(map(self._measured, [part] if part else self.parts))
        return f"{where}: {'; '.join(measured)}\n\n{lines}\n"

    def _measured(self, about: Mapping[str, Any]) -> str:
        """The command, and the commit where figures are those of a version."""
        return f"`{about['command']}`" + (f" at commit {about['commit']}" if self.of_a_version else "")


def main() -> None:
    """Write all pages."""
    for page, text in pages().items():
        page.write_text(text)
        print(page)


def pages() -> dict[Path, str]:
    """Every page that has tables, as the results have them."""
    found = results()
    readme, page_of_results = ROOT / "README.md", DOCS / "results.md"
    texts = {readme: filled(readme.read_text(), {"tried": tried(doctors())}.get)}
    for page in sorted(DOCS.glob("*.md")):
        of_page = [each for each in found if each.file.stem == page.stem]
        texts[page] = filled(page.read_text(), partial(table, of_page or found))
    texts[page_of_results] = filled(page_of_results.read_text(), tables_of_claims(found).get)
    return texts


def results() -> list[Result]:
    """All results, by name."""
    files = sorted([*RESULTS.glob("*.json"), *OF_A_VERSION.glob("*.json")], key=lambda file: file.name)
    return [Result(file, stored(file)) for file in files]


def table(found: Iterable[Result], name: str) -> str | None:
    """The table of a name from every result that has one with rows; None if no result knows it."""
    mine = [each for each in found if name in each.has["tables"]]
    full = [
        each.table(name) for each in mine if each.machine is None or len(each.has["tables"][name]) > EMPTY
    ]
    return "\n".join(full) if mine else None


def tables_of_claims(found: Iterable[Result]) -> dict[str, str]:
    """The tables of docs/results.md by their names."""
    here = [each for each in found if not each.of_a_version]
    return {
        "anywhere": table_of_claims([each for each in here if each.machine is None]),
        "timed": table_of_claims([each for each in here if each.machine is not None], "machine"),
        "versions": table_of_claims([each for each in found if each.of_a_version], "machine", "commit"),
    }


def table_of_claims(found: Iterable[Result], *about: str) -> str:
    """A line for each claim: first those whose bar is missed, last those without a bar."""
    claims = [(claim, each) for each in found for claim in each.claims()]
    claims.sort(key=lambda each: (False, True, None).index(each[0].reached))
    return markdown(
        ["claim", "bar", *about, "figure"],
        [
            [claim.words, claim.bar, *(of.about[name] for name in about), of.cell(claim)]
            for claim, of in claims
        ],
    )


if __name__ == "__main__":
    main()
