"""The findings of the Ring Attention study."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench.analysis import notebooks
from sp_bench.analysis.paper_tables import claims, rows
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies.ring.arithmetic import FILE, explainer, is_right, items
from sp_bench.analysis.studies.ring.held import GPUS, SETTLED, memory
from sp_bench.analysis.studies.ring.model import STEP, Setting
from sp_bench.analysis.studies.ring.onset import HIDDEN, onsets, settings
from sp_bench.plan.mask import CAUSAL
from tests.support.sections import numbers, table_of
from tests.support.typed import of_kind


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("records"), workers=1)


@pytest.mark.long
def test_memory_is_linear_in_a_ranks_tokens_whatever_the_sequence(runs: Runs) -> None:
    table = {of_kind(int, row[0]): numbers((row[2], row[3], row[5])) for row in table_of(memory(runs)).rows}
    assert set(table) == set(GPUS)
    settled = [row for n, row in table.items() if n >= SETTLED]
    _, held, whole = settled[0]
    assert all(row[1].kind == "computed" for row in settled)
    assert all(row[1].known == pytest.approx(held.known, rel=1e-3) for row in settled)
    assert all(row[2].known == pytest.approx(whole.known, rel=1e-3) for row in settled)
    assert table[256][0].known == pytest.approx(table[4][0].known / 64, rel=1e-3)


def test_the_condition_is_flops_over_bandwidth() -> None:
    setting = Setting("h100_ndr400", 2)
    assert setting.gpus == 16
    assert setting.hop_bytes_per_s() == pytest.approx(4.7e10)
    assert setting.paper_tokens().known == pytest.approx(989.4e12 / 4.7e10)
    # An Ascend node shares a GPU's HCCS cables out over its pairs; a PCIe tree's slowest hop is its uplink.
    assert Setting("ascend_oam", 1).hop_bytes_per_s() == pytest.approx(1.6e11 / 7)
    assert Setting("a10_pcie", 1).hop_bytes_per_s() == pytest.approx(1.3e10)
    assert "no peak" in Setting("ascend_oam", 1).paper_tokens().why


def test_a_mask_halves_what_there_is_to_hide_behind() -> None:
    setting = Setting("h100_ndr400", 2)
    assert 1.8 < setting.least_tokens(CAUSAL).known / setting.least_tokens().known < 2.2


def test_the_simulator_hides_from_where_the_rates_say(runs: Runs) -> None:
    (onset,) = onsets(runs, [Setting("a100_hdr200", 2)])
    shares = [share.known for share in onset.shares.values()]
    assert onset.from_block.known == pytest.approx(onset.least.known, rel=0.12)
    assert shares == sorted(shares) and shares[0] < 0.5 and shares[-1] >= HIDDEN
    assert all(block % STEP == 0 for block in onset.shares)


def test_every_preset_is_looked_at() -> None:
    assert len(settings()) == len(set(settings())) == 16


def test_the_explainers_numbers(runs: Runs) -> None:
    found = {item.name: item for item in items(runs)}
    said = claims(FILE, "name")
    assert {row["name"] for row in rows(FILE)} - set(found) == {
        *("sequence", "gpus", "width", "element", "network", "serial_compute", "serial_transfer")
    }
    right = {name for name, item in found.items() if item.again.value is not None and is_right(said[name], item.again)}
    assert {name for name in found if name not in right} == {"round_compute", "share", "overlap_use"}
    # A KV chunk is two tensors of 125,000 x 4096 x 2 bytes, and 7 of 8 rounds send one.
    assert found["round_bytes"].ring.value == pytest.approx(2 * 125_000 * 4096 * 2 / 1e9)
    assert found["total_bytes"].ring.value == pytest.approx(7 * 2 * 125_000 * 4096 * 2 / 1e9)
    assert found["rounds"].ring.value == 7
    assert found["overlap_use"].again.value == pytest.approx(100 * 8 / 15)
    assert found["share"].again.value == pytest.approx(0.5)
    assert found["round_compute"].ring.kind == found["share"].ring.kind == "simulated"
    assert len(table_of(explainer(runs)).rows) == 11


@pytest.mark.exhaustive
def test_notebook_runs(runs: Runs, tmp_path: Path) -> None:
    assert notebooks.execute("ring", tmp_path, runs.folder) == ""
