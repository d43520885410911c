"""The costs of blocks, folds and casts on a device, from published or measured figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from sp_bench.cluster import decoding
from sp_bench.cluster.decoding import CacheReads
from sp_bench.cluster.device_section import DeviceSection
from sp_bench.cluster.head_dims import Padded, padded
from sp_bench.cluster.implementation import Implementation
from sp_bench.cluster.kernel_table import KernelTable
from sp_bench.cluster.memory_costs import MemoryCosts
from sp_bench.cluster.variable import Kernel, blocks_s, joined_s
from sp_bench.errors import RequestError
from sp_bench.plan.memo import keep
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import DTYPE_BYTES, Problem, flops_per_pair
from sp_bench.plan.region_table import Sizes, rows_seen, table_of
from sp_bench.plan.regions import Region, RegionKind

FORMS = ("PCIe", "NVL")
"""Forms of one GPU model, with different clocks and peaks."""


@dataclass(frozen=True, kw_only=True)
class DeviceCosts(MemoryCosts):
    """One device's kernel rates and memory rates."""

    name: str
    tables: tuple[KernelTable, ...]
    """The first table with a problem's dtype and head_dim is used: those of the device's own kernel come first."""
    peak_tflops: Mapping[str, float]
    """Dense peak TFLOP/s by dtype, for MFU; a missing dtype has no MFU."""
    matmul_tflops: Mapping[str, float]
    """TFLOP/s of large matrix products by dtype, for training steps."""
    memory_bytes: float | None
    """Memory of a rank; None for no limit."""
    repeat_bytes_per_s: float
    """Bandwidth of copies that repeat key heads, and of sums over the heads that share one."""
    elementwise_bytes_per_s: float
    """Bandwidth of norms, rotations and activations, as if all between two matrix products were one kernel."""
    layer_launch_s: float
    """Launch overhead of a matrix product, or of what is between two."""
    transfer_slowdown: float
    """How much longer kernels take while their rank's transfers are in flight: 0.19 is 19%."""
    host_bytes_per_s: float | None = None
    """Bandwidth of copies to pinned memory of the host, or from it; None: not known."""
    caches: CacheReads | None = None
    """Figures of kernels for decoding; None: not known."""
    _block_s: dict[tuple[Problem, str], np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Results of `block_s`: all plans of a layout ask for the same ones."""

    @classmethod
    def of(cls, section: DeviceSection) -> Self:
        """The costs of a section `device`."""
        tables = [KernelTable.build(name, rates, section.sms) for name, rates in section.rates.items()]
        return cls(
            name=section.name,
            tables=tuple(sorted(tables, key=lambda table: table.kernel != section.kernel)),
            peak_tflops=section.peak_tflops,
            matmul_tflops=section.matmul_tflops or {},
            memory_bytes=section.memory_bytes,
            memory_bytes_per_s=section.memory_bytes_per_s,
            fold_bytes_per_s=section.fold_bytes_per_s or section.memory_bytes_per_s,
            sum_bytes_per_s=section.sum_bytes_per_s or section.memory_bytes_per_s,
            repeat_bytes_per_s=section.repeat_bytes_per_s or section.memory_bytes_per_s,
            launch_s=section.launch_s,
            elementwise_bytes_per_s=section.elementwise_bytes_per_s or section.memory_bytes_per_s,
            layer_launch_s=section.launch_s if section.layer_launch_s is None else section.layer_launch_s,
            transfer_slowdown=section.transfer_slowdown,
            caches=section.caches,
            host_bytes_per_s=section.host_bytes_per_s,
        )

    def with_kernel(self, kernel: str) -> Self:
        """The device with the tables of one kernel alone; `auto` is any. Raises RequestError for one without tables."""
        tables = tuple(table for table in self.tables if kernel in ("auto", table.kernel))
        if not tables:
            names = ", ".join(dict.fromkeys(table.kernel for table in self.tables))
            rule = f"there are no figures of this kernel on {self.name}, so that it can't be simulated there"
            raise RequestError(f"kernel={kernel}", rule, f"one of {names}, or auto, would work")
        return replace(self, tables=tables)

    def used_by(self, implementation: Implementation) -> Self:
        """The device as somebody's code uses it."""
        slowdown = implementation.transfer_slowdown
        slowdown = self.transfer_slowdown if slowdown is None else slowdown
        return replace(self, implementation=implementation, transfer_slowdown=slowdown)

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for a dtype or head_dim without kernel rates."""
        known = [table for table in self.tables if problem.dtype in table.dtypes]
        if not known:
            dtypes = dict.fromkeys(dtype for table in self.tables for dtype in table.dtypes)
            raise RequestError(
                f"dtype={problem.dtype}",
                f"there are no kernel figures for it on {self.name}, so that it can't be simulated there",
                f"one of {', '.join(dtypes)} would work",
            )
        if problem.latent_dim:
            self.matmul_flops_per_s(problem.dtype, "making of keys is")
        fits = any(table.fits(problem) for table in known) or padded(known, problem)
        if not (fits or problem.decodes):  # the time of a decode step is that of reads, for any width
            widths = sorted({(table.head_dim, table.v_head_dim or table.head_dim) for table in known})
            head_dims = " or ".join(f"{k}" if k == v else f"{k} with v_head_dim={v}" for k, v in widths)
            raise RequestError(
                f"head_dim={problem.head_dim}",
                f"the kernel figures of {self.name} are for head_dim {head_dims}, and rates differ by it",
                f"head_dim={head_dims} would work, or a cluster file with figures for {problem.head_dim}",
            )

    def matmul_flops_per_s(self, dtype: str, what: str = "training step is") -> float:
        """FLOP/s of large matrix products. Raises RequestError for a dtype without figures, by which no `what`
        simulated.
        """
        if dtype not in self.matmul_tflops:
            known = ", ".join(f"dtype={name}" for name in self.matmul_tflops)
            raise RequestError(
                f"dtype={dtype}",
                f"there are no figures of matrix products for it on {self.name}, so that no {what} simulated",
                f"{known or f'cluster.device.matmul_tflops={{{dtype}: 100}}'} would work",
            )
        return 1e12 * self.matmul_tflops[dtype]

    def figures(self, problem: Problem) -> str:
        """The kernel figures that a problem is simulated with, such as `published (flash_attn_3)`."""
        return _named(self._table(problem))

    def other_figures(self, problem: Problem) -> list[tuple[str, str]]:
        """Each other kernel that it has figures of, and these, in words as `figures` has them."""
        own = self._table(problem).kernel
        return [(table.kernel, _named(table)) for table in self.tables if table.kernel != own]

    def notes(self, problem: Problem) -> list[str]:
        """Warnings where a problem needs more than the tables' figures cover."""
        table, notes = self._table(problem), []
        if isinstance(table, Padded):
            notes.append(table.note())
        elif table.figures == "assumed":
            notes.append(f"the kernel rates of {self.name} are assumptions, at least in part")
        if problem.v_head_dim and not (problem.decodes or table.v_head_dim):
            notes.append(f"values of {problem.v_head_dim} are padded, and take as long as values of {problem.head_dim}")
        if problem.decodes:
            rate, known = f"at {self.memory_bytes_per_s / 1e12:.3g} TB/s", "no such kernel was measured"
            if self.caches:
                rate, known = "by the bytes", f"the figures of reads are {self.caches.figures}"
                if problem.head_dim != self.caches.head_dim:
                    known += f", of heads of {self.caches.head_dim}: heads of 256 were seen to take a fifth longer"
            tflops = self._decoded_flops_per_s(problem) / 1e12
            notes.append(
                f"a decode step's kernel is simulated by its reads of memory {rate}, or by its matrix products at "
                f"{tflops:.3g} TFLOP/s, whichever take longer: {known}"
            )
        elif isinstance(problem.blocks, PackBlocks):
            notes.append(self._pack_note(problem.blocks, table.smallest))
        elif (tokens := min(problem.queries.largest, problem.keys.largest)) < table.smallest:
            notes.append(
                f"blocks of {tokens} tokens are below the smallest of the kernel figures "
                f"({table.smallest}); their rate is taken to be that one's, which is too fast"
            )
        return notes

    def _pack_note(self, blocks: PackBlocks, smallest: int) -> str:
        """How blocks of many documents are simulated, and how much of the work is below the kernel figures."""
        small = np.minimum(blocks.shapes.q_tokens, blocks.shapes.kv_tokens) < smallest
        share = blocks.pairs[small].sum() / blocks.pairs.sum()
        note = "a block of several documents is simulated as one kernel call for variable lengths"
        if not share:
            return note
        below = f"pieces below the smallest of the kernel figures ({smallest} tokens)"
        return f"{note}; {max(share, 0.01):.0%} of the work is in {below}, at rates extrapolated from that one's"

    def block_s(self, problem: Problem, phase: str) -> np.ndarray:
        """Seconds of one block without its fold, by class of `Problem.blocks`: (classes,).

        They are for a rank that has a device or a core to itself.
        """
        if (known := self._block_s.get((problem, phase))) is None:
            known = keep(self._block_s, (problem, phase), self._find_block_s(problem, phase))
            known.flags.writeable = False
        return known

    def _find_block_s(self, problem: Problem, phase: str) -> np.ndarray:
        blocks = problem.blocks
        if isinstance(blocks, PackBlocks):
            return self._pack_s(problem, phase, blocks)
        if problem.decodes:
            return np.concatenate([self.caches_s(problem, [q]) for q in range(problem.n)])
        classes = [blocks.regions_of(kind) for kind in range(blocks.classes)]
        seen = np.array([rows_seen(table_of(regions).plain)[1] for regions in classes])
        several = np.array([len(regions) > 1 for regions in classes])
        seconds = np.array([self.regions_s(problem, phase, regions) for regions in classes], float)
        return seconds + self.makings_s(problem, phase, seen, several)

    def regions_s(self, problem: Problem, phase: str, regions: Iterable[Region]) -> float:
        """Seconds of kernel calls, one for each region, given keys and values (makings_s)."""
        return sum(self._region_s(problem, phase, region) for region in regions)

    def pieces_s(self, problem: Problem, phase: str, works: Sequence[Sizes]) -> np.ndarray:
        """Seconds of regions that kernels for variable lengths take together, a call for each kind of them
        (cluster.variable), given keys and values (makings_s): (works,).
        """
        kernel, number = self._kernel(problem, phase), np.repeat(np.arange(len(works)), [x.pairs.size for x in works])
        kind, q_tokens, kv_tokens, pairs = (np.concatenate(each) for each in zip(*works, strict=True))
        outer, total_s = q_tokens if phase == "forward" else kv_tokens, np.zeros(len(works))
        for call in range(3):
            of_call, mask = kind == call, "causal" if call else "full"
            blocks, of = np.unique(number[of_call], return_inverse=True)
            whole, longest = np.bincount(of, outer[of_call]), np.zeros(blocks.size)
            np.maximum.at(longest, of, outer[of_call])
            each_s = kernel.pieces_s(mask, q_tokens[of_call], kv_tokens[of_call], pairs[of_call], whole[of])
            alone_s = np.bincount(of, each_s)
            several_s = alone_s / kernel.factor(mask)
            total_s[blocks] += self.repeats_s(problem, phase, np.bincount(of, kv_tokens[of_call]))
            total_s[blocks] += self.launch_s + kernel.call_s(alone_s, several_s, np.bincount(of), whole, longest)
        return total_s

    def caches_s(self, problem: Problem, queries: Sequence[int] | np.ndarray) -> np.ndarray:
        """Seconds of a decode step's kernel call for the rows of some chunks, of all sequences: (n,), by the chunk of
        keys that they see (cluster.decoding).
        """
        reads_s, products_s = self._decoded_s(problem, queries)
        launches = 1 if self.caches else decoding.KERNELS  # figures have both kernels, and what is between them
        return np.where(reads_s > 0, launches * self.launch_s + np.maximum(reads_s, products_s), 0.0)

    def reads_bind(self, problem: Problem) -> bool:
        """Whether reads of caches take longer than products in a decode step's call for all rows."""
        reads_s, products_s = self._decoded_s(problem, range(problem.n))
        return bool(reads_s.max() >= products_s.max())

    def _decoded_s(self, problem: Problem, queries: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the reads, and of the matrix products, of such a call: (n,) each."""
        moved, flops = decoding.work(problem, queries)
        reads_s = self.caches.seconds(moved) if self.caches else moved / self.memory_bytes_per_s
        return reads_s, flops / self._decoded_flops_per_s(problem)

    def _decoded_flops_per_s(self, problem: Problem) -> float:
        """FLOP/s of a decode step's matrix products: those of a large forward block."""
        tokens, heads = problem.keys.seqlen, problem.block_heads
        table = self._table(problem)
        return table.flops_per_s("forward", "full", tokens, tokens, batch_heads=heads, dtype=problem.dtype)

    def joined_s(self, problem: Problem, phase: str, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Seconds of one call each of a query chunk of a pack, (calls,), with several key chunks, (chunks, calls).

        Where a rank has two pieces of every document, one call has the first ones and one the second ones, as they see
        other keys if the mask is causal.
        """
        blocks = problem.blocks
        assert isinstance(blocks, PackBlocks), "blocks of a whole sequence have rates of their own"
        parts = 2 if len(keys) > 1 and problem.layout.name.startswith("zigzag") else 1
        seconds = joined_s(self._kernel(problem, phase), blocks, queries, keys, parts)
        seen = blocks.keys_seen.reshape(blocks.chunks, -1)[queries[None, :], keys].sum(axis=0)
        keys_s = self.keys_s(problem, phase, seen, blocks.mask.windowed)
        return seconds + (parts * self.launch_s + keys_s) * (seconds > 0)

    def _pack_s(self, problem: Problem, phase: str, blocks: PackBlocks) -> np.ndarray:
        """A block of many documents is one call of a kernel for variable lengths (cluster.variable), but where a window
        ends have calls of their own: gradients of keys made of latents are summed over them.
        """
        seconds = blocks_s(self._kernel(problem, phase), blocks)
        keys_s = self.keys_s(problem, phase, blocks.keys_seen, blocks.mask.windowed)
        return seconds + (self.launch_s + keys_s) * (seconds > 0)

    def _kernel(self, problem: Problem, phase: str) -> Kernel:
        batch_heads = problem.batch * problem.block_heads
        return Kernel(self._table(problem), phase, batch_heads, self._flops_per_pair(problem, phase), problem.dtype)

    def _flops_per_pair(self, problem: Problem, phase: str) -> int:
        """FLOPs of a (query, key) pair of a head as rates count them: of values as wide as the kernel computes them,
        and without the padding of keys.
        """
        return flops_per_pair(phase, problem.head_dim, self._table(problem).v_head_dim or problem.head_dim)

    def _table(self, problem: Problem) -> KernelTable:
        fitting = [table for table in self.tables if table.fits(problem)]
        if not fitting and (of_padded := padded(self.tables, problem)):
            return of_padded
        # Measured points may have a dtype or head_dim without figures: the nearest table then ranks their variants.
        return (
            fitting[0]
            if fitting
            else min(
                self.tables,
                key=lambda t: (problem.dtype not in t.dtypes, abs(math.log2(t.head_dim / problem.head_dim))),
            )
        )

    def _region_s(self, problem: Problem, phase: str, region: Region) -> float:
        full, batch_heads = region.kind is RegionKind.FULL, problem.batch * problem.block_heads
        # A kernel works on tiles of rows: STRICT, which is one row less, takes as long as CAUSAL.
        pairs = region.pairs if full else region._replace(kind=RegionKind.CAUSAL).pairs
        flops_per_s = self._table(problem).flops_per_s(
            phase,
            "full" if full else "causal",
            len(region.q),
            len(region.kv),
            batch_heads=batch_heads,
            dtype=problem.dtype,
        )
        block_s = self.launch_s + batch_heads * self._flops_per_pair(problem, phase) * pairs / flops_per_s
        return block_s + self.repeats_s(problem, phase, len(region.kv))

    def keys_s(self, problem: Problem, phase: str, tokens: Any, several: Any = False):
        """Seconds of what a call's keys cost beside its kernel, for so many (a number, or an array of them): of
        repeating them for all query heads and adding their gradients, where an implementation does
        (Implementation.repeats_keys), and of making them of latents (makings_s).
        """
        return self.repeats_s(problem, phase, tokens) + self.makings_s(problem, phase, tokens, several)

    def repeats_s(self, problem: Problem, phase: str, tokens, *, calls: int = 1):
        """Seconds of repeating the keys of so many tokens for all query heads, and of adding the gradients that each of
        several `calls` returns of them: 0 where an implementation does neither.

        K and V are read once and written for each query head, their gradients read so and written once.
        """
        kernels, sharing = self.implementation.repeats_keys, problem.heads // problem.kv_heads
        if phase != "backward" or sharing == 1 or self._table(problem).kernel not in kernels:
            return 0.0
        heads = problem.block_heads * (1 + 1 / sharing)
        moved = (1 + calls) * heads * (problem.head_dim + problem.value_dim) * DTYPE_BYTES[problem.dtype]
        return 2 * (1 + calls) * self.launch_s + problem.batch * tokens * moved / self.repeat_bytes_per_s

    def makings_s(self, problem: Problem, phase: str, tokens: Any, several: Any = False):
        """Seconds of making the keys and values of a block of so many latents (a number, or an array of them); backward
        also of their gradients. 0 where no latents travel, or a block has none.

        They are made once for all kernel calls of a block. Where it has `several`, their gradients are summed before
        (run.makings).

        Forward are two matrix products, and a copy that puts the shared elements behind those made. Backward makes them
        again, and has two products for the gradients of latents and two for those of the matrices (run.latents).
        """
        if not problem.latent_dim:
            return 0.0
        rows, heads = problem.batch * tokens, problem.block_heads
        made = problem.made_dim + problem.value_dim
        matrices = heads * made * problem.latent_dim
        flops, size = 2.0 * rows * matrices, DTYPE_BYTES[problem.dtype]
        moved = rows * heads * (problem.made_dim + problem.head_dim) * size
        launches = 3
        if phase == "backward":
            # What is made lies together for the products, and what is shared is summed over heads; then the products
            # are added, to each other and to the gradients of the matrices.
            flops, launches = 3 * flops, 13
            moved += rows * heads * (2 * problem.made_dim + (problem.rope_dim or 0)) * size
            moved += rows * (5 * problem.latent_dim + 2 * (problem.rope_dim or 0)) * size
            wide = DTYPE_BYTES[problem.accumulate_dtype]
            moved += matrices * (size + 2 * wide)
            # Sums begin as zeros, have each call's added, and are cast.
            moved += several * rows * heads * (problem.head_dim + problem.value_dim) * (4 * wide + 2 * size)
            launches += 6 * several
        # Of a dtype without figures, measured points still rank their variants.
        others = (*self.matmul_tflops.values(), *self.peak_tflops.values())
        tflops = self.matmul_tflops.get(problem.dtype) or max(others, default=1.0)
        return (tokens > 0) * (launches * self.launch_s + moved / self.memory_bytes_per_s + flops / (1e12 * tflops))


def _named(table: KernelTable) -> str:
    return f"{table.figures} ({table.kernel})"


def same_model(found: str, figures: str) -> bool:
    """Whether the device `found` is the one of a cluster's `figures`, by model, such as H100, and form."""
    models, words = set(re.findall(r"[A-Za-z]+[0-9]+\w*", figures)), set(re.findall(r"\w+", found))
    return bool(models) and models <= words and all((form in found) == (form in figures) for form in FORMS)
