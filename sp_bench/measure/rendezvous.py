"""Rendezvous of processes that share a name and know the host of one of them.

The name determines a list of ports. One process listens at the first that is free; the others try them in turn. A
token, also determined by the name, tells the right listener from those of other names or programs. It is no secret: as
with torch.distributed, whoever can reach the ports must be trusted.
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
"""Ports below those that systems give to outgoing connections."""
HANDSHAKE_S = 2.0
"""Seconds to wait for the other side to send its token."""
RETRY_S = 0.05


class Listener:
    """The process that others connect to. Close it, or use it as a context manager."""

    def __init__(self, name: str) -> None:
        """Start to listen. Raises OSError if none of the name's ports is free."""
        self._name, self._socket = name, _bound(name)
        self._socket.listen(1024)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close()

    def accept(self, deadline: float) -> tuple[Connection, str]:
        """The next connection with the right token, and the local address it came to.

        `deadline` is a time of time.monotonic(). Raises TimeoutError.
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
    """A connection to the listener of that name, and the local address it starts from.

    `deadline` is a time of time.monotonic(). Raises TimeoutError.
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
    """The name of the network interface that has this IPv4 address; None if none has."""
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
    """As many bytes as a token has; fewer if the connection ends."""
    size, received = hashlib.sha256().digest_size, b""
    while len(received) < size and (part := peer.recv(size - len(received))):
        received += part
    return received
