"""The registry of peers, and the checks of a request for one. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sp_bench.errors import RequestError, nearest
from sp_bench.peers.deepspeed_ulysses import DeepSpeedUlysses
from sp_bench.peers.peer import PEER, Peer
from sp_bench.peers.ring_flash_attn import RingFlashAttn
from sp_bench.peers.torch_context_parallel import TorchContextParallel
from sp_bench.peers.transformer_engine import TransformerEngine
from sp_bench.peers.user import User
from sp_bench.peers.yunchang import Yunchang
from sp_bench.plan.mask import Mask

PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (TorchContextParallel, RingFlashAttn, Yunchang, DeepSpeedUlysses, TransformerEngine)
}
"""Every package by its `impl` name. A new one is imported above and listed here."""


def build(impl: str | None, options: Mapping[str, Any], *, mask: Mask, here: bool = True) -> Peer:
    """The peer of that name, or the user's function if `impl` is module:name, with the options of method=peer.

    Raises RequestError for an unknown name or option or, if it is to run `here`, a package that is not installed.
    """
    if impl and ":" in impl:
        return User.named(impl, options, mask=mask, here=here)
    if impl not in PEERS:
        rule = f"method={PEER} needs an implementation to run" if impl is None else "there is no such implementation"
        known = nearest(impl or "", PEERS)
        raise RequestError(f"impl={'null' if impl is None else impl}", rule, f"{known}, or your_module:your_function")
    return PEERS[impl].build(options, mask=mask, here=here)
