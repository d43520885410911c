"""The stand-in for flash_attn against dense attention in fp64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sp_bench.peers import stand_in
from sp_bench.plan.regions import RegionKind
from tests.support.dense import TOLERANCE, Answers, Block, attention, block_of, relative_error
from tests.support.marks import exhaustive

ROOT = Path(__file__).parents[2]
SIZES = ((8, 8), (5, 12), (1, 7), (1, 1))
"""Queries and keys."""

dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
masks = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


def last_queries(queries: int, keys: int, kv_heads: int, dtype: torch.dtype, causal: bool) -> tuple[Block, Answers]:
    """A block whose last query is aligned to its last key, and what comes of it: the last rows of a square one."""
    square = block_of(keys, keys, kv_heads, dtype)
    rows = slice(keys - queries, keys)
    dout = torch.zeros_like(square.dout)
    dout[:, rows] = square.dout[:, rows]
    whole = attention(square._replace(dout=dout), RegionKind.CAUSAL if causal else RegionKind.FULL)
    block = Block(square.q[:, rows], square.k, square.v, dout[:, rows])
    return block, whole._replace(out=whole.out[:, rows], lse=whole.lse[:, :, rows], dq=whole.dq[:, rows])


def assert_close(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for x, y in zip(got, wanted, strict=True):
        assert x.shape == y.shape and x.dtype == dtype
        assert relative_error(x, y) <= 2 * TOLERANCE[dtype]


def nans_like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places for their gradients."""
    return torch.full_like(q, torch.nan), torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)


@dtypes
@masks
@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_forward_and_backward(dtype: torch.dtype, causal: bool, queries: int, keys: int, kv_heads: int) -> None:
    """By the functions that peers call, and by the differentiable one."""
    block, exact = last_queries(queries, keys, kv_heads, dtype, causal)
    q, k, v, dout = block
    scale = q.shape[3] ** -0.5
    out, lse, *_ = stand_in._flash_attn_forward(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)
    torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-3)
    dq, dk, dv = gradients = nans_like(q, k, v)
    stand_in._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, scale, causal, -1, -1, 0.0, None, False)
    assert_close((out, *gradients), (exact.out, *exact[2:]), dtype)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = stand_in.flash_attn_func(q, k, v, causal=causal)
    assert_close((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)), (exact.out, *exact[2:]), dtype)


@masks
def test_packed_sequences(causal: bool) -> None:
    """Each sequence of a pack is on its own, whatever its length."""
    parts = [last_queries(queries, keys, 2, torch.float64, causal) for queries, keys in ((8, 8), (5, 12))]
    blocks, answers = [block for block, _ in parts], [exact for _, exact in parts]
    q, k, v, dout = (torch.cat([x[0] for x in operand]) for operand in zip(*blocks, strict=True))
    ends = ([0, 8, 13], [0, 8, 20])
    q_ends, k_ends = (torch.tensor(x, dtype=torch.int32) for x in ends)
    sizes = (q_ends, k_ends, 8, 12)
    scale = q.shape[2] ** -0.5
    out, lse, *_ = stand_in._flash_attn_varlen_forward(q, k, v, *sizes, 0.0, scale, causal)
    assert lse.shape == (q.shape[1], q.shape[0])
    dq, dk, dv = gradients = nans_like(q, k, v)
    stand_in._flash_attn_varlen_backward(dout, q, k, v, out, lse, dq, dk, dv, *sizes, 0.0, scale, causal)
    wanted = (torch.cat([x[0] for x in field]) for field in zip(*((a.out, *a[2:]) for a in answers), strict=True))
    assert_close((out, *gradients), tuple(wanted), torch.float64)


@pytest.mark.parametrize(
    "asked",
    [
        {"dropout_p": 0.1},
        {"softmax_scale": 1.0},
        {"window_size": (8, 0)},
        {"softcap": 30.0},
        {"alibi_slopes": torch.ones(4)},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_anything_else_is_refused(asked: dict[str, object]) -> None:
    q, k, v, _ = block_of(4, 4)
    with pytest.raises(ValueError, match="plain exact attention only"):
        stand_in.flash_attn_func(q, k, v, **asked)  # pyright: ignore


def test_fewer_keys_than_queries_under_a_mask_are_refused() -> None:
    q, k, v, _ = block_of(4, 3)
    with pytest.raises(ValueError, match="4 queries and 3 keys"):
        stand_in.flash_attn_func(q, k, v, causal=True)


@pytest.mark.parametrize("installed", [False, exhaustive(True)])
def test_it_stands_in_only_where_flash_attn_is_missing(tmp_path: Path, installed: bool) -> None:
    if installed:
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn" / "__init__.py").write_text("def flash_attn_func(): ...\n")
    code = (
        "from sp_bench.peers import stand_in; stand_in.install(); stand_in.install();"
        "import flash_attn; print(flash_attn.flash_attn_func.__module__)\n"
        "from flash_attn.flash_attn_interface import _flash_attn_forward as f; print(f.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    if installed:
        assert done.stdout.split() == ["flash_attn"], done.stderr
    else:
        assert done.stdout.split() == ["sp_bench.peers.stand_in"] * 2, done.stderr
