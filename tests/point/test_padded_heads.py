"""Points of padded heads: what their records say, what they cost in simulation, and where they are tried."""

from __future__ import annotations

import pytest

from sp_bench.__main__ import main
from sp_bench.advise.__main__ import main as advise
from sp_bench.advise.candidates import Question, answer, for_method
from sp_bench.describe import main as describe
from sp_bench.point.simulated import simulate_point
from sp_bench.records import Record
from tests.support.points import point

ON = ("gpus=8", "seqlen=16k", "cluster=h100_ndr400", "mask=full")
PAD = "method.pad_heads=true"


def simulated(*overrides: str) -> Record:
    return simulate_point(point(*ON, *overrides))[0]


@pytest.mark.parametrize("method", ["ulysses", "upipe"])
def test_a_record_counts_padded_heads_and_its_mfu_true_ones(method: str) -> None:
    """28 heads of 4 key heads cost what 32 of 4 do, and the copies that pad; the work that counts is 7/8 of that."""
    padded = simulated(f"method={method}", "heads=28", "kv_heads=4", PAD)
    whole = simulated(f"method={method}", "heads=32", "kv_heads=4")
    assert (padded.heads, padded.kv_heads, padded.padded_heads, padded.padded_kv_heads) == (28, 4, 32, 4)
    assert (whole.padded_heads, whole.padded_kv_heads) == (None, None)
    assert padded.comm_bytes_per_gpu == padded.comm_bytes_expected == whole.comm_bytes_per_gpu
    assert padded.comm_bytes_lower_bound and whole.comm_bytes_lower_bound
    assert padded.comm_bytes_lower_bound < whole.comm_bytes_lower_bound
    assert padded.peak_mem_bytes_max and whole.peak_mem_bytes_max and whole.variant is not padded.variant
    assert padded.peak_mem_bytes_max > whole.peak_mem_bytes_max
    assert padded.kernels_ms == whole.kernels_ms
    assert padded.step_ms_median and whole.step_ms_median
    copies_ms = padded.step_ms_median - whole.step_ms_median
    assert 0 < copies_ms < 0.1 * whole.step_ms_median
    assert padded.mfu and whole.mfu
    assert padded.mfu == pytest.approx(7 / 8 * whole.mfu * whole.step_ms_median / padded.step_ms_median)
    assert padded.variant is not None and padded.variant.endswith("padded to 32/4 heads")
    assert padded.validation is not None and "have no padded heads" in padded.validation


def test_copies_take_the_time_of_the_memory_that_they_move() -> None:
    """Twelve kernels: zeros for Q, K, V and dO and their heads into them, and Out, dQ, dK and dV out of the padded."""
    padded, whole = (
        simulated("method=ulysses", "kv_heads=4", *words).step_ms_median or 0.0
        for words in (("heads=28", PAD), ("heads=32",))
    )
    device = point(*ON).cluster.device
    filled, read_and_written = 32 + 4 + 4 + 32, 2 * 2 * (28 + 4 + 4 + 28)
    moved_bytes = (filled + read_and_written) * 16 * 1024 // 8 * 128 * 2
    assert device.memory_bytes_per_s
    copies_s = 12 * device.launch_s + moved_bytes / device.memory_bytes_per_s
    assert padded - whole == pytest.approx(1e3 * copies_s, rel=1e-6)


def test_padding_is_tried_where_it_is_asked_for_alone() -> None:
    asked = ("method=usp", "heads=28", "kv_heads=7", "method.layout=auto")
    without, padded = simulated(*asked), simulated(*asked, PAD)
    assert without.candidates is None and without.variant == "ulysses 1 x ring 8"
    variants = [row["variant"] for row in padded.candidates or ()]
    assert any("ulysses 8 x ring 1 padded to 32/8 heads" in variant for variant in variants)
    assert any(variant == "ulysses 1 x ring 8" for variant in variants)


def test_advice_pads_where_it_is_asked_to() -> None:
    methods, asked = ("ulysses", "ring"), [*ON, "heads=28", "kv_heads=4"]
    assert "method.pad_heads=true would work" in answer(Question(asked, methods)).refused["ulysses"]
    found = answer(Question([*asked, PAD], methods))
    assert {each.name for each in found.feasible} == {"ulysses padded to 32/4 heads", "ring 1x8"}
    assert for_method([PAD, "gpus=8"], "ring") == ["gpus=8", "method=ring"]


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    heads = ["heads=40", "kv_heads=10", PAD]
    assert describe(["method=ulysses", "gpus=8", "seqlen=1k", *heads]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "40 heads are padded to 48, and 10 key heads to 24, each key head 2 times" in text
    assert main(["method=ulysses", *ON, *heads, "baseline=null", "--all"]) == 0
    assert "8 of 48; of keys, copies included, 14 of 24" in " ".join(capsys.readouterr().out.split())
    assert main(["method=ulysses", *ON, *heads[:2]]) == 2
    assert "method.pad_heads=true would work" in " ".join(capsys.readouterr().err.split())
    assert main(["method=ulysses", *ON, *heads[:2], "method.pad_heads=4"]) == 2
    assert advise([*ON, *heads[:2], "method.pad_heads=4"]) == 2
    assert capsys.readouterr().err.count("method.pad_heads=4: must be true or false") == 2
