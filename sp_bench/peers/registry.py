"""The registry of peers, and the checks of a request for one. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sp_bench.errors import RequestError, nearest
from sp_bench.peers.deepspeed_ulysses import DeepSpeedUlysses
from sp_bench.peers.peer import Peer
from sp_bench.peers.ring_flash_attn import RingFlashAttn
from sp_bench.peers.torch_context_parallel import TorchContextParallel
from sp_bench.peers.transformer_engine import TransformerEngine
from sp_bench.peers.user import User
from sp_bench.peers.yunchang import Yunchang
from sp_bench.plan.mask import Mask

METHOD = "peer"
"""The value of the key `method` that runs the peer which `impl` names."""

PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (TorchContextParallel, RingFlashAttn, Yunchang, DeepSpeedUlysses, TransformerEngine)
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


def refuse_run(peer: Peer, *, mode: str, kernel: str, device: str) -> None:
    """Raise RequestError for a run that a peer can't do: a simulation, one on that device, or with another kernel."""
    if mode == "simulate":
        rule = f"{peer.name} has no plan that could be simulated"
        raise RequestError(f"method={METHOD} mode=simulate", rule, "cluster=local would work, which measures")
    peer.refuse_device(device)
    if kernel != "auto":
        raise RequestError(f"kernel={kernel}", f"{peer.name} has its own kernel", "kernel=auto would work")
