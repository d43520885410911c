"""The registry of peers, and the checks of a request for one. Imports no torch."""

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
"""The value of the key `method` that runs the peer which `impl` names."""

PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (TorchContextParallel, RingFlashAttn, Yunchang, DeepSpeedUlysses)
}
"""Every package by its `impl` name. A new one is imported above and listed here."""


def build(impl: str | None, options: Mapping[str, Any], *, mask: Mask) -> Peer:
    """The peer of that name, or the user's function if `impl` is module:name, with the options of method=peer.

    Raises RequestError for an unknown name or option, or if the package is not installed.
    """
    if impl and ":" in impl:
        return User.named(impl, options, mask=mask)
    if impl not in PEERS:
        rule = f"method={METHOD} needs an implementation to run" if impl is None else "there is no such implementation"
        known = nearest(impl or "", PEERS)
        raise RequestError(f"impl={'null' if impl is None else impl}", rule, f"{known}, or your_module:your_function")
    return PEERS[impl].build(options, mask=mask)


def refuse_run(peer: Peer, *, mode: str, kernel: str) -> None:
    """Raise RequestError for a run that a peer can't do: a simulation, one with another kernel, or with flash_attn.

    Peers run on CPUs, for which flash_attn has no kernels.
    """
    if mode == "simulate":
        rule = f"{peer.name} has no plan that could be simulated"
        raise RequestError(f"method={METHOD} mode=simulate", rule, "cluster=local would work, which measures")
    if peer.kernel_name == "flash_attn":
        rule = "flash_attn is installed here, and takes no tensors of a CPU"
        would_work = "an environment without flash_attn would work, where a stand-in takes its place"
        raise RequestError(f"impl={peer.impl}", rule, would_work)
    if kernel != "auto":
        raise RequestError(f"kernel={kernel}", f"{peer.name} has its own kernel", "kernel=auto would work")
