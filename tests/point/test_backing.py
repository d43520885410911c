"""Validation of simulated records, the intervals that follow, and that all who show them agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sp_bench import records
from sp_bench.advise.candidates import Feasible
from sp_bench.analysis.explorer import columns
from sp_bench.cli.rows import ROWS
from sp_bench.cli.words import number, ratio, speed_up
from sp_bench.describe import memory_front
from sp_bench.methods import build
from sp_bench.plan.documents import Chunked, Documents, Window
from sp_bench.plan.layout import Positions
from sp_bench.plan.mask import CAUSAL, FULL, WHOLE, WholeMask
from sp_bench.plan.regions import Regions
from sp_bench.point import Outcome
from sp_bench.point import backing as backings
from sp_bench.point.backing import BETWEEN_NODES, PACKS, TELLING, Backing, Kind, Validation, figures_of, known, row_of
from sp_bench.point.choose import choose
from sp_bench.point.simulated import simulate_point
from sp_bench.point.training import simulate_training
from sp_bench.records import Record
from sp_bench.records.interval import Interval, interval
from sp_bench.resources import conf_files
from sp_bench.workload import Train
from tests.support.made_records import made
from tests.workload.requests import point

H100 = ("model=none", "workload=attention", "cluster=h100_ndr400", "seqlen=32k", "dtype=bfloat16", "mode=simulate")
H100 += ("implementation=published",)
RING, TILED = ("KV passed on", "NVLink"), "KV passed on and Q and outputs passed on"
TILES = "cluster=a800 kernel=flash_attn implementation=ultraattn"
BACKED = (
    ("method=ring gpus=8", RING),
    ("method=ring gpus=8 causal=false", RING),
    ("method=ring gpus=16", ("KV passed on", BETWEEN_NODES)),
    ("method=ulysses gpus=8", ("all-to-alls", "NVLink")),
    ("method=usp method.ulysses=2 gpus=8 cluster=a100_hdr200", ("KV passed on and all-to-alls", "NVLink")),
    ("method=ring gpus=8 cluster=l20_pcie", ("KV passed on", "PCIe")),
    ("method=ulysses gpus=8 cluster=b200", ("all-to-alls", "NVLink")),
    ("method=reference gpus=1 seqlen=8k cluster=a100_hdr200", ("no transfers", "NVLink")),
    (f"method=mesh method.tile=[2,4] gpus=8 {TILES}", (TILED, "NVLink")),
    (f"method=mesh method.tile=[2,4] method.form=gather gpus=8 {TILES}", (TILED, "NVLink")),
    (f"method=startrail method.team=2 gpus=16 {TILES}", (TILED, BETWEEN_NODES)),
)
"""Points of whose kind there are measurements, on their cluster."""
OURS_BACKED = (
    ("method=ring gpus=64 seqlen=256k implementation=ours", ("KV passed on", BETWEEN_NODES)),
    (
        "method=usp method.ulysses=2 gpus=8 seqlen=512k cluster=a100_hdr200 implementation=ours",
        ("KV passed on and all-to-alls", "NVLink"),
    ),
    ("method=ulysses gpus=8 implementation=ours", ("all-to-alls", "NVLink")),
)
"""Points of such kinds with our implementation, which takes as long as the one that was measured."""
UNMEASURED = (
    ("method=mesh method.tile=[8,32] gpus=256 seqlen=1M heads=32", "KV, Q and outputs passed on over several nodes"),
    ("method=mesh method.tile=[2,4] gpus=8", "KV, Q and outputs passed on over NVLink"),
    ("method=startrail method.team=2 gpus=8", "KV, Q and outputs passed on over NVLink"),
    ("method=tokenring gpus=16", "Q and outputs passed on over several nodes"),
    ("method=pass_q gpus=4 cluster=a10_pcie", "Q and outputs passed on over PCIe"),
    ("method=ring gpus=8 cluster=ascend_oam", "KV passed on over cables"),
    (
        "method=mesh method.tile=[2,4] gpus=8 mask=document data=equal",
        "mask=document, KV, Q and outputs passed on",
    ),
    (
        "method=group_cast method.qo_comm=true method.ulysses=1 gpus=8 mask=document data=long implementation=ours",
        "rows cast and rows of Q and outputs cast over NVLink",
    ),
    ("method=ring gpus=8 mask=document data=equal window=[63,0]", "mask=document with a window"),
    ("method=ring gpus=8 mask=window window=[4095,0]", "mask=window, KV passed on over NVLink"),
    ("method=ring gpus=8 mask=chunked chunk=8k", "mask=chunked, KV passed on over NVLink"),
    ("method=ring gpus=8 seqlen=16k model=llama_1b workload=train heads=32", "whole steps of workload=train"),
)
"""Points of a kind that nobody measured, and what their record says."""
OTHER = (
    "method=ring gpus=16 cluster.inter.bytes_per_s=1.0e+10",
    "method=ring gpus=16 cluster.inter.latency_s=1.0e-4",
    "method=ring gpus=16 cluster.placement=cyclic",
    "method=ring gpus=16 cluster.fabric={nodes_per_leaf:1,oversubscription:4}",
    "method=ring gpus=8 cluster.intra.bytes_per_s=1.0e+10",
    "method=ring gpus=8 cluster.gpus_per_node=16",
    "method=ring gpus=8 cluster.device.launch_s=1.0e-3",
    "method=ring gpus=8 cluster=b200 kernel=flash_attn_4",
    "method=ring gpus=8 cluster=h200_ndr400",
    "method=ring gpus=16 cluster=a100_hdr200",
    "method=tokenring gpus=4 cluster=shaped dtype=float32 heads=4 head_dim=64 seqlen=2k",
)
"""Points of a kind that was measured, on a cluster whose figures are not those of any that was."""
OTHER_CODE = (
    ("method=ring gpus=8 implementation=ours", "are of implementation=published, which takes at least "),
    (
        "method=all_gather gpus=64 seqlen=1M implementation=ours",
        "implementation=published, which is simulated to take ",
    ),
    ("method=ring gpus=8 implementation.host_s_per_block=1.0e-3", "are of implementation=published"),
    ("method=ring gpus=8 kernel=flash_attn", "whose figures are others"),
    ("method=ring gpus=8 mask=document data=long implementation=ours", "are of implementation=published, which takes"),
    ("method=all_gather method.fuse=true gpus=8 seqlen=64k implementation=ours", "have no fused blocks"),
)
"""Points of a kind that was measured, of code that nobody has measured, and what their record says."""
SAME = (
    "method=ring gpus=16 cluster.name=acme",
    "method=ring gpus=8 cluster.device.name=acme",
    "method=ring gpus=16 cluster.inter.bytes_per_s=47e9",
    "method=ring gpus=8 cluster.inter.bytes_per_s=1.0e+10",
    "method=ring gpus=8 cluster.device.memory_bytes=9.0e+10",
)
"""A measured cluster under another name, and with changes that no time of the point depends on."""


def simulated(overrides: str) -> Record:
    given = {override.partition("=")[0] for override in overrides.split()}
    request = point(*(key for key in H100 if key.partition("=")[0] not in given), *overrides.split())
    return simulate_training(request) if isinstance(request.workload, Train) else simulate_point(request)[0]


@pytest.mark.parametrize(("overrides", "kind"), [*BACKED, *OURS_BACKED])
def test_a_record_says_what_backs_it(overrides: str, kind: tuple[str, str]) -> None:
    """In words, as the kind of its points, and as two numbers."""
    record, backing = simulated(overrides), row_of(Kind("attention", WHOLE, *kind))
    assert backing
    theirs = simulated(overrides.replace("implementation=ours", "implementation=published"))
    apart = abs((theirs.step_ms_median or 0) / (record.step_ms_median or 1) - 1)
    assert apart < TELLING and f"n={backing.points}" in backing.words() == theirs.validation
    assert apart == 0 or (overrides, kind) in OURS_BACKED
    of_theirs = [f"public code, {apart:.1%} apart"] if apart else []
    assert record.validation == backing.words(*of_theirs)
    assert record.validation_kind == backing.kind._asdict()
    # Ours may have a layout that takes theirs a little longer than the best.
    assert record.validation_error == pytest.approx(backing.two_of_three + apart, abs=1e-3)
    step_ms, low, high = record.step_ms_median, record.step_ms_validated_low, record.step_ms_validated_high
    assert step_ms and low and high and low < step_ms < high
    assert (step_ms / low - 1, 1 - step_ms / high) == pytest.approx((record.validation_error,) * 2)


@pytest.mark.parametrize(("overrides", "says"), UNMEASURED)
def test_a_kind_that_nobody_measured_has_no_interval(overrides: str, says: str) -> None:
    record = simulated(overrides)
    assert (record.validation or "").startswith("not validated (") and says in (record.validation or "")
    assert_not_validated(record)


@pytest.mark.parametrize("overrides", OTHER)
def test_other_figures_than_those_that_were_measured_have_no_interval(overrides: str) -> None:
    """The files of the suite, overrides of them, and a cluster of one's own."""
    record = simulated(overrides)
    assert (record.validation or "").startswith("not validated (measurements of ")
    assert (record.validation or "").endswith("whose figures are others)")
    assert_not_validated(record)


@pytest.mark.parametrize(("overrides", "says"), OTHER_CODE)
def test_other_code_than_was_measured_has_no_interval(overrides: str, says: str) -> None:
    """Ours has one only where the code that was measured is simulated to take as long."""
    record = simulated(overrides)
    assert (record.validation or "").startswith("not validated (measurements of ") and says in (record.validation or "")
    assert_not_validated(record)


@pytest.mark.parametrize("overrides", SAME)
def test_the_same_figures_by_another_name_are_validated(overrides: str) -> None:
    assert simulated(overrides).step_ms_validated_low is not None


@pytest.mark.parametrize(
    "overrides", ["method=upipe method.stages=2", "method=group_cast method.ulysses=2 method.slices=2"]
)
def test_all_to_alls_in_stages_were_not_measured(overrides: str) -> None:
    """Those of whole sequences. Group casts of packs were measured as this suite takes them, in slices or not."""
    record = simulated(f"{overrides} gpus=8 kv_heads=8")
    assert "exchange all heads at once" in (record.validation or "")
    assert_not_validated(record)
    assert simulated("method=upipe method.stages=1 gpus=8 kv_heads=8").step_ms_validated_low is not None


def test_stragglers_were_not_measured() -> None:
    record = simulated("method=ring gpus=8 stragglers.ranks={0:1.5}")
    assert "have no stragglers" in (record.validation or "")
    assert_not_validated(record)


@pytest.mark.parametrize("overrides", ["method=ring gpus=16 method.layout=zigzag", "method=all_gather gpus=8"])
def test_only_their_code_is_simulated_beside_ours(overrides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours was simulated with nearly alike ranks when it was chosen, and isn't again."""
    request = point(*(key for key in H100 if "implementation" not in key), *overrides.split())
    choice, clusters = choose(request), list[str]()
    again = backings.simulated(replace(choice, runs={}), request.cluster, nearly_alike=True)
    assert choice.nearly_s == again.total_s

    def counted(*arguments: Any, **keys: Any) -> Any:
        clusters.append(arguments[1].device.implementation.name)
        return simulated_choice(*arguments, **keys)

    simulated_choice = backings.simulated
    monkeypatch.setattr(backings, "simulated", counted)
    backings.validated(request, choice)
    assert clusters == ["published"]


def test_of_many_ranks_their_code_is_not_simulated_where_it_may_be_much_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no interval either way: the bound is no more than what it is simulated to take."""
    asked = ("method=all_gather", "gpus=32", "seqlen=128k")
    request = point(*(key for key in H100 if "implementation" not in key), *asked)
    choice = choose(request)
    whole = backings.validated(request, choice).why_not
    monkeypatch.setattr(backings, "MANY_RANKS", 32)
    monkeypatch.setattr(backings, "simulated", lambda *_, **__: pytest.fail("simulated"))
    bounded = backings.validated(request, choice).why_not
    assert "which is simulated to take" in whole and "which may take as little as" in bounded
    bound_ms, simulated_ms = (float(why.split()[-2]) for why in (bounded, whole))
    assert bound_ms <= simulated_ms < (1 - backings.TELLING) * 1e3 * choice.total_s


def test_their_code_is_not_simulated_where_a_bound_shows_that_it_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    request = point(*(key for key in H100 if "implementation" not in key), "method=ring", "gpus=8")
    choice = choose(request)
    as_theirs = choose(point(*H100, "method=ring", "gpus=8", f"method.layout={choice.problem.layout.name}"))
    monkeypatch.setattr(backings, "simulated", lambda *_, **__: pytest.fail("simulated"))
    why = backings.validated(request, choice).why_not
    assert "of implementation=published, which takes at least " in why
    least_ms = float(why.split()[-2])
    assert 1e3 * choice.total_s * (1 + TELLING) < least_ms <= 1.001 * 1e3 * as_theirs.total_s


def assert_not_validated(record: Record) -> None:
    assert record.step_ms_validated_low is record.step_ms_validated_high is record.validation_error is None
    assert {*(record.validation_kind or {})} == {"workload", "mask", "transfers", "links"}
    assert not interval(record).backed


@pytest.mark.parametrize(
    "overrides",
    [
        *(BACKED[i][0] for i in (0, 2, 5)),
        *(UNMEASURED[i][0] for i in (0, 6, 8, 10)),
        *(OTHER[i] for i in (0, 10)),
        SAME[1],
    ],
)
def test_command_line_record_explorer_and_advice_agree(overrides: str, tmp_path: Path) -> None:
    """All show the two numbers that stand in the record, or none where it has none, after it was written and read."""
    made_now = simulated(overrides)
    path = records.write(tmp_path, made_now)
    record = records.read(path)
    low, high = record.step_ms_validated_low, record.step_ms_validated_high
    assert interval(record).ends == (None if low is None else (low, high))
    cells = {row.name.strip(): row.cell(record) for row in ROWS}
    assert cells["step [95% interval]"] == "-"
    ends = "" if low is None or high is None else f" [{number(low)}, {number(high)}]"
    assert cells["step [two of three]"] == f"{number(record.step_ms_median, 5)} ms{ends}"
    assert ("not validated" in cells["validation"]) == (low is None)
    found = columns.columns({path: record})
    explored = [found[side]["step_ms_median"][0] for side in ("low", "high")]
    assert explored == [None if end is None else pytest.approx(end, rel=1e-8) for end in (low, high)]
    assert all((found["low"][name][0] is None) == (low is None) for name in ("step_ms_median", "tokens_per_s"))
    advised = Feasible(build("ring", {}), record).time
    assert (advised.low_ms, advised.high_ms) == (low, high)


def test_the_front_of_memory_has_the_intervals_of_records() -> None:
    request = point("method=ring", "method.layout=search", "gpus=8", *H100)
    record = simulate_point(request)[0]
    fastest = memory_front(request)[-1].interval
    ends = (record.step_ms_validated_low, record.step_ms_validated_high)
    assert (fastest.low_ms, fastest.high_ms) == pytest.approx(ends)
    assert not any(
        one.interval.backed for one in memory_front(point("method=ring", "gpus=8", "cluster.gpus_per_node=16", *H100))
    )


def test_every_mask_is_a_class_of_its_own_but_causal_and_full() -> None:
    class Prefix(WholeMask):
        """A new one, that nobody has measured."""

        name = "prefix"
        flops_share, balanced_layout = 0.75, "zigzag"

        def regions(self, q: Positions, kv: Positions) -> Regions:
            return FULL.regions(q, kv)

        def relation(self, q_chunk: int, kv_chunk: int) -> int:
            return 0

    windowed = Documents((8, 8), True, 3)
    masks = (Documents((8, 8)), windowed, Window((16,), True, 3), Chunked.of(8, 16))
    assert CAUSAL.measured_as == FULL.measured_as == WHOLE
    assert len({WHOLE, *(mask.measured_as for mask in masks)}) == 1 + len(masks)
    assert Prefix().measured_as == "mask=prefix"


def test_an_interval_holds_the_measured_times_that_the_error_allows() -> None:
    backing = Backing(Kind("attention", WHOLE, *RING), 0.1, 0.25, 4, "published", {})
    found = Validation(backing.kind, backing).around(100.0)
    assert (found.low_ms, found.high_ms) == pytest.approx((80, 400 / 3)) and found.backed
    no_end = Validation(backing.kind, backing._replace(two_of_three=1.0)).around(100.0)
    assert not no_end.backed
    measured = made("ring", mode="measure", step_ms_median=10.0, step_ms_ci95_low=9.0, step_ms_ci95_high=12.0)
    assert interval(measured).ends == (9.0, 12.0)
    assert interval(made("ring", mode="measure", step_ms_median=10.0)).ends is None


def test_intervals_overlap_only_where_both_are_known() -> None:
    one, reached, beyond = (Interval(x - 2, x, x + 2) for x in (10.0, 14.0, 14.1))
    unknown = Interval(None, 10.0, None)
    assert one.overlaps(reached) and reached.overlaps(one) and not one.overlaps(beyond)
    assert not unknown.overlaps(one) and not one.overlaps(unknown) and not unknown.overlaps(unknown)


def step(ms: float, error: float | None) -> Record:
    ends: dict[str, Any] = {}
    if error is not None:
        ends = {"step_ms_validated_low": ms / (1 + error), "step_ms_validated_high": ms / (1 - error)}
    return made("ring", mode="simulate", step_ms_median=ms, **ends)


@pytest.mark.parametrize(
    ("error", "shown"), [(0.001, "2.36x"), (0.02, "2.36x"), (0.05, "2.4x"), (0.9, "2x"), (None, "2.4x")]
)
def test_a_speed_up_has_the_digits_that_its_steps_leave_it(error: float | None, shown: str) -> None:
    """Its last digit stands where the first one of its error does."""
    assert ratio(step(23.6, error), step(10.0, error)) == shown


def test_steps_with_common_times_are_too_close_to_call() -> None:
    fast, near, far = (Outcome(step(ms, 0.05)) for ms in (10.0, 10.9, 11.2))
    assert speed_up(fast.record, [fast, near]) == "1.09x [0.986, 1.2] ~"
    assert speed_up(fast.record, [fast, far]) == "1.12x [1.01, 1.24]"
    for one, other in ((None, None), (0.05, None), (None, 0.05)):
        unknown = [Outcome(step(ms, error)) for ms, error in ((10.0, one), (30.0, other))]
        assert speed_up(unknown[0].record, unknown) == "3.0x (not validated)"
        assert speed_up(unknown[1].record, unknown) == "1.00x", "over itself"


@pytest.mark.parametrize(("over", "shown"), [(9.6, "0.96x"), (10.4, "1.04x"), (13.0, "1.3x"), (5.0, "0.5x")])
def test_a_ratio_that_is_not_validated_says_which_is_the_faster(over: float, shown: str) -> None:
    assert ratio(step(over, None), step(10.0, None)) == shown


def test_every_row_of_the_backing_is_of_a_kind_that_plans_have() -> None:
    words = {"rows cast", "KV passed on", "Q and outputs passed on", "all-to-alls", "no transfers"}
    for row in known():
        assert isinstance(row, Backing) and 0 <= row.median <= row.two_of_three and row.points and row.clusters
        rest = row.kind.transfers.replace("Q and outputs passed on", "")
        assert set(rest.replace(" and ", ",").split(",")) - {""} <= words
        assert row.kind.workload in ("attention", "train") and row.kind.mask in (WHOLE, PACKS)


def test_the_figures_that_were_compared_are_those_of_the_cluster_files() -> None:
    """After a change of a file, nothing backs its points until `python -m sp_bench.validate published` ran again."""
    for row in known():
        for name, figures in row.clusters.items():
            cluster = name.partition(" (")[0]
            assert (cluster in conf_files("cluster")) == (figures is not None)
            if figures:
                config = point("method=ring", "gpus=8", f"cluster={cluster}", *H100[:2], *H100[4:]).config["cluster"]
                kernels = {f"{table['figures']} ({kernel})" for kernel, table in config["device"]["rates"].items()}
                assert figures in figures_of(config, row.kind, *kernels), f"{name}, {row.kind}"


def test_a_row_whose_figures_are_not_known_backs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row._replace(clusters=dict.fromkeys(row.clusters)) for row in known()]
    monkeypatch.setattr(backings, "known", lambda: rows)
    assert_not_validated(simulated("method=ring gpus=8"))
