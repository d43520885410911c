"""Kernels that read a cache's pages as they lie: results, and the choice of one for decode steps."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_bench.errors import RequestError
from sp_bench.kernels import KERNELS, BlockKernel, choose, choose_for_caches
from sp_bench.kernels.contract import PagedKernel
from sp_bench.kernels.entries import Entries, merged
from sp_bench.methods import build
from sp_bench.plan.caches import Caches
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import RegionKind
from sp_bench.run.caches import in_pages, reads_in_place
from sp_bench.run.engine import Engine
from tests.kernels import fakes
from tests.kernels.test_choose import ADA, H100, gpu, packages
from tests.support.dense import LSE_TOLERANCE, TOLERANCE, relative_error

CPU = torch.device("cpu")
READERS = ("aten_cpu", *fakes.OF_CACHES)
UNUSED = 1e4


@contextmanager
def kernel_of(name: str) -> Iterator[BlockKernel]:
    """A kernel for decode steps, with a fake of what it calls."""
    with fakes.installed(name) if name in (*fakes.OF_CACHES, *fakes.OF_LATENTS) else nullcontext():
        kernel = KERNELS[name]()
        kernel.decodes = True
        yield kernel


def pools(lengths: list[int], page: int, heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Entries]:
    """k and v in pages in any order, one more than there are, with large numbers where no key is; and the entries."""
    draw, counts = random.Random(sum(lengths)), [-(-length // page) for length in lengths]
    places = draw.sample(range(sum(counts) + 1), sum(counts))
    k, v = (torch.full((sum(counts) + 1, page, heads, width), UNUSED, dtype=dtype) for _ in range(2))
    generator, found = torch.Generator().manual_seed(page), []
    for length, count in zip(lengths, counts, strict=True):
        found.append(tuple(places.pop() for _ in range(count)))
        for number, place in enumerate(found[-1]):
            keys = min(page, length - number * page)
            for pool in (k, v):
                pool[place, :keys] = torch.randn(keys, heads, width, generator=generator).to(dtype)
    return k, v, Entries(tuple(lengths), tuple(found), page, CPU)


def exact(q: Tensor, k: Tensor, v: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
    """(out_ERHD, lse_EHR) in fp64, each entry's keys gathered."""
    found = []
    for one, length, places in zip(q, entries.lengths, entries.places, strict=True):
        keys, values = (x[list(places)].flatten(0, 1)[:length].double() for x in (k, v))
        scores = torch.einsum("rhd,khd->hrk", one.double(), keys) * q.shape[3] ** -0.5
        found.append((torch.einsum("hrk,khd->rhd", scores.softmax(2), values), scores.logsumexp(2)))
    out, lse = (torch.stack(x) for x in zip(*found, strict=True))
    return out, lse


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_pages_are_read_as_they_lie(name: str, dtype: torch.dtype) -> None:
    if name in fakes.OF_CACHES and dtype in (torch.float32, torch.float64):
        assert "float16 and bfloat16" in KERNELS[name].refuses_caches("cuda", str(dtype).removeprefix("torch."), 64, 64)
        return
    with kernel_of(name) as kernel:
        assert isinstance(kernel, PagedKernel)
        for page in (1, 3, 16, 64, 100, 256, 512):
            if not kernel.takes_pages(page):
                continue
            for rows, heads in ((1, 4), (4, 2), (9, 1)):
                k, v, entries = pools([1, page, page + 1, 5 * page - 1, 2], page, heads, 64, dtype)
                q = torch.randn(len(entries), rows, heads, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
                out, lse = kernel.forward_pages(q, k, v, entries)
                wanted, of_lse = exact(q, k, v, entries)
                assert out.dtype == dtype and out.shape == q.shape
                assert relative_error(out, wanted) <= TOLERANCE[dtype], (page, rows)
                torch.testing.assert_close(lse.double(), of_lse, rtol=0, atol=LSE_TOLERANCE[dtype])


def test_which_pages_a_kernel_takes() -> None:
    taken = {
        name: [page for page in (1, 16, 64, 128, 256, 384, 512) if KERNELS[name].takes_pages(page)] for name in KERNELS
    }
    every = [1, 16, 64, 128, 256, 384, 512]
    assert taken.pop("flash_attn") == [256, 512]
    assert taken.pop("flash_mla") == [64]
    assert taken.pop("aten_cpu") == [64, 128, 256, 384, 512]
    assert taken.pop("flash_attn_3") == taken.pop("flashinfer") == every
    assert not any(taken.values())


@pytest.mark.parametrize("name", fakes.OF_CACHES)
@pytest.mark.parametrize("page", [None, 7, 256])
def test_a_step_on_one_rank(name: str, page: int | None) -> None:
    """The engine's calls of each kernel: rows of several counts, with pages in the pool's order or without pages."""
    mask = Caches((700, 260, 41, 1030), new=2, share=3, page=page)
    layout = mask.layout("auto")
    shape = {"heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "layout": layout}
    problem = Problem(n=1, seqlen=mask.seqlen, kv_seqlen=mask.kv_seqlen, mask=mask, **shape)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(1, tokens, 2, 64, generator=generator).bfloat16()
        for tokens in (mask.seqlen, mask.kv_seqlen, mask.kv_seqlen)
    )
    method = build("dcp", {})
    with kernel_of(name) as kernel:
        engine = Engine({"forward": method.plan(problem, "forward", COMPUTE_BOUND)}, problem, kernel, CPU)
        assert reads_in_place(kernel, problem) == (
            name == "flashinfer" or (page is not None and kernel.takes_pages(page))
        )
        pooled, before = in_pages(problem, 0, k, v), fakes.FlashInferModule.BatchDecodeWithPagedKVCacheWrapper.made
        outs = [engine.forward(q, *pooled)[0] for _ in range(2)]
        engine.close()
        # A plan for all rows that are as many, and none more at a second step.
        made = fakes.FlashInferModule.BatchDecodeWithPagedKVCacheWrapper.made - before
        assert made == (name == "flashinfer")
    assert torch.equal(*outs)
    row = first = 0
    for length in mask.lengths:
        for token in range(2):
            seen = slice(first, first + length - 1 + token)
            rows = slice(row, row + 3)
            scores = torch.einsum("rhd,khd->hrk", q[0, rows].double(), k[0, seen].double()) / 8
            wanted = torch.einsum("hrk,khd->rhd", scores.softmax(2), v[0, seen].double())
            assert relative_error(outs[0][0, rows], wanted) <= TOLERANCE[torch.bfloat16]
            row += 3
        first += length


@pytest.mark.parametrize("name", fakes.OF_LATENTS)
def test_latent_pages_are_read_with_values_that_are_their_first_elements(name: str) -> None:
    """Twice, as at two steps, and keys that lie one behind the other."""
    with kernel_of(name) as kernel:
        assert isinstance(kernel, PagedKernel)
        assert not kernel.pads(576, 512)
        for page in (1, 16, 64, 256):
            if not kernel.takes_pages(page):
                continue
            for rows in (1, 5, 16):
                k, _, entries = pools([1, page, page + 1, 3 * page - 1, 2], page, 1, 576, torch.bfloat16)
                q = torch.randn(len(entries), rows, 1, 576, generator=torch.Generator().manual_seed(3)).bfloat16()
                wanted, of_lse = exact(q, k, k[..., :512], entries)
                for _ in range(2):
                    out, lse = kernel.forward_pages(q, k, k[..., :512], entries)
                    assert out.shape == (*q.shape[:3], 512) and out.is_contiguous() and lse.shape == of_lse.shape
                    assert relative_error(out, wanted) <= TOLERANCE[torch.bfloat16], (page, rows)
                    torch.testing.assert_close(lse.double(), of_lse, rtol=0, atol=LSE_TOLERANCE[torch.bfloat16])
        for keys in (64, 100):
            q, k = (torch.randn(2, tokens, 1, 576).bfloat16() for tokens in (3, keys))
            out, lse = kernel.forward(q, k, k[..., :512], RegionKind.FULL)
            scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 24
            wanted = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(3), k[..., :512].double())
            assert relative_error(out, wanted) <= TOLERANCE[torch.bfloat16]
            torch.testing.assert_close(lse.double(), scores.logsumexp(3), rtol=0, atol=LSE_TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("name", fakes.OF_LATENTS)
@pytest.mark.parametrize("page", [None, 64, 16])
def test_a_step_of_latents_on_one_rank(name: str, page: int | None) -> None:
    mask = Caches((300, 64, 41), new=1, share=4, page=page)
    shape = {"heads": 1, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "absorbed": True, "dtype": "bfloat16"}
    problem = Problem(n=1, seqlen=mask.seqlen, kv_seqlen=mask.kv_seqlen, mask=mask, layout=mask.layout("auto"), **shape)
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, n, 1, 576, generator=generator).bfloat16() for n in (mask.seqlen, mask.kv_seqlen))
    with kernel_of(name) as kernel:
        plans = {"forward": build("dcp", {}).plan(problem, "forward", COMPUTE_BOUND)}
        engine = Engine(plans, problem, kernel, CPU)
        pooled = in_pages(problem, 0, k, k[..., :0])
        outs = [engine.forward(q, *pooled)[0] for _ in range(2)]
        engine.close()
    assert torch.equal(*outs)
    first = 0
    for row, length in enumerate(mask.lengths):
        rows, keys = slice(4 * row, 4 * row + 4), k[0, first : first + length].double()
        scores = torch.einsum("rhd,khd->hrk", q[0, rows].double(), keys) / 24
        wanted = torch.einsum("hrk,khd->rhd", scores.softmax(2), keys[..., :512])
        assert relative_error(outs[0][0, rows], wanted) <= TOLERANCE[torch.bfloat16]
        first += length


def test_the_choice_for_latent_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, H100)
    with fakes.installed("flash_attn_3"), fakes.installed("flash_mla"), fakes.installed("flashinfer"):
        assert chosen(64).name == chosen(64, 576, 512).name == "flash_attn_3"
        for name, widths in (("flash_mla", (128, 128)), ("flash_mla", (576, 576)), ("flashinfer", (576, 576))):
            with pytest.raises(RequestError, match=f"kernel={name}: it takes .*576 with .*512, not {widths[0]} with"):
                chosen(64, *widths, name)
        with pytest.raises(RequestError, match="kernel=flash_attn_3: it takes a head_dim of at most 256"):
            chosen(64, 576, 576, "flash_attn_3")
        with pytest.raises(RequestError, match="kernel=flash_mla: it has no backward, and is for workload=decode"):
            choose("flash_mla", "cuda", "bfloat16", 576)
    with fakes.installed("flash_mla"), fakes.installed("flashinfer"):
        assert [chosen(page, 576, 512).name for page in (64, 16)] == ["flash_mla", "flashinfer"]
    gpu(monkeypatch, ADA)
    with fakes.installed("flash_mla"), fakes.installed("flashinfer"):
        assert chosen(64, 576, 512).name == "flashinfer"
        with pytest.raises(RequestError, match="kernel=flash_mla: it is for GPUs of compute capability 9.x"):
            chosen(64, 576, 512, "flash_mla")


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3"])
def test_long_caches_are_cut_unless_all_is_deterministic(name: str) -> None:
    k, v, entries = pools([300, 20], 256, 2, 64, torch.bfloat16)
    q = torch.randn(2, 4, 2, 64).bfloat16()
    package = "flash_attn_interface" if name == "flash_attn_3" else "flash_attn.flash_attn_interface"
    with kernel_of(name) as kernel:
        assert isinstance(kernel, PagedKernel)
        kernel.forward_pages(q, k, v, entries)
        assert sys.modules[package].splits == 0
        torch.use_deterministic_algorithms(True)
        try:
            kernel.forward_pages(q, k, v, entries)
        finally:
            torch.use_deterministic_algorithms(False)
        assert sys.modules[package].splits == 1


def test_blocks_of_training_are_never_cut() -> None:
    q, k, v = (torch.randn(1, 8, 2, 64).bfloat16() for _ in range(3))
    with fakes.installed("flash_attn_3"):
        for decodes, splits in ((False, 1), (True, 0)):
            kernel = KERNELS["flash_attn_3"]()
            kernel.decodes = decodes
            kernel.forward(q, k, v, RegionKind.FULL)
            assert sys.modules["flash_attn_interface"].splits == splits


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=8), blind=st.booleans())
def test_parts_of_entries_merge_to_the_whole(parts: list[tuple[int, int]], blind: bool) -> None:
    """In any order, also with a part that saw no key beside others."""
    generator, numbers = torch.Generator().manual_seed(len(parts)), sorted({entry for entry, _ in parts})
    q = torch.randn(len(numbers), 2, 3, 8, generator=generator, dtype=torch.float64)
    keys = [(numbers.index(e), *torch.randn(2, n, 3, 8, generator=generator, dtype=torch.float64)) for e, n in parts]

    def attention(entry: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("rhd,khd->hrk", q[entry], k)
        return torch.einsum("hrk,khd->rhd", scores.softmax(2), v), scores.logsumexp(2)

    of_parts = [attention(*each) for each in keys]
    entries = [entry for entry, _, _ in keys]
    if blind:
        of_parts.append((torch.zeros(2, 3, 8, dtype=torch.float64), torch.full((3, 2), -torch.inf).double()))
        entries.append(0)
    out, lse = (torch.stack(x) for x in zip(*of_parts, strict=True))
    found, of_lse = merged(out, lse, torch.tensor(entries), len(numbers))
    for entry in range(len(numbers)):
        of_entry = [(k, v) for number, k, v in keys if number == entry]
        k, v = (torch.cat(x) for x in zip(*of_entry, strict=True))
        wanted, wanted_lse = attention(entry, k, v)
        torch.testing.assert_close(found[entry], wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(of_lse[entry], wanted_lse, rtol=0, atol=1e-12)


def chosen(page: int | None, head_dim: int = 128, value_dim: int = 128, name: str = "auto") -> BlockKernel:
    return choose_for_caches(name, "cuda", "bfloat16", head_dim, value_dim, page)


def test_the_choice_for_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that read the pages come before those before which keys are copied."""
    gpu(monkeypatch, ADA)
    packages(monkeypatch, "flash_attn", "flashinfer")
    assert (chosen(None).name, chosen(256).name, chosen(64).name) == ("flash_attn", "flash_attn", "flashinfer")
    assert chosen(64).decodes and not chosen(64).notes
    packages(monkeypatch, "flash_attn")
    assert chosen(64).name == "flash_attn"
    assert chosen(64).notes == ("flash_attn reads no pages of 64 tokens: keys are copied by an index before it",)
    assert chosen(None, 576, 512).name == "reference"
    packages(monkeypatch)
    assert chosen(64).name == "aten_flash"
    assert choose_for_caches("auto", "cpu", "float32", 128, 128, 64).name == "aten_cpu"


def test_hopper_has_flash_attn_3(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, H100)
    with fakes.installed("flash_attn_3"), fakes.installed("flashinfer"):
        assert chosen(64).name == "flash_attn_3"


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, H100)
    packages(monkeypatch, "flashinfer")
    with pytest.raises(RequestError, match=r"kernel=flashinfer: it takes a head_dim of 64, 128, 256 .* not 96 with 96"):
        chosen(64, 96, 96, "flashinfer")
    with pytest.raises(RequestError, match="values as wide, or 576 with 512, not 128 with 64"):
        chosen(64, 128, 64, "flashinfer")
    with pytest.raises(RequestError, match="kernel=flashinfer: it has no backward, and is for workload=decode alone"):
        choose("flashinfer", "cuda", "bfloat16", 128)
    with pytest.raises(RequestError, match="kernel=flashinfer: it runs on cuda only, not on cpu; kernel=auto"):
        choose_for_caches("flashinfer", "cpu", "bfloat16", 128, 128, 64)
    with pytest.raises(RequestError, match="there is no such kernel; did you mean flashinfer"):
        chosen(64, name="flash_infer")
    packages(monkeypatch)
    with pytest.raises(RequestError, match="pip install flashinfer-python would install it"):
        chosen(64, name="flashinfer")
