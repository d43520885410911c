"""Shaped hosts: that they come and go, that their links carry what was asked for and no more, and that they count."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sp_bench.errors import RequestError
from sp_bench.labs.shaped import namespaces
from sp_bench.labs.shaped.home import SLICE_NS, link_bytes
from sp_bench.labs.shaped.hosts import FIRST_ADDRESS, IPV4, ShapedHosts
from sp_bench.measure.pool import RankPool
from tests.labs.shaped import jobs
from tests.support.hosts import BURST_BYTES, LINK_BYTES_PER_S, described
from tests.support.processes import wait_for

ROOT = Path(__file__).parents[3]
PAYLOAD_BYTES = 2**20
LONG_SLICES_SINCE = (6, 12)
BURSTS = 2
"""A message crosses two shaped ends, each of which lets one burst through at once."""

pytestmark = pytest.mark.usefixtures("can_be_made")


def least_s(payload_bytes: int, bytes_per_s: float) -> float:
    """The least time of a message over links that were idle."""
    return (payload_bytes - BURSTS * BURST_BYTES) / bytes_per_s


def interfaces() -> list[str]:
    """The interfaces of the namespace that this thread is in."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    return sorted(line.partition(":")[0].strip() for line in lines)


def seen_from_outside() -> tuple[list[str], str, int]:
    """Things that hosts could leave behind: interfaces, named namespaces, and open files of this process."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return interfaces(), names, len(os.listdir("/proc/self/fd"))


def kernel_version() -> tuple[int, ...]:
    """Its first two numbers."""
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


def is_there(place: str) -> bool:
    """Whether a path leads to a network namespace."""
    try:
        return os.readlink(place).startswith("net:")
    except OSError:
        return False


def test_hosts_leave_nothing_behind() -> None:
    before = seen_from_outside()
    with ShapedHosts(described(hosts_per_leaf=2, uplink_bytes_per_s=1e7), (0, 1, 2)) as hosts:
        places = [hosts.place_of(rank) for rank in range(3)]
        assert all(namespaces.call_inside(place, interfaces) == ["lo", "shaped0"] for place in places)
        assert seen_from_outside()[:2] == before[:2], "neither interfaces nor names outside"
    assert seen_from_outside() == before
    assert not any(map(is_there, places))
    hosts.close()


def test_ranks_share_a_host() -> None:
    with ShapedHosts(described(ranks_per_host=2), (0, 0, 1, 1)) as hosts:
        assert hosts.place_of(0) == hosts.place_of(1) != hosts.place_of(2)
        assert hosts.ranks_by_host == {"host0": [0, 1], "host1": [2, 3]}


@pytest.mark.long
@pytest.mark.parametrize("transfers_first", [True, False])
def test_transfers_go_before_blocks(transfers_first: bool) -> None:
    """By priority, and blocks keep their core as long as the kernel lets them."""
    with RankPool(2, hosts=ShapedHosts(described(transfers_first=transfers_first), (0, 1))) as pool:
        others = {os.SCHED_RR if transfers_first else os.SCHED_OTHER}
        assert pool.run(jobs.policies) == [(os.SCHED_OTHER, others)] * 2
        assert pool.run(jobs.policies_with_a_group) == [(os.SCHED_OTHER, others)] * 2
        if kernel_version() >= LONG_SLICES_SINCE:
            assert all((found == SLICE_NS) is transfers_first for found in pool.run(jobs.slice_ns))


def test_a_link_is_shaped_at_both_ends(pair: ShapedHosts) -> None:
    def shapes() -> str:
        return subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True, check=True).stdout

    ends = namespaces.call_inside(pair.place_of(0), shapes) + namespaces.call_inside(pair._switches, shapes)
    assert re.findall(r"tbf \w+: dev (\S+) root .*rate 160Mbit burst 32Kb", ends) == ["shaped0", "port0", "port1"]


@pytest.mark.long
def test_two_runs_have_hosts_at_once() -> None:
    """With the same addresses, and both at the full rate."""
    with (
        RankPool(2, hosts=ShapedHosts(described(), (0, 1))) as one,
        RankPool(2, hosts=ShapedHosts(described(), (0, 1))) as other,
    ):
        for pool in (one, other):
            for seconds, sent, _ in pool.run(jobs.exchange, PAYLOAD_BYTES):
                assert seconds >= least_s(PAYLOAD_BYTES, LINK_BYTES_PER_S)
                assert PAYLOAD_BYTES <= sent <= 1.1 * PAYLOAD_BYTES


@pytest.mark.long
def test_ranks_end_with_their_hosts() -> None:
    hosts = ShapedHosts(described(), (0, 1))
    place = hosts.place_of(0)
    with RankPool(2, hosts=hosts) as pool:
        assert pool.run(jobs.is_on_a_host) == [True, True]
        assert is_there(place)
    assert not is_there(place)
    assert link_bytes() is None, "this process has stayed where it was"


def test_ranks_without_hosts_are_on_none() -> None:
    with RankPool(2) as pool:
        assert pool.run(jobs.is_on_a_host) == [False, False]


@pytest.mark.parametrize("bytes_per_s", [LINK_BYTES_PER_S, LINK_BYTES_PER_S / 4])
def test_a_link_carries_no_more_than_its_rate(bytes_per_s: float) -> None:
    """In both directions at once; and it carries what is sent, counted with little more than the payload."""
    hosts = ShapedHosts(described(link_bytes_per_s=bytes_per_s), (0, 1))
    with RankPool(2, hosts=hosts) as pool:
        for seconds, *counted in pool.run(jobs.exchange, PAYLOAD_BYTES):
            assert seconds >= least_s(PAYLOAD_BYTES, bytes_per_s)
            assert all(PAYLOAD_BYTES <= count <= 1.1 * PAYLOAD_BYTES for count in counted)


def test_hosts_have_settings_of_their_own(pair: ShapedHosts) -> None:
    """This machine doesn't get them."""

    def settings() -> list[list[str]]:
        return [Path("/proc/sys/net/ipv4", name).read_text().split() for name in IPV4]

    wanted = [value.split() for value in IPV4.values()]
    assert namespaces.call_inside(pair.place_of(0), settings) == wanted
    assert settings() != wanted


def test_ranks_of_a_host_talk_past_its_link() -> None:
    with RankPool(2, hosts=ShapedHosts(described(link_bytes_per_s=1e5, ranks_per_host=2), (0, 0))) as pool:
        for _, sent, received in pool.run(jobs.exchange, PAYLOAD_BYTES):
            assert sent + received < PAYLOAD_BYTES / 100


def test_an_uplink_is_shared() -> None:
    """Two hosts send to two of the other leaf over an uplink that is slower than either's link."""
    uplink_bytes_per_s = LINK_BYTES_PER_S / 4
    hosts = ShapedHosts(described(hosts_per_leaf=2, uplink_bytes_per_s=uplink_bytes_per_s), range(4))
    with RankPool(4, hosts=hosts) as pool:
        seconds = max(pool.run(jobs.send_across, PAYLOAD_BYTES, 2))
    assert seconds >= least_s(2 * PAYLOAD_BYTES, uplink_bytes_per_s)


def test_all_of_many_hosts_reach_each_other() -> None:
    """They have more neighbours than a kernel's table, which all namespaces share, holds by default: 1024."""
    n, port = 36, 5000
    addresses = [str(FIRST_ADDRESS + host) for host in range(n)]

    def bound(host: int) -> socket.socket:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.bind((addresses[host], port))
        opened.settimeout(2)
        return opened

    def arrives(sender: socket.socket, own: str, receiver: socket.socket, address: str) -> bool:
        for _ in range(10):  # a busy machine may lose a datagram
            sender.sendto(b"here", (address, port))
            with contextlib.suppress(TimeoutError):
                while receiver.recvfrom(8)[1][0] != own:
                    pass  # one of an earlier sender that was sent again
                return True
        return False

    with ShapedHosts(described(), range(n)) as hosts, contextlib.ExitStack() as stack:
        sockets = [
            namespaces.call_inside(hosts.place_of(i), lambda i=i: stack.enter_context(bound(i))) for i in range(n)
        ]
        for own, sender in zip(addresses, sockets, strict=True):
            for address, receiver in zip(addresses, sockets, strict=True):
                assert arrives(sender, own, receiver, address), f"{address} hears nothing of {own}"


OWNER = """
import sys
from sp_bench.measure.pool import RankPool
from sp_bench.labs.shaped.hosts import ShapedHosts
from tests.labs.shaped import jobs
from tests.support.hosts import described

if __name__ == "__main__":
    hosts = ShapedHosts(described(), (0, 1))
    pool = RankPool(2, hosts=hosts)
    assert pool.run(jobs.is_on_a_host) == [True, True]
    print(*pool.pids, flush=True)
    sys.stdin.read()
"""


def namespaces_of_processes() -> set[str]:
    """Every network namespace that a process is in."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue
    return found


@pytest.mark.long
def test_a_killed_owner_leaves_nothing_and_others_keep_theirs(pair: ShapedHosts) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert owner.stdout
        pids = owner.stdout.readline().split()
        left = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        assert len(left) == 2 and left <= namespaces_of_processes()
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_for(lambda: not left & namespaces_of_processes(), "the namespaces of the dead owner to go")
    assert namespaces.call_inside(pair.place_of(1), interfaces) == ["lo", "shaped0"]


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"burst_bytes": 9000}, "cluster.hosts.burst_bytes=9000: must be at least 9014, a frame, to be made; 75000"),
        ({"link_bytes_per_s": 1e12}, r"cluster.hosts.link_bytes_per_s=1e\+12: must be from 10000 to 1e\+11 to be made"),
        ({"hosts_per_leaf": 2, "uplink_bytes_per_s": 1.0}, "cluster.hosts.uplink_bytes_per_s=1: must be from 10000"),
    ],
)
def test_figures_that_no_link_can_have_are_refused(figures: dict[str, float], message: str) -> None:
    before = seen_from_outside()
    with pytest.raises(RequestError, match=message):
        ShapedHosts(described(**figures), (0, 1))
    assert seen_from_outside() == before


def test_what_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a tc that can't shape, as a kernel without tbf has it."""
    before = seen_from_outside()
    for tool in ("ip", "bridge"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    (tmp_path / "tc").write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 1\n")
    (tmp_path / "tc").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(
            RequestError, match=r"this kernel can't make hosts \(tc: Error: Specified qdisc kind is unkn"
        ):
            ShapedHosts(described(), (0, 1))
    assert seen_from_outside() == before
