"""Figures of a cluster have plausible ranges: one in another unit is not simulated without a word."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from msgspec import inspect

from sp_bench import labs
from sp_bench.__main__ import main
from sp_bench.cli.compose import Composer
from sp_bench.cluster import Cluster
from sp_bench.cluster.cluster import ClusterSection
from sp_bench.cluster.emulation import lab_module
from sp_bench.point import resolve
from sp_bench.reading import figures, implausible, plausible
from sp_bench.resources import conf_content, conf_files

FILES = conf_files("cluster")
NO_FIGURES = {"placement"}
"""Numbers of GPUs, by which they are named."""
SCHEMAS = [ClusterSection, *(lab_module(lab.name, "description").Hosts for lab in pkgutil.iter_modules(labs.__path__))]
WHOLE: dict[str, Any] = {
    "cores": 4, "gpus_per_node": 8,
    "intra": {"kind": "pcie_tree", "bytes_per_s": 2e10, "latency_s": 5e-6, "flow_bytes_per_s": 1e10, "crowding": 0.5,
              "nvls_bytes_per_s": 4e11, "gpus_per_switch": 2, "gpus_per_socket": 4, "uplink_bytes_per_s": 2e10,
              "socket_bytes_per_s": 4e10},
    "inter": {"bytes_per_s": 5e10, "latency_s": 2e-5, "flow_bytes_per_s": 1e10, "nics_per_node": 4},
    "fabric": {"nodes_per_leaf": 4, "oversubscription": 2.0, "latency_s": 1e-6},
}  # fmt: skip
"""Keys that no file of the suite has, or not all of them."""


def numbers(info: inspect.Type, path: str, *, ranged: bool = False) -> Iterator[tuple[str, bool]]:
    """Each number of a schema, and whether it has a range."""
    if isinstance(info, inspect.Metadata):
        yield from numbers(info.type, path, ranged=ranged or plausible(info) is not None)
    elif isinstance(info, inspect.UnionType):
        for part in info.types:
            yield from numbers(part, path, ranged=ranged)
    elif isinstance(info, inspect.IntType | inspect.FloatType):
        yield path, ranged
    elif isinstance(info, inspect.StructType):
        for field in info.fields:
            if field.encode_name not in NO_FIGURES:
                yield from numbers(field.type, f"{path}.{field.encode_name}")
    elif isinstance(info, inspect.DictType):
        yield from numbers(info.value_type, f"{path}.*")
    elif isinstance(info, inspect.VarTupleType | inspect.ListType):
        yield from numbers(info.item_type, f"{path}[]")


@pytest.mark.parametrize("schema", SCHEMAS, ids=[schema.__module__ for schema in SCHEMAS])
def test_every_number_of_a_cluster_has_a_range(schema: type) -> None:
    found = dict(numbers(inspect.type_info(schema), ""))
    assert len(found) > 10
    assert not [path for path, ranged in found.items() if not ranged]


@pytest.mark.parametrize("name", FILES)
def test_the_figures_of_the_suite_s_clusters_are_plausible(name: str) -> None:
    assert not Cluster.build(conf_content(FILES[name], FILES)).warnings


def placed(content: dict[str, Any], path: str, value: float) -> dict[str, Any]:
    """The content with another value at a path as `figures` gives it."""
    changed = deepcopy(content)
    *above, last = path.split(".")[1:]
    section: Any = changed
    for key in above:
        section = section[key] if key in section else section[int(key)]
    section[last if last in section else int(last)] = value
    return changed


def test_each_figure_is_warned_of_with_its_unit() -> None:
    """Below and above its range, unless no such value is valid."""
    content = json.loads(json.dumps({**conf_content(FILES["h100_ndr400"], FILES), **WHOLE}))
    section = content["device"]
    section |= {"layer_launch_s": 1e-6, "elementwise_bytes_per_s": 1e12}
    section["rates"] = dict([next(iter(section["rates"].items()))])
    section["rates"]["flash_attn_3"]["blocks_per_sm"] = 1
    tried = [(path, found) for path, _, found in figures(ClusterSection, content, "cluster")]
    paths = {path for path, _ in tried}
    assert {"cluster.fabric.oversubscription", "cluster.intra.crowding", "cluster.device.launch_s"} <= paths
    for path, found in tried:
        value = 10 * found.high
        (warning,) = implausible(ClusterSection, placed(content, path, value), "cluster")
        assert warning.startswith(f"{path}={value:g} is implausible: it is in {found.unit}, and {found.low:g} to")
        assert implausible(ClusterSection, placed(content, path, found.high), "cluster") == []
        if found.low > 1:
            assert len(implausible(ClusterSection, placed(content, path, found.low / 10), "cluster")) == 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cluster.inter.bytes_per_s=400", "it is in bytes/s of each NIC, in each direction"),  # Gb/s
        ("cluster.inter.bytes_per_s=400e9", "it is in bytes/s of each NIC, in each direction"),  # bits/s
        ("cluster.intra.bytes_per_s=900", "it is in bytes/s of each GPU, in each direction"),  # GB/s
        ("cluster.inter.latency_s=5", "it is in seconds"),  # microseconds
        ("cluster.device.memory_bytes=80", "it is in bytes of each GPU's memory"),  # GB
        ("cluster.device.peak_tflops.bfloat16=989e12", "it is in TFLOP/s of each GPU"),  # FLOP/s
    ],
)
def test_points_say_it(override: str, says: str) -> None:
    with Composer() as composer:
        request = resolve(composer.compose(["gpus=16", "seqlen=32k", "mode=simulate", override]))
    (note,) = request.notes
    assert note.startswith(f"{override.partition('=')[0]}=")
    assert says in note


def test_the_command_prints_it(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    point = ["method=ring", "gpus=16", "seqlen=16k", "baseline=null", "logger=none", f"results_dir={tmp_path}"]
    assert main([*point, "cluster.inter.bytes_per_s=400"]) == 0
    assert "note: cluster.inter.bytes_per_s=400 is implausible: it is in bytes/s of each NIC" in " ".join(
        capsys.readouterr().out.split()
    )
