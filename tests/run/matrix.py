"""The attentions that the tests of exactness run: every method in every variant, layout, mask and dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from sp_bench.methods import REGISTRY
from sp_bench.methods.mesh import tiles
from sp_bench.methods.mesh_lean import ORDERS
from sp_bench.methods.tasp import TASP
from tests.run import jobs
from tests.support.attention_cases import DTYPES, HEADS, Case, errors_of, of_one_batch_entry, together, wrong_in
from tests.support.problems import divisors
from tests.support.ranks import SIZES, Ranks

LARGE = tuple(n for n in SIZES if n > 2)


def variants(n: int) -> list[Case]:
    """Ring, and every tile of mesh in every placement, searched, and by gathers."""
    meshes = [Case(n=n, method="mesh", tile=tile) for tile in tiles(n)]
    placed = [replace(case, options=(("placement", "kv"),)) for case in meshes if case.tile and 1 not in case.tile]
    searched = [replace(case, options=(("schedule", "searched"),)) for case in meshes]
    lean = [
        Case(n=n, method="mesh", tile=(2, n // 2), options=(("schedule", order),)) for order in ORDERS if n % 2 == 0
    ]
    gathers = [replace(case, options=(("form", "gather"),)) for case in meshes]
    gathers += [replace(case, options=(*case.options, ("collectives", "messages"))) for case in gathers[1:2]]
    return [Case(n=n, method="ring"), *meshes, *placed, *searched, *lean, *gathers]


WHOLE = (("qo_comm", False), ("slices", 1))
TRADES = (("inner", 1), ("qo_comm", True), ("slices", 1))
SLICED = (("inner", 1), ("qo_comm", False), ("slices", 2))
"""How group_cast sends rows, and in what slices of the heads."""


def others(n: int) -> list[Case]:
    """Every method but ring, all_gather, tasp and mesh with whole heads, in every variant. u ranks split 2u heads."""
    cases = [Case(n=n, method=method) for method in ("striped", "zigzag", "pass_q", "hybrid_cp", "dcp", "helix")]
    cases += [Case(n=n, method="dcp", options=(("collectives", "messages"),))]
    cases += [
        Case(n=n, method=method, options=(("inner", inner),))
        for inner in divisors(n)
        for method in ("double_ring", "burst_attention")
    ]
    cases += [Case(n=n, method="tree", options=(("inner", inner),)) for inner in divisors(n)[:-1] or [1]]
    cases += [Case(n=n, method="tokenring", options=(("nodes", nodes),)) for nodes in divisors(n)]
    cases += [Case(n=n, method="startrail", options=(("team", c),)) for c in divisors(n) if n % c**2 == 0]
    cases += [Case(n=n, method="ulysses", heads=n)]
    staged = ((1, True), (2, True), (2, False), (4, True))
    cases += [Case(n=n, method="upipe", heads=4 * n, options=(("stages", s), ("overlap", o))) for s, o in staged]
    for u in divisors(n):
        cases += [
            Case(n=n, method=method, heads=2 * u, options=(("ulysses", u),)) for method in ("usp", "ulysses_all_gather")
        ]
        cast = [stages for stages in (1, 2, 4) if stages == 1 or stages < n // u]
        cases += [
            Case(n=n, method="group_cast", heads=2 * u, options=(("ulysses", u), ("stages", stages), *how))
            for near in divisors(n // u)
            for stages in cast
            if near == 1 or stages <= max(n // u // near - 1, 1)
            for how in ((("inner", near), *WHOLE), *([TRADES] * (near == 1 and u < n)), *([SLICED] * (near == 1)))
        ]
        inner = [w for w in divisors(n // u) if w < n // u or u == n]
        cases += [Case(n=n, method="loongtrain", heads=2 * u, options=(("ulysses", u), ("inner", w))) for w in inner]
    cases += [
        Case(n=n, method="mesh", tile=tile, heads=2 * u, options=(("ulysses", u),))
        for u in divisors(n)[1:]
        for tile in tiles(n // u)
    ]
    return cases + [Case(n=n, method="reference")] * (n == 1)


def key_heads(heads: int) -> list[int]:
    """As many as heads, half as many (or the most below that divide them), one. Of 2u: above, equal to and below u."""
    return sorted({heads, divisors(heads)[-2:][0], 1}, reverse=True)


def grouped(cases: Iterable[Case]) -> list[Case]:
    return [replace(case, kv_heads=kv_heads) for case in cases for kv_heads in key_heads(case.heads)]


def everything(n: int) -> list[Case]:
    """Every method in every variant, with all key_heads. Of n = 9, which is there for its root, what has a side of 3.

    all_gather is there with all key heads at a time, and with one; mesh in slices where they divide; tasp on the most
    rings that divide them.
    """
    cases = grouped([*variants(n), *others(n)])
    sliced = (("schedule", "searched"), ("slices", 2))
    by_gathers = (("form", "gather"), ("slices", 2))
    for kv_heads in key_heads(HEADS):
        if kv_heads % 2 == 0:
            cases += [Case(n=n, method="mesh", tile=tile, kv_heads=kv_heads, options=sliced) for tile in tiles(n)]
            cases += [Case(n=n, method="mesh", tile=tiles(n)[-1], kv_heads=kv_heads, options=by_gathers)]
        problem = Case(n=n, method="ring", kv_heads=kv_heads).problem
        cases += [
            Case(n=n, method="tasp", kv_heads=kv_heads, options=(("inner", m.size), ("rings", m.rings)))
            for m in TASP().candidates(problem)
        ]
        strides = sorted({1, kv_heads})
        cases += [Case(n=n, method="all_gather", kv_heads=kv_heads, options=(("stride", s),)) for s in strides]
    return [c for c in cases if n != 9 or c.method == "ring" or c.tile or 3 in dict(c.options).values()]


def matrix(n: int, *, causal: bool) -> list[Case]:
    """Everything on every layout, on up to two ranks MHA and a GQA in every dtype. On more, these rotate.

    There a variant has one number of key heads on a layout with a mask, another one on the next; from n = 6, where
    cases take longest, masks take turns over layouts, too. A method of one variant has all of them.
    """
    cases, by_variant = [], together(everything(n), lambda case: replace(case, kv_heads=1))
    variants_of = Counter(of_one[0].method for of_one in by_variant)
    for variant, of_one in enumerate(by_variant):
        whole = variants_of[of_one[0].method] == 1 or (n <= 2 and len(of_one) < 3)
        for i, layout in enumerate(REGISTRY[of_one[0].method].layouts):
            turn = variant + i + SIZES.index(n)
            if n >= 6 and (turn + causal) % 2 and not whole:
                continue
            for place, case in enumerate(of_one):
                if n <= 2:
                    dtypes = [d for j, d in enumerate(DTYPES) if whole or not place or (turn + j + place) % 2]
                elif whole or (turn // 2 + causal) % len(of_one) == place:
                    dtypes = [DTYPES[(turn + 2 * causal + place * whole) % 3]]
                else:
                    continue
                cases += [replace(case, causal=causal, layout=layout, dtype=dtype) for dtype in dtypes]
    cases += of_one_batch_entry(cases)
    trimmed = [case for case in cases if case.method == "tokenring" and case.layout == "zigzag" and causal]
    return cases + [replace(case, options=(*case.options, ("trim", False))) for case in trimmed]


def part_of_the_matrix(n: int) -> list[Case]:
    """Each variant on n ranks once: from one to the next another layout, mask, dtype and number of key heads."""
    cases = matrix(n, causal=True) + matrix(n, causal=False)
    by_variant = together(cases, lambda case: (case.method, str(case.method_options), case.batch))
    return [alike[7 * i % len(alike)] for i, alike in enumerate(by_variant)]


def axes(case: Case) -> tuple[tuple, ...]:
    """Cases of make test for each method, on two ranks: a layout and a mask, MHA or GQA in a dtype."""
    return (case.layout, case.causal), (case.kv_heads < case.heads, case.dtype)


def cover_of_the_matrix(n: int) -> list[Case]:
    """Each variant once, and each method with all its `axes`."""
    cases, found = part_of_the_matrix(n), set()
    for case in [*cases, *matrix(n, causal=True)[::-1], *matrix(n, causal=False)]:
        news = {(case.method, *axis) for axis in axes(case)} - found
        cases += [case] if news and case not in cases else []
        found |= news
    return cases


def measure(ranks: Ranks, cases: Iterable[Case]) -> dict[Case, dict[str, float]]:
    """The relative L2 errors of out, dq, dk and dv over all ranks."""
    answers = ranks.run(jobs.find_differences, list(cases))
    errors = {}
    for case in answers[0]:
        errors[case] = errors_of(answer[case] for answer in answers[: case.n])
    return errors


def assert_exact(ranks: Ranks, cases: Iterable[Case]) -> None:
    wanted = list(cases)
    errors = measure(ranks, wanted)
    assert list(errors) == wanted
    for dtype in DTYPES:
        worst = [max(by_tensor.values()) for case, by_tensor in errors.items() if case.dtype == dtype]
        print(f"{len(worst)} cases in {dtype}, off by at most {max(worst, default=0):.1e}")
    wrong = [
        f"{case}: {tensor} is off by {error:.1e}"
        for case, by_tensor in errors.items()
        for tensor, error in wrong_in(case, by_tensor).items()
    ]
    assert not wrong, f"{len(wrong)} results are wrong:\n" + "\n".join(wrong)
