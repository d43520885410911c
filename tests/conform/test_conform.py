"""sp_bench.conform on attention that is right, and on attention with one bug of each kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sp_bench.conform.__main__ import main
from sp_bench.conform.case import Case
from sp_bench.conform.catalogue import CHECKS, check_named
from sp_bench.conform.ranks import Worlds
from sp_bench.conform.run import rows_of, smallest
from sp_bench.conform.subjects import subjects_named
from sp_bench.methods import REGISTRY
from sp_bench.peers.transformer_engine import TransformerEngine
from tests.conform.support import failures, named, row
from tests.support.marks import exhaustive

HERE = "tests.conform.attentions"
QUICK = [check for check in CHECKS if check.name != "compile"]
"""Tracing takes seconds."""


@pytest.mark.long
def test_right(worlds: Worlds) -> None:
    """Every check holds but those that it doesn't claim."""
    rows = rows_of(named("right"), worlds, checks=QUICK, sizes=(2, 3))
    assert not failures(rows)
    assert [row.check.name for row in rows if row.status != "holds"] == NOT_CLAIMED


def test_right_on_two_ranks(worlds: Worlds) -> None:
    """Without the checks that try many cases."""
    rows = rows_of(named("right"), worlds, checks=[check for check in CHECKS if check.name not in DEAR], sizes=(2,))
    assert not failures(rows)
    assert [row.check.name for row in rows if row.status != "holds"] == NOT_CLAIMED


NOT_CLAIMED = ["uneven", "window", "scale"]
DEAR = ("checkpoint", "compile", "length", "memory", "messages", "other_length", "shapes", "volume")
"""Checks that try many cases, or large ones, before one fails."""
NEEDS_THREE = ("padding",)
"""Bugs that cases on two ranks don't show."""
OTHERS = REGISTRY.keys() - {"reference", "mesh", "ulysses"}


@pytest.mark.parametrize("bug", [exhaustive(check.name) if check.name in DEAR else check.name for check in CHECKS])
def test_each_bug_is_caught_by_the_check_meant_for_it(worlds: Worlds, bug: str) -> None:
    """And what is not wrong with the output of a plain call isn't blamed on it."""
    if bug != "out":
        assert row(worlds, named(bug), "out", (2,)).status == "holds"
    found = row(worlds, named(bug), bug, (1,) if bug == "out" else (3,) if bug in NEEDS_THREE else (2,))
    assert found.status == "fails", found
    assert found.why


def test_a_bug_of_torch_is_caught(worlds: Worlds) -> None:
    """It is that of torch.distributed.nn.functional.all_gather (docs/how-to/conform.md)."""
    checks = [check_named(name) for name in ("out", "dq", "dk", "dv", "sub_groups")]
    found = rows_of(named("torch_gather"), worlds, checks=checks, sizes=(1, 2), shrink_s=0)
    assert [row.status for row in found] == ["holds", "holds", "fails", "fails", "fails"]
    assert "is not part of group" in found[-1].why


@pytest.mark.parametrize(
    ("bug", "wanted"),
    [
        ("out", Case(n=1, mask="causal")),
        ("batch", Case(n=2, batch=2)),
        ("kv_heads", Case(n=1, heads=4, kv_heads=2)),
        ("dk", Case(n=2)),
        ("head_dim", Case(n=1, head_dim=80)),
    ],
)
def test_failures_are_shrunk(worlds: Worlds, bug: str, wanted: Case) -> None:
    found = row(worlds, named(bug), bug, sizes=(2, 3), shrink_s=60)
    assert found.smallest is not None
    assert found.smallest.simpler(tokens=2) == wanted


def test_the_smallest_case_is_one_that_fails() -> None:
    big = Case(n=8, heads=16, kv_heads=8, tokens=32, batch=2, head_dim=80, dtype="bfloat16", mask="causal")
    assert smallest(big, lambda case: case.n > 2 and case.batch == 2, 120) == Case(n=3, batch=2)
    assert smallest(big, lambda case: case == big, 120) == big
    odd = Case(n=2, heads=5, kv_heads=5)
    assert smallest(odd, lambda case: case.heads > 4, 120) == Case(n=1, heads=5)


@pytest.mark.long
def test_a_hang_is_a_failure_and_the_next_case_runs() -> None:
    with Worlds(timeout_s=15) as impatient:
        found = row(impatient, named("hangs"), "out", sizes=(1, 2))
        assert found.status == "fails"
        assert found.failed == 2, "both masks"
        assert "no rank has answered" in found.why or "hangs" in found.why
        assert found.smallest is not None
        assert found.smallest.n == 2


def test_refusals_are_told_apart(worlds: Worlds) -> None:
    found = row(worlds, named("refuses"), "batch", sizes=(2,))
    assert found.status == "refused"
    assert found.refused == {"NotImplementedError: one sequence at a time": 2}


def test_what_is_not_claimed_is_not_run(worlds: Worlds) -> None:
    assert row(worlds, named("out"), "volume").status == "not claimed"
    assert row(worlds, named("out"), "documents").status == "not claimed"
    assert row(worlds, named("out", head_parallel=True), "heads").status == "not claimed"


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ulysses", {}),
        ("mesh", {}),
        exhaustive("mesh", {"form": "gather"}),
        *(exhaustive(name, {}) for name in sorted(OTHERS)),
    ],
)
def test_our_own_methods(worlds: Worlds, method: str, options: dict[str, str]) -> None:
    rows = rows_of(named(method, **options), worlds)
    assert not failures(rows)
    assert rows[0].status == "holds", "nothing is run"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table with the smallest failing case, in Markdown and JUnit too; the exit code says that something fails."""
    files = [f"markdown={tmp_path / 'found.md'}", f"junit={tmp_path / 'found.xml'}"]
    assert main([f"{HERE}:batch", "checks=out,batch,volume", "sizes=1,2", *files]) == 1
    printed = capsys.readouterr().out
    assert "1 holds, 1 fails, 1 not claimed" in printed
    assert "n=2 full seqlen=4 heads=1 head_dim=8 float32 batch=2" in " ".join(printed.split())
    assert "| `batch` | two sequences at a time | fails | 0 of 2 |" in (tmp_path / "found.md").read_text()
    suite = ElementTree.parse(tmp_path / "found.xml").getroot()[0]
    assert suite.attrib | {"name": ""} == {"name": "", "tests": "3", "failures": "1", "errors": "0", "skipped": "1"}
    assert main([f"{HERE}:right", "checks=out", "sizes=2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tests.conform.attentions:rihgt"], "did you mean right?"),
        (["nowhere:at_all"], "can't be imported: no module nowhere"),
        (["rng"], "did you mean ring?"),
        ([], "no target: there is one thing to check"),
        (["ring", "checks=outt"], "did you mean out?"),
        (["ring", "sizes=5"], "sizes=5: is not run; one of 1, 2, 3, 4, 6, 8 would work"),
        (["ring", "profile=medium"], "profile=medium: there is no such profile"),
        (["ring", "tile=[2,2]"], "method.tile: there is no such key"),
        ([f"{HERE}:right", "layuot=zigzag"], "did you mean layout?"),
        (
            [f"{HERE}:right", "layout=zigzag", "method.layout=zigzag"],
            "layout: is given as method.layout too; one of them",
        ),
        ([f"{HERE}:right", "method.layout=spiral"], "layout=spiral: there is no such layout; known: auto, contiguous"),
        ([f"{HERE}:right", "layout=spiral"], "layout=spiral: there is no such layout; known: auto, contiguous"),
        ([f"{HERE}:right", "masks=sliding"], "masks=sliding: masks are those of a whole sequence; window=true would"),
        ([f"{HERE}:right", "masks=causal,document"], "documents=true would claim it; masks: full, causal"),
        ([f"{HERE}:right", "masks=cuasal"], "masks=cuasal: there is no such mask; did you mean causal?"),
        ([f"{HERE}:right", "masks=[]"], "masks=(): a function takes at least one; masks=causal would work"),
        ([f"{HERE}:right", "dtypes=fp8"], "dtypes=fp8: is no dtype that is checked; known: bfloat16, float16"),
        (["ring_flash_attn", "dtypes=int8"], "dtypes=int8: is no dtype that is checked"),
        ([f"{HERE}:right", "uneven=perhaps"], "uneven=perhaps: is a claim or not; uneven=true would work"),
        (["ring", "junit=/proc/nowhere/x"], "junit=/proc/nowhere/x: can't be written"),
    ],
)
def test_bad_requests(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_packages_for_gpus_only_are_refused_by_name_and_left_out_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = ["torch_context_parallel", "ring_flash_attn", "yunchang", "deepspeed_ulysses"]
    assert [*dict.fromkeys(subject.name for subject in subjects_named("peers", {}))] == peers
    monkeypatch.setattr(TransformerEngine, "refuse_absence", lambda self: None)
    assert main(["transformer_engine", "algorithm=p2p"]) == 2
    assert "transformer-engine takes tensors of GPUs only; device=cuda" in capsys.readouterr().err


@pytest.mark.long
def test_pytest_plugin(tmp_path: Path) -> None:
    """The installed plugin: a test for each check, a failure with the smallest case, and nothing else collected."""
    (tmp_path / "test_mine.py").write_text("def test_mine(): raise SystemExit\n")
    (tmp_path / "mine.py").write_text(f"from {HERE} import batch, right\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "--sp-conform-sizes=2"]
    command += ["--sp-conform", "mine:batch,masks=full", "--sp-conform-checks=out,batch,volume"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed, 1 skipped" in found.stdout, found.stdout + found.stderr
    assert "two sequences at a time: n=2 full seqlen=4 heads=1 head_dim=8 float32 batch=2" in found.stdout
    assert found.returncode == 1
