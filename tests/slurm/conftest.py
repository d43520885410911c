"""A SLURM in a box for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sp_bench.errors import RequestError
from tests.slurm.testcluster import SlurmBox, refuse_without_root_and_packages


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmBox]:
    """Four nodes of 8 pretend GPUs."""
    try:
        refuse_without_root_and_packages()
    except RequestError as error:
        pytest.skip(str(error))
    made = SlurmBox(tmp_path_factory.mktemp("slurm") / "box")
    made.up()
    yield made
    made.down()
