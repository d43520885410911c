"""The command line: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from sp_bench import records
from sp_bench.__main__ import main
from sp_bench.cli.compose import Composer
from sp_bench.plan.method import PHASES
from tests.support.marks import exhaustive
from tests.support.processes import wait_for
from tests.support.typed import Known

LOCAL = ["cluster=local", "dtype=float32", "heads=4", "head_dim=16", "iters=3", "warmup=1"]


def run(arguments: list[str], folder: Path) -> int:
    return main([*arguments, f"results_dir={folder}", "logger=none"])


def test_help_is_light(tmp_path: Path) -> None:
    """No torch, hydra or numpy before --help has printed; and no torch for a simulated point at all."""
    code = (
        "import sys; from sp_bench.__main__ import main; main(['--help']);"
        "assert not {'torch', 'hydra', 'numpy', 'wandb'} & set(sys.modules);"
        f"main(['gpus=16', 'logger=none', 'results_dir={tmp_path}']);"
        "assert not {'torch', 'wandb', 'pandas'} & set(sys.modules), 'simulating imports what it must not'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for words in (
        "sp-bench method=mesh gpus=256",
        "Exit codes",
    ):
        assert re.search(words, done.stdout), words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpus=0", "gpus=0: must be a whole number of at least 1; gpus=8 would work"),
        ("gpus=16 method.tile=[3,5]", r"method.tile=\[3,5\]: a \* b must be gpus=16; one of \[1,16\], \[2,8\]"),
        ("method.tile=[0,256]", r"method.tile=\[0,256\]: must be auto or two integers"),
        ("method.tile=[4]", r"method.tile=\[4\]: must be auto or two"),
        ("method.tile=4", "method.tile=4: must be auto or two"),
        ("seqlen=255", "seqlen=255: the striped layout for 256 ranks .*; seqlen=256 or more would work"),
        ("mask=casual", "mask=casual: there is no such mask; did you mean causal"),
        ("mask=full causal=true", "causal=True: is short for mask=causal, beside mask=full; one of them would work"),
        ("seqlen=10q", "seqlen=10q: must be a whole number .*8k"),
        ("seqlen=-4", "seqlen=-4: must be a whole number of at least 1"),
        ("kv_heads=5", "kv_heads=5: must divide heads=32 .*; one of 1, 2, 4, 8, 16, 32 would work"),
        ("causal=maybe", "causal=maybe: must be true or false"),
        ("method=mehs", "method=mehs: there is no such method; did you mean mesh"),
        ("dtype=bfloat", "dtype=bfloat: there is no such dtype; did you mean bfloat16"),
        ("cluster=h100", "cluster=h100: there is no such cluster; did you mean h100_ndr400"),
        ("gpu=4", "gpu: there is no such key; did you mean gpus=4[?]"),
        ("method.tiel=auto", "method.tiel: there is no such key; did you mean method.tile=auto[?]"),
        ("layout=zigzag", "layout: there is no such key; did you mean method.layout=zigzag[?]$"),
        ("tile=[4,4] method=ring", r"tile: there is no such key; did you mean method=mesh method.tile=\[4,4\][?]$"),
        (
            "method=ring method.tile=[4,4]",
            r"method.tile: is a key of method=mesh, not of method=ring; did you mean method=mesh method.tile=",
        ),
        (
            "data.lengths=[24,3072]",
            r"data.lengths: is a key of data=lengths, not of data=none; did you mean mask=document data=lengths data",
        ),
        ("head=8", "head: there is no such key; did you mean heads=8[?]$"),
        (
            "memory=60GB",
            "memory: is a key of sp-bench advise, not of a point; did you mean sp-bench advise memory=60GB",
        ),
        ("xyzzy=1", "xyzzy: there is no such key; `sp-bench help` lists all keys$"),
        ("--method ring", "--method: there is no such flag; did you mean method=ring[?]"),
        ("--method=ring", "--method=ring: there is no such flag; did you mean method=ring[?]"),
        ("--jsn", "--jsn: there is no such flag; did you mean --json[?]$"),
        ("advice gpus=4", "command=advice: there is no such command; did you mean advise[?]"),
        ("seqlen=1e6", r"seqlen=1000000.0: must be .*; seqlen=1000000 or seqlen=1M \(1048576\) would work$"),
        ("gpus=16.0", "gpus=16.0: must be a whole number of at least 1; gpus=16 would work$"),
        (
            "data=lengths mask=document data.lengths=[8,x,9]",
            r"data.lengths\[1\]=x: must be a whole number of at least 1",
        ),
        (
            "-m method=mesh,usp,ring method.ulysses=auto",
            "method.ulysses: method=ring has no such key; mesh.ulysses=auto usp.ulysses=auto would work$",
        ),
        (
            "method=ring mesh.ulysses=2 baseline=usp",
            "mesh.ulysses: is an option of method=mesh, and asked for is method=ri",
        ),
        ("-m method=ring,usp usp.tile=[2,2]", "usp.tile: there is no such key; .*known: usp.collectives, usp.fuse"),
        (
            "cluster.intra.latency=1",
            "cluster.intra.latency: there is no such key; did you mean cluster.intra.latency_s",
        ),
        ("cluster.inter.bytes_per_s=-1", "cluster.inter.bytes_per_s=-1: must be a finite number above 0"),
        ("cluster.inter.bytes_per_s=0", "cluster.inter.bytes_per_s=0: must be a finite number above 0"),
        ("cluster.inter.bytes_per_s=1e999", "cluster.inter.bytes_per_s=inf: must be a finite"),
        ("cluster.gpus_per_node=7", "gpus=256: nodes of h100_ndr400 have 7 GPUs.*; gpus=252 or 259 would work"),
        ("cluster.inter=null", "gpus=256: the cluster is one node of 8, without NICs; gpus=8 would work"),
        ("cluster.inter.nics_per_node=3", "cluster.inter.nics_per_node=3: must divide gpus_per_node=8; 1, 2, 4, 8"),
        (
            "cluster.fabric={nodes_per_leaf:4,oversubscription:0.5}",
            "cluster.fabric.oversubscription=0.5: must be a finite number of at least 1",
        ),
        ("cluster.placement=[0,0]", r"cluster.placement=\[0, 0\]: must be block, cyclic, or a list of different"),
        ("cluster.gpus_per_node=2.5", "cluster.gpus_per_node=2.5: must be a whole number"),
        ("cluster.gpus_per_node=true", "cluster.gpus_per_node=true: must be a whole number"),
        ("cluster.device=null", "cluster.device=null: must be a section"),
        ("cluster.device.rates=null", "cluster.device.rates=null: must be a section"),
        ("cluster.device.launch_s=abc", "cluster.device.launch_s=abc: must be a finite number"),
        ("kernel=flash_attn_4 cluster=a100_hdr200", "kernel=flash_attn_4: there are no figures .*; one of flash_attn"),
        ("head_dim=160", "head_dim=160: the kernel figures of NVIDIA H100 SXM are for head_dim 32 or 64 or 128"),
        ("method.layout=null", "method.layout=None: there is no such layout"),
        ("gpus=${hds}", "gpus=.*Interpolation key 'hds' not found"),
        ("gpus=8 gpus=4", "gpus=4: gpus is given twice"),
        ("method=reference gpus=4", "gpus=4: reference keeps everything on one GPU; gpus=1 would work"),
        ("method=tokenring method.nodes=3", "method.nodes=3: must divide gpus=256"),
        ("method=double_ring method.inner=3", "method.inner=3: must be auto or divide gpus=256"),
        ("method=ulysses", "gpus=256: ulysses splits heads=32 evenly.*; one of 1, 2, 4, 8, 16, 32 would work"),
        (
            "method=usp method.ulysses=3",
            "method.ulysses=3: must be auto or divide gpus=256 and heads=32.*; one of 1, 2",
        ),
        ("method=startrail method.team=32", "method.team=32: .* a square that divides gpus=256; one of 1, 2, 4, 8, 16"),
        ("method=all_gather method.stride=3", "method.stride=3: must be auto or divide kv_heads=32; one of 1, 2, 4"),
        ("method=tokenring method.trim=x", "method.trim=x: must be true or false; method.trim=true would work"),
        (
            "method.placement=o",
            "method.placement=o: must be q, kv, node, auto or two integers .*; method.placement=q would work",
        ),
        ("method.layout=stripe", "method.layout=stripe: there is no such layout; did you mean striped"),
        ("baseline=rign", "baseline=rign: there is no such baseline; did you mean ring"),
        ("logger=wand", "logger=wand: there is no such logger; did you mean wandb"),
        ("kernel=flesh", "kernel=flesh: there is no such kernel"),
        ("phase=backwards", "phase=backwards: there is no such phase; did you mean backward.*forward_backward"),
        ("workload=prefill prefill.chunk=2M", "prefill.chunk=2097152: is longer than the prompt, seqlen=1048576"),
        ("workload=prefill train.offload=true", "train.offload=true: is about training, and"),
        (
            "workload=prefill method=peer impl=torch_context_parallel",
            "method=peer impl=torch_context_parallel: workload=prefill",
        ),
        ("workload=training", "workload=training: there is no such workload; .*known: attention"),
        ("mode=measured", "mode=measured: there is no such mode; did you mean measure"),
        ("mode=measure", "mode=measure on cluster=h100_ndr400: this machine has"),
        ("dtype=float32", "dtype=float32: there are no kernel figures for it on NVIDIA H100 SXM.*bfloat16, float16"),
        ("cluster=local gpus=1048576 seqlen=1M", "gpus=1048576: .* cores hold at most .* ranks"),
        (
            "cluster=local gpus=4 seqlen=512M",
            "gpus=4, seqlen=512M: its ranks need about .* GiB and this machine has",
        ),
        ("iters=0 gpus=8", "iters=0: must be a whole number of at least 1"),
        ("timeout_s=0", "timeout_s=0: must be a positive number of seconds"),
        (
            "cluster.device.launch=1",
            "cluster.device.launch: .* did you mean cluster.device.launch_s.*fold_bytes_per_s",
        ),
        ("cluster.devise.launch_s=1", "cluster.devise: there is no such key; did you mean cluster.device"),
        ("cluster.intra.kind=full", "cluster.intra.kind=full: there is no such kind; did you mean full_mesh"),
        ("cluster.device.fold_bytes_per_s=0", "cluster.device.fold_bytes_per_s=0: must be a finite number above 0"),
        ("gpus=32,64", "gpus=32,64: is a list of values; -m gpus=32,64 would run"),
        ("reuse=perhaps", "reuse=perhaps: must be auto, true or false"),
        ("+extra=1", "extra: there is no such key"),
        ("+cluster.device.fold_bites=3", "cluster.device.fold_bites: .* did you mean cluster.device.fold_bytes_per_s"),
        ("+gpus=8", r"\+gpus=8: every key, optional ones too, is set without \+; gpus=8 would work"),
        ("mesh", "mesh: is not of the form key=value; method=mesh would work$"),
        ("--fast", "--fast: there is no such flag"),
        ("--config-dir /nowhere", "--config-dir /nowhere: is not a folder"),
        ("-m method=ring,mehs", "method=mehs: there is no such method"),
        ("-m seqlen=8k,10q", "seqlen=10q: must be a whole number"),
        ("-m gpus=12,20", "none of 2 points: .*would work"),
    ],
)
def test_bad_requests(arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, one message with the value, the rule and what would work; no rank, no record."""
    assert run(arguments.split(), tmp_path) == 2
    captured = capsys.readouterr()
    assert re.match(f"sp_bench: {message}", captured.err), captured.err
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err + captured.out
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.long
def test_the_main_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """256 GPUs simulated, said so, with the tile and why, beside Ring."""
    assert run(["method=mesh", "gpus=256", "--all"], tmp_path) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Simulated, not measured: this machine has" in text
    for words in ("MFU", "throughput", "closed form", "lower bound", "peak memory", "exposed", "forward", "backward"):
        assert words in text
    assert re.search("variants in ms .* 8x32 zigzag[*] 307,", text)
    by_method = {r.method: r for r in records.read_all(tmp_path)}
    mesh, ring = Known(by_method["mesh"]), Known(by_method["ring"])
    assert mesh.mode == ring.mode == "simulate"
    assert mesh.nodes == 32
    assert mesh.tile_a * mesh.tile_b == 256
    assert mesh.comm_bytes_per_gpu == mesh.comm_bytes_expected > mesh.comm_bytes_lower_bound
    assert mesh.step_ms_median == pytest.approx(mesh.forward_ms_median + mesh.backward_ms_median)
    assert mesh.step_ms_median == pytest.approx(min(c["step_ms"] for c in mesh.candidates if c["step_ms"]))
    assert all(c["step_ms"] or c["bound_ms"] > mesh.step_ms_median for c in mesh.candidates)
    tiles = [f"{2**i}x{2 ** (8 - i)}" for i in range(9)]
    assert [(c["layout"], c["variant"]) for c in mesh.candidates] == [
        (layout, tile) for layout in ("striped", "zigzag") for tile in tiles
    ]
    assert mesh.variant == f"{mesh.tile_a}x{mesh.tile_b}"
    assert mesh.comm_bytes_busiest_gpu == mesh.comm_bytes_per_gpu, "all ranks send the same"
    flops = 3.5 * 4 * 2**40 * 4096 / 2
    assert mesh.mfu == pytest.approx(flops / 256 / 989.4e12 / (mesh.step_ms_median / 1e3))
    assert by_method["mesh"].err_out is None, "nothing was executed"
    # Ring sends 255 KV chunks forward and as many dKV chunks backward: 3 * 255 * 2 * 4096 * 4096 * 2 bytes.
    assert ring.comm_bytes_per_gpu == 3 * 255 * 2 * 4096 * 4096 * 2
    assert ring.step_ms_median > mesh.step_ms_median


def test_records_have_the_contract_s_fields(tmp_path: Path) -> None:
    contract = """schema_version run_id status error mode method tile_a tile_b gpus nodes seqlen batch heads kv_heads
    head_dim causal dtype phase cluster kernel device_name step_ms_median step_ms_p25 step_ms_p75 step_ms_ci95_low
    step_ms_ci95_high forward_ms_median backward_ms_median iters_per_s tokens_per_s tflops_per_gpu mfu
    comm_bytes_per_gpu comm_bytes_expected comm_bytes_lower_bound compute_ms exposed_comm_ms peak_mem_bytes_max
    peak_mem_bytes_min rank_imbalance err_out err_dq err_dk err_dv provenance""".split()
    assert run(["gpus=8", "seqlen=64k", "baseline=null"], tmp_path) == 0
    (record,) = records.read_all(tmp_path)
    content = json.loads((tmp_path / f"{record.run_id}.json").read_text())
    assert set(contract) <= set(content)
    assert content["run_id"] == record.run_id
    assert all(k.startswith(records.KEPT_VARIABLES) for k in content["provenance"]["environment"])
    frame = records.load(tmp_path)
    assert len(frame) == 1
    assert frame.tokens_per_s[0] == content["tokens_per_s"]


def test_options_of_one_method_in_a_sweep() -> None:
    """METHOD.OPTION is of the points of that method, whichever order keys have, and each point is there once."""
    arguments = [
        "mesh.ulysses=1,2",
        "method=mesh,usp,ring",
        "usp.ulysses=8",
        "usp.layout=striped",
        "method.layout=zigzag",
    ]
    with Composer() as composer:
        points = composer.points(arguments, sweep=True)
        found = [composer.compose(point)["method"] for point in points]
    options = [(each["name"], each.get("ulysses"), each["layout"]) for each in found]
    assert sorted(options, key=str) == [
        ("mesh", 1, "zigzag"),
        ("mesh", 2, "zigzag"),
        ("ring", None, "zigzag"),
        ("usp", 8, "striped"),
    ]


def test_options_of_a_single_point_and_its_baseline() -> None:
    arguments = ["method=usp", "usp.ulysses=4", "ring.layout=striped", "gpus=8"]
    with Composer() as composer:
        (point,) = composer.points(arguments, sweep=False)
        config = composer.compose(point)
        baseline = composer.baseline(config, arguments)
        assert config == composer.compose(["method=usp", "method.ulysses=4", "gpus=8"])
        assert baseline == composer.compose(["method=ring", "method.layout=striped", "gpus=8"])


@pytest.mark.parametrize("nothing", ["none", "null"])
def test_none_and_null_are_nothing(nothing: str) -> None:
    keys = ("baseline", "logger", "data", "model", "window", "nccl", "kv_heads", "wire_dtype", "impl")
    arguments = [f"{key}={nothing}" for key in keys]
    with Composer() as composer:
        (point,) = composer.points(arguments, sweep=False)
        assert composer.compose(point) == composer.compose(["baseline=null", "logger=none"])
        assert len(composer.points(["data=null,short", "mask=document"], sweep=True)) == 2
        assert composer.compose(["train.recompute=none"])["train"]["recompute"] == "none", "a word of its own"


@pytest.mark.parametrize(("first", "last"), [("ring", "mesh"), ("mesh", "ring")])
def test_of_two_choices_of_a_group_the_last_one_counts(first: str, last: str) -> None:
    with Composer() as composer:
        found = composer.compose([f"method={first}", "cluster=local", f"method={last}"])
        assert found == composer.compose([f"method={last}", "cluster=local"])
    assert found["method"]["name"] == last


def test_a_sweep_is_one_table_and_reuses_finished_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-m", "method=ring,mesh", "gpus=8,12,16", "seqlen=64k"]
    assert run(arguments, tmp_path) == 0, "12 GPUs don't fill nodes of 8, which is a row"
    text = capsys.readouterr().out
    assert text.count("unsupported: gpus=12") == 2
    assert text.count("│ ok") == 4
    assert "reused" not in text
    (tmp_path / "broken.json").write_text("{")
    one = next(path for path in tmp_path.glob("*.json") if '"ok"' in path.read_text())
    one.unlink()
    with pytest.warns(UserWarning, match=r"left out: .*broken.json: not a whole JSON object"):
        assert len(records.read_all(tmp_path)) == 5
    assert run(arguments, tmp_path) == 0
    assert "reused: 3 of 6 points" in capsys.readouterr().out
    assert one.exists()


def test_a_config_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the user's folder, or in the one that --config-dir names, which goes before it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    source = Path(__file__).parents[2] / "conf" / "cluster" / "h100_ndr400.yaml"
    own, users = tmp_path / "own", tmp_path / "home" / "sp_bench"
    for folder, name in ((own, "mine"), (users, "users")):
        (folder / "cluster").mkdir(parents=True)
        text = source.read_text().replace("name: h100_ndr400", f"name: {name}")
        (folder / "cluster" / "mine.yaml").write_text(text)
    point = ["cluster=mine", "gpus=8", "seqlen=64k"]
    assert run(["--config-dir", str(own), *point], tmp_path / "r") == 0
    assert "8 GPUs on mine" in capsys.readouterr().out
    assert run(point, tmp_path / "r") == 0
    assert "8 GPUs on users" in capsys.readouterr().out
    assert main(["--cfg", "gpus=8"]) == 0
    assert "gpus: 8" in capsys.readouterr().out


@pytest.mark.long
def test_measured_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real ranks: mesh beside ring, gate passed, sent bytes = plan = closed form, every raw sample kept."""
    assert run([*LOCAL, "gpus=4", "seqlen=1k", "kv_heads=2"], tmp_path) == 0
    text = capsys.readouterr().out
    assert "Measured on 4 ranks: cluster=local is this machine" in text
    assert "every rank" in text
    found = records.read_all(tmp_path)
    assert sorted(r.method for r in found) == ["mesh", "ring"]
    assert all(record.mfu is None for record in found)
    for record in map(Known, found):
        assert (record.mode, record.status, record.kernel) == ("measure", "ok", "aten_cpu")
        assert 0 < max(record.err_out, record.err_dq, record.err_dk, record.err_dv) < 2e-6
        assert record.comm_bytes_per_gpu == record.comm_bytes_expected
        assert record.step_ms_ci95_low <= record.step_ms_median <= record.step_ms_ci95_high
        assert record.provenance["ranks_by_host"] == {os.uname().nodename: [0, 1, 2, 3]}
        samples = json.loads((tmp_path / f"{record.run_id}.samples.json").read_text())
        samples = pd.DataFrame(samples)
        whole = {"step", "compute_only", "communication_only"}
        cores = {"core", "core_window", "compute_only_core", "communication_only_core"}
        assert set(samples.part) == whole | cores | {"blocks", "waits", "kernels", "folds", "caller"}
        assert set(samples.groupby(["phase", "part"]).size()) == {4 * 3}, "ranks and iterations"
        slowest_ms = 1e3 * samples.groupby(["part", "phase", "iteration"]).seconds.max()
        for part in whole:
            for phase in PHASES:
                name = f"{phase}_ms_median" if part == "step" else f"{part}_{phase}_ms_median"
                assert (
                    getattr(record, name) == pytest.approx(slowest_ms[part][phase].median())
                    and getattr(record, name) > 0
                )
            name = "step_ms_median" if part == "step" else f"{part}_ms_median"
            assert getattr(record, name) == pytest.approx(slowest_ms[part].groupby("iteration").sum().median())
        for part in cores:
            mean_ms = 1e3 * samples[(samples.part == part) & (samples["rank"] == 0)].seconds.mean()
            assert getattr(record, f"{part}_ms_mean") == pytest.approx(mean_ms), "of one machine, once"
        assert record.exposed_comm_ms == max(record.step_ms_median - record.compute_only_ms_median, 0)
        assert 0 < record.rank_step_ms_min <= record.rank_step_ms_max
        assert 0 < record.peak_mem_bytes_min <= record.peak_mem_bytes_max <= record.peak_mem_bytes_expected
        assert record.peak_mem_source == "the executor's live tensors"
        assert record.peak_rss_growth_bytes_max > 0


@pytest.mark.long
def test_measured_backward_only(tmp_path: Path) -> None:
    """The forward gives it its inputs, also those that ulysses keeps, and is in no figure."""
    arguments = ["-m", "method=ring,ulysses", "gpus=2", "seqlen=256", "phase=backward,forward_backward", "iters=1"]
    assert run([*LOCAL[:-2], "warmup=0", *arguments], tmp_path) == 0
    found = {(r.method, r.phase): r for r in records.read_all(tmp_path)}
    for method in ("ring", "ulysses"):
        only, both = Known(found[method, "backward"]), Known(found[method, "forward_backward"])
        assert (only.status, both.status) == ("ok", "ok")
        assert only.record.forward_ms_median is only.record.compute_only_forward_ms_median is None
        assert only.step_ms_median == only.backward_ms_median > 0 and only.compute_only_backward_ms_median > 0
        assert 0 < max(only.err_out, only.err_dq, only.err_dk, only.err_dv) < 2e-6
        backward = {name: sent for name, sent in both.comm_bytes_by_lane.items() if name.startswith("backward/")}
        assert only.comm_bytes_by_lane == backward
        assert only.comm_bytes_per_gpu == only.comm_bytes_expected == sum(backward.values())
        assert 0 < only.peak_mem_bytes_max <= only.peak_mem_bytes_expected <= both.peak_mem_bytes_expected
        assert only.tflops_per_gpu * only.step_ms_median == pytest.approx(
            both.tflops_per_gpu * both.step_ms_median * 2.5 / 3.5
        )
        samples = pd.read_json(tmp_path / f"{only.run_id}.samples.json")
        assert set(samples.phase) == {"backward", "all"}


def test_measured_forward_only_on_one_rank(tmp_path: Path) -> None:
    assert run([*LOCAL, "gpus=1", "seqlen=100", "phase=forward", "causal=false", "baseline=null"], tmp_path) == 0
    (record,) = records.read_all(tmp_path)
    assert record.backward_ms_median is None
    assert record.err_dq is None
    assert record.comm_bytes_per_gpu == 0


@pytest.mark.parametrize(
    ("sent", "status", "why"),
    [
        exhaustive(signal.SIGKILL, "failed", r"rank \d: died: killed by SIGKILL"),
        exhaustive(signal.SIGSTOP, "timeout", r"rank \d: hangs: its process"),
    ],
)
def test_a_rank_that_dies_or_hangs(sent: signal.Signals, status: str, why: str, tmp_path: Path) -> None:
    """Exit 1 within the timeout, a record that says which rank and why, the other point done, no process left."""
    command = [sys.executable, "-m", "sp_bench", *LOCAL[:4], "iters=150", "gpus=2", "seqlen=1k", "timeout_s=5"]
    process = subprocess.Popen(
        [*command, "logger=none", f"results_dir={tmp_path}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        ranks = _wait_for_ranks(process.pid, 2)
        time.sleep(0.5)  # let them begin
        os.kill(ranks[1], sent)
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 1, out + err
    assert "Traceback" not in err
    by_status = {record.status: record for record in records.read_all(tmp_path)}
    assert set(by_status) == {status, "ok"}
    assert re.match(why, by_status[status].error or ""), by_status[status].error
    hang = tmp_path / f"{by_status[status].run_id}.hang.json"
    assert hang.exists() is (sent == signal.SIGSTOP), "of a hang it is kept what the threads of silent ranks were at"
    if hang.exists():
        assert set(json.loads(hang.read_text())) == set("01")
    assert not [rank for rank in ranks if _alive(rank)]


def _wait_for_ranks(parent: int, n: int) -> list[int]:
    """The rank processes below `parent`, in order of their start."""
    ranks = list[int]()

    def started() -> bool:
        nonlocal ranks
        below = {parent}
        for _ in range(3):
            below |= {pid for pid, ppid in _processes() if ppid in below}
        servers = {ppid for pid, ppid in _processes() if pid in below and ppid in below and ppid != parent}
        ranks = sorted(pid for pid, ppid in _processes() if ppid in servers)
        return len(ranks) == n

    wait_for(started, "the ranks to start")
    return ranks


def _processes() -> list[tuple[int, int]]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found.append((int(path.parent.name), int(fields[1])))
    return found


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_records_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = ["--json", "mode=simulate", "gpus=8", "seqlen=16k"]
    assert run([*point, "method=zigzag", "baseline=ring"], tmp_path) == 0
    output = capsys.readouterr()
    found = [json.loads(line) for line in output.out.splitlines()]
    assert [record["method"] for record in found] == ["zigzag", "ring"]
    assert found == [json.loads((tmp_path / f"{record['run_id']}.json").read_text()) for record in found]
    assert "SIMULATED" in output.err
    assert run(["-m", *point, "method=ring,ulysses"], tmp_path) == 0
    assert [json.loads(line)["method"] for line in capsys.readouterr().out.splitlines()] == ["ring", "ulysses"]


def test_optional_keys_of_a_cluster_are_set_without_plus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that its file leaves out."""
    times = {}
    for key in ("", "device.fold_bytes_per_s=1e10", "inter.flow_bytes_per_s=1e9", "device.kernel=flash_attn"):
        added = [f"cluster.{key}"] if key else []
        assert run(["--json", "gpus=16", "seqlen=128k", "method=ring", "mode=simulate", *added], tmp_path) == 0
        times[key] = json.loads(capsys.readouterr().out)["step_ms_median"]
        if added:
            assert times[key] > times[""]
            assert run([f"+cluster.{key}"], tmp_path) == 2
            assert f"without +; cluster.{key} would work" in capsys.readouterr().err
