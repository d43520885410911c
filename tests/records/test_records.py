"""Records on disk: what is read back, what is refused, and the tables that `collect` makes of them."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import records
from sp_bench.records import Record
from sp_bench.records.__main__ import main
from sp_bench.records.tables import write_tables
from tests.support.made_records import PLAIN, columns, made
from tests.support.typed import Known

FIELDS = [field.name for field in dataclasses.fields(Record)]
NESTED = ("comm_bytes_by_lane", "comm_bytes_by_link", "candidates", "stragglers", "notes", "config", "provenance")


def collect(*arguments: Path | str) -> int:
    return main(["collect", *map(str, arguments)])


def parquet(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file with their JSON text read."""
    rows = pq.read_table(path).to_pylist()
    return [row | {key: json.loads(row[key]) for key in NESTED if row[key] is not None} for row in rows]


def content(**changes: Any) -> dict[str, Any]:
    return made("b").to_dict() | changes


BROKEN = {
    "half": json.dumps(content())[:900],
    "empty": "",
    "no object": "[1, 2]",
    "deep": "[" * 200_000,
    "not text": b"\xff\xfe\xff",
    "foreign": '{"name": "package", "version": 3}',
    "gpus": json.dumps(content(gpus="four")),
    "a float": json.dumps(content(seqlen=1.5)),
    "a truth value": json.dumps(content(gpus=True)),
    "no number": json.dumps(content(mfu="0.4")),
    "no truth value": json.dumps(content(causal=1)),
    "too much": json.dumps(content(seed=2**63)),
    "a null": json.dumps(content(method=None)),
    "by lane": json.dumps(content(comm_bytes_by_lane={"kv": "1"})),
    "notes": json.dumps(content(notes="one")),
    "candidates": json.dumps(content(candidates=[["16x16", 1.0]])),
    "unknown field": json.dumps(content(gpu=4)),
    "a field missing": json.dumps({key: value for key, value in content().items() if key != "seqlen"}),
    "status": json.dumps(content(status="fine")),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_named_and_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes):
    records.write(tmp_path, made("a"))
    folder = tmp_path / "below"
    folder.mkdir()
    (folder / "b.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(UserWarning, match=r"left out: .*b\.json"):
        assert records.read_all(folder) == []
    assert collect(tmp_path) == 0
    out, err = capsys.readouterr()
    assert f"set aside: {folder / 'b.json'}: " in err
    assert f"1 file set aside, in set_aside/: {folder / 'b.json'}\n" in out
    aside = tmp_path / "set_aside" / "below" / "b.json"
    assert aside.read_bytes() == (text if isinstance(text, bytes) else text.encode())
    assert not (folder / "b.json").exists()
    assert [row["run_id"] for row in parquet(tmp_path / "records.parquet")] == ["a"]
    assert collect(tmp_path) == 0
    assert capsys.readouterr() == (f"1 record: {tmp_path}/records.parquet, {tmp_path}/records.csv\n", "")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": "four"}, "gpus='four' is not int"),
        ({"mfu": []}, r"mfu=\[\] is not float | None"),
        ({"gpus": 1.5, "causal": None}, "gpus=1.5 is not int; causal=None is not bool"),
    ],
)
def test_a_wrong_type_is_named_with_its_field(tmp_path: Path, changes: dict[str, Any], says: str):
    (tmp_path / "b.json").write_text(json.dumps(content(**changes)))
    with pytest.raises(ValueError, match=says):
        records.read(tmp_path / "b.json")


def test_what_is_set_aside_never_replaces_what_is_there(tmp_path: Path):
    for text in ("one", "two", "three"):
        (tmp_path / "b.json").write_text(text)
        assert collect(tmp_path) == 0
    aside = tmp_path / "set_aside"
    assert [(aside / name).read_text() for name in ("b.json", "b.json.2", "b.json.3")] == ["one", "two", "three"]


@pytest.mark.parametrize("version", [records.SCHEMA_VERSION - 1, records.SCHEMA_VERSION + 1])
def test_another_schema_version_is_named_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str], version: int):
    path = records.write(tmp_path, made("a", schema_version=version))
    assert collect(tmp_path) == 0
    out, err = capsys.readouterr()
    assert f"left out: {path}: schema_version={version}, and this code reads {records.SCHEMA_VERSION}" in err
    assert f"1 file of another schema version, or unreadable; still there: {path}" in out
    assert path.exists()
    assert parquet(tmp_path / "records.parquet") == []


def test_both_tables_say_what_the_records_say(tmp_path: Path):
    there = [
        made("a", error='quoted, "text"\nof two lines, é', mfu=0.1 + 0.2, iters=3),
        made("b", status="oom", tile_a=None, tile_b=None, comm_bytes_by_lane=None, notes=None, causal=False),
        made("c", config={"b": 1, "a": {"16": [None, 1.5, "ü"]}}, candidates=[{"variant": "1x2", "ms": 1}, {}]),
    ]
    for record in reversed(there):
        records.write(tmp_path, record, samples=columns({"forward": [[1.0]]}), trace={}, ranks={})
    assert collect(tmp_path) == 0
    assert parquet(tmp_path / "records.parquet") == [record.to_dict() for record in there]
    with (tmp_path / "records.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == FIELDS
    for record, row in zip(there, rows, strict=True):
        for name, cell in zip(FIELDS, row, strict=True):
            value = getattr(record, name)
            if value is None:
                assert cell == ""
            elif name in NESTED:
                assert json.loads(cell) == value
            elif isinstance(value, str | bool):
                assert cell == str(value)
            else:
                assert float(cell) == value


def test_pandas_reads_both_tables(tmp_path: Path):
    records.write(tmp_path, made("a"))
    records.write(tmp_path, made("b", mfu=0.5, tile_a=None))
    assert collect(tmp_path, "--to", tmp_path / "new" / "tables") == 0
    one, other = (tmp_path / "new" / "tables" / f"records.{kind}" for kind in ("parquet", "csv"))
    frames = [pd.read_parquet(one), pd.read_csv(other)]
    for frame in frames:
        assert list(frame.columns) == FIELDS
        assert frame.mfu.isna().tolist() == [True, False]
        assert frame.gpus.tolist() == [256, 256]
        assert frame.causal.tolist() == [True, True]
        assert frame.config.map(json.loads).tolist() == [PLAIN["config"]] * 2
    assert not (tmp_path / "records.parquet").exists()


NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
KEYS = st.text(max_size=5)
LEAVES = st.none() | st.booleans() | NUMBERS | KEYS
JSON = st.recursive(LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x, max_size=3), max_leaves=6)


@given(
    error=st.none() | st.text(),
    mfu=st.none() | st.floats(allow_nan=False),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    config=st.none() | st.dictionaries(KEYS, JSON, max_size=3),
    lanes=st.none() | st.dictionaries(KEYS, NUMBERS, max_size=3),
)
def test_any_record_comes_back_from_its_file_and_from_parquet(
    tmp_path_factory: pytest.TempPathFactory, error: Any, mfu: Any, seed: Any, config: Any, lanes: Any
):
    folder = tmp_path_factory.getbasetemp()
    record = made("any", error=error, mfu=mfu, seed=seed, config=config, comm_bytes_by_lane=lanes)
    assert records.read(records.write(folder, record)) == record
    write_tables([record], folder)
    (row,) = parquet(folder / "records.parquet")
    assert row == record.to_dict()


def test_text_that_is_no_unicode_stops_nothing(tmp_path: Path):
    records.write(tmp_path, made("a", error="no file \udcff", provenance={"argv": ["\udcff"]}))
    assert collect(tmp_path) == 0
    (row,) = parquet(tmp_path / "records.parquet")
    assert row["error"] == "no file \\udcff"
    assert row["provenance"] == {"argv": ["\udcff"]}


def test_the_same_records_make_the_same_bytes(tmp_path: Path):
    for run_id in ("b", "c", "a"):
        records.write(tmp_path / run_id, made(run_id))
    assert collect(tmp_path, "--to", tmp_path / "one") == 0
    assert collect(*(tmp_path / run_id for run_id in "cab"), "--to", tmp_path / "other") == 0
    for name in ("records.parquet", "records.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_a_point_with_several_records_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    old = records.write(tmp_path / "x", made("a", step_ms_median=1.0))
    new = records.write(tmp_path / "b", made("a", step_ms_median=2.0))
    os.utime(old, ns=(1, 1))
    records.write(tmp_path / "c", made("same"))
    records.write(tmp_path / "d", made("same"))
    assert collect(tmp_path, tmp_path / "x") == 0  # the folder is there already
    out, err = capsys.readouterr()
    assert [(row["run_id"], row["step_ms_median"]) for row in parquet(tmp_path / "records.parquet")] == [
        ("a", 2.0),
        ("same", 12.5),
    ]
    assert f"left out: {old}: differs from {new}, which is newer" in err
    assert f"1 file differing from a newer record of the same point; still there: {old}" in out
    assert "1 file saying the same as another" in out


def test_of_a_sweeps_folder_its_records_are_collected(tmp_path: Path):
    sweep = tmp_path / "sweeps" / "table3"
    for name in ("scripts", "logs", "points", "records"):
        (sweep / name).mkdir(parents=True)
    others = [sweep / "sweep.json", sweep / "jobs.json", sweep / "points" / "p.json"]
    others += [tmp_path / "wandb" / "run" / "summary.json", tmp_path / ".cache" / "x.json"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"run_id": "a"}')
    records.write(sweep / "records", made("a"))
    for folder in (tmp_path, sweep, sweep / "records"):
        assert collect(folder, "--to", tmp_path / "out") == 0
        assert [row["run_id"] for row in parquet(tmp_path / "out" / "records.parquet")] == ["a"]
    assert collect(sweep / "points", "--to", tmp_path / "out") == 0
    assert all(path.exists() for path in others)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere: is not a folder"),
        ([".", "a.json"], "a.json: is not a folder"),
        ([".", "--to", "a.json"], "--to a.json: can't be written"),
    ],
)
def test_what_cannot_be_served(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
):
    monkeypatch.chdir(tmp_path)
    records.write(tmp_path, made("a"))
    (tmp_path / "broken.json").touch()
    assert collect(*arguments) == 2
    assert says in capsys.readouterr().err
    assert (tmp_path / "broken.json").exists()


def test_the_command_line(tmp_path: Path):
    command = [sys.executable, "-m", "sp_bench.records"]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, "collect", str(tmp_path)], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"0 records: {tmp_path}/records.parquet, {tmp_path}/records.csv\n"
    assert list(pd.read_parquet(tmp_path / "records.parquet").columns) == FIELDS
    assert subprocess.run([*command, "gather"], cwd=root, capture_output=True).returncode == 2


def test_what_an_earlier_record_left_beside_it_goes(tmp_path: Path):
    path = records.write(tmp_path, made("a"), samples=columns({"forward": [[1.0]]}), trace={"traceEvents": []})
    assert set(records.beside(path)) == {"samples", "trace"}
    records.write(tmp_path, made("a", status="failed"), ranks={"forward_busy_ms": [1.0]})
    assert {name: other.name for name, other in records.beside(path).items()} == {"ranks": "a.ranks.json"}
    records.write(tmp_path, made("a", status="timeout"), hang={"0": {"stack": []}})
    assert set(records.beside(path)) == {"hang"}


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(OSError, match="a.json"):
        records.write_whole(tmp_path / "a.json", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_tests_read_known_fields_as_what_they_are():
    """`Known` declares those that are no numbers; a record's other fields are optional or not, and numbers."""
    there = {name: set(get_args(kind) or (kind,)) - {NoneType} for name, kind in get_type_hints(Record).items()}
    there.pop("how")
    numbers = {name for name, kinds in there.items() if kinds <= {int, float, bool}}
    declared = get_type_hints(Known)
    assert declared.keys() == there.keys() - numbers
    assert {name: {kind} for name, kind in declared.items()} == {name: there[name] for name in declared}
    known = Known(made(mfu=0.4))
    assert known.mfu == 0.4 and known.mode == "simulate"
    with pytest.raises(AssertionError, match="ttft_s isn't known: ok, None"):
        _ = known.ttft_s
    with pytest.raises(AttributeError, match="no_field"):
        _ = known.no_field
