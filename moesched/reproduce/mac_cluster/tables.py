"""Sections of the Apple silicon cluster paper's Tables 3 to 5 and prompt speeds, with simulated values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from moesched.reproduce.mac_cluster.paper import PARTS, MacPaper, PrintedSystem
from moesched.reproduce.mac_cluster.runs import Simulated, run_system
from moesched.reproduce.report import Section, Value, agrees, rounded

SHORT, LONG = 6.1, 5.9
"""Printed tokens per second on two nodes with a short and with a long prompt, which section 5.4 compares."""


class Tables:
    """Makes the sections that need simulations of table rows; each row is simulated only once."""

    def __init__(self, paper: MacPaper, on_progress: Callable[[str], None]) -> None:
        self.paper = paper
        self.on_progress = on_progress
        self.run = cache(self._run)

    def _run(self, index: int) -> Simulated:
        """Simulate the row at an index of `paper.systems`, with the request of Tables 3 and 4."""
        system = self.paper.systems[index]
        self.on_progress(f"{system.method} on {system.nodes} nodes")
        return run_system(self.paper, system, self.paper.prompt, self.paper.new_tokens)

    def rows(self, table: str) -> list[tuple[PrintedSystem, Simulated]]:
        """Return each row of a table as a pair: as printed, and as simulated.

        Args:
            table: "Table 3" or "Table 4".
        """
        return [
            (system, self.run(index))
            for index, system in enumerate(self.paper.systems)
            if table in system.tables
        ]

    def breakdown(self, table: str) -> Section:
        """Make the report's section on the paper's Table 3 or 4: each printed value beside the simulated one.

        Args:
            table: "Table 3" or "Table 4".
        """
        rows = [row for system, found in self.rows(table) for row in _cells(system, found)]
        ends = ", ".join(
            f"{found.token.ends * 1e3:.3g} ms ({system.method}, {system.nodes} nodes)"
            for system, found in self.rows(table)
        )
        notes = [f"Embedding and sampling take {ends}."]
        return self.paper.section(table.lower().replace(" ", "-"), rows, notes=notes)

    def prompts(self) -> Section:
        """Make the section of footnotes 3 and 4: the prompt tokens per second that each system processes."""
        rows: list[dict[str, Value]] = []
        for index, system in enumerate(self.paper.systems):
            self.on_progress(f"prompt of {system.method} on {system.nodes} nodes, token by token")
            tokens = self.paper.prompt
            each = tokens / run_system(self.paper, system, tokens, 2, chunk=1).prompt_seconds
            rows.append(
                {
                    "method": system.method,
                    "nodes": system.nodes,
                    "paper": system.prompt_tokens_per_second,
                    "ours": rounded(each),
                    "error": round(each / system.prompt_tokens_per_second - 1, 4),
                    "one_message_a_layer": rounded(tokens / self.run(index).prompt_seconds),
                }
            )
        return self.paper.section("prompts", rows)

    def cost(self) -> Section:
        """Make the section of Table 5: the throughput and the price of each way to run the model."""
        index, system = next(
            (i, each) for i, each in enumerate(self.paper.systems) if "Table 4" in each.tables
        )
        self.on_progress("2000 tokens in, 256 out")
        long = 1 / run_system(self.paper, system, 2000, 256).token.total
        short = 1 / self.run(index).token.total
        rows: list[dict[str, Value]] = []
        for solution in self.paper.solutions:
            simulated, price = solution.nodes > 1, solution.nodes * solution.price_usd
            rows.append(
                {
                    "solution": solution.name,
                    "price_usd": price,
                    "paper": solution.tokens_per_second,
                    "ours": rounded(long) if simulated else None,
                    "error": round(long / solution.tokens_per_second - 1, 4) if simulated else None,
                    "paper_per_usd": solution.per_usd,
                    "ours_per_usd": rounded(long / price) if simulated else None,
                }
            )
        databricks, macs = self.paper.solutions
        ratio = long / (macs.nodes * macs.price_usd) / databricks.per_usd
        paper_loss, our_loss = 1 - LONG / SHORT, 1 - long / short
        return self.paper.section(
            "table-5",
            rows,
            [
                self.paper.claims["per_usd"].beside(f"{ratio:.3g}x", agrees((1.15, 1.15), (ratio, ratio))),
                self.paper.claims["long_prompts"].beside(
                    f"{our_loss:.1%}", agrees((paper_loss, paper_loss), (our_loss, our_loss))
                ),
            ],
        )


def _cells(system: PrintedSystem, found: Simulated) -> list[dict[str, Value]]:
    ours = {
        "tok/s": 1 / found.token.total,
        "time": found.token.total,
        **{part: getattr(found.token, part) for part in PARTS},
    }
    printed = {
        "tok/s": system.tokens_per_second,
        "time": system.seconds,
        **{part: getattr(system, part) for part in PARTS},
    }
    whole = ["tok/s", "time"] if len(system.fitted) > 1 else []  # most of it is then fitted
    fitted = {*system.fitted, *whole}
    return [
        {
            "method": system.method,
            "nodes": system.nodes,
            "part": part,
            "paper": printed[part],
            "ours": rounded(ours[part]),
            "error": round(ours[part] / printed[part] - 1, 4),
            "fitted": part in fitted,
        }
        for part in ours
    ]
