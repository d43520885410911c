"""python -m sp_bench.validate: this machine's points. python -m sp_bench.validate published: others' points.

python -m sp_bench.validate documents: others' bars of packed documents. python -m sp_bench.validate steps: others'
training steps.
"""

from __future__ import annotations

import sys

from sp_bench.validate import documents, machine, published, steps

COMMAND = (
    "validate",
    "key=value ... | published | documents | steps",
    "how far simulated points are from measured ones",
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    command, *rest = arguments or [""]
    if command == "documents":
        return documents.main(rest)
    if command == "steps":
        return steps.main(rest)
    return published.main(rest) if command == "published" else machine.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
