"""Fixtures and rules that all tests share: the pool of ranks, and how hard hypothesis tries."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sp_bench.measure import pool
from tests.support.marks import NEEDS_A_GPU
from tests.support.ranks import Ranks

settings.register_profile("quick", deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=1000, print_blob=True)
# A change is judged by examples that depend on nothing but the test; new ones are looked for outside CI.
settings.register_profile("ci", settings.get_profile("quick"), max_examples=60, derandomize=True, database=None)
settings.load_profile(os.environ.get("SP_BENCH_HYPOTHESIS", "ci" if os.environ.get("SP_BENCH_CI") else "quick"))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed lines have any length. xdist's workers have 80 columns: no test should depend on that."""
    monkeypatch.setenv("COLUMNS", "1000")


IMPORTED_BY_TORCH = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo", "torch.distributed.fsdp")
SHARED = ("box", "ranks", "can_be_made", "world")
"""Fixtures of which all workers together have one, those with the longest tests first."""
USE = "ranks: Ranks"
"""The text that a file which uses the ranks has somewhere."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Only files with tests of the ranks are collected where only these are asked for, which takes seconds less."""
    asked = re.fullmatch(r"ranks( and (not )?\w+)*\s*", config.option.markexpr)
    is_file = collection_path.suffix == ".py"
    return True if asked and is_file and not _may_use_ranks(collection_path) else None


@cache
def _may_use_ranks(path: Path) -> bool:
    return USE in path.read_text()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker runs all tests of a file, or all that share ranks, SLURM or hosts.

    Those come first: the groups are long, and a worker that got one last would work alone.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_shared(item) or item.nodeid.partition("::")[0]))
        if _shared(item) == "ranks":
            if not _may_use_ranks(item.path):
                raise pytest.UsageError(f"{item.nodeid} uses the ranks: its file must have `{USE}`, or isn't collected")
            item.add_marker(pytest.mark.ranks)
    items.sort(key=lambda item: SHARED.index(name) if (name := _shared(item)) else len(SHARED))


gc.disable()  # until all tests are collected: what that makes stays


def pytest_collection_finish() -> None:
    """Objects made by collecting stay for the session, so that no collection of garbage goes through them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _shared(item: pytest.Item) -> str | None:
    return next((name for name in SHARED if name in getattr(item, "fixturenames", ())), None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip for want of anything but a GPU is a failure where SP_BENCH_CI is set, which says that it is all there."""
    report = yield
    for_want_of_a_gpu = report.skipped and NEEDS_A_GPU in str(report.longrepr)
    if report.skipped and not for_want_of_a_gpu and os.environ.get("SP_BENCH_CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report


@pytest.fixture(scope="session", autouse=True)
def no_user_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No cluster files of whoever runs the tests, nor their W&B."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("configuration")))
        yield


@pytest.fixture(scope="session", autouse=True)
def preloaded_ranks() -> Iterator[None]:
    """Modules of most jobs are imported once, and not by each rank of each pool.

    The last three torch imports itself: with sympy for a gradient that is given, for an optimizer, for sharded weights.
    """
    with pytest.MonkeyPatch.context() as patch:
        modules = [*pool.PRELOADED, "tests.run.jobs", *IMPORTED_BY_TORCH]
        patch.setattr(pool, "PRELOADED", modules)
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Nine rank processes for the whole session."""
    shared = Ranks()
    yield shared
    shared.close()
