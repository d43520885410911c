"""How processes find each other that know only a name which they share and the host of one of them.

The name decides on some ports, of which the one process listens at the first that is free; the others try them in
turn. A token, which the name decides as well, tells a listener of another name or another program from the right one.
It keeps no secret: as with torch.distributed, whoever can reach the ports must be trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import time
from multiprocessing.connection import Connection

CANDIDATES = 16
PORTS = range(10_000, 32_000)
"""Below those that systems give to outgoing connections."""
HANDSHAKE_S = 2.0
"""How long to wait for a peer to show its token."""
RETRY_S = 0.05


class Listener:
    """The side that others come to. Close it, or use it as a context manager."""

    def __init__(self, name: str) -> None:
        """Raises OSError where none of the name's ports is free."""
        self._name, self._socket = name, _bound(name)
        self._socket.listen(1024)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """No more connections."""
        self._socket.close()

    def accept(self, deadline: float) -> tuple[Connection, str]:
        """The next peer that has the token, and our address that it came to. `deadline` is by time.monotonic().

        Raises TimeoutError.
        """
        while True:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            peer, _ = self._socket.accept()
            with contextlib.suppress(OSError):
                peer.settimeout(HANDSHAKE_S)
                if _received(peer) == _token(self._name, "come"):
                    peer.sendall(_token(self._name, "welcome"))
                    peer.settimeout(None)
                    address = peer.getsockname()[0]
                    return Connection(peer.detach()), address
            peer.close()


def connect(host: str, name: str, deadline: float) -> tuple[Connection, str]:
    """A connection to the listener of that name, and our address that it goes out from.

    `deadline` is by time.monotonic(). Raises TimeoutError.
    """
    while True:
        for port in _ports(name):
            with contextlib.suppress(OSError):
                peer = socket.create_connection((host, port), HANDSHAKE_S)
                with contextlib.ExitStack() as undo:
                    undo.callback(peer.close)
                    peer.sendall(_token(name, "come"))
                    if _received(peer) == _token(name, "welcome"):
                        undo.pop_all()
                        peer.settimeout(None)
                        address = peer.getsockname()[0]
                        return Connection(peer.detach()), address
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody listens at {host}")
        time.sleep(RETRY_S)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an IPv4 address; None where none has."""
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, get_address, name.encode().ljust(40, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _ports(name: str) -> list[int]:
    return random.Random(name).sample(PORTS, CANDIDATES)


def _bound(name: str) -> socket.socket:
    for port in _ports(name):
        with contextlib.suppress(OSError):
            return socket.create_server(("", port))
    raise OSError(f"none of the ports {', '.join(map(str, _ports(name)))} is free")


def _token(name: str, side: str) -> bytes:
    return hashlib.sha256(f"{side} {name}".encode()).digest()


def _received(peer: socket.socket) -> bytes:
    """A token's length of bytes, or fewer where the peer has no more."""
    size, found = hashlib.sha256().digest_size, b""
    while len(found) < size and (part := peer.recv(size - len(found))):
        found += part
    return found
