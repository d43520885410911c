"""Packages fail the checks that they are known to fail (analysis/studies/conform/conform_known.csv), and no others."""

from __future__ import annotations

import importlib.util

import pytest

from sp_bench.analysis.studies.conform import KNOWN, TIMEOUT_S, found_rows
from sp_bench.conform.catalogue import CHECKS
from sp_bench.conform.ranks import Worlds
from sp_bench.conform.run import rows_of
from sp_bench.conform.subjects import subjects_named
from sp_bench.peers.registry import PEERS
from tests.support.marks import exhaustive

SUBJECTS = subjects_named("peers", {})
SIZES = (2,)
"""Those of the page, study=conform, are more."""


@pytest.mark.parametrize("peer", [exhaustive(name) for name, peer in PEERS.items() if peer.on_cpus])
def test_failures_are_those_that_are_known(peer: str) -> None:
    """One that is new is a bug of the package or of its adapter; one that is gone should leave the list."""
    module = PEERS[peer].module.partition(".")[0]
    if not importlib.util.find_spec(module):
        pytest.skip(f"{module} is not installed")
    known = {(row["subject"], row["check"]) for row in found_rows(KNOWN) if row["subject"].split()[0] == peer}
    failing = {}
    with Worlds(TIMEOUT_S) as worlds:
        for subject in (each for each in SUBJECTS if each.name == peer):
            rows = rows_of(subject, worlds, sizes=SIZES, shrink_s=0)
            assert rows[0].status == "holds", "nothing is run"
            failing |= {(subject.title, r.check.name): f"{r.smallest}: {r.why}" for r in rows if r.status == "fails"}
    assert failing.keys() == known, failing


def test_known_failures_are_of_packages_and_have_a_reason() -> None:
    titles, checks = {subject.title for subject in SUBJECTS}, {check.name for check in CHECKS}
    for row in found_rows(KNOWN):
        assert row["subject"] in titles and row["check"] in checks and row["why"], row
