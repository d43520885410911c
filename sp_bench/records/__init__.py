"""Records: one flat JSON object for each benchmark point, written whole or not at all.

`python -m sp_bench` writes them to <results_dir>/<run_id>.json, and beside them raw samples in <run_id>.samples.json
or, where a point is simulated, each rank's times in <run_id>.ranks.json and some ranks' timelines, which Perfetto
opens, in <run_id>.trace.json. Where ranks hung, <run_id>.hang.json says what each of their threads was at.
`load(dir)` gives all of a folder as a pandas frame; `python -m sp_bench.records collect` makes tables of many folders.
"""

from sp_bench.records.files import BESIDE, OtherVersionError, beside, load, read, read_all, write, write_whole
from sp_bench.records.identity import code_version, digest, machine, run_id
from sp_bench.records.provenance import KEPT_VARIABLES, provenance
from sp_bench.records.record import MODES, SCHEMA_VERSION, STATUSES, Record

__all__ = [
    "BESIDE",
    "KEPT_VARIABLES",
    "MODES",
    "SCHEMA_VERSION",
    "STATUSES",
    "OtherVersionError",
    "Record",
    "beside",
    "code_version",
    "digest",
    "load",
    "machine",
    "provenance",
    "read",
    "read_all",
    "run_id",
    "write",
    "write_whole",
]
