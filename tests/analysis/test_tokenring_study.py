"""The findings of the TokenRing study, and the plans behind its records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sp_bench.analysis import notebooks
from sp_bench.analysis.number import record_source
from sp_bench.analysis.plans import busy_links, choice_of, lanes_together, step_ends_ms
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import tokenring
from sp_bench.analysis.studies.tokenring.profile import TESTBED
from sp_bench.analysis.studies.tokenring.transformer import PLACES
from tests.support.sections import numbers, table_of, values, words_of
from tests.support.typed import of_kind


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("records"))


@pytest.mark.long
def test_table1_counts_what_the_closed_forms_say(runs: Runs) -> None:
    section = tokenring.table1(runs)
    sent = {(row[0], row[3]): [getattr(cell, "value", cell) for cell in row[4:]] for row in table_of(section).rows}
    forms = [(n, 2 * (n - 1)) for n in tokenring.COUNTED_GPUS]
    assert sent["TokenRing", 32] == sent["Ring Attention", 32] == sent["TokenRing", 8] == [c for _, c in forms]
    assert sent["Ring Attention", 8] == [c / 4 for _, c in forms]
    assert sent["DeepSpeed-Ulysses", 32] == [*(4 * (n - 1) / n for n, _ in forms[:2]), "refused"]
    assert "4 times as much" in words_of(section)


def test_figure6_shows_paper_and_ours_and_which_was_fitted(runs: Runs) -> None:
    section = tokenring.figure6(runs)
    table = table_of(section)
    rows = {(row[0], row[1]): row for row in table.rows}
    ring, token = rows["ring", 0], rows["tokenring", 2]
    paper, ours, ratio = numbers(ring[2:5])
    assert (paper.value, paper.kind, ours.kind) == (7.6, "paper", "simulated")
    assert ratio.value == pytest.approx(1, abs=0.02) and ring[5] == "link rate set from it"
    paper, ours, ratio = numbers(token[2:5])
    assert (paper.value, token[5]) == (4.6, "no")
    assert ratio.value == pytest.approx(ours.known / 4.6)
    # All the time of the pass is in its steps, and what the paper leaves out is there without a ratio.
    steps = values(row[3] for row in table.rows if row[0] == "tokenring")
    record = runs.one(method="tokenring", **TESTBED)
    assert sum(steps) == pytest.approx(record.forward_ms_median)
    assert [row[2] for row in table.rows if row[0] == "tokenring"][3:] == ["not given"] * 2
    assert "fitted" in words_of(section) and "it was causal" in words_of(section)


@pytest.mark.long
def test_more_gpus_more_steps_with_both(runs: Runs) -> None:
    rows = table_of(tokenring.directions(runs)).rows
    # Of n + 1 steps the first two send no output, the last two no Q.
    sends_both = dict(zip((row[0] for row in rows), values(row[1] for row in rows), strict=True))
    assert sends_both == {n: pytest.approx(max(0, n - 3) / (n + 1)) for n in (2, 4, 8, 16, 32)}
    for row in rows[1:]:
        shares = values(row[3:])
        assert shares[1] == 0 < shares[3] < shares[2] < 1  # the cable back: idle in Ring, used in TokenRing
        assert shares[4] == shares[5] > 0  # a switch's ports: both directions in Ring too


@pytest.mark.long
def test_a_diffusion_transformer_sends_both_in_one_step_of_five(runs: Runs) -> None:
    section = tokenring.dit(runs)
    assert "in 20% of its steps on four GPUs" in words_of(section)
    rows = table_of(section).rows
    assert [tuple(row[:3]) for row in rows] == list(PLACES)
    for row in rows:
        attention, forward, step = values(row[3:10:3])
        assert 28 * attention < forward < step


@pytest.mark.long
def test_full_mesh_gains_and_switch_does_not(runs: Runs) -> None:
    rows = table_of(tokenring.topologies(runs)).rows
    keys = [(of_kind(str, row[0])[:4], *row[1:4]) for row in rows]
    gains = dict(zip(keys, values(row[8] for row in rows), strict=True))
    mesh = [gains["full", "full", 1024, n] for n in (2, 4, 8)]
    assert mesh == sorted(mesh) and mesh[-1] > 1.3
    assert max(gain for key, gain in gains.items() if key[0] == "NVSw") < 1


@pytest.mark.long
def test_hybrid_is_faster_across_many_nodes(runs: Runs) -> None:
    rows = table_of(tokenring.nodes(runs)).rows
    times = dict(zip((tuple(row[:3]) for row in rows), values(row[3] for row in rows), strict=True))
    for cluster in tokenring.NODE_CLUSTERS:
        assert times[cluster, 64, "tokenring, hybrid"] < times[cluster, 64, "tokenring"]


def test_steps_and_lanes_of_a_record(runs: Runs) -> None:
    record = runs.one(method="tokenring", gpus=4, seqlen="8k", cluster="ascend_oam", phase="forward", causal=False)
    ends = step_ends_ms(record)
    assert ends == sorted(ends) and len(ends) == 5
    assert ends[-1] == pytest.approx(record.forward_ms_median)
    both, one = lanes_together(record, ("q", "o"))
    assert 0 < both < both + one <= 1
    assert max(share.max() for share in busy_links(record).values()) <= 1 + 1e-9


def test_a_record_of_other_code_is_refused(runs: Runs) -> None:
    record = runs.one(method="ring", gpus=4, seqlen="8k", cluster="ascend_oam", phase="forward")
    with pytest.raises(ValueError, match="other code"):
        choice_of(replace(record, step_ms_median=1.0))
    with pytest.raises(ValueError, match="unsupported"):
        choice_of(runs.one(method="ulysses", gpus=64, seqlen="8k"))


@pytest.mark.long
def test_notebook_runs(runs: Runs, tmp_path: Path) -> None:
    assert notebooks.execute("tokenring", tmp_path, runs.folder) == ""


def test_a_source_names_what_was_changed_of_a_cluster(runs: Runs) -> None:
    asked = {"method": "ring", "gpus": 16, "seqlen": "16k", "phase": "forward", "cluster": "ascend_oam"}
    record = runs.one(**asked, cluster__gpus_per_node=16, cluster__inter__bytes_per_s=1e9)
    command = record_source(record).text
    assert "cluster=ascend_oam cluster.gpus_per_node=16 cluster.inter.bytes_per_s=1000000000.0" in command
    assert runs.ask([tuple(command.split()[3:])])[0].run_id == record.run_id
