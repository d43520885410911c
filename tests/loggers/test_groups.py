"""The runs of one sweep share a group, which their records have too."""

from __future__ import annotations

from sp_bench.cli.arguments import in_group, sweep_name
from sp_bench.loggers import wandb_fields as fields
from sp_bench.slurm.points import planned


def test_a_sweep_is_named_by_what_it_asks_for():
    asked = ["method=ring,mesh", "gpus=8", "logger.mode=online"]
    assert sweep_name([*asked, "results_dir=elsewhere", "logger=wandb"]) == "method=ring,mesh gpus=8"
    long = [f"seqlen={','.join(str(2**i) for i in range(40))}"]
    assert len(sweep_name(long)) == 128
    assert sweep_name(long) != sweep_name([*long, "gpus=8"])


def test_a_group_that_is_asked_for_stays():
    assert in_group({"logger": {"name": "none"}, "gpus": 8}, "s") == {
        "logger": {"name": "none", "group": "s"},
        "gpus": 8,
    }
    assert in_group({"logger": {"group": "mine"}}, "s") == {"logger": {"group": "mine"}}


def test_points_and_refusals_of_a_slurm_sweep_are_in_its_group():
    tasks, refused = planned("cpu_methods", ["gpus=4", "method=ring,mesh,ulysses", "heads=2", "kv_heads=null"])
    points = [point for task in tasks for point in task.points]
    assert points
    assert refused
    assert {point.config["logger"]["group"] for point in points} == {"cpu_methods"}
    assert {fields.group(record.to_dict()) for _, record in refused} == {"cpu_methods"}
