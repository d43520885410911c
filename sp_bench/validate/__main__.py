"""python -m sp_bench.validate: this machine's points. python -m sp_bench.validate published: others' points."""

from __future__ import annotations

import sys

from sp_bench.validate import machine, published


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return published.main(arguments[1:]) if arguments[:1] == ["published"] else machine.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
