"""A process that runs points for Runs: `python -m sp_bench.analysis.worker FOLDER`.

Each line of input is a point as a JSON list, and each line of output its record. multiprocessing is not used: its
processes would run the caller's main module again, be it a notebook or a script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sp_bench.analysis.runs import record_of


def main() -> None:
    """Answer points until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        record = record_of(tuple(json.loads(line)), Path(sys.argv[1]))
        print(json.dumps(record.to_dict()), file=answers, flush=True)


if __name__ == "__main__":
    main()
