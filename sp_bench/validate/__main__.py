"""python -m sp_bench.validate: this machine's points. python -m sp_bench.validate published: others' points.

python -m sp_bench.validate documents: others' bars of packed documents. python -m sp_bench.validate steps: others'
training steps.
"""

from __future__ import annotations

import sys
from types import ModuleType

from sp_bench.cli.arguments import only_keys, run_command, writable_folder
from sp_bench.extras import require
from sp_bench.validate import documents, machine, published, steps

COMMAND = (
    "validate",
    "key=value ... | published | documents | steps",
    "how far simulated points are from measured ones",
)
OF_OTHERS = {"published": published, "documents": documents, "steps": steps}
RESULTS = "docs/results"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or (name := arguments[0]) not in OF_OTHERS:
        return machine.main(arguments)
    module = OF_OTHERS[name]
    return run_command(
        f"sp_bench.validate {name}", module.__doc__ or "", lambda given: _write(module, given), arguments[1:]
    )


def _write(module: ModuleType, arguments: list[str]) -> int:
    require("analysis", "validating")
    module.write(writable_folder("out", only_keys(arguments, {"out": RESULTS}).get("out", RESULTS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
