"""python -m sp_bench.validate: this machine's points. python -m sp_bench.validate published: others' points."""

from __future__ import annotations

import sys

from sp_bench.validate import machine, published

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(published.main(arguments[1:]) if arguments[:1] == ["published"] else machine.main(arguments))
