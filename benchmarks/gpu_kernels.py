"""Errors and rates of this machine's block kernels.

python -m benchmarks.gpu_kernels [device=cuda] [kernels=all]

Prints Markdown tables for every kernel that runs here, or for those asked for (kernels=cudnn,flash_attn): errors
against fp64; rates beside published figures (benchmarks/published_kernels.csv); the time of a rank's blocks and folds
beside one call of as many FLOPs; and a fold's bandwidth over a copy's. Failures are listed below their table, and the
exit code is 1. device=cpu does the same with small shapes. Without a GPU, device=cuda exits with 2.
"""

from __future__ import annotations

import csv
import inspect
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sp_bench.calibrating.clock import CLOCKS, cpu_seconds
from sp_bench.cli.arguments import only_keys, run_command
from sp_bench.errors import RequestError, unknown
from sp_bench.kernels import KERNELS, BlockKernel, auto_order, fold_
from sp_bench.kernels.contract import empty_output
from sp_bench.kernels.fold import fold_bytes, fold_unfused_
from sp_bench.markdown import of_rows
from sp_bench.plan.method import PHASES
from sp_bench.plan.problem import flops_per_pair
from sp_bench.plan.regions import RegionKind
from sp_bench.workload import GateErrors
from sp_bench.workload.exactness import NAMES, relative_error, squared_norms

PUBLISHED = Path(__file__).with_name("published_kernels.csv")
FOLDS = {"fold": fold_, "fold in torch": fold_unfused_}
KEYS = {"device": "cuda", "kernels": "all"}
"""The keys of the command line, with their defaults."""
Row = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Shapes and repetitions of all measurements on a device."""

    device: str
    dtype: str
    heads: int
    kv_heads: int
    """KV heads of the errors with grouped queries."""
    head_dim: int
    error_tokens: tuple[int, ...]
    rate_tokens: tuple[int, ...]
    total_tokens: int
    """Tokens of a batch of blocks in the rates."""
    block_tokens: tuple[int, ...]
    """Tokens of a rank's queries, and of each key block, in the efficiency."""
    blocks: int
    """Key blocks of a rank in the efficiency."""
    memory_tokens: int
    repetitions: int
    kernels: tuple[str, ...] | None = None
    """The names of the kernels asked for; None: all that run here."""

    def random(self, tokens: int, heads: int | None = None, *, batch: int = 1, seed: int = 0) -> Tensor:
        """Normal random numbers: (batch, tokens, heads, head_dim)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (batch, tokens, heads or self.heads, self.head_dim)
        return torch.randn(shape, generator=generator, device=self.device).to(getattr(torch, self.dtype))

    def seconds(self, call: Callable[[], object]) -> float:
        """The median seconds of a call, after one that isn't counted."""
        return self._median(partial(CLOCKS[self.device], call))

    def queueing_seconds(self, call: Callable[[], object]) -> float | None:
        """The median seconds in which a thread queues a call on an idle GPU; None on a CPU: calls are synchronous."""
        return self._median(partial(_queued, call)) if self.device == "cuda" else None

    def _median(self, timed: Callable[[], tuple[float, object]]) -> float:
        return statistics.median([timed()[0] for _ in range(1 + self.repetitions)][1:])


def _queued(call: Callable[[], object]) -> tuple[float, object]:
    torch.cuda.synchronize()
    return cpu_seconds(call)


BENCHES = {
    "cuda": Bench(
        device="cuda", dtype="bfloat16", heads=16, kv_heads=4, head_dim=128, error_tokens=(1, 2, 33, 127, 129, 500),
        rate_tokens=(512, 1024, 2048, 4096, 8192, 16384), total_tokens=16384, block_tokens=(4096, 16384, 32768),
        blocks=4, memory_tokens=65536, repetitions=10,
    ),
    "cpu": Bench(
        device="cpu", dtype="bfloat16", heads=4, kv_heads=2, head_dim=64, error_tokens=(1, 2, 33, 64),
        rate_tokens=(256, 512), total_tokens=512, block_tokens=(256, 512),
        blocks=4, memory_tokens=2048, repetitions=3,
    ),
}  # fmt: skip


def kernels(bench: Bench) -> list[BlockKernel]:
    """The kernels that run here, or those of them asked for, in the order of `auto`, without the reference."""
    setting = (bench.device, bench.dtype, bench.head_dim)
    running = [
        kernel for kernel in auto_order(bench.device) if kernel.name != "reference" and not kernel.refuses(*setting)
    ]
    return [kernel() for kernel in running if bench.kernels is None or kernel.name in bench.kernels]


def refusals(bench: Bench) -> list[Row]:
    """The kernels that don't run here, with the reason."""
    reasons = {name: kernel.refuses(bench.device, bench.dtype, bench.head_dim) for name, kernel in KERNELS.items()}
    return [{"kernel": name, "why not": why} for name, why in reasons.items() if why]


def attempts(case: Callable[..., Row], *choices: Iterable[Any]) -> Iterator[Row | str]:
    """A row for each combination of the choices; if it fails, its name and the error."""
    for chosen in itertools.product(*choices):
        try:
            yield case(*chosen)
        except Exception as error:  # the other combinations go on
            names = (x.value if isinstance(x, RegionKind) else getattr(x, "name", x) for x in chosen)
            yield f"{', '.join(map(str, names))}: {type(error).__name__}: {' '.join(str(error).split())}"


def errors(bench: Bench) -> Iterator[Row | str]:
    """The largest errors over all sizes: relative L2 against fp64, and the largest difference of the lse.

    The correctness gate's bounds apply. A single size, like a single head, may have a larger error than all sizes
    together: with two tokens the exact dq and dk nearly cancel.
    """
    return attempts(partial(_errors, bench), kernels(bench), RegionKind, (bench.heads, bench.kv_heads))


def _errors(bench: Bench, kernel: BlockKernel, mask: RegionKind, kv_heads: int) -> Row:
    """The row of a kernel. Raises ArithmeticError if the kernel is wrong."""
    norms, elements, lse_errors = [], [], []
    for tokens in bench.error_tokens:
        q, dout = (bench.random(tokens, seed=seed) for seed in (0, 3))
        k, v = (bench.random(tokens, kv_heads, seed=seed) for seed in (1, 2))
        results, exact = (_all_results(x, q, k, v, dout, mask) for x in (kernel, KERNELS["reference"]()))
        norms.append(torch.stack([squared_norms(results[name], exact[name]).cpu() for name in NAMES], dim=1))
        elements.append(torch.tensor([exact[name].numel() for name in NAMES]))
        lse_errors.append(_lse_error(results["lse"], exact["lse"]))
    by_size, counts = torch.stack(norms, dim=2), torch.stack(elements, dim=1)
    together = relative_error(by_size.sum(dim=2), counts.sum(dim=1)).tolist()
    largest = relative_error(by_size, counts).amax(dim=1).tolist()
    judged = GateErrors(
        overall={**dict(zip(NAMES, together, strict=True)), "lse": max(lse_errors)},
        worst_head=dict(zip(NAMES, largest, strict=True)),
    )
    if wrong := judged.wrong(bench.dtype):
        raise ArithmeticError(wrong)
    row = {"kernel": kernel.name, "mask": mask.value, "heads/kv": f"{bench.heads}/{kv_heads}"}
    shown = {**judged.worst_head, "lse": max(lse_errors)}
    return row | {name: f"{error:.1e}" for name, error in shown.items()}


def _lse_error(found: Tensor, exact: Tensor) -> float:
    """The largest difference of the lse; infinite unless it is -inf for rows without keys, and finite elsewhere."""
    error = torch.where(found == exact, 0.0, (found.double() - exact).abs())
    return float(error.nan_to_num(nan=math.inf).max())


def _all_results(
    kernel: BlockKernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: RegionKind
) -> dict[str, Tensor]:
    if kernel.name == "reference":
        q, k, v, dout = (x.double() for x in (q, k, v, dout))
    out, lse = kernel.forward(q, k, v, mask)
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, mask)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def rates(bench: Bench) -> Iterator[Row | str]:
    """TFLOP/s of batches of square blocks. FLOPs are those of the unmasked pairs, or of half of all pairs if causal."""
    return attempts(partial(_rates, bench), kernels(bench), RegionKind, bench.rate_tokens)


def _rates(bench: Bench, kernel: BlockKernel, mask: RegionKind, tokens: int) -> Row:
    batch = max(bench.total_tokens // tokens, 1)
    q, k, v, dout = (bench.random(tokens, batch=batch, seed=seed) for seed in range(4))
    out, lse = kernel.forward(q, k, v, mask)
    pairs = {RegionKind.FULL: tokens**2, RegionKind.STRICT: tokens * (tokens - 1) / 2}.get(mask, tokens**2 / 2)
    row = {"kernel": kernel.name, "mask": mask.value, "tokens": str(tokens), "batch": str(batch)}
    calls = partial(kernel.forward, q, k, v, mask), partial(kernel.backward, dout, q, k, v, out, lse, mask)
    for phase, call in zip(PHASES, calls, strict=True):
        flops = flops_per_pair(phase, bench.head_dim, bench.head_dim) * pairs * batch * bench.heads
        rate = flops / bench.seconds(call) / 1e12
        known = published(kernel.name, phase, mask.value, tokens, bench.head_dim)
        row |= {phase: f"{rate:.3g}", "published " + phase: f"{known:g} ({rate / known:.0%})" if known else ""}
    return row


def published(kernel: str, phase: str, mask: str, tokens: int, head_dim: int) -> float | None:
    """The published TFLOP/s on this GPU; None without a figure."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    wanted = (KERNELS[kernel].published_as or kernel, phase, mask, str(tokens), str(head_dim))
    with PUBLISHED.open(newline="") as file:
        for entry in csv.DictReader(file):
            case = tuple(entry[key] for key in ("kernel", "phase", "mask", "tokens", "head_dim"))
            if case == wanted and entry["gpu"] in gpu.replace("-", " ").split():
                return float(entry["tflops"])
    return None


def efficiency(bench: Bench) -> Iterator[Row | str]:
    """The time of one call on all keys over that of a rank's blocks and folds, and the time to queue the latter."""
    return attempts(partial(_efficiency, bench), kernels(bench), bench.block_tokens)


def _efficiency(bench: Bench, kernel: BlockKernel, tokens: int) -> Row:
    q, dout = (bench.random(tokens, seed=seed) for seed in (0, 3))
    k, v = (bench.random(tokens * bench.blocks, seed=seed) for seed in (1, 2))
    out, lse = kernel.forward(q, k, v, RegionKind.FULL)
    whole = (
        partial(kernel.forward, q, k, v, RegionKind.FULL),
        partial(kernel.backward, dout, q, k, v, out, lse, RegionKind.FULL),
    )
    blocks = (
        partial(_forward_blocks, kernel, q, k, v, tokens),
        partial(_backward_blocks, kernel, dout, q, k, v, out, lse, tokens),
    )
    row = {"kernel": kernel.name, "tokens of a block": str(tokens), "blocks": str(bench.blocks)}
    for phase, one, many in zip(PHASES, whole, blocks, strict=True):
        whole_s, blocks_s, queueing_s = bench.seconds(one), bench.seconds(many), bench.queueing_seconds(many)
        row |= {phase: f"{1e3 * blocks_s:.3g} ms", f"{phase}, one call": f"{1e3 * whole_s:.3g} ms"}
        row[f"{phase} efficiency"] = f"{whole_s / blocks_s:.1%}"
        row[f"{phase}, queueing"] = "" if queueing_s is None else f"{1e3 * queueing_s:.3g} ms"
    return row


def _forward_blocks(kernel: BlockKernel, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> Tensor:
    """The forward blocks and folds of a rank, in the executor's way: the first output becomes the accumulator."""
    out, lse = empty_output(q[:, :0])
    for i, (k_block, v_block) in enumerate(zip(k.split(tokens, dim=1), v.split(tokens, dim=1), strict=True)):
        part, part_lse = kernel.forward(q, k_block, v_block, RegionKind.FULL)
        if i == 0:
            out, lse = part.float(), part_lse
        else:
            fold_(out, lse, part, part_lse)
    return out.to(q.dtype)


def _backward_blocks(
    kernel: BlockKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tokens: int
) -> tuple[Tensor, ...]:
    """The backward blocks of a rank; each block of keys has accumulators of its own."""
    dq, dkv = torch.zeros(0), []
    for i, (k_block, v_block) in enumerate(zip(k.split(tokens, dim=1), v.split(tokens, dim=1), strict=True)):
        part, *part_dkv = kernel.backward(dout, q, k_block, v_block, out, lse, RegionKind.FULL)
        dq = part.float() if i == 0 else dq.add_(part)
        dkv += [x.float() for x in part_dkv]
    return (dq.to(q.dtype), *(x.to(k.dtype) for x in dkv))


def folds(bench: Bench) -> Iterator[Row | str]:
    """The bandwidth of the executor's fold and of one in torch operations: the fewest bytes to move over the time."""
    return attempts(partial(_folds, bench), FOLDS)


def _folds(bench: Bench, name: str) -> Row:
    part = bench.random(bench.memory_tokens)
    out, lse = bench.random(bench.memory_tokens, seed=1).float(), part[..., 0].transpose(1, 2).float().contiguous()
    other, part_lse = out.clone(), lse.clone()
    copy_rate = 2 * out.nbytes / bench.seconds(partial(out.copy_, other))
    rate = fold_bytes(out, lse, part) / bench.seconds(partial(FOLDS[name], out, lse, part, part_lse))
    rates = {"GB/s": f"{rate / 1e9:.4g}", "fp32 copy, GB/s": f"{copy_rate / 1e9:.4g}"}
    return {"": name, **rates, "fold / copy": f"{rate / copy_rate:.1%}"}


TABLES: dict[str, Callable[[Bench], Iterator[Row | str]]] = {
    "Errors against fp64": errors,
    "Rates, TFLOP/s": rates,
    "Blocks and folds of a rank against one call": efficiency,
    "Folds": folds,
}


def report(bench: Bench) -> Iterator[tuple[str, bool]]:
    """The tables one by one, each with whether all of it could be measured."""
    on = torch.cuda.get_device_name() if bench.device == "cuda" else "CPU"
    yield f"# Block kernels on {on}", True
    yield f"torch {torch.__version__}, {bench.dtype}, {bench.heads} heads of {bench.head_dim}", True
    if refused := refusals(bench):
        yield f"## Not here\n\n{of_rows(refused)}", True
    for title, find in TABLES.items():
        table, whole = with_failures(find(bench))
        yield f"## {title}\n\n{inspect.cleandoc(find.__doc__ or '')}\n\n{table}", whole


def with_failures(found: Iterable[Row | str]) -> tuple[str, bool]:
    """A table of the rows with the failures below it, and whether there was none."""
    rows, failed = [], []
    for one in found:
        (failed if isinstance(one, str) else rows).append(one)
    shown = [of_rows(rows)] if rows else []
    shown += ["Failed:\n\n" + "\n".join(f"- {one}" for one in failed)] if failed else []
    return "\n\n".join(shown), not failed


def requested(arguments: Sequence[str]) -> Bench:
    """The bench that the arguments ask for.

    Raises RequestError for an unknown or absent device, and for kernels that don't run on it.
    """
    given = KEYS | only_keys(arguments, KEYS)
    device, names = given["device"], given["kernels"]
    if device not in BENCHES:
        raise unknown("device", device, BENCHES)
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError("device=cuda", "torch sees no GPU here", "device=cpu would work")
    bench = BENCHES[device]
    if names == KEYS["kernels"]:
        return bench
    running = [kernel.name for kernel in kernels(bench)]
    for name in names.split(","):
        if name not in running:
            raise RequestError(
                f"kernels={names}", f"{name} doesn't run here", f"of {', '.join(running)}, any would work"
            )
    return replace(bench, kernels=tuple(names.split(",")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all tables; returns the exit code."""
    return run_command("benchmarks.gpu_kernels", __doc__ or "", _print, arguments)


def _print(arguments: list[str]) -> int:
    complete = True
    for text, whole in report(requested(arguments)):
        print(text, end="\n\n", flush=True)
        complete = complete and whole
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
