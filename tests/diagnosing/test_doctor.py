"""The doctor on this machine's CPU ranks: its rows, its JSON, its exit code; and what ranks measure for it."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from sp_bench.diagnosing import examine
from sp_bench.diagnosing.examine import DOCUMENTS, checked, pairs_of, spec, with_callers_log
from sp_bench.diagnosing.nccl_log import read_log
from sp_bench.doctor import main
from sp_bench.kernels.pieces import Pieces, calls
from sp_bench.measure.pool import RankFailure, RankPool
from sp_bench.plan.groups import Group
from sp_bench.plan.ops import Pass
from sp_bench.plan.regions import RegionKind
from sp_bench.run.transport import members_of
from tests.diagnosing.fakes import fake_nvidia_smi, gpus, nccl_log, rank_of
from tests.diagnosing.jobs import log_of, pairs, under_load
from tests.support.ranks import WORLD, Ranks

SMALL = ("ranks=2", "device=cpu", "head_dim=16")


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "doctor.json"
    assert main([*SMALL, f"out={path}"]) == 0
    text, found = capsys.readouterr().out, json.loads(path.read_text())
    rows = {row["check"]: row for row in found["findings"]}
    assert set(found) == {"made", "counts", "findings", "hosts", "ranks", "links"}, "nothing ran on a GPU"
    assert found["made"]["command"] == "python -m sp_bench.doctor ranks=2 device=cpu head_dim=16"
    assert rows["aten_cpu float32"]["found"] == rows["reference bfloat16"]["found"] == "passes the gate against fp64"
    assert rows["ranks"]["found"] == "2 ranks on 1 host, processes of this machine"
    (link,) = found["links"]
    assert (link["a"], link["b"]) == (0, 1) and 1e5 < link["bytes_per_s"] < 1e13 and 0 < link["latency_s"] < 1
    assert [rank["device"] for rank in found["ranks"]] == [{"device": "CPU"}] * 2
    assert found["counts"]["fail"] == 0 and text.endswith("0 fail\n")
    assert re.search(r"^  ok    aten_cpu float32 +passes the gate", text, re.MULTILINE)


def test_a_row_that_fails_is_exit_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And ranks that fail in one job are replaced for the next."""
    done: list[str] = []

    class Pool:
        def __init__(self, inner: RankPool) -> None:
            self.inner = inner

        def run(self, job: str, *arguments: object) -> list[object]:
            done.append(job.partition(":")[2])
            if done[-1] == "gate":
                raise RankFailure(1, "died: killed by SIGSEGV")
            return self.inner.run(job, *arguments)

        def close(self) -> None:
            done.append("close")
            self.inner.close()

    open_ranks = examine.open_ranks
    monkeypatch.setattr(examine, "open_ranks", lambda *how, **named: Pool(open_ranks(*how, **named)))
    assert main([*SMALL, "dtype=float32", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    rows = {row["check"]: row for row in found["findings"]}
    assert rows["aten_cpu float32"]["status"] == "fail"
    assert rows["aten_cpu float32"]["found"] == "fails the gate: rank 1: died: killed by SIGSEGV"
    assert len(found["links"]) == 1
    assert done == ["look", "kernels_here", "gate", "close", "gate", "close", "pair_rates", "close"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("device=tpu", "device=tpu: there is no such device"),
        ("ranks=0", "ranks=0: must be a whole number of at least 1"),
        ("ranks=two", "ranks=two: must be a whole number"),
        ("head_dim=x", "head_dim=x: must be a whole number"),
        ("dtype=int8", "dtype=int8: there is no such dtype"),
        ("rank=2", "rank: there is no such key; did you mean ranks"),
        ("--jso", "--jso: there is no such flag; did you mean --json"),
        ("device=cuda", "device=cuda: this machine has no GPU; device=cpu would work"),
    ],
)
def test_bad_arguments_exit_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sp_bench.doctor.gpus_here", lambda: 0)
    monkeypatch.setattr("sp_bench.doctor.examine", None)
    assert main(arguments.split()) == 2
    assert f"sp_bench.doctor: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("n", [1, 4])
def test_the_gate_computes_every_kind_of_kernel_call(n: int) -> None:
    """Blocks without their diagonal, and several regions of different lengths in one call."""
    striped, documents = (one.problem.blocks for one in checked(n, "auto", "float32", 16))
    found = [region.kind for kind in range(striped.classes) for region in striped.regions_of(kind)]
    assert RegionKind.CAUSAL in found and (RegionKind.STRICT in found) == (n > 1)
    regions = documents.regions_of(documents.of(0, 0))
    (pieces,) = calls(regions, torch.device("cpu"), varlen=True)
    assert isinstance(pieces, Pieces) and pieces.q_lengths == DOCUMENTS


def test_pairs() -> None:
    """All of few ranks; of many, enough that each rank is in one and each neighbourhood too."""
    assert pairs_of(4) == list(itertools.combinations(range(4), 2))
    many = pairs_of(256)
    assert len(many) < 2 * 256 and {rank for pair in many for rank in pair} == set(range(256))
    assert (7, 8) in many and (0, 255) in many


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_all_ranks_have_made_the_communicator_that_pairs_use(n: int) -> None:
    """NCCL's of the first lane among all ranks, when the plans were prepared: a pair alone could not make it."""
    plan = spec(n, "auto", "float32", 16).plans["forward"]
    first = next(op for op in plan.ops if isinstance(op, Pass))
    assert isinstance(first.group, Group)
    assert {members_of(first.group, rank) for rank in range(n)} == {tuple(range(n))}


@pytest.mark.long
def test_ranks_measure_pair_by_pair(ranks: Ranks) -> None:
    wanted = [(0, 1), (2, 5), (0, 8)]
    found = ranks.run(pairs, spec(WORLD, "auto", "float32", 16).plans, wanted)
    assert [[(pair.a, pair.b) for pair in of_rank] for of_rank in found] == [[(0, 1), (0, 8)], [], [(2, 5)], *[[]] * 6]
    assert all(pair.bytes_per_s > 0 and pair.latency_s > 0 for of_rank in found for pair in of_rank)


@pytest.mark.long
def test_one_rank_of_a_host_asks_for_its_gpus_under_load(ranks: Ranks, tmp_path: Path) -> None:
    state = gpus(2, clocks__sm="1410")
    first, *others = ranks.run(under_load, str(fake_nvidia_smi(tmp_path, state)))
    assert first[1] == state and others == [None] * (WORLD - 1)


@pytest.mark.long
def test_each_rank_reads_its_own_log_of_nccl(ranks: Ranks, tmp_path: Path) -> None:
    texts = [nccl_log(rank, WORLD) for rank in range(WORLD)]
    assert ranks.run(log_of, str(tmp_path), texts) == list(map(read_log, texts))


def test_the_log_that_the_doctor_asks_for_is_no_fault_of_the_caller() -> None:
    rank = rank_of(0, environment={"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "x", "NCCL_IB_HCA": "mlx5"})
    assert with_callers_log(rank, {}).environment == {"NCCL_IB_HCA": "mlx5"}
    assert with_callers_log(rank, {"NCCL_DEBUG": "WARN"}).environment["NCCL_DEBUG"] == "WARN"
