"""From a sweep's file to points, tasks and scripts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sp_bench import records
from sp_bench.slurm import scripts
from sp_bench.slurm.points import by_gpus, numbered, planned
from sp_bench.slurm.settings import load
from sp_bench.slurm.sweep import main

GOLDEN = Path(__file__).parent / "golden"
SMALL = ["cluster=local", "seqlen=240k", "mask=causal", "logger=none"]


SUMMARIES = {
    "modules": r"slurm.sweep: 2 job arrays, 2 tasks, \d+ points; up to 4 nodes a task; at most 80 GPU hours, "
    "if each task takes its 02:00:00; account my_account, partition gpu\n",
    "containers": r"slurm.sweep: 1 job arrays, 1 tasks, \d+ points; up to 2 nodes a task; at most 24 GPU hours, "
    r"if each task takes its 02:00:00; account ours, partition batch; the image needs .*\n",
    "testcluster": r"slurm.sweep: 3 job arrays, 6 tasks, 30 points; up to 1 nodes a task; at most 4.667 GPU hours, "
    "if each task takes its 00:10:00; account by default, partition by default\n",
}


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """The scripts that would be submitted from a checkout in /suite, whose length lines depend on; and what is said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripts, "ROOT", Path("/suite"))
        assert main([*arguments, "folder=/sweeps/one", "--dry-run"]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("modules", ["sweep=mesh_table3", "slurm=modules", *SMALL, "gpus=8,32"]),
        ("containers", ["sweep=mesh_table3", "slurm=containers", "slurm.account=ours", *SMALL, "gpus=12"]),
        ("testcluster", ["sweep=cpu_methods", "slurm=testcluster"]),
    ],
)
def test_scripts(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They are as in golden/: arrays by GPUs, each with its own nodes, tasks and GPUs a node."""
    out, err = dry_run(capsys, *arguments)
    assert out == (GOLDEN / f"{name}.sbatch").read_text()
    assert re.fullmatch(SUMMARIES[name], err), err
    assert not Path("/sweeps").exists()


def test_methods_share_a_task_and_nothing_else_does() -> None:
    tasks, refused = planned("cpu_methods", [])
    assert not refused
    assert [task.number for task in tasks] == list(range(6))
    assert {tuple(p.config["method"]["name"] for p in task.points) for task in tasks} == {
        ("ring", "striped", "ulysses", "tokenring", "mesh")
    }
    assert {(task.gpus, p.config["seqlen"]) for task in tasks for p in task.points} == {
        (gpus, seqlen) for gpus in (2, 4, 8) for seqlen in ("1k", "2k")
    }
    assert {gpus: len(of_gpus) for gpus, of_gpus in by_gpus(tasks).items()} == {2: 2, 4: 2, 8: 2}
    assert len({point.id for task in tasks for point in task.points}) == 30


def test_what_the_command_line_says_goes_before_the_file() -> None:
    tasks, _ = planned("cpu_methods", ["method=ring", "gpus=2", "seqlen=512,4k", "iters=3"])
    assert [(t.points[0].config["seqlen"], t.points[0].config["iters"], len(t.points)) for t in tasks] == [
        (512, 3, 1),
        ("4k", 3, 1),
    ]


def test_a_point_s_id_is_its_config_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the machine that asks, nor of where results go."""
    ids = []
    for host, folder in (("login", "a"), ("node", "b")):
        monkeypatch.setattr(records, "machine", lambda host=host: {"host": host})
        tasks, _ = planned("cpu_methods", ["method=ring", "gpus=2", "seqlen=512", f"results_dir={folder}"])
        ids.append(tasks[0].points[0].id)
    assert ids[0] == ids[1]


def test_points_that_can_not_be_served_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    tasks, refused = planned("cpu_methods", ["gpus=4,6", "seqlen=4"])
    assert [(task.gpus, len(task.points)) for task in tasks] == [(4, 5)]
    assert len(refused) == 5
    out, err = dry_run(capsys, "sweep=cpu_methods", "gpus=4,6", "seqlen=4")
    assert "--ntasks=6" not in out
    assert re.search(r"unsupported, \d points: .*would work", err)


def test_arrays_in_few_words() -> None:
    settings = load("testcluster")
    tasks = [task for task in numbered((2, ()) for _ in range(9)) if task.number not in (3, 4, 7)]
    assert scripts.array(settings, tasks) == "0-2,5-6,8"
    assert scripts.array(load("testcluster", ["most_at_once=2"]), tasks[:1]) == "0%2"


@pytest.mark.parametrize(("gpus", "nodes", "per_node"), [(1, 1, 1), (8, 1, 8), (12, 2, 6), (20, 3, 7), (64, 8, 8)])
def test_nodes_for_gpus(gpus: int, nodes: int, per_node: int, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = dry_run(capsys, "sweep=cpu_methods", "method=ring", f"gpus={gpus}", f"seqlen={gpus * 16}")
    for option in (f"--nodes={nodes}", f"--ntasks={gpus}", f"--ntasks-per-node={per_node}", f"--gres=gpu:{per_node}"):
        assert f"#SBATCH {option}\n" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sweep=mesh_tabel3", "sweep=mesh_tabel3: there is no such sweep; did you mean mesh_table3"),
        ("sweep=mesh_table3 slurm=modulse", "slurm=modulse: there is no such slurm; did you mean modules"),
        ("sweep=mesh_table3 slurm.acount=x", "slurm.acount: there is no such key; did you mean slurm.account"),
        ("sweep=mesh_table3 slurm.gpus_per_node=0", "slurm.gpus_per_node=0: must be a whole number of at least 1"),
        (
            "sweep=mesh_table3 slurm.modules=cuda",
            r"slurm.modules=cuda: must be a list of texts; slurm.modules=\[...\]",
        ),
        ("sweep=mesh_table3 slurm.container.mounts=[/a]", "slurm.container.image: is missing"),
        (
            "sweep=mesh_table3 slurm.time=null",
            "slurm.time=null: must be hours:minutes:seconds.*=01:00:00 would work",
        ),
        ("sweep=mesh_table3 gpu=4", "gpu: there is no such key; did you mean gpus"),
        ("sweep=cpu_methods method=ring gpus=2 seqlen=8k,10q", "seqlen=10q: must be a whole number"),
        (
            "sweep=cpu_methods method=ring gpus=2 mode=alone",
            "mode=alone: takes one process, whatever gpus is; python -m sp_bench -m mode=alone",
        ),
        (
            "sweep=cpu_methods method=ring gpus=2 mode=simulate",
            "mode=simulate: needs no jobs; python -m sp_bench -m mode=simulate",
        ),
        ("slurm=modules", "sweep: is not given"),
        ("sweep=mesh_table3 --wiat", "--wiat: there is no such flag; did you mean --wait"),
        ("stauts results", "command=stauts: there is no such command; did you mean status"),
        ("status /nowhere", "/nowhere: is not the folder of a sweep"),
        (
            "sweep=cpu_methods method=ring gpus=2 slurm.variables.SLURM_CONF=/no",
            "SLURM_CONF=/no: there is no such file",
        ),
    ],
)
def test_bad_requests(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one message, before anything is written or submitted."""
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert re.match(f"slurm.sweep: {message}", captured.err), captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
