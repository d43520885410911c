"""Configs of the ways GPUs are joined, with round numbers."""

from __future__ import annotations

from typing import Any

SWITCH = {"kind": "switch", "bytes_per_s": 8e9, "latency_s": 1e-5}


FULL_MESH = {**SWITCH, "kind": "full_mesh"}


PCIE = {**SWITCH, "kind": "pcie_tree", "gpus_per_switch": 2, "uplink_bytes_per_s": 8e9}


SOCKETS = {**PCIE, "gpus_per_socket": 4, "socket_bytes_per_s": 4e9}


NICS = {"bytes_per_s": 1e9, "latency_s": 1e-3}


Config = dict[str, Any]


def config(g: int | None = 8, intra: Config = SWITCH, inter: Config | None = NICS, **other: Any) -> Config:
    return {"gpus_per_node": g, "intra": intra, "inter": inter, **other}
