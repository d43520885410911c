"""Implementations of plans: what merging costs, which blocks are one call, and hosts that are slower than devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sp_bench import methods
from sp_bench.__main__ import main
from sp_bench.cluster import Cluster
from sp_bench.cluster.implementation import OURS, Implementation
from sp_bench.plan import Plan, Problem
from sp_bench.plan.tensors import DQ, O, Tensor
from sp_bench.point.simulated import simulate_point
from sp_bench.resources import conf_content, conf_files
from sp_bench.simulate import Run, simulate
from sp_bench.simulate.graph import build_graph
from tests.support.points import point
from tests.support.problems import mask_of

UNFUSED = Implementation(name="test", fold_bytes_per_element=40)


def cluster(name: str, implementation: Implementation = OURS) -> Cluster:
    files = conf_files("cluster")
    found = Cluster.build(conf_content(files[name], files))
    return replace(found, device=found.device.used_by(implementation))


def problem(layout: str, *, causal: bool = True, n: int = 8, tokens: int = 2048) -> Problem:
    mask = mask_of(causal)
    of_mask = mask.layout(layout)
    return Problem(n=n, seqlen=n * tokens, heads=8, kv_heads=8, head_dim=128, mask=mask, layout=of_mask)


def planned(p: Problem, method: str, options: dict[str, object]) -> tuple[Plan, Problem]:
    chosen = methods.build(method, options)
    p = chosen.assigned(p)
    return chosen.plan(p, "forward", cluster("h100_ndr400").profile(p)), p


def run(p: Problem, implementation: Implementation, method: str = "ring", **options: object) -> Run:
    plan, p = planned(p, method, options)
    return simulate(plan, p, cluster("h100_ndr400", implementation))


@pytest.mark.parametrize(("layout", "rows"), [("contiguous", 7), ("zigzag", 3.5)])
def test_merging_moves_what_is_counted(layout: str, rows: float) -> None:
    """Each of 7 hops merges a rank's rows, or zigzag's last rank's half of them, at 40 bytes for an element."""
    p = problem(layout, causal=layout == "zigzag")
    device = cluster("h100_ndr400").device
    elements, bytes_per_s = 2048 * 8 * (128 + 1), device.fold_bytes_per_s  # an lse for each row and head
    free = run(p, replace_bytes(1e-9)).work_s
    rank = {"contiguous": 0, "zigzag": 0}[layout]
    taken = run(p, UNFUSED).work_s[rank] - free[rank]
    assert taken == pytest.approx(rows * 40 * elements / bytes_per_s, rel=1e-3)
    slices = UNFUSED.replace(slice_bytes_per_element=8)
    more = run(p, slices).work_s[rank] - run(p, UNFUSED).work_s[rank]
    assert more == pytest.approx((layout == "zigzag") * rows * 8 * elements / bytes_per_s, abs=1e-9)


def replace_bytes(size: float) -> Implementation:
    return UNFUSED.replace(fold_bytes_per_element=size)


def test_blocks_that_wait_for_nothing_are_one_call() -> None:
    """All-gather has its own block and then one of all other keys: it merges once, not seven times."""
    p = problem("contiguous", causal=False)
    one, many = (
        run(p, UNFUSED.replace(joins_blocks=joins), "all_gather", stride=8).work_s.max()
        - run(p, replace_bytes(1e-9).replace(joins_blocks=joins), "all_gather", stride=8).work_s.max()
        for joins in (True, False)
    )
    assert many == pytest.approx(7 * one, rel=1e-3)
    joined, single = (run(p, UNFUSED.replace(joins_blocks=joins)).work_s for joins in (True, False))
    np.testing.assert_array_equal(joined, single)


def test_a_slow_host_is_what_small_blocks_wait_for() -> None:
    large, small = problem("contiguous", causal=False, tokens=16384), problem("contiguous", causal=False, tokens=256)
    host = OURS.replace(host_s_per_block=3e-4)
    assert run(small, host).makespan_s == pytest.approx(8 * 3e-4, rel=0.1)
    assert run(small, OURS).makespan_s < 0.5 * run(small, host).makespan_s
    assert run(large, host).makespan_s == run(large, OURS).makespan_s


@pytest.mark.parametrize(("share", "sliced"), [(1.0, False), (1.0, True), (0.5, True)])
def test_ours_is_one_pass_over_the_rows_that_a_block_has(share: float, sliced: bool) -> None:
    """A fold reads its part and both ways the accumulator; the first one writes all of that, and zeros are written."""
    device, p = cluster("h100_ndr400").device, problem("zigzag")
    rows = 2048 * 8

    def moved(tensor: Tensor, bytes_per_s: float, *, first: bool) -> float:
        taken_s = device.fold_s(p, tensor, share=share, sliced=sliced, first=first)
        return (taken_s - device.launch_s) * bytes_per_s / rows

    assert moved(O, device.fold_bytes_per_s, first=False) == pytest.approx(share * (128 * 10 + 12))
    assert moved(DQ, device.sum_bytes_per_s, first=False) == pytest.approx(share * 128 * 10)
    assert moved(DQ, device.sum_bytes_per_s, first=True) == pytest.approx(128 * (2 * share + 4))
    lse = sliced * 4 * (1 + share)  # of a block with all rows it becomes the accumulator's
    assert moved(O, device.sum_bytes_per_s, first=True) == pytest.approx(128 * (2 * share + 4) + lse)


@pytest.mark.parametrize("trim", [True, False])
def test_arrived_partials_are_merged_where_they_have_rows(trim: bool) -> None:
    """Ranks merge 7 partials. With `trim` those of later ranks' keys have half of the rows, as zigzag assigns them."""
    p, found = problem("zigzag"), cluster("h100_ndr400")
    plan, p = planned(p, "tokenring", {"trim": trim})
    free = replace(found, device=replace(found.device, fold_bytes_per_s=1e30))
    taken_s = simulate(plan, p, found).work_s - simulate(plan, p, free).work_s
    rank = np.arange(8)
    whole_s = found.device.fold_s(p, O, arriving=True) - found.device.launch_s
    assert taken_s == pytest.approx(whole_s * (rank + (7 - rank) / 2 if trim else 7 + 0 * rank))


def test_rows_that_are_sent_are_cut_out_or_cast() -> None:
    """Rank 0 cuts the later half of 7 Q, which go on so. Of 7 partials, ranks cast the half for earlier ranks, and else
    all."""
    p, found = problem("zigzag", tokens=1024), cluster("h100_ndr400")
    plan, p = planned(p, "tokenring", {})

    def moved_bytes(key: str) -> np.ndarray:
        rate, delays_s = getattr(found.device, key), []
        for bytes_per_s in (rate, rate / 2):
            graph = build_graph(plan, p, replace(found, device=replace(found.device, **{key: bytes_per_s})))
            delays = graph.by_rank(graph.tasks.delay_s)[graph.rows_of(blocks=False)]
            delays_s.append(delays.sum(axis=0)[graph.quotient.orbit])
        return (delays_s[1] - delays_s[0]) * rate

    rank, row_elements = np.arange(8), 8 * 128
    assert moved_bytes("memory_bytes_per_s") == pytest.approx((rank == 0) * 7 * 512 * row_elements * 2 * 2)
    cast_rows = rank * 512 + (7 - rank) * 1024
    assert moved_bytes("sum_bytes_per_s") == pytest.approx(cast_rows * row_elements * (4 + 2))


def test_crowded_pcie_links_lose_capacity() -> None:
    """An all-to-all of 8 gets a fraction of what a ring gets; without the switch both get the links' rate."""
    found = cluster("l20_pcie")
    intra = found.topology.intra
    free = replace(found, topology=found.topology.replace(intra=intra.replace(crowding=0.0)))
    p = problem("contiguous", causal=False, tokens=4096)
    times = {}
    for method in ("ring", "ulysses"):
        plan, assigned = planned(p, method, {})
        times[method] = [simulate(plan, assigned, each).makespan_s for each in (found, free)]
    assert times["ring"][0] == times["ring"][1]
    assert times["ulysses"][0] > 2 * times["ulysses"][1]
    assert found.network(8).crowding(np.array([False, True]), 7).tolist() == [pytest.approx(7**0.78), 1.0]


def test_somebody_elses_code_is_not_measured_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = ["method=ring", "gpus=2", "seqlen=1k", "heads=2", "head_dim=64", "dtype=float32", "logger=none"]
    assert main([*point, "cluster=local", "implementation=published", f"results_dir={tmp_path}"]) == 2
    assert "implementation=published: is simulated only" in capsys.readouterr().err


REPEATING = (
    "gpus=8", "seqlen=64k", "heads=16", "head_dim=128", "dtype=bfloat16", "cluster=b200", "kernel=cudnn",
    "implementation=published", "implementation.host_s_per_block=0", "mode=simulate",
)  # fmt: skip
CHUNK, RATE, LAUNCH_S = 64 * 1024 // 8, 6e11, 5e-6


def _repeating_ms(*keys: str) -> dict[str, float]:
    """Milliseconds that a rank computes more in each phase than with `repeats_keys` empty."""
    found = {}
    for phase in ("forward", "backward"):
        each = [
            simulated(*keys, *REPEATING, f"phase={phase}", *without)
            for without in ((), ("implementation.repeats_keys=[]",))
        ]
        found[phase] = each[0] - each[1]
    return found


def simulated(*keys: str) -> float:
    record, _ = simulate_point(point(*keys))
    assert record.compute_ms is not None
    return record.compute_ms


def _ms(tokens: float, key_heads: int, *, calls: int, blocks: int) -> float:
    """Blocks that repeat so many keys together for 16 heads, and add the gradients of each of some calls."""
    row_bytes = 2 * 128 * 2 * (16 + key_heads)  # K and V
    return 1e3 * (blocks * 2 * (1 + calls) * LAUNCH_S + (1 + calls) * tokens * row_bytes / RATE)


def test_keys_are_repeated_before_each_of_several_backward_calls() -> None:
    """All of a ring's eight. Not before Ulysses' only one, nor in a forward, nor where each head has its keys."""
    ring = ("method=ring", "method.layout=contiguous", "causal=false")
    wanted = _ms(8 * CHUNK, 4, calls=1, blocks=8)
    assert _repeating_ms(*ring, "kv_heads=4") == pytest.approx({"forward": 0.0, "backward": wanted}, rel=1e-6)
    nothing = pytest.approx({"forward": 0.0, "backward": 0.0})
    assert _repeating_ms(*ring, "kv_heads=16") == nothing
    assert _repeating_ms("method=ulysses", "causal=false", "kv_heads=8") == nothing


def test_a_joined_call_for_each_piece_of_the_queries_gets_all_keys_repeated() -> None:
    """All-gather in zigzag order: seven blocks in two calls, whatever share of their keys the mask leaves. The rank's
    own is one causal region.
    """
    keys = ("method=all_gather", "method.layout=zigzag", "method.stride=4", "kv_heads=4", "causal=true")
    joined, own = _ms(7 * CHUNK, 4, calls=2, blocks=7), _ms(CHUNK, 4, calls=1, blocks=1)
    found = _repeating_ms(*keys)
    assert found == pytest.approx({"forward": 0.0, "backward": joined + own}, rel=1e-6)
