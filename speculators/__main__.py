"""``python -m speculators`` and the console script."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; 130 when Ctrl-C stopped it, be it while modules are imported."""
    try:
        from speculators.cli.app import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("\nstopped; what was written is whole, and the same command can be run again", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
