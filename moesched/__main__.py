"""`python -m moesched` is the command `moesched`."""

from __future__ import annotations

import sys

from moesched.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
