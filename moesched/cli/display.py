"""Shows the progress of a run on the terminal: a bar while weights load, then the generated text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moesched.cli.output import Bar, stdout
from moesched.inputs.prompts import Prompt
from moesched.runs.listeners import Listener
from moesched.steps.plan import Plan
from moesched.system.logs import Log
from moesched.system.plain_text import plain_text
from moesched.system.standard_output import command_output
from moesched.tasks import Task

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from moesched.drivers.replay import ReplayedRun

_log = Log(__name__)

SHOWN_PROMPT = 60
REFRESHES_PER_SECOND = 8
ESTIMATING = "estimating the band"
SIMULATING = "simulating"
ENDS_OF_LAYERS = ("post_attention", "combine")


def display_of(prompts: Sequence[Prompt], *, json: bool) -> LoadingBar:
    """Return the display of progress and texts for a run of some prompts; with `json` it shows progress only."""
    if json:
        return LoadingBar()
    if len(prompts) == 1:
        return OneText(prompts[0])
    return ManyTexts(prompts)


class LoadingBar(Listener):
    """A progress bar until the first token: the device prepares, resident pages load, and prompts are computed.

    The bar is shown at once, since libraries take seconds to load.
    """

    def __init__(self) -> None:
        self._bar: Bar | None = Bar("starting", patience=0).__enter__()
        self._loaded = self._pages = 0
        self._prefilled = self._layers = 0

    def planned(self, plan: Plan) -> None:
        """Start the bar of a planned batch: first over its pages of weights to load, then over its prefill's layers."""
        _log.info("planned", requests=len(plan.batch.prompts), micro_batches=len(plan.batch.micro_batches))
        self._loaded, self._pages = 0, sum(len(kept.slots) for kept in plan.weights.resident)
        self._prefilled, self._layers = 0, len(plan.layers) * len(plan.chunks)
        self._bar = self._bar or Bar("loading weights").__enter__()
        self._bar.update(0, self._pages or None, "loading weights")

    def preparing(self, what: str, done: float, total: float) -> None:
        """Show the progress of a device's preparation before the first step.

        Args:
            what: words for the preparation.
            done, total: amounts in any one unit.
        """
        if self._bar is not None:
            self._bar.update(done, total, what)

    def loading(self, done: int, total: int) -> None:
        """Show the progress of a cluster's loading.

        Args:
            done: number of resident pages that all nodes together have loaded.
            total: number of resident pages of all nodes.
        """
        if self._bar is None:
            self._bar = Bar("loading weights").__enter__()
        self._bar.update(done, total)

    def ended(self, task: Task) -> None:
        """Advance the bar if the ended task loaded a page, or was the last one of a prefill layer for a micro-batch."""
        bar = self._bar
        if bar is None:
            return
        if task.verb == "load":
            self._loaded += 1
            bar.update(self._loaded, self._pages, "loading weights")
        elif task.phase == "prefill" and task.verb in ENDS_OF_LAYERS:
            self._prefilled += 1
            bar.update(self._prefilled, self._layers, "prefill")

    def generated(self, request: int, token: int, text: str) -> None:
        """Remove the bar at the batch's first token, since loading and prefill are over; the token is not shown."""
        if self._bar is not None:
            self.close()
            _log.info("first token", request=request)

    def ran(self) -> None:
        """Remove the bar at the end of a batch."""
        self.close()

    def writing(self, trace: Path) -> None:
        """Show that the file `trace` is being written."""
        self.close()
        self._bar = Bar(f"writing {trace}").__enter__()

    def estimating(self, done: int, total: int) -> None:
        """Show how many simulations of the prediction's uncertainty band are done: `done` of `total`."""
        self._bar = self._bar or Bar(ESTIMATING).__enter__()
        self._bar.update(done, total, ESTIMATING)

    def close(self) -> None:
        """Remove the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class OneText(LoadingBar):
    """Display of one prompt's text, token by token; token ids if the model has no tokenizer."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__()
        self._prompt = prompt
        self._begun = False

    def generated(self, request: int, token: int, text: str) -> None:
        """Print `text`, the text of a new token; the first token also removes the bar."""
        super().generated(request, token, text)
        self._begin()
        self._write(text)

    def finished(self, request: int, text: str) -> None:
        """Print `text`, the end of the answer, which was held back until now, and end the line."""
        if self._begun:
            self._write(text + "\n")

    def _begin(self) -> None:
        if not self._begun:
            from rich.text import Text

            self._begun = True
            stdout().print(Text(plain_text(shown(self._prompt)), style="bold"), end="", soft_wrap=True)

    def _write(self, text: str) -> None:
        out = command_output()
        out.write(plain_text(text))
        out.flush()


class ManyTexts(LoadingBar):
    """Display of several prompts and their answers; each is printed when it is complete.

    Until then, a terminal shows the end of each unfinished text in a live table.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        super().__init__()
        self._prompts = prompts
        self._texts: dict[int, str] = {}
        self._console = stdout()
        self._live: Live | None = None

    def generated(self, request: int, token: int, text: str) -> None:
        """Add `text`, the text of a request's new token, which the live table shows at its next refresh."""
        super().generated(request, token, text)
        if self._live is None and self._console.is_terminal:
            self._live = self._start()
        self._texts[request] = self._texts.get(request, "") + text

    def finished(self, request: int, text: str) -> None:
        """Print a request's prompt and whole answer; `text` is the end of the answer, which was held back until now."""
        if request not in self._texts:
            return
        from rich.text import Text

        whole = self._texts.pop(request) + text
        prompt = f"[{request}] {shown(self._prompts[request])}"
        self._console.print(Text.assemble((plain_text(prompt), "bold"), plain_text(whole)), soft_wrap=True)

    def ran(self) -> None:
        """Remove the bar and the live table at the end of a batch."""
        super().ran()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self) -> Live:
        from rich.live import Live

        live = Live(
            get_renderable=self._table,
            console=self._console,
            transient=True,
            refresh_per_second=REFRESHES_PER_SECOND,
        )
        live.start()
        return live

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        width = max(20, self._console.width - 8)
        rows = list(self._texts.items())[: max(1, self._console.height - 2)]
        for request, text in rows:
            tail = plain_text(" ".join(text.split())[-width:])
            table.add_row(Text(f"[{request}]", style="bold"), Text(tail, no_wrap=True))
        return table


def shown(prompt: Prompt) -> str:
    """Return a prompt for display: a text as it is; token ids with commas, and of many ids only the last ones."""
    text = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    return text if len(text) <= SHOWN_PROMPT or isinstance(prompt, str) else "..." + text[-SHOWN_PROMPT:]


class SimulationBar(Listener):
    """A progress bar for a long simulation: the planner's search, steps, then runs for the uncertainty band."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._samples = 0
        self._all = 1

    def preparing(self, what: str, done: float, total: float) -> None:
        """Show a stage of the planner's search: its name `what` and the amount `done`; `total` is not shown."""
        self._bar.update(done, what=what)

    def planned(self, plan: Plan) -> None:
        """Set the bar's total: the number of new tokens of a request times the number of micro-batches."""
        self._all = plan.batch.new_tokens * len(plan.batch.micro_batches)
        self._bar.update(0, self._all, SIMULATING)

    def ended(self, task: Task) -> None:
        """Advance the bar if the task sampled a micro-batch's tokens."""
        if task.verb == "sample":
            self._samples += 1
            self._bar.update(self._samples)

    def replayed(self, run: ReplayedRun) -> None:
        """Complete the bar, since the batch of `run` is done."""
        self._bar.update(self._all)

    def estimating(self, done: int, total: int) -> None:
        """Show how many simulations of the uncertainty band are done: `done` of `total`."""
        self._bar.update(done, total, what=ESTIMATING)

    def writing(self, trace: Path) -> None:
        """Show that the file `trace` is being written."""
        self._bar.update(0, what=f"writing {trace}")
