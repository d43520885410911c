"""What backs simulated records, the intervals that follow, and how comparisons are printed with them."""

from __future__ import annotations

import math

import pytest

from sp_bench.bench import Outcome
from sp_bench.bench.backing import Backing, interval, known, widest
from sp_bench.bench.simulated import simulate_point
from sp_bench.bench.training import simulate_training
from sp_bench.cli.report import interval as interval_of
from sp_bench.cli.report import ratio, speed_up
from sp_bench.records import Record
from tests.support.made_records import made
from tests.workload.requests import point

H100 = ("model=none", "workload=attention", "cluster=h100_ndr400", "seqlen=32k", "dtype=bfloat16", "mode=simulate")
RING = ("KV passed on", "NVLink")


def simulated(*overrides: str) -> Record:
    keys = {override.partition("=")[0] for override in overrides}
    given = [key for key in H100 if key.partition("=")[0] not in keys]
    return simulate_point(point(*given, *overrides))[0]


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        ("method=ring gpus=8", RING),
        ("method=ring gpus=16", ("KV passed on", "several nodes")),
        ("method=ulysses gpus=8", ("all-to-alls", "NVLink")),
        ("method=usp method.ulysses=2 gpus=8", ("KV passed on and all-to-alls", "NVLink")),
        ("method=ring gpus=8 cluster=l20_pcie", ("KV passed on", "PCIe")),
        ("method=reference gpus=1 seqlen=8k", ("no transfers", "NVLink")),
        ("method=tokenring gpus=4 cluster=shaped dtype=float32 heads=4 head_dim=64 seqlen=2k",
         ("Q and outputs passed on", "emulated hosts")),
    ],
)  # fmt: skip
def test_a_record_says_what_backs_it(overrides: str, kinds: tuple[str, str]) -> None:
    record, backing = simulated(*overrides.split()), known()[kinds]
    assert record.validation == str(backing) and f"n={backing.points}" in record.validation
    assert record.validation_error == backing.two_of_three and interval(record).backed


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("method=mesh method.tile=[2,4] gpus=8", "KV passed on and Q and outputs passed on x NVLink: none"),
        ("method=startrail method.team=2 gpus=8", "KV passed on and Q and outputs passed on x NVLink: none"),
        ("method=tokenring gpus=16", "Q and outputs passed on x several nodes: none"),
        ("method=pass_q gpus=4 cluster=a10_pcie", "Q and outputs passed on x PCIe: none"),
        ("method=ring gpus=8 cluster=ascend_oam", "KV passed on x cables: none"),
    ],
)
def test_a_record_says_that_nothing_backs_it(overrides: str, says: str) -> None:
    """Its interval is then that of the least known kind of transfers over such links, or of all."""
    record = simulated(*overrides.split())
    assert (record.validation, record.validation_error) == (says, None)
    alike = [row.two_of_three for (_, links), row in known().items() if f" x {links}: " in says]
    found = interval(record)
    assert not found.backed
    assert found.step_ms / found.low_ms - 1 == pytest.approx(
        max(alike or [row.two_of_three for row in known().values()])
    )


def test_a_training_step_has_what_backs_its_attention() -> None:
    record = simulate_training(point("model=llama_1b", "cluster=h100_ndr400", "dtype=bfloat16", "method=ring", "gpus=8",
                                     "seqlen=16k"))  # fmt: skip
    assert record.validation == f"whole steps: none; their attention, {known()[RING]}"
    assert (record.validation_error, record.implementation) == (None, "ours")
    assert interval(record).step_ms / interval(record).low_ms - 1 == pytest.approx(widest("NVLink"))


def test_an_interval_holds_the_measured_times_that_the_error_allows() -> None:
    found = interval(step(100.0, 0.25))
    assert (100 / found.low_ms - 1, 100 / found.high_ms - 1) == pytest.approx((0.25, -0.25))
    assert interval_of(step(100.0, 0.25)) == (found.low_ms, found.high_ms)
    assert interval(step(100.0, 1.0)).high_ms == math.inf
    measured = made("ring", mode="measure", step_ms_median=10.0, step_ms_ci95_low=9.0, step_ms_ci95_high=12.0)
    assert interval_of(measured) == (9.0, 12.0)
    assert interval_of(made("ring", mode="measure", step_ms_median=10.0)) is None


def step(ms: float, error: float | None) -> Record:
    return made(
        "ring", mode="simulate", step_ms_median=ms, validation_error=error, validation="KV passed on x NVLink: none"
    )


@pytest.mark.parametrize(
    ("error", "shown"), [(0.001, "2.36x"), (0.02, "2.36x"), (0.05, "2.4x"), (None, "2.4x"), (0.9, "2x"), (2.0, "2x")]
)
def test_a_speed_up_has_the_digits_that_its_steps_leave_it(error: float | None, shown: str) -> None:
    """Its last digit stands where the first one of its error does."""
    assert ratio(step(23.6, error), step(10.0, error)) == shown


def test_steps_with_common_times_are_too_close_to_call() -> None:
    fast, near, far = (Outcome(step(ms, 0.05)) for ms in (10.0, 10.9, 11.2))
    assert speed_up(fast.record, [fast, near]) == "1.09x  (too close to call)"
    assert speed_up(fast.record, [fast, far]) == "1.12x"
    unknown = [Outcome(step(ms, None)) for ms in (10.0, 11.2)]
    assert speed_up(unknown[0].record, unknown) == "1.1x  (too close to call)"


def test_every_row_of_the_backing_is_of_a_kind_that_plans_have() -> None:
    words = {"KV passed on", "Q and outputs passed on", "all-to-alls", "no transfers"}
    for row in known().values():
        assert isinstance(row, Backing) and 0 <= row.median <= row.two_of_three and row.points and row.clusters
        rest = row.transfers.replace("Q and outputs passed on", "")
        assert set(rest.replace(" and ", ",").split(",")) - {""} <= words
