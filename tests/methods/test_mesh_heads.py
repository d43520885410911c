"""Mesh with heads as a third axis: its volume, its limits Mesh, USP and Ulysses, and what it refuses."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench import account
from sp_bench.check import check_all
from sp_bench.errors import RequestError
from sp_bench.methods import build
from sp_bench.plan import Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.plan.tensors import Q
from tests.support.problems import cost_profiles, mask_of


def problem(n: int, heads: int, kv_heads: int, layout: str = "striped", *, causal: bool = True) -> Problem:
    mask = mask_of(causal)
    return Problem(n=n, seqlen=4 * n, heads=heads, kv_heads=kv_heads, head_dim=8, mask=mask, layout=LAYOUTS[layout])


@given(st.sampled_from([1, 2, 6, 8, 12, 16, 24]), st.sampled_from(sorted(LAYOUTS)), st.data())
def test_every_variant_is_proven_and_sends_its_closed_form(n: int, layout: str, data: st.DataObject) -> None:
    """Also with fewer key heads than ranks that split them, any costs, and either placement and schedule."""
    asked = problem(n, 8, data.draw(st.sampled_from([1, 2, 4, 8])), layout, causal=data.draw(st.booleans()))
    options = {"ulysses": "auto", "placement": "auto", "schedule": data.draw(st.sampled_from(["paper", "searched"]))}
    method = data.draw(st.sampled_from(build("mesh", options).candidates(asked)))
    costs = data.draw(st.just(COMPUTE_BOUND) | cost_profiles())
    assigned, plans = method.assigned(asked), {phase: method.plan(asked, phase, costs) for phase in PHASES}
    check_all(plans, assigned)
    for phase, plan in plans.items():
        assert account.volume(plan, assigned).total_bytes == method.bytes_sent(asked, phase)


@pytest.mark.parametrize("kv_heads", [2, 16])
def test_its_limits_send_what_mesh_usp_and_ulysses_do(kv_heads: int) -> None:
    asked = problem(16, 16, kv_heads)
    for phase in PHASES:
        for u, name, option in ((4, "usp", {"ulysses": 4}), (16, "ulysses", {})):
            found = build("mesh", {"ulysses": u, "tile": (1, 16 // u)}).bytes_sent(asked, phase)
            assert found == build(name, option).bytes_sent(asked, phase)
        whole = build("mesh", {"tile": (4, 4)})
        assert str(whole.plan(asked, phase, COMPUTE_BOUND).ops) == str(
            build("mesh", {"tile": (4, 4), "ulysses": 1}).plan(asked, phase, COMPUTE_BOUND).ops
        )


@pytest.mark.parametrize(("n", "u"), [(16, 4), (64, 4), (256, 16), (1024, 16)])
def test_square_tiles_send_less_than_mesh_and_usp(n: int, u: int) -> None:
    """4 sqrt(n / u) - 4 + 4 (u - 1) / u chunks forward, with as many key heads as heads."""
    asked, side = problem(n, u, u), math.isqrt(n // u)
    unit = asked.chunk_bytes(Q, wire=True)

    def payload(name: str, **options: object) -> float:
        method = build(name, options)
        return account.volume(method.plan(asked, "forward", COMPUTE_BOUND), method.assigned(asked)).payload_bytes / unit

    found = payload("mesh", ulysses=u, tile=(side, side))
    assert found == pytest.approx(4 * side - 4 + 4 * (u - 1) / u)
    assert found < payload("mesh", tile=(math.isqrt(n), math.isqrt(n)))
    assert found < payload("usp", ulysses=u)


def test_auto_stands_for_every_degree_and_tile() -> None:
    asked = problem(8, 4, 2)
    found = {(m.symbols(asked)["u"], m.tile_shape(8)) for m in build("mesh", {"ulysses": "auto"}).candidates(asked)}
    assert found == {(u, (a, 8 // u // a)) for u in (1, 2, 4) for a in (1, 2, 4, 8) if 8 // u % a == 0}
    (only,) = build("mesh", {"ulysses": "auto", "tile": (2, 1)}).candidates(asked)
    assert only.head_parallel(8) == 4 and only.variant(8) == "ulysses 4 x 2x1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ulysses": 0}, "method.ulysses=0: must be auto or an integer of at least 1; .* would work"),
        ({"ulysses": "two"}, "method.ulysses=two: must be auto or an integer"),
        ({"ulysses": 3}, "method.ulysses=3: must divide gpus=8 and heads=4, and .*; one of 1, 2, 4 would work"),
        ({"ulysses": 8}, "method.ulysses=8: must divide gpus=8 and heads=4"),
        (
            {"ulysses": 2, "tile": (2, 4)},
            r"method.tile=\[2,4\]: a \* b times ulysses=2 must be gpus=8; one of \[1,4\], \[2,2\], \[4,1\] would work",
        ),
        ({"ulysses": "auto", "tile": (3, 1)}, r"method.tile=\[3,1\]: a \* b times ulysses=auto must be gpus=8"),
        (
            {"ulysses": 2, "slices": 2, "schedule": "searched"},
            "method.slices=2: heads are split among ranks already, by method.ulysses=2; method.slices=1, or .*",
        ),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        build("mesh", options).candidates(problem(8, 4, 2))
    assert re.match(message, str(refused.value)), str(refused.value)


def test_slices_and_degrees_are_not_combined() -> None:
    options = {"ulysses": "auto", "slices": "auto", "schedule": "searched"}
    found = build("mesh", options).candidates(replace(problem(8, 4, 4)))
    assert all(1 in (m.head_parallel(8), m.head_slices(problem(8, 4, 4))) for m in found)
    assert {m.head_parallel(8) for m in found} == {1, 2, 4}
