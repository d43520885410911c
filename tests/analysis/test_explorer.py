"""The explorer's page: its columns, what it keeps to itself, and its command line."""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sp_bench import draw, records
from sp_bench.analysis import explore
from sp_bench.analysis.assignments import planned
from sp_bench.analysis.explorer import columns, details, fields, page, serving
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.timelines import Span
from tests.support.made_records import made, simulated, spread, written


def content(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="records">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated point with its timeline, a measured one, and one that failed."""
    folder = tmp_path_factory.mktemp("records")
    Runs(folder).one(method="mesh", gpus=4, tile=[2, 2], seqlen="16k", heads=8, trace=2)
    interval = {"step_ms_ci95_low": 99.0, "step_ms_ci95_high": 102.0, "mfu": 0.25}
    written(folder, "measured", spread(100.0), method="ring", **interval)
    records.write(folder, made("failed", status="oom", error="<b>too large</b>", step_ms_median=None))
    return folder


def test_fields_are_those_of_records() -> None:
    shown = fields.SETTINGS | fields.RESULTS
    assert {*shown} - {*fields.MADE} <= set(records.Record.__dataclass_fields__)
    assert len(shown) == len({one.label for one in shown.values()}), "two columns would have one name"


def test_columns_have_units_and_intervals(folder: Path) -> None:
    found = columns.columns(explore.found_in([folder]))
    at = found["id"].index("measured")
    assert [found["low"]["step_ms_median"][at], found["high"]["step_ms_median"][at]] == [99.0, 102.0]
    assert found["results"]["mfu"][at] == 25.0
    low, high = found["low"]["mfu"][at], found["high"]["mfu"][at]
    step = found["results"]["step_ms_median"][at]
    assert (low, high) == (pytest.approx(25 * step / 102), pytest.approx(25 * step / 99))
    assert found["results"]["step_ms_median"][found["id"].index("failed")] is None
    modes = found["settings"]["mode"]
    assert {modes["values"][code] for code in modes["codes"]} == {"measured", "simulated"}


def test_simulated_points_have_what_measurements_like_them_are_within() -> None:
    ends: dict[str, Any] = {"step_ms_validated_low": 80.0, "step_ms_validated_high": 400 / 3}
    simulated = made(mode="simulate", step_ms_median=100.0, forward_ms_median=40.0, mfu=0.5, **ends)
    unknown = made(mode="simulate", step_ms_median=100.0)
    found = columns.columns({Path(__file__): simulated, Path(__file__).parent: unknown})
    ends = {name: (found["low"][name][0], found["high"][name][0]) for name in found["low"]}
    assert ends["step_ms_median"] == pytest.approx((80, 400 / 3))
    assert ends["forward_ms_median"] == pytest.approx((32, 160 / 3))
    assert ends["mfu"] == pytest.approx((37.5, 62.5))
    assert found["low"]["step_ms_median"][1] is found["high"]["step_ms_median"][1] is None, "not validated"


def test_few_iterations_have_no_interval(tmp_path: Path) -> None:
    interval = {"step_ms_ci95_low": 99.0, "step_ms_ci95_high": 102.0}
    path = written(tmp_path, "few", spread(100.0, iters=4), iters=4, **interval)
    assert columns.columns({path: records.read(path)})["low"]["step_ms_median"] == [None]


def test_options_without_a_column_are_settings() -> None:
    record = made(config={"method": {"name": "mesh", "tile": [8, 8]}, "offload": True})
    found = columns.setting_values(record)
    assert (found["method_options"], found["options"]) == ("method.tile=[8,8]", "offload=true")
    assert found["cluster_options"] is None


def test_the_page_needs_no_network_and_no_text_ends_its_data(folder: Path, tmp_path: Path) -> None:
    assert explore.main([str(folder), f"out={tmp_path}/page.html"]) == 0
    html = (tmp_path / "page.html").read_text()
    outside = re.findall(r'(?:src|href)="(?!#)[^"]*"', html.partition("<script>")[0])
    assert outside == []
    assert "Redistribution and use in source and binary forms" in html, "the libraries' licences go with them"
    assert "<b>too large" not in html
    found = content(html)
    assert unpacked(found["details"]["failed"])["error"] == "<b>too large</b>"


def test_a_file_names_no_machine(folder: Path) -> None:
    found = explore.found_in([folder])
    html = page.explorer(found, "records", drawings=0)
    assert "private-host" not in html
    shown = [unpacked(text) for text in content(html)["details"].values()]
    assert "private-host" not in json.dumps(shown)
    assert "measured.json" in [one["file"] for one in shown]
    assert all("timeline" not in one for one in shown), "drawings=0"


def test_a_points_drawings_are_those_of_its_plan_and_trace(folder: Path) -> None:
    (path,) = [path for path in explore.found_in([folder]) if path.with_suffix(".trace.json").exists()]
    record = records.read(path)
    found = details.drawn(record, path)
    assert found["missing"] == []
    by_rank = next(one for one in found["matrices"] if (one["phase"], one["by"]) == ("forward", "rank"))
    plan, problem, _ = planned(record, "forward")
    assert by_rank["values"] == draw.assignment(plan, problem).ravel().tolist()
    ends = [end for *_, end in found["timeline"]["spans"]]
    assert max(ends) == pytest.approx(record.step_ms_median, rel=1e-5)
    assert details.of_point(record, path, private=False)["command"].startswith("python -m sp_bench method=mesh ")


def test_measured_and_failed_points_say_what_they_lack(folder: Path) -> None:
    path = folder / "measured.json"
    found = details.drawn(records.read(path), path)
    assert found["timeline"]["kinds"] == ["forward", "backward"]
    assert found["timeline"]["ranks"] == [2, 2]
    failed = details.drawn(records.read(folder / "failed.json"), folder / "failed.json")
    assert [why.partition(":")[0] for why in failed["missing"]] == ["No timeline", "No assignment matrix"]


def test_only_near_spans_of_one_row_are_joined() -> None:
    spans = [Span("a", "x", 0, 1), Span("a", "x", 1.05, 2), Span("a", "x", 3, 4), Span("b", "x", 0.5, 1.02)]
    merged = details._merged(spans, 0.1)
    assert merged == [Span("a", "x", 0, 2), Span("a", "x", 3, 4), Span("b", "x", 0.5, 1.02)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no folder: there is nothing to explore"),
        (["nowhere"], "nowhere: is not a folder"),
        (["{empty}"], "has no records"),
        (["{folder}", "port=80"], "port=80: goes with --serve"),
        (["{folder}", "--serve", "out=x"], "out=x: goes with a file"),
        (["{folder}", "--serve", "port=99999"], "port=99999: must be from 0 to 65535"),
        (["{folder}", "drawings=some"], "drawings=some: must be from 0"),
        (["{folder}", "out=/proc/page.html"], "can't be written"),
        (["{folder}", "--server"], "--server"),
    ],
)
def test_bad_requests(
    arguments: list[str], said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explore.main([each.format(folder=folder, empty=tmp_path) for each in arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def server(folder: Path) -> Iterator[serving.Server]:
    with serving.Server(lambda: explore.found_in([folder]), "records", 0) as made_server:
        threading.Thread(target=made_server.serve_forever, daemon=True).start()
        yield made_server
        made_server.shutdown()


def test_a_served_page_has_new_records_and_whole_points(server: serving.Server, folder: Path) -> None:
    with urllib.request.urlopen(server.address) as answer:
        before = content(answer.read().decode())
    assert before["server"] and "details" not in before
    path = simulated(folder, "new", 12.0)
    with urllib.request.urlopen(server.address) as answer:
        assert content(answer.read().decode())["id"] == sorted([*before["id"], "new"])
    path.unlink()
    with urllib.request.urlopen(f"{server.address}points/measured") as answer:
        found = json.loads(answer.read())
    assert found["provenance"]["host"] == "private-host"
    assert found["timeline"]["ranks"] == [2, 2]


@pytest.mark.parametrize(("path", "host", "status"), [("points/none", None, 404), ("", "elsewhere.example", 403)])
def test_a_server_refuses(server: serving.Server, path: str, host: str | None, status: int) -> None:
    request = urllib.request.Request(f"{server.address}{path}", headers={"Host": host} if host else {})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert error.value.code == status


def test_a_port_that_is_taken(server: serving.Server, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.main([str(folder), "--serve", f"port={server.server_port}"]) == 2
    assert f"port={server.server_port}: can't be used" in capsys.readouterr().err
