"""records check, the JSON Schema of a record, and workload ids."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sp_bench import records
from sp_bench.analysis.explorer.fields import MADE, RESULTS, SETTINGS
from sp_bench.cli import report
from sp_bench.cli.words import title
from sp_bench.loggers import wandb_fields
from sp_bench.point.simulated import simulate_point
from sp_bench.point.training import simulate_training
from sp_bench.records.__main__ import main
from sp_bench.records.checking import problems_of
from sp_bench.records.record import Record
from sp_bench.records.schema import columns, fields_page, json_schema, quantities
from sp_bench.records.work import peak_of, step_flops
from sp_bench.workload import Train
from tests.support.made_records import made, simulated, spread, written
from tests.workload.requests import point

PAGE = Path(__file__).parents[2] / "docs/reference/record.schema.json"
FIELDS = PAGE.with_name("record_fields.md")
REPORTED = {"mode": "report", "source": "Table 3 of somebody's paper", "step_ms_median": 12.5, "provenance": None}
INTERVAL = {"step_ms_ci95_low": 99.0, "step_ms_ci95_high": 101.0, "device_name": "a CPU"}


def measured(folder: Path, **changes: Any) -> Path:
    return written(folder, "3fa2c0de", spread(100.0), **(INTERVAL | changes))


def test_the_page_has_the_schema() -> None:
    assert json.loads(PAGE.read_text()) == json_schema()


def test_the_page_has_the_fields() -> None:
    assert FIELDS.read_text() == fields_page() + "\n"


def test_every_quantity_is_one_row_with_a_meaning() -> None:
    """A record's file, its schema, tables, W&B and the explorer have the rows of records.quantities, and no others."""
    known = quantities()
    assert not [name for name, one in known.items() if not one.meaning or not one.row_of.how]
    declared = [name for part in Record.__mro__[:-1] for name in inspect.get_annotations(part)]
    assert sorted(name for name in declared if name != "how") == sorted(known), "a name in two parts"
    assert list(known) == list(made().to_dict()) == list(columns())
    assert sorted(json_schema()["properties"]) == sorted(known)
    shown = {*SETTINGS, *RESULTS} - {*MADE}
    assert shown == {name for name, one in known.items() if one.shown and one.shown.label}
    record = made().to_dict()
    placed = {*wandb_fields.config(record | {"provenance": None}), *wandb_fields.summary(record)}
    assert placed == {name for name, one in known.items() if one.wandb}


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({}, True),
        (REPORTED, True),
        ({"mode": "report"}, False),
        ({"source": "a paper"}, False),
        ({"mode": "guess"}, False),
        ({"gpus": 0}, False),
        ({"gpus": "4"}, False),
        ({"speed": 1}, False),
        ({"schema_version": 3}, False),
        ({"dtype": "float8"}, False),
    ],
)
def test_the_schema_takes_records_alone(changes: dict[str, Any], valid: bool) -> None:
    content = made().to_dict() | changes
    validator = jsonschema.Draft202012Validator(json_schema())
    assert validator.is_valid(content) is valid


def test_a_right_record_of_each_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are counted by mode, and never together."""
    measured(tmp_path / "a")
    simulated(tmp_path / "b", "0b", 12.5)
    records.write(tmp_path / "c", made("0c", **REPORTED))
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "3 files: 0 wrong, 1 measured, 1 reported, 1 simulated\n"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step_ms_median": 100.5}, "step_ms_median=100.5 is not the median of its samples, 100"),
        ({"step_ms_ci95_low": 100.5}, "are not in order"),
        ({"step_ms_ci95_low": None}, "mode=measure has no interval"),
        ({"device_name": None}, "mode=measure has no device_name"),
        ({"provenance": None}, "mode=measure has no provenance"),
        ({"mfu": 1.5}, "mfu=1.5 is not between 0 and 1"),
        ({"iters_per_s": 5.0}, "iters_per_s=5.0 is not that of step_ms_median=100.0, 10"),
        ({"comm_bytes_lower_bound": 8000.0}, "comm_bytes_per_gpu=7658 is below comm_bytes_lower_bound=8000"),
        ({"status": "failed", "error": None}, "status=failed has no error"),
        ({"workload_id": "attention/else"}, "workload_id=attention/else is not that of its fields"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    (problem,) = problems_of(measured(tmp_path, **changes))
    assert says in problem


H100 = ("cluster=h100_ndr400", "mode=simulate", "dtype=bfloat16", "method=ring", "gpus=8", "head_dim=128")
ATTENTION = ("model=none", "workload=attention", "seqlen=32k", "heads=32")
POINTS = (
    *((*ATTENTION, f"phase={phase}") for phase in ("forward", "backward", "forward_backward")),
    *((*ATTENTION, "kv_heads=8", "batch=2", mask) for mask in ("mask=full", "mask=causal")),
    (*ATTENTION, "mask=window", "window=[1023,0]"),
    (*ATTENTION, "mask=window", "window=[511,512]"),
    (*ATTENTION, "mask=chunked", "chunk=4k"),
    (*ATTENTION, "mask=document", "data=short", "seed=3"),
    (*ATTENTION, "mask=document", "data=short", "window=[1023,0]"),
    ("model=llama3_8b", "seqlen=64k"),
    ("model=llama_1b", "seqlen=64k", "model.layers=4", "train.recompute=full"),
    ("model=llama3_8b", "seqlen=64k", "model.layers=4", "train.tensor_parallel=2"),
    ("model=dit_xl", "seqlen=64k", "head_dim=72", "mask=full"),
    ("model=deepseek_v2_lite", "cluster=h200_ndr400", "seqlen=64k"),
    ("model=minicpm3_4b", "seqlen=16k"),
)


def point_of(keys: tuple[str, ...]) -> Record:
    request = point(
        *(own for own in H100 if own.partition("=")[0] not in {key.partition("=")[0] for key in keys}), *keys
    )
    return simulate_training(request) if isinstance(request.workload, Train) else simulate_point(request)[0]


@pytest.mark.parametrize("keys", POINTS, ids=" ".join)
def test_rates_are_those_of_shape_mask_model_and_time(keys: tuple[str, ...], tmp_path: Path) -> None:
    """Recomputed from the fields, they are what the suite writes; with another time or rate they are not."""
    record = point_of(keys)
    assert record.mfu and record.tflops_per_gpu and problems_of(records.write(tmp_path, record)) == []

    def problems(**changes: Any) -> str:
        return "; ".join(problems_of(records.write(tmp_path, replace(record, **changes))))

    off = 1.01
    step_ms = record.step_ms_median or 0.0
    of_time = {"iters_per_s": 1e3 / step_ms / off, "tokens_per_s": (record.tokens_per_s or 0.0) / off}
    longer = problems(step_ms_median=step_ms * off, **of_time)
    assert "tflops_per_gpu=" in longer and "mfu=" in longer
    assert "is not that of its shape" in problems(tflops_per_gpu=record.tflops_per_gpu * off)
    assert "TFLOP/s of its shape and step over 989.4" in problems(mfu=record.mfu * off)
    other = {"heads": 2 * record.heads} if record.model is None else {"batch": 2, "tokens_per_s": None}
    assert "tflops_per_gpu=" in problems(**other, workload_id="")


@pytest.mark.parametrize("rates", ["its own", "none"])
@pytest.mark.parametrize("mode", ["simulate", "report"])
@pytest.mark.parametrize("keys", [POINTS[2], POINTS[5], POINTS[8], POINTS[10]], ids=" ".join)
def test_no_step_is_faster_than_the_peak(keys: tuple[str, ...], mode: str, rates: str, tmp_path: Path) -> None:
    """Whether the record has rates that fit its time, or none; of others' records, by the device that they name."""
    record = point_of(keys)
    assert record.mfu and record.step_ms_median and record.tflops_per_gpu
    step_ms = record.step_ms_median * record.mfu / 2
    changes: dict[str, Any] = {"step_ms_median": step_ms, "iters_per_s": None, "tokens_per_s": None, "mfu": None}
    changes["tflops_per_gpu"] = None if rates == "none" else record.tflops_per_gpu * 2 / record.mfu
    if mode == "report":
        changes |= {"mode": "report", "source": "a table", "device_name": "NVIDIA H100 80GB HBM3"}
    (problem,) = problems_of(records.write(tmp_path, replace(record, **changes)))
    assert "would be 1,979 TFLOP/s a GPU, and the dense peak of NVIDIA H100 SXM in bfloat16 is 989.4" in problem


def test_a_device_whose_peak_nobody_knows_has_none() -> None:
    unknown = made(device_name="a CPU", step_ms_median=1e-6)
    assert peak_of(unknown) is None and peak_of(made(device_name=None)) is None
    assert peak_of(made(device_name="NVIDIA H100 PCIe")) is None, "another form, with another peak"
    assert step_flops(made(mask="document", documents=2, longest_document=9)) is None, "no lengths"


def test_modes_are_not_mixed(tmp_path: Path) -> None:
    path = measured(tmp_path)
    path.with_suffix(".samples.json").unlink()
    assert problems_of(path) == ["mode=measure has no 3fa2c0de.samples.json beside it"]
    (clocked,) = problems_of(simulated(tmp_path, "0b", 12.5, kernels_ms=3.0))
    assert clocked == "mode=simulate has kernels_ms, which only a measurement has"
    as_simulated = measured(tmp_path / "b", mode="simulate")
    assert "mode=simulate has samples beside it, which only a measurement has" in problems_of(as_simulated)
    with pytest.raises(ValueError, match="mode=report source=None"):
        made(mode="report")
    assert not made(**REPORTED).measured


def test_files_that_are_no_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = simulated(tmp_path, "0b", 12.5).rename(tmp_path / "renamed.json")
    (tmp_path / "half.json").write_text("{")
    assert main(["check", str(path), str(tmp_path / "half.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: run_id=0b is not the file's name, which 0b.json would be"
    assert lines[1].startswith(f"{tmp_path / 'half.json'}: not a whole JSON object")
    assert lines[2] == "2 files: 2 wrong"
    assert main(["check", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: does not exist" in capsys.readouterr().err


def test_workload_ids() -> None:
    """They say what is asked, in words, and don't depend on who answers or how."""
    plain = made()
    assert plain.workload_id == "attention/forward_backward/causal/1048576x1/32:32:128/bfloat16"
    same = made(method="ring", gpus=8, cluster="b200", mode="report", source="x", kernel="cudnn")
    assert same.workload_id == plain.workload_id
    others = [
        made(seqlen=8),
        made(batch=2),
        made(kv_heads=8),
        made(phase="forward"),
        made(causal=False),
        made(dtype="float16"),
        made(workload="train", model="llama3_8b"),
        made(workload="train", model="llama_7b"),
        made(mask="window", window=[4095, None]),
        made(mask="chunked", config={"chunk": 512}),
        made(mask="chunked", config={"chunk": 1024}),
        made(mask="chunked", config={"chunk": 1024}, causal=False),
        made(mask="document", documents=3, longest_document=9),
        made(mask="document", documents=3, longest_document=9, config={"data": {"lengths": [9, 5, 2]}}),
        made(mask="document", documents=3, longest_document=9, config={"data": {"lengths": [9, 2, 5]}}),
    ]
    assert len({plain.workload_id, *(other.workload_id for other in others)}) == 1 + len(others)


@pytest.mark.parametrize("changed", ["layers=2", "width=1024", "ffn=1024", "vocab=1024", "rope_theta=2.0"])
def test_what_is_changed_of_a_model_is_in_its_workload_id_and_title(changed: str) -> None:
    """In words, with every figure of the model; the points of a table are then compared with their own model alone."""
    keys = ("model=llama3_8b", "gpus=8", "seqlen=64k", "mode=simulate", "cluster=h100_ndr400", "dtype=bfloat16")
    whole, other = (record_of(*keys, *more) for more in ((), (f"model.{changed}",)))
    assert whole.workload_id.startswith("train:llama3_8b/") and "llama3_8b, " in title(whole)
    assert other.workload_id.startswith(f"train:llama3_8b[{changed}]/")
    assert f"llama3_8b[{changed}]" in title(other)
    assert report._problem(whole) != report._problem(other)
    assert record_of(*keys, "model.layers=32").workload_id == whole.workload_id, "the same model"


def test_models_of_ones_own_are_told_apart_by_their_figures() -> None:
    mine = [{"name": "mine", "kind": "decoder", "layers": layers} for layers in (2, 4)]
    first, second = (made(workload="train", model="mine", config={"model": model}) for model in mine)
    assert first.workload_id != second.workload_id
    assert first.workload_id.startswith("train:mine-")
    assert made(workload="train", model="mine", config=None).workload_id.startswith("train:mine/")


def record_of(*overrides: str) -> Record:
    """The record of a training step that failed."""
    request = point(*overrides)
    return request.record("failed", "not run")
