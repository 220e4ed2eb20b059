"""Log lines of a library: they never reach standard output, where an application's results are."""

from __future__ import annotations

import subprocess
import sys

SAYS = """
from moesched.system.logs import Log
Log("a").info("for those who ask")
Log("a").warning("slow", factor=2)
print("result")
"""


def test_warnings_go_to_standard_error_where_nobody_configured_logs() -> None:
    said = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=True)
    assert said.stdout == "result\n"
    [line] = said.stderr.splitlines()
    assert "slow" in line
    assert "factor" in line


def test_an_application_that_configures_structlog_gets_all_lines() -> None:
    configures = (
        "import structlog; structlog.configure(processors=[structlog.processors.KeyValueRenderer(['event'])])"
    )
    said = subprocess.run(
        [sys.executable, "-c", configures + SAYS], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == ["event='for those who ask'", "event='slow' factor=2", "result"]
    assert said.stderr == ""
