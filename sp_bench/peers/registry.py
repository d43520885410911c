"""The registry of peers, and what a request for one is held to. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sp_bench.errors import RequestError, nearest
from sp_bench.peers.deepspeed_ulysses import DeepSpeedUlysses
from sp_bench.peers.peer import Peer
from sp_bench.peers.ring_flash_attn import RingFlashAttn
from sp_bench.peers.torch_context_parallel import TorchContextParallel
from sp_bench.peers.user import User
from sp_bench.peers.yunchang import Yunchang
from sp_bench.plan.mask import Mask

METHOD = "peer"
"""The method=... that runs the peer which impl=... names."""

PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (TorchContextParallel, RingFlashAttn, Yunchang, DeepSpeedUlysses)
}
"""Every package by the name that `impl` has for it. A new one is imported above and listed here."""


def build(impl: str | None, options: Mapping[str, Any], *, mask: Mask) -> Peer:
    """The peer of that name, or the user's own function where it is module:name, with the options of method=peer.

    Raises RequestError for a name that there is not, a package that is not installed, and an option it doesn't have.
    """
    if impl and ":" in impl:
        return User.named(impl, options, mask=mask)
    if impl not in PEERS:
        rule = f"method={METHOD} needs an implementation to run" if impl is None else "there is no such implementation"
        known = nearest(impl or "", PEERS)
        raise RequestError(f"impl={'null' if impl is None else impl}", rule, f"{known}, or your_module:your_function")
    return PEERS[impl].build(options, mask=mask)


def refuse_run(peer: Peer, *, mode: str, kernel: str) -> None:
    """Raise RequestError for what can be asked of a method but not of a peer: a simulation, or another kernel.

    Ranks are on CPUs.
    """
    if mode == "simulate":
        raise RequestError(
            f"method={METHOD} mode=simulate",
            f"{peer.name} has no plan that could be simulated",
            "cluster=local would work, which measures",
        )
    if peer.kernel_name == "flash_attn":
        raise RequestError(
            f"impl={peer.impl}",
            "flash_attn is installed here, and takes no tensors of a CPU",
            "an environment without flash_attn would work, where a stand-in takes its place",
        )
    if kernel != "auto":
        raise RequestError(f"kernel={kernel}", f"{peer.name} brings its own", "kernel=auto would work")
