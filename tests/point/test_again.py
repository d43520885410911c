"""A record's config asks for the point of the record, also when it was read from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sp_bench.point.request import resolve
from tests.support.points import point

CONF = Path(__file__).parents[2] / "conf"
CHOICES = [
    f"{section}={path.stem}"
    for section in ("cluster", "method", "model", "implementation")
    for path in sorted((CONF / section).glob("*.yaml"))
]
NEEDED = {
    "method=peer": ["impl=ring_flash_attn", "cluster=local", "gpus=2"],
    "method=reference": ["gpus=1"],
    "model=deepseek_v3": ["method=pass_q"],
}
"""Overrides that a choice needs."""


@pytest.mark.parametrize("choice", CHOICES)
def test_a_config_that_was_written_and_read(choice: str) -> None:
    asks_for_its_point("gpus=8", "seqlen=64k", choice, *NEEDED.get(choice, []))


@pytest.mark.parametrize("data", sorted({path.stem for path in (CONF / "data").glob("*.yaml")} - {"none"}))
def test_packs_of_a_config_that_was_written_and_read(data: str, tmp_path: Path) -> None:
    """Keys of a histogram are numbers, which JSON turns into text."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1024 3072 61440")
    path = f"data.path={lengths}"
    given = {"file": [path], "sample": [path], "lengths": ["data.lengths=[1k,3k,60k]"]}
    asks_for_its_point("gpus=8", "seqlen=64k", "mask=document", f"data={data}", *given.get(data, []))


def asks_for_its_point(*overrides: str) -> None:
    request = point(*overrides)
    again = resolve(json.loads(json.dumps(request.config)))
    assert (again.run_id, again.problem, again.method) == (request.run_id, request.problem, request.method)
