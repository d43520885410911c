"""The JSON Schema of a record (docs/reference/record.schema.json), from the rows of records.quantities."""

from __future__ import annotations

from typing import Any

import msgspec

from sp_bench.plan.problem import DTYPE_BYTES
from sp_bench.records.record import MODES, REPORTED, SCHEMA_VERSION, STATUSES, Record
from sp_bench.records.schema import quantities

IDENTIFIER = "https://json-schema.org/draft/2020-12/schema"
_VALUES = {
    "schema_version": {"const": SCHEMA_VERSION},
    "status": {"enum": [*STATUSES]},
    "mode": {"enum": [*MODES, REPORTED]},
    "dtype": {"enum": [*DTYPE_BYTES]},
}
"""Rules that the types of fields don't say."""


def json_schema() -> dict[str, Any]:
    """The schema of a record's file. A field's description has its unit."""
    schema = msgspec.json.schema(Record)["$defs"]["Record"]
    known = quantities()
    for name, field in schema["properties"].items():
        field |= _VALUES.get(name, {}) | {"description": known[name].meaning}
        if field.get("type") == "integer" and name in ("gpus", "seqlen", "batch", "heads", "kv_heads", "head_dim"):
            field["minimum"] = 1
    reported = {"properties": {"mode": {"const": REPORTED}}}
    schema |= {
        "$schema": IDENTIFIER,
        "title": f"A record of sp_bench, version {SCHEMA_VERSION}",
        "description": "One benchmark point. Times are in ms, sizes in bytes; null is not known.",
        "required": [*schema["required"], "schema_version"],
        "additionalProperties": False,
        "if": reported,
        "then": {"required": ["source"], "properties": {"source": {"type": "string"}}},
        "else": {"properties": {"source": {"type": "null"}}},
    }
    return schema
