"""The host's time to queue a plan: `python -m benchmarks.host_path [ranks=8,64,256,1024]` prints a table.

One process runs the program of one rank as it does on a GPU, with everything stubbed that a GPU or NCCL would do:
kernels return empty tensors, streams and events are numbers, torch.distributed is torch's own with the backend that
sends nothing (`fake`), and triton compiles its kernels for an H100, and launches nothing. What is left is the time of
Python, torch and triton.

Beside each plan, in turn with it, runs a loop as ring-flash-attention has it (Zhu 2024), written from its published
algorithm: each step sends and receives K and V in one batch, calls a kernel and merges out and lse by torch's
operations, on tensors of two tokens; backward it sends the gradients of K and V on a second ring. Blocks alone leave
out the transfers of both, transfers alone the blocks. Times are medians of REPETITIONS executions of forward and
backward, of the thread's own time.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from sp_bench.cli.arguments import only_keys, run_command
from sp_bench.kernels import fold
from sp_bench.kernels.contract import BlockKernel
from sp_bench.markdown import of_rows
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.mask import FULL
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Block, Plan, Transfer
from sp_bench.plan.problem import Problem
from sp_bench.run.devices import HostClock
from sp_bench.run.engine import Engine, Saved
from sp_bench.run.executor import Action
from sp_bench.run.nccl import NcclTransport

RANKS = (8, 64, 256, 1024)
REPETITIONS = 5
HEAD_DIM, TOKENS = 8, 2
METHODS: dict[str, Callable[[int], dict[str, object]]] = {
    "ring": lambda n: {},
    "zigzag": lambda n: {},
    "mesh": lambda n: {"tile": (2 ** (n.bit_length() // 2), 2 ** ((n.bit_length() - 1) // 2))},
    "all_gather": lambda n: {},
    "tokenring": lambda n: {},
    "ulysses": lambda n: {},
}
"""Options by number of ranks, a power of two."""


class StubKernel(BlockKernel):
    """Returns tensors with nothing in them."""

    name: ClassVar[str] = "stub"

    @classmethod
    def refuses(cls, device: str, dtype: str, head_dim: int) -> str:
        return ""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@dataclass
class StubDevice(HostClock):
    """A device that does nothing (run.devices.Device), and counts what is asked of it."""

    capturing: bool = False
    finished: Any = None
    asked: Counter[str] = field(default_factory=Counter)

    def current(self) -> int:
        return -1

    def lane(self, number: int) -> int:
        return number

    def switch(self, stream: int) -> None:
        """Change no stream: this device has one."""

    def record(self, stream: int, event: int | None = None) -> int:
        self.asked["record"] += 1
        return 0

    def wait(self, stream: int, event: int) -> None:
        self.asked["wait"] += 1

    def mark(self) -> float:
        self.asked["mark"] += 1
        return 0.0

    def capture(self, queue: Callable[[], Any]) -> tuple[None, Any]:
        return None, queue()

    def replay(self, graph: None) -> None:
        """Do nothing: capture has called what it would queue."""


class TritonDriver:
    """A GPU for triton (triton.runtime.driver) on which nothing is launched."""

    launched: ClassVar[list[tuple]] = []
    """The arguments of the last launch."""
    utils = SimpleNamespace(
        load_binary=lambda *kernel: (0, 0, 0, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 2**20},
    )

    @staticmethod
    def launcher_cls(source: object, metadata: object) -> Callable[..., None]:
        """The function that would launch a kernel."""

        def launch(*given: Any) -> None:
            TritonDriver.launched[:] = [given]

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def triton_stubbed() -> Iterator[Any]:
    """The module of the kernels that GPUs take, which are compiled and not launched; folds of CPU tensors take them."""
    from triton.runtime import driver

    fold_triton = importlib.import_module("sp_bench.kernels.fold_triton")
    with ExitStack() as all_of:
        all_of.enter_context(patch.object(driver, "_active", TritonDriver()))
        all_of.enter_context(patch.object(fold, "fused_on", lambda device: fold_triton))
        yield fold_triton


@contextmanager
def stubbed(rank: int, n: int) -> Iterator[None]:
    """torch.distributed of n ranks that takes everything and sends nothing, and triton that launches nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)
    try:
        with triton_stubbed(), patch.object(c10d, "_set_pg_timeout", lambda *timeout: None):
            yield
    finally:
        dist.destroy_process_group()


class PlanStep:
    """A method's forward and backward on one rank of n."""

    def __init__(self, name: str, n: int, *, heads: int | None = None, timed: bool = False) -> None:
        """Within `stubbed`. Ulysses has a head for each rank."""
        heads = heads or (n if name == "ulysses" else 2)
        method = build(name, METHODS[name](n))
        problem = Problem(
            n=n, seqlen=TOKENS * n, heads=heads, kv_heads=heads, head_dim=HEAD_DIM, mask=FULL, dtype="bfloat16",
            layout=FULL.layout(method.layout),
        )  # fmt: skip
        method = method.candidates(problem)[0]
        self.plans: dict[str, Plan] = {phase: method.plan(problem, phase, COMPUTE_BOUND) for phase in PHASES}
        self.problem, self.device = method.assigned(problem), StubDevice()
        self.transport = NcclTransport(
            None,
            communicator=lambda *key: dist.group.WORLD,
            timeout=timedelta(minutes=1),
            nodes=[r // 8 for r in range(n)],
        )
        self.transport.prepare(self.plans.values())
        self.engine = Engine(
            self.plans, self.problem, StubKernel(), torch.device("cpu"), rank=n // 2 + 1, transport=self.transport,
            queues=self.device, timed=timed,
        )  # fmt: skip
        shape = (1, TOKENS, heads, HEAD_DIM)
        self.inputs = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(4)]
        self.saved: Saved = {}

    def __call__(self, action: Action) -> None:
        q, k, v, dout = self.inputs
        _, saved = self.engine.forward(q, k, v, action)
        self.saved = saved if action is Action.EVERYTHING else self.saved
        self.engine.backward(dout, self.saved, action)

    def count(self, kind: Any) -> int:
        """How many operations of a kind the step has."""
        return sum(isinstance(op, kind) for plan in self.plans.values() for op in plan.ops)


class RingStep:
    """ring_flash_attn's loop, forward and backward, of n full blocks."""

    def __init__(self, n: int) -> None:
        self.n, self.kernel = n, StubKernel()
        self.q, self.k, self.v, self.dout = (
            torch.zeros(1, TOKENS, 2, HEAD_DIM, dtype=torch.bfloat16) for _ in range(4)
        )

    def __call__(self, action: Action) -> None:
        sends, computes = action is not Action.COMPUTE, action is not Action.COMMUNICATION
        out, lse = self._forward(sends, computes)
        self._backward(out, lse, sends, computes)

    def _forward(self, sends: bool, computes: bool) -> tuple[Any, Any]:
        ring, k, v, out, lse = _Ring(self.n, sends), self.k, self.v, None, None
        for step in range(self.n):
            if step + 1 < self.n:
                next_k, next_v = ring.send_recv(k), ring.send_recv(v)
                ring.commit()
            if computes:
                part, part_lse = self.kernel._forward(self.q, k, v, False)
                out, lse = _merged(out, lse, part, part_lse)
            if step + 1 < self.n:
                ring.wait()
                k, v = next_k, next_v  # pyright: ignore[reportPossiblyUnboundVariable]
        if out is None or lse is None:
            return self.q, self.q.new_zeros((1, 2, TOKENS), dtype=torch.float32)
        return out.to(torch.bfloat16), lse.squeeze(dim=-1).transpose(1, 2)

    def _backward(self, out: Tensor, lse: Tensor, sends: bool, computes: bool) -> None:
        keys, gradients = _Ring(self.n, sends), _Ring(self.n, sends)
        k, v, dq, dk, dv, next_dk, next_dv = self.k, self.v, None, None, None, None, None
        grads = (self.q, self.k, self.v)
        for step in range(self.n):
            if step + 1 < self.n:
                next_k, next_v = keys.send_recv(k), keys.send_recv(v)
                keys.commit()
            if computes:
                grads = self.kernel._backward(self.dout, self.q, k, v, out, lse, False)
            if dq is None or dk is None or dv is None:
                dq, dk, dv = (x.to(torch.float32) for x in grads)
            else:
                if computes:
                    dq += grads[0]
                gradients.wait()
                assert next_dk is not None and next_dv is not None
                if computes:
                    dk, dv = grads[1] + next_dk, grads[2] + next_dv
            if step + 1 < self.n:
                keys.wait()
                k, v = next_k, next_v  # pyright: ignore[reportPossiblyUnboundVariable]
            next_dk, next_dv = gradients.send_recv(dk), gradients.send_recv(dv)
            gradients.commit()
        gradients.wait()


class _Ring:
    """The messages of a ring: two for each tensor, in one batch."""

    def __init__(self, n: int, sends: bool) -> None:
        self._sends, self._to, self._from = sends, 1 % n, n - 1
        self._ops: list[Any] = []
        self._works: list[Any] = []

    def send_recv(self, x: Tensor) -> Tensor:
        if not self._sends:
            return x
        into = torch.empty_like(x)
        self._ops.append(dist.P2POp(dist.isend, x, self._to))
        self._ops.append(dist.P2POp(dist.irecv, into, self._from))
        return into

    def commit(self) -> None:
        if self._sends:
            self._works = dist.batch_isend_irecv(self._ops)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._ops = [], []


def _merged(out: Tensor | None, lse: Tensor | None, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The merge of ring-flash-attention, of out_BSHD in fp32 and lse_BSH1."""
    part_lse = part_lse.transpose(-2, -1).unsqueeze(dim=-1)
    if out is None or lse is None:
        return part.to(torch.float32), part_lse
    out = out - functional.sigmoid(part_lse - lse) * (out - part.to(torch.float32))
    return out, lse - functional.logsigmoid(lse - part_lse)


def us(steps: Sequence[Callable[[Action], None]], action: Action) -> list[float]:
    """The median microseconds of each step, in turn: the thread's own, whatever else the machine does."""
    taken: list[list[float]] = []
    for _ in range(1 + REPETITIONS):
        taken.append([])
        for step in steps:
            started = time.thread_time()
            step(action)
            taken[-1].append(time.thread_time() - started)
    return [1e6 * median(of_step) for of_step in zip(*taken[1:], strict=True)]


def row(name: str, n: int) -> dict[str, str]:
    """A line of the table."""
    with stubbed(n // 2 + 1, n):
        mine, ring = PlanStep(name, n), RingStep(n)
        blocks, transfers, hops = mine.count(Block), mine.count(Transfer), 3 * n - 2
        spent = {action: us((mine, ring), action) for action in Action}
        asked = Counter(mine.device.asked)
        mine(Action.EVERYTHING)
        asked = mine.device.asked - asked
    whole, alone, sent = (spent[a] for a in (Action.EVERYTHING, Action.COMPUTE, Action.COMMUNICATION))
    return {
        "method": name, "ranks": str(n), "blocks": str(blocks), "transfers": str(transfers),
        "us a block, all": f"{whole[0] / blocks:.0f}", "ring's loop, all": f"{whole[1] / (2 * n):.0f}",
        "ratio": f"{whole[0] / blocks / (whole[1] / (2 * n)):.2f}",
        "us a block, alone": f"{alone[0] / blocks:.0f}", "ring's loop, blocks": f"{alone[1] / (2 * n):.0f}",
        "us a transfer": f"{sent[0] / transfers:.0f}", "ring's loop, a batch": f"{sent[1] / hops:.0f}",
        "events a block": f"{(asked['mark'] + asked['record']) / blocks:.1f}",
        "timed": f"{asked['mark'] / blocks:.1f}",
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    return run_command("benchmarks.host_path", __doc__ or "", _print, arguments)


def _print(arguments: list[str]) -> int:
    defaults = {"ranks": ",".join(map(str, RANKS)), "methods": ",".join(METHODS)}
    keys = defaults | only_keys(arguments, defaults)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    rows = [row(name, int(n)) for name in keys["methods"].split(",") for n in keys["ranks"].split(",")]
    print(of_rows(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
