"""A process that runs points for Runs: `python -m sp_bench.analysis.worker FOLDER`.

Reads a point as a JSON list on each line, and answers each with its record on a line. A process of its own kind rather
than multiprocessing's, which would run the main module of whoever asked, be it a notebook or a script, once more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sp_bench.analysis.runs import record_of


def main() -> None:
    """Until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        record = record_of(tuple(json.loads(line)), Path(sys.argv[1]))
        print(json.dumps(record.to_dict()), file=answers, flush=True)


if __name__ == "__main__":
    main()
