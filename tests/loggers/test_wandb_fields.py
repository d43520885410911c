"""Fields of a record and their places in a W&B run."""

from __future__ import annotations

import pytest

from sp_bench.loggers import wandb_fields as fields
from tests.support.made_records import columns

RECORD = {
    "run_id": "3fa2",
    "status": "ok",
    "error": None,
    "mode": "simulate",
    "method": "mesh",
    "tile_a": 16,
    "tile_b": 16,
    "variant": "16x16",
    "gpus": 256,
    "seed": 0,
    "causal": True,
    "cluster": "h100_ndr400",
    "kernel": None,
    "step_ms_median": 12.5,
    "mfu": None,
    "comm_bytes_by_lane": {"forward/kv": 2},
    "notes": ["slow", "and wide"],
    "config": {"logger": {"group": "mesh_table3"}, "results_dir": "/home/me"},
    "provenance": {"git_commit": "abc", "versions": {"torch": "2.13"}, "host": "node7", "argv": ["-m", "sp_bench"]},
}


def test_a_record_is_split_into_what_was_asked_and_what_came_out():
    config, summary = fields.config(RECORD), fields.summary(RECORD)
    assert summary == {
        "status": "ok",
        "error": None,
        "step_ms_median": 12.5,
        "mfu": None,
        "comm_bytes_by_lane": {"forward/kv": 2},
    }
    assert config["gpus"] == 256
    assert config["causal"] is True
    assert config["kernel"] is None
    assert config["seed"] == 0
    assert not set(config) & set(summary)


def test_hosts_arguments_and_folders_stay_here():
    config = fields.config(RECORD)
    assert (config["git_commit"], config["versions"]) == ("abc", {"torch": "2.13"})
    assert not {"host", "argv", "config", "provenance"} & (set(config) | set(fields.summary(RECORD)))


def test_group_and_notes():
    assert fields.group(RECORD) == "mesh_table3"
    assert fields.group({"config": {"logger": {"name": "none"}}}) is fields.group({"config": None}) is None
    assert fields.notes(RECORD) == "slow\nand wide"
    assert fields.notes({"notes": None}) is None


@pytest.mark.parametrize(
    ("changes", "name"),
    [({}, "mesh 16x16 256gpu"), ({"method": "ring", "tile_a": None, "tile_b": None, "variant": None}, "ring 256gpu")],
)
def test_name(changes: dict, name: str):
    assert fields.name(RECORD | changes) == name


def test_tags_leave_out_what_is_none_and_fit():
    assert fields.tags(RECORD) == ["simulate", "h100_ndr400", "ok"]
    assert fields.tags({"mode": "measure", "cluster": None, "status": "x" * 99}) == ["measure", "x" * 64]


def test_samples_are_rows_in_the_order_of_the_columns():
    assert fields.sample_rows(columns({"forward": [[1.0, 2.0], [3.0]]})) == [
        (0, 0, "forward", "step", 0.001),
        (0, 1, "forward", "step", 0.002),
        (1, 0, "forward", "step", 0.003),
    ]
