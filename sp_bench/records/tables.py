"""Records as one table: a Parquet and a CSV file with the same columns and rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sp_bench.extras import require
from sp_bench.records.record import Record
from sp_bench.records.schema import columns
from sp_bench.resources import write_whole


def write_tables(records: Iterable[Record], folder: Path) -> list[Path]:
    """Write records.parquet and records.csv; return their paths. The same records make the same bytes.

    The columns are a record's fields in their order. Nested fields are JSON text. None is null in Parquet and empty in
    CSV. Raises OSError if the folder can't be written, RequestError if pyarrow is not installed.
    """
    rows = [row(record) for record in records]
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"records.parquet": _parquet(rows), "records.csv": _csv(rows)}
    for name, content in contents.items():
        write_whole(folder / name, content)
    return [folder / name for name in contents]


def row(record: Record) -> dict[str, Any]:
    """A record's fields as the cells of a row: text, numbers, booleans or None."""
    content = record.to_dict()
    return {name: None if (value := content[name]) is None else _cell(value, kind) for name, kind in columns().items()}


def _cell(value: Any, kind: type) -> Any:
    if kind in (dict, list):
        return json.dumps(value)
    if kind is str:  # an argument or a path may have bytes that are not UTF-8
        return value.encode("utf-8", "backslashreplace").decode()
    return kind(value)


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    require("analysis", "a Parquet file")
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(name, types.get(kind, pa.string())) for name, kind in columns().items()])
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    return sink.getvalue()


def _csv(rows: list[dict[str, Any]]) -> bytes:
    sink = io.StringIO()
    writer = csv.DictWriter(sink, columns(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()
