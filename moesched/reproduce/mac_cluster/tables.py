"""Tables 3 to 5 of the Apple silicon cluster paper, and its prompts: each row simulated, cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from moesched.reproduce.mac_cluster.paper import PARTS, MacPaper, PrintedSystem
from moesched.reproduce.mac_cluster.runs import Simulated, run_system
from moesched.reproduce.report import Claim, Section, Value, agrees, rounded

SHORT, LONG = 6.1, 5.9
"""Tokens per second on two nodes that section 5.4 compares."""


class Tables:
    """Sections that need simulations of the tables' rows; each row is simulated once."""

    def __init__(self, paper: MacPaper, on_progress: Callable[[str], None]) -> None:
        self.paper = paper
        self.on_progress = on_progress
        self.run = cache(self._run)

    def _run(self, index: int) -> Simulated:
        """Simulate a row with the workload of Tables 3 and 4."""
        system = self.paper.systems[index]
        self.on_progress(f"{system.method} on {system.nodes} nodes")
        return run_system(self.paper, system, self.paper.prompt, self.paper.new_tokens)

    def rows(self, table: str) -> list[tuple[PrintedSystem, Simulated]]:
        """The rows of a table."""
        return [
            (system, self.run(index))
            for index, system in enumerate(self.paper.systems)
            if table in system.tables
        ]

    def breakdown(self, table: str) -> Section:
        """Table 3 or 4, cell by cell."""
        rows = [row for system, found in self.rows(table) for row in _cells(system, found)]
        ends = ", ".join(
            f"{found.token.ends * 1e3:.3g} ms ({system.method}, {system.nodes} nodes)"
            for system, found in self.rows(table)
        )
        return Section(
            name=table.lower().replace(" ", "-"),
            title=f"{table}: seconds of a token, {self.paper.prompt} tokens in, {self.paper.new_tokens} out",
            how=(
                "The first node's time: experts, including their wiring; exchanges and waiting for other nodes; all "
                "else in the layers. The total includes embedding and sampling, which the paper's parts omit."
            ),
            rows=rows,
            notes=[f"Embedding and sampling take {ends}."],
        )

    def prompts(self) -> Section:
        """Footnotes 3 and 4."""
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
        return Section(
            name="prompts",
            title="Prompt evaluation, tokens/s",
            how=(
                "Nothing here was fitted. Token by token, as MLX's DBRX runs its experts: every token of the prompt "
                "passes a layer by itself, and exchanges of one overlap with the kernels of the next. The last "
                "column is how our policies run: the whole prompt passes a layer at once, with one message."
            ),
            rows=rows,
        )

    def cost(self) -> Section:
        """Table 5."""
        index, system = next(
            (i, each) for i, each in enumerate(self.paper.systems) if "Table 4" in each.tables
        )
        self.on_progress("2000 tokens in, 256 out")
        long = 1 / run_system(self.paper, system, 2000, 256).token.total
        short = 1 / self.run(index).token.total
        rows: list[dict[str, Value]] = []
        for solution in self.paper.solutions:
            simulated = solution.nodes > 1
            ours = long if simulated else None
            rows.append(
                {
                    "solution": solution.name,
                    "price_usd": solution.nodes * solution.price_usd,
                    "paper": solution.tokens_per_second,
                    "ours": None if ours is None else rounded(ours),
                    "error": None if ours is None else round(ours / solution.tokens_per_second - 1, 4),
                    "paper_per_usd": solution.per_usd,
                    "ours_per_usd": (
                        None if ours is None else rounded(ours / (solution.nodes * solution.price_usd))
                    ),
                }
            )
        databricks, macs = self.paper.solutions
        ratio = long / (macs.nodes * macs.price_usd) / databricks.per_usd
        return Section(
            name="table-5",
            title="Table 5: tokens/s and tokens/s per USD, 2000 tokens in, 256 out",
            how="The paper quotes the row of Databricks. Ours is P-LR-D on two simulated nodes.",
            rows=rows,
            claims=[
                Claim(
                    where="section 5.4",
                    what="more tokens per second and USD than 8 x H100",
                    paper="1.15x",
                    ours=f"{ratio:.3g}x",
                    agrees=agrees((1.15, 1.15), (ratio, ratio)),
                ),
                Claim(
                    where="section 5.4",
                    what="loss of tokens per second with 2000 tokens in, instead of 128",
                    paper=f"{1 - LONG / SHORT:.1%}",
                    ours=f"{1 - long / short:.1%}",
                    agrees=agrees((1 - LONG / SHORT,) * 2, (1 - long / short,) * 2),
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
