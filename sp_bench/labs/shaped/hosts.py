"""Make shaped hosts: a network namespace for each, and one more for the switches that join them.

                         [down0]  spine  [down1]
                            |               |
                          [up0]           [up1]
    host 0 [shaped0]--[port0]               [port2]--[shaped0] host 2
                          leaf0           leaf1
    host 1 [shaped0]--[port1]               [port3]--[shaped0] host 3

Each [ ] is an end of a virtual cable (veth). A token bucket filter (tbf) shapes the traffic it sends. Without
hosts_per_leaf, leaf0 has all hosts, and there is no spine.

The namespaces have no names, so any number of runs can have hosts at once. They end with the process that made them,
even if it is killed: the kernel removes a namespace that no process holds.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from sp_bench.errors import RequestError
from sp_bench.labs.shaped import namespaces
from sp_bench.labs.shaped.description import Hosts
from sp_bench.labs.shaped.home import LINK, ShapedHome

MTU_BYTES = 9000
"""Jumbo frames, as in clusters, so that headers are less than 1% of the traffic."""
FRAME_BYTES = MTU_BYTES + 14
LARGEST_PACKET_BYTES = 2**16
"""The largest packet that TCP hands to the interface."""
QUEUE_BYTES = 2**26
"""More than the sockets behind a link can have in flight, so that packets wait and none is dropped."""
IPV4 = {
    "tcp_congestion_control": "reno",  # every kernel has it, and no packets are lost
    "tcp_slow_start_after_idle": "0",  # ranks pause between messages
    # Packets may be reordered between cores, or wait long in a queue, which TCP should not take for a loss. (The
    # newest kernels ignore tcp_recovery=0.)
    "tcp_reordering": "300",
    "tcp_recovery": "0",
    "tcp_early_retrans": "0",
    # A message's packets in the link's queue delay other messages, and gloo's notice that a receive is posted.
    "tcp_limit_output_bytes": "131072",
    "tcp_rmem": "4096 1048576 1048576",
    "tcp_wmem": "4096 1048576 1048576",
}
"""TCP settings. Windows are open from the start and hold several times the data in flight on a fast link."""
FIRST_ADDRESS = ipaddress.IPv4Address("10.0.0.1")
SHAPED_BYTES_PER_S = (1e4, 1e11)
"""The range of rates that tbf can represent."""


class ShapedHosts:
    """Hosts that are up and connected, and the ranks on each. Use it as a context manager, or close it."""

    def __init__(self, hosts: Hosts, host_of: Sequence[int]) -> None:
        """Make the hosts. `host_of` has the host of each rank, counted from 0.

        Raises RequestError if this machine, this user's rights or these figures don't allow it.
        """
        _refuse(hosts)
        self._hosts, self._host_of, self._held = hosts, host_of, []
        try:
            self._switches, *self._places = [self._new_place() for _ in range(max(host_of) + 2)]
            namespaces.call_inside(self._switches, self._join)
            for host, place in enumerate(self._places):
                namespaces.call_inside(place, lambda host=host: self._bring_up(host))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _not_allowed(error) from None
            raise

    def __enter__(self) -> ShapedHosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def place_of(self, rank: int) -> str:
        """The path of the namespace of a rank's host."""
        return self._places[self._host_of[rank]]

    def home_of(self, rank: int) -> ShapedHome:
        """The host environment that the rank's process must move to (run.home)."""
        return ShapedHome(self.place_of(rank), self._hosts.transfers_first)

    @property
    def ranks_by_host(self) -> dict[str, list[int]]:
        """The ranks on each host, by the host's name."""
        return {
            f"host{host}": [rank for rank, its in enumerate(self._host_of) if its == host]
            for host in sorted(set(self._host_of))
        }

    def close(self) -> None:
        """Release the hosts and switches. A host ends with the last process on it."""
        for namespace in self._held:
            os.close(namespace)
        self._held = []

    def _new_place(self) -> str:
        self._held.append(namespaces.new())
        return namespaces.path(self._held[-1])

    def _join(self) -> None:
        """In the switches' namespace: make the switches and all cables."""
        _without_ipv6()
        hosts, links, shapes = self._hosts, [], []
        below = hosts.hosts_per_leaf or len(self._places)
        leaves = range(-(-len(self._places) // below))
        links += [f"link add name leaf{leaf} up type bridge" for leaf in leaves]
        for host, place in enumerate(self._places):
            links.append(_cable(f"port{host}", f"{LINK} address {_hardware_address(host)} netns {place}"))
            links.append(self._plug(f"port{host}", f"leaf{host // below}"))
            shapes.append(self._shape(f"port{host}", hosts.link_bytes_per_s))
        if hosts.uplink_bytes_per_s and len(leaves) > 1:
            links.append("link add name spine up type bridge")
            for leaf in leaves:
                links.append(_cable(f"up{leaf}", f"down{leaf}"))
                links += [self._plug(f"up{leaf}", f"leaf{leaf}"), self._plug(f"down{leaf}", "spine")]
                shapes += [self._shape(f"{end}{leaf}", hosts.uplink_bytes_per_s) for end in ("up", "down")]
        _batch("ip", links)
        _batch("tc", shapes)
        _batch("bridge", self._routes(below, len(leaves)))

    def _routes(self, below: int, leaves: int) -> list[str]:
        """The port of each switch that leads to each host: a switch that has to learn it floods all ports before, which
        may be more packets at once than the kernel queues.
        """
        ways = []
        for host in range(len(self._places)):
            leaf = host // below
            ports = [f"port{host}"]
            if self._hosts.uplink_bytes_per_s and leaves > 1:
                ports += [f"down{leaf}", *(f"up{other}" for other in range(leaves) if other != leaf)]
            ways += [f"fdb replace {_hardware_address(host)} dev {port} master static" for port in ports]
        return ways

    def _bring_up(self, host: int) -> None:
        """In a host's namespace: set up TCP, addresses and the shape of its traffic."""
        _without_ipv6()
        for name, value in IPV4.items():
            Path("/proc/sys/net/ipv4", name).write_text(value)
        lines = ["link set dev lo up", f"link set dev {LINK} {self._packets()} up"]
        lines.append(f"address add {FIRST_ADDRESS + host}/8 dev {LINK}")
        # Neighbours are set, because the kernel learns only a few, for all namespaces together.
        lines += [
            f"neighbour add {FIRST_ADDRESS + other} lladdr {_hardware_address(other)} dev {LINK} nud permanent"
            for other in range(len(self._places))
            if other != host
        ]
        _batch("ip", lines)
        _batch("tc", [self._shape(LINK, self._hosts.link_bytes_per_s)])

    def _plug(self, end: str, switch: str) -> str:
        return f"link set dev {end} {self._packets()} master {switch} up"

    def _packets(self) -> str:
        """The packet size of an end: at most a burst with headers. tbf would cut up larger ones, at a cost."""
        return f"gso_max_size {min(LARGEST_PACKET_BYTES, self._hosts.burst_bytes * 7 // 8)}"

    def _shape(self, end: str, bytes_per_s: float) -> str:
        burst_bytes = self._hosts.burst_bytes
        return f"qdisc add dev {end} root tbf rate {bytes_per_s:.0f}bps burst {burst_bytes} limit {QUEUE_BYTES}"


def make(hosts: Hosts, host_of: Sequence[int], *, transfers_first: bool = True) -> ShapedHosts:
    """The hosts, with each rank on host_of[rank]. Raises RequestError if they can't be made.

    transfers_first=False takes away the priority of transfers that the hosts may give.
    """
    return ShapedHosts(hosts.replace(transfers_first=transfers_first and hosts.transfers_first), host_of)


@lru_cache(maxsize=8)
def refuse(hosts: Hosts) -> None:
    """Raise RequestError if such hosts can't be made here. Two are made and removed to find out."""
    make(hosts, (0, 1)).close()


def _refuse(hosts: Hosts) -> None:
    """Raise RequestError for a system or figures that no hosts can be made with."""
    if sys.platform != "linux":
        raise RequestError("cluster.hosts", "hosts are made on Linux only", "mode=simulate would work")
    for tool in ("ip", "tc", "bridge"):
        if not shutil.which(tool):
            would = "the package iproute2, or mode=simulate, would work"
            raise RequestError("cluster.hosts", f"hosts are made with {tool}, which is not in PATH", would)
    if hosts.burst_bytes < FRAME_BYTES:
        rule = f"must be at least {FRAME_BYTES}, a frame, to be made"
        raise RequestError(f"cluster.hosts.burst_bytes={hosts.burst_bytes}", rule, "75000 would work")
    low, high = SHAPED_BYTES_PER_S
    for key in ("link_bytes_per_s", "uplink_bytes_per_s"):
        rate = getattr(hosts, key)
        if rate is not None and not low <= rate <= high:
            rule = f"must be from {low:g} to {high:g} to be made"
            raise RequestError(f"cluster.hosts.{key}={rate:g}", rule, "2.5e+7, or mode=simulate, would work")


def _not_allowed(error: OSError) -> RequestError:
    why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    would = "root, `unshare --map-root-user` before the command, or mode=simulate would work"
    return RequestError("cluster.hosts", f"hosts can't be made with this user's rights ({why})", would)


def _without_ipv6() -> None:
    """In a new namespace: every host would tell all others of its groups, and crowd out packets."""
    for scope in ("default", "all"):
        setting = Path("/proc/sys/net/ipv6/conf", scope, "disable_ipv6")
        if setting.exists():
            setting.write_text("1")


def _cable(end: str, other_end: str) -> str:
    return f"link add name {end} mtu {MTU_BYTES} type veth peer name {other_end} mtu {MTU_BYTES}"


def _hardware_address(host: int) -> str:
    """A locally administered MAC address."""
    return (0x02 << 40 | host).to_bytes(6).hex(":")


def _batch(tool: str, lines: Sequence[str]) -> None:
    """Run lines of ip, tc or bridge. Raises RequestError where the kernel lacks a feature, or PermissionError."""
    done = subprocess.run([tool, "-batch", "-"], input="\n".join(lines), text=True, capture_output=True)
    if done.returncode:
        said = f"{tool}: {' '.join(done.stderr.split())}"
        if os.strerror(errno.EPERM) in said:
            raise PermissionError(errno.EPERM, said)
        would = "a kernel with veth, bridge and tbf (sch_tbf), or mode=simulate, would work"
        raise RequestError("cluster.hosts", f"this kernel can't make hosts ({said})", would)
