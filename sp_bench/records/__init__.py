"""Records: one flat JSON object for each benchmark point, written whole or not at all.

`python -m sp_bench` writes a record to <results_dir>/<run_id>.json. Beside it are, for a measured point, its samples in
<run_id>.samples.json; for a simulated one, each rank's times in <run_id>.ranks.json and the timelines of some ranks,
for Perfetto, in <run_id>.trace.json; of both, the timeline that is printed in <run_id>.timeline.json; if ranks hung,
their threads in <run_id>.hang.json. `load(dir)` reads a folder's
records into a pandas frame; `python -m sp_bench.records collect` makes tables of many folders.
"""

from sp_bench.records.files import BESIDE, OtherVersionError, beside, load, read, read_all, write
from sp_bench.records.identity import code_version, digest, machine, run_id
from sp_bench.records.provenance import KEPT_VARIABLES, provenance
from sp_bench.records.record import MODES, SCHEMA_VERSION, STATUSES, Record
from sp_bench.resources import write_whole

__all__ = [
    "BESIDE", "KEPT_VARIABLES", "MODES", "SCHEMA_VERSION", "STATUSES", "OtherVersionError", "Record", "beside",
    "code_version", "digest", "load", "machine", "provenance", "read", "read_all", "run_id", "write", "write_whole",
]  # fmt: skip
