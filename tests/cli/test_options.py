"""How many options there are. One more is a decision: this test has its number changed, and the change says why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hydra import compose
from omegaconf import OmegaConf

from sp_bench.cli.compose import Composer
from sp_bench.resources import CONF
from sp_bench.slurm.settings import Settings

COUNTS = {
    "config": 58,
    "data": 9,
    "implementation": 10,
    "kernel": 1,
    "logger": 5,
    "method": 24,
    "model": 13,
    "slurm": 15,
}
"""Keys of config.yaml and, of each group, the different keys that its choices have. Not clusters: those are figures."""


def keys(content: dict[str, Any], path: str = "") -> Iterator[str]:
    """The names of all values, `a.b` of a nested one."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from keys(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


@pytest.mark.parametrize("method", sorted(path.stem for path in (CONF / "method").glob("*.yaml")))
def test_a_methods_file_is_read_as_hydra_reads_it(method: str) -> None:
    with Composer() as composer:
        wanted = OmegaConf.to_container(compose("config", overrides=[f"method={method}"]).method)
        assert composer.compose([f"method={method}"])["method"] == wanted


def test_the_number_of_options() -> None:
    config = yaml.safe_load((CONF / "config.yaml").read_text())
    found = {"config": {name for name in keys(config) if name != "defaults"}}
    for group in (path for path in CONF.iterdir() if path.is_dir() and path.name not in ("cluster", "sweep", "slurm")):
        choices = [yaml.safe_load(path.read_text()) for path in group.glob("*.yaml")]
        if choices:
            found[group.name] = {key for choice in choices for key in choice if key not in ("defaults", "name")}
    found["slurm"] = set(Settings.__struct_fields__)
    assert {name: len(options) for name, options in found.items()} == COUNTS
