"""Parts of a model's layers, which must give a token the same whatever other tokens there are.

A part is known to be so by what it is made of, or it is tried: on some tokens, and on each half of them alone. One
that can't be tried by itself (its parameters are sharded or on no device, or it takes more than hidden states) is tried
when it is first called, with what it is called with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from sp_bench.errors import RequestError
from sp_bench.integrations.layer_masks import OTHERWISE
from sp_bench.run.differentiable import untraced

OF_TOKENS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout)
"""Modules of torch that work on each token alone; a class that is made of one is known by its forward."""
TRIED_TOKENS = 6


def parts_of(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, part) of a layer; those in a list or dictionary each by itself."""
    for place, part in layer.named_children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{place}.{inner}", each) for inner, each in parts_of(part))
        else:
            yield place, part


def refuse_part(title: str, part: nn.Module, width: int) -> None:
    """Raise RequestError if a part that takes hidden states (1, S, width) mixes tokens, now or when first called."""
    if all(type(module).forward in {cls.forward for cls in (*OF_TOKENS, nn.Sequential)} for module in part.modules()):
        return
    weight = next(chain(part.parameters(), part.buffers()), torch.empty(1))
    mixed = None
    if type(weight) in (Tensor, nn.Parameter) and not weight.is_meta and weight.numel():
        x = torch.randn(1, TRIED_TOKENS, width, generator=torch.Generator().manual_seed(0)).to(weight)
        mixed = _mixes(part, (x,), {})
    if mixed is None:
        part.register_forward_pre_hook(_AtFirstCall(title), with_kwargs=True)
    elif mixed:
        raise _refusal(title)


class _AtFirstCall:
    """A hook of a part that couldn't be tried by itself."""

    def __init__(self, title: str) -> None:
        self._title, self._tried = title, False

    def __call__(self, part: nn.Module, args: tuple, given: dict[str, Any]) -> None:
        """Raise RequestError if it mixes tokens, or can't be tried."""
        if not self._tried:
            self._tried = untraced(self._try)(part, args, given)

    def _try(self, part: nn.Module, args: tuple, given: dict[str, Any]) -> bool:
        """Whether it could be tried; not with one token or on no device."""
        states = _states((*args, *given.values()))
        if states is None or states.is_meta or _tokens(states) < 2:
            return False
        mixed = _mixes(part, args, given)
        if mixed is None:
            rule = "is no part that is known to work on each token alone, and can't be tried on some of them"
            raise RequestError(self._title, rule, OTHERWISE)
        if mixed:
            raise _refusal(self._title)
        return True


def _refusal(title: str) -> RequestError:
    rule = "gives a token something else if other tokens are not there, and would see those of its rank only"
    return RequestError(title, rule, OTHERWISE)


def _mixes(part: nn.Module, args: tuple, given: dict[str, Any]) -> bool | None:
    """Whether a module that is called with these arguments gives half of the tokens something else; None: can't say."""
    states = _states((*args, *given.values()))
    if states is None:
        return None
    tokens, half = _tokens(states), min(_tokens(states), TRIED_TOKENS) // 2
    runs = (range(2 * half), range(half), range(half, 2 * half))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _evaluated(part):
            results = [_tensors(part.forward(*_cut(args, tokens, run), **_cut(given, tokens, run))) for run in runs]
    except Exception:  # it takes something else
        return None
    mixing = []
    for whole, *halves in zip(*results, strict=False):
        if not bool(whole.isfinite().all()):
            return None
        dim = _dim(whole, 2 * half)
        if dim is not None and all(_dim(x, half) == dim for x in halves):
            apart = (whole - torch.cat(halves, dim)).abs().max()
            mixing.append(bool(apart > torch.finfo(whole.dtype).eps ** 0.5 * whole.abs().max()))
    return any(mixing) if mixing else None


def _states(arguments: tuple) -> Tensor | None:
    """The hidden states: the first argument that is a tensor of numbers."""
    return next((x for x in arguments if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1), None)


def _tokens(states: Tensor) -> int:
    """How many tokens hidden states (B, S, ...) or (S, width) are of."""
    return states.shape[1 if states.ndim > 2 else 0]


def _dim(x: Tensor, tokens: int) -> int | None:
    """The dimension of a tensor that counts tokens; None if none does."""
    dims = (0, 1) if x.ndim == 2 and x.is_floating_point() else (1, 0)
    return next((dim for dim in dims if dim < x.ndim and x.shape[dim] == tokens), None)


def _cut(x: Any, tokens: int, run: range) -> Any:
    """A copy of arguments with a run of the tokens."""
    if isinstance(x, Tensor):
        dim = _dim(x, tokens)
        return x if dim is None else x.narrow(dim, run.start, len(run)).clone()
    if isinstance(x, dict):
        return {key: _cut(each, tokens, run) for key, each in x.items()}
    return type(x)(_cut(each, tokens, run) for each in x) if type(x) in (tuple, list) else x


def _tensors(out: Any) -> list[Tensor]:
    """The tensors of numbers that a module returns."""
    parts = out if isinstance(out, tuple | list) else (out,)
    return [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()]


@contextmanager
def _evaluated(part: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in part.modules()]
    part.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
