"""The host's time to queue a plan: `python -m benchmarks.host_path [ranks=8,64,256] [before=CHECKOUT]` prints a table.

One process runs the program of one rank as it does on a GPU, with everything stubbed that a GPU or NCCL would do
(host_stubs.py). What is left is the time of Python, torch and triton. In turn with each plan runs the loop of
ring-flash-attention (Zhu 2024), its own code from its package with the same stubs: `zigzag` beside its zigzag loop, all
others beside its ring loop, of as many ranks. `theirs` is a step of that loop, which is a block with its merges and its
share of the messages; a transfer of theirs is one batch of messages for K and V.

A phase's time is the thread's own, whatever else the machine does: the median of REPETITIONS executions, and a ratio
that of the ratios of executions in turn. Blocks alone leave out the transfers, transfers alone the blocks.

`before=CHECKOUT` runs the code of another checkout of this repository too, in processes in turn with this one's, and
puts its times beside them, with those of the loop in the same processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.host_stubs import StubDevice, StubKernel, stub_flash_attn_backward, stub_flash_attn_forward, stubbed
from sp_bench.cli.arguments import only_keys, run_command
from sp_bench.markdown import of_rows
from sp_bench.methods import build
from sp_bench.peers.registry import PEERS
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.mask import CAUSAL, FULL, Mask
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Block, Plan, Transfer
from sp_bench.plan.problem import Problem
from sp_bench.run.engine import Engine, Saved
from sp_bench.run.executor import Action
from sp_bench.run.nccl import NcclTransport

RANKS = (8, 64, 256)
REPETITIONS = 25
ROUNDS = 3
"""Processes of each checkout that are compared."""
HEAD_DIM, TOKENS = 8, 2
METHODS: dict[str, Callable[[int], dict[str, object]]] = {
    "ring": lambda n: {},
    "zigzag": lambda n: {},
    "all_gather": lambda n: {},
    "tokenring": lambda n: {},
    "mesh": lambda n: {"tile": (2 ** (n.bit_length() // 2), 2 ** ((n.bit_length() - 1) // 2))},
    "ulysses": lambda n: {},
}
"""Options by number of ranks, a power of two."""
OF_BLOCKS = tuple(name for name in METHODS if name != "ulysses")
"""The methods with many blocks."""


class PlanStep:
    """A method's forward and backward on one rank of n."""

    def __init__(self, name: str, n: int, *, timed: bool = False) -> None:
        """Within `stubbed`. Ulysses has a head for each rank; zigzag has a causal mask, which it is for."""
        heads, mask = n if name == "ulysses" else 2, CAUSAL if name == "zigzag" else FULL
        method = build(name, METHODS[name](n))
        problem = _problem(n, heads, mask, method.layout)
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

    def __call__(self, action: Action = Action.EVERYTHING) -> None:
        self.forward(action)
        self.backward(action)

    def forward(self, action: Action = Action.EVERYTHING) -> None:
        """Queue a forward; what it saves is kept if it is whole."""
        q, k, v, _ = self.inputs
        _, saved = self.engine.forward(q, k, v, action)
        self.saved = saved if action is Action.EVERYTHING else self.saved

    def backward(self, action: Action = Action.EVERYTHING) -> None:
        """Queue the backward of the last forward that was whole."""
        self.engine.backward(self.inputs[3], self.saved, action)

    def count(self, kind: Any, phase: str | None = None) -> int:
        """How many operations of a kind a phase has, or the step."""
        plans = self.plans.values() if phase is None else [self.plans[phase]]
        return sum(isinstance(op, kind) for plan in plans for op in plan.ops)


def _problem(n: int, heads: int, mask: Mask, layout: str) -> Problem:
    return Problem(
        n=n, seqlen=TOKENS * n, heads=heads, kv_heads=heads, head_dim=HEAD_DIM, mask=mask, dtype="bfloat16",
        layout=mask.layout(layout),
    )  # fmt: skip


class TheirStep:
    """ring-flash-attention's loop, forward and backward, of a rank of n: n blocks in each."""

    def __init__(self, name: str, n: int) -> None:
        """Within `stubbed`. Raises RequestError if the package is not installed."""
        mask = CAUSAL if name == "zigzag" else FULL
        peer = PEERS["ring_flash_attn"].build({}, mask=mask)
        peer.attention(_problem(n, 2, mask, peer.layout), torch.device("cpu"))  # it imports the package
        self.n, self._loop = n, "zigzag_ring_flash_attn" if mask is CAUSAL else "ring_flash_attn"
        self._module: Any = sys.modules[f"ring_flash_attn.{self._loop}"]
        self._how = {"softmax_scale": HEAD_DIM**-0.5, "causal": mask is CAUSAL}
        self._inputs = [torch.zeros(1, TOKENS, 2, HEAD_DIM, dtype=torch.bfloat16) for _ in range(4)]
        self._found: tuple[Tensor, ...] = ()

    def __call__(self, action: Action = Action.EVERYTHING) -> None:
        self.forward(action)
        self.backward(action)

    def forward(self, action: Action = Action.EVERYTHING) -> None:
        """Queue a forward, or its blocks or n batches of messages alone."""
        self._found = self._queue("forward", self._inputs[:3], action) or self._found

    def backward(self, action: Action = Action.EVERYTHING) -> None:
        """Queue the backward of the last forward, or its blocks or n batches of messages alone."""
        *qkv, dout = self._inputs
        self._queue("backward", (dout, *qkv, *self._found), action)

    def _queue(self, phase: str, tensors: Sequence[Tensor], action: Action) -> tuple[Tensor, ...]:
        """Queue the loop of a phase; returns its results, none for messages alone."""
        if action is Action.COMMUNICATION:
            ring, (_, k, v, _) = self._module.RingComm(None), self._inputs
            for _ in range(self.n):
                ring.send_recv_kv(k, v)
                ring.wait()
            return ()
        stubs: dict[str, Any] = {"_flash_attn_forward": stub_flash_attn_forward}
        stubs |= {"_flash_attn_backward": stub_flash_attn_backward}
        stubs |= {"RingComm": _NoRing} if action is Action.COMPUTE else {}
        with patch.multiple(self._module, **stubs):
            return getattr(self._module, f"{self._loop}_{phase}")(None, *tensors, **self._how)


class _NoRing:
    """A ring without messages, on which tensors come back at once (ring_flash_attn.utils.RingComm)."""

    def __init__(self, group: None) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def send_recv_kv(self, k: Tensor, v: Tensor, *buffers: Tensor | None) -> tuple[Tensor, Tensor]:
        """The tensors that came: those that were sent."""
        return k, v

    def wait(self) -> None:
        """Return at once: nothing was sent."""


class Times(NamedTuple):
    """The median microseconds of a phase, and of that of the loop in turn with it."""

    mine: float
    theirs: float
    ratio: float
    """The median of the ratios in turn."""


def times(mine: Callable[[Action], None], theirs: Callable[[Action], None], action: Action) -> Times:
    """Medians of REPETITIONS executions in turn: the thread's own time, whatever else the machine does."""
    taken: list[tuple[float, float]] = []
    for _ in range(2 + REPETITIONS):  # the first ones compile
        started = time.thread_time()
        mine(action)
        between = time.thread_time()
        theirs(action)
        taken.append((1e6 * (between - started), 1e6 * (time.thread_time() - between)))
    taken = taken[2:]
    mine_us, theirs_us = (median(each) for each in zip(*taken, strict=True))
    return Times(mine_us, theirs_us, median(a / b for a, b in taken))


def measured(name: str, n: int) -> dict[str, Any]:
    """The times of a method on a rank of n in microseconds, by block or transfer, and counts."""
    with stubbed(n // 2 + 1, n):
        step, loop = PlanStep(name, n), TheirStep(name, n)
        counts = {phase: (step.count(Block, phase), step.count(Transfer, phase)) for phase in PHASES}
        blocks, transfers = (sum(each) for each in zip(*counts.values(), strict=True))
        measures: dict[str, Any] = {"method": name, "ranks": n, "blocks": blocks, "transfers": transfers}
        for phase in PHASES:
            of_phase = times(getattr(step, phase), getattr(loop, phase), Action.EVERYTHING)
            measures[phase] = _by(of_phase, counts[phase][0], n)
        measures["blocks alone"] = _by(times(step, loop, Action.COMPUTE), blocks, 2 * n)
        measures["transfer"] = _by(times(step, loop, Action.COMMUNICATION), transfers, 2 * n)
        asked = Counter(step.device.asked)
        step()
        measures["events"] = (step.device.asked - asked)["record"] / blocks
    return measures


def _by(found: Times, mine: int, theirs: int) -> list[float]:
    """(microseconds of one of mine, of one of theirs, their ratio)."""
    return [found.mine / mine, found.theirs / theirs, found.ratio * theirs / mine]


def row(found: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, str]:
    """A line of the table, with the times of an earlier checkout if there are any."""
    cells = {key: str(found[key]) for key in ("method", "ranks", "blocks", "transfers")}
    for part in (*PHASES, "blocks alone", "transfer"):
        mine, theirs, ratio = found[part]
        if before:
            cells |= {f"{part}, before": f"{before[part][0]:.1f}", f"{part}, theirs then": f"{before[part][1]:.1f}"}
            cells |= {f"{part}, ratio before": f"{before[part][2]:.2f}"} if part != "transfer" else {}
        cells |= {f"{part}, us": f"{mine:.1f}", f"{part}, theirs": f"{theirs:.1f}"}
        cells |= {f"{part}, ratio": f"{ratio:.2f}"} if part != "transfer" else {}
    return cells | {"events a block": f"{found['events']:.1f}"}


def rows(methods: Sequence[str] = OF_BLOCKS, ranks: Sequence[int] = RANKS) -> list[dict[str, str]]:
    """The table of this code."""
    torch.set_num_threads(1)
    return [row(measured(name, n)) for name in methods for n in ranks]


def compared(before: str, methods: Sequence[str] = OF_BLOCKS, ranks: Sequence[int] = RANKS) -> list[dict[str, str]]:
    """The table of this code with the times of another checkout, by processes in turn: medians of ROUNDS of each.

    The other's sp_bench is timed by this benchmark. Raises RequestError if `before` is no checkout.
    """
    from sp_bench.analysis import earlier  # this file also runs with the code of checkouts that are without it

    theirs = earlier.checkout(before)
    asked = [f"methods={','.join(methods)}", f"ranks={','.join(map(str, ranks))}", "json=true"]
    own = Path(__file__).resolve().parent.parent
    of_each: dict[Path, list[list[dict[str, Any]]]] = {theirs: [], own: []}
    with tempfile.TemporaryDirectory() as folder:
        for path in theirs.iterdir():
            (Path(folder) / path.name).symlink_to((own if path.name == "benchmarks" else theirs) / path.name)
        for _ in range(ROUNDS):
            for checkout, root in ((theirs, Path(folder)), (own, own)):
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.host_path", *asked], cwd=root, text=True,
                    env=earlier.environment(root), stdout=subprocess.PIPE, check=True,
                )  # fmt: skip
                of_each[checkout].append(json.loads(done.stdout))
    of_before, of_now = (_medians(rounds) for rounds in of_each.values())
    return [row(now, then) for now, then in zip(of_now, of_before, strict=True)]


def _medians(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The rows of several processes as one: the median of each number."""
    for of_row in zip(*rounds, strict=True):
        lists = {key: [row[key] for row in of_row] for key in of_row[0]}
        yield {
            key: [median(each) for each in zip(*values, strict=True)] if isinstance(values[0], list) else values[0]
            for key, values in lists.items()
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    return run_command("benchmarks.host_path", __doc__ or "", _print, arguments)


def _print(arguments: list[str]) -> int:
    defaults = {"ranks": ",".join(map(str, RANKS)), "methods": ",".join(METHODS), "before": "", "json": "false"}
    keys = defaults | only_keys(arguments, defaults)
    torch.set_num_threads(1)
    methods, ranks = keys["methods"].split(","), [int(n) for n in keys["ranks"].split(",")]
    if keys["json"] == "true":
        print(json.dumps([measured(name, n) for name in methods for n in ranks]))
        return 0
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    before = keys["before"]
    print(of_rows(compared(before, methods, ranks) if before else rows(methods, ranks)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
