"""Loss curves of every method against one process. Measured on CPU ranks; times don't matter here."""

from __future__ import annotations

from functools import cache

import numpy as np

from sp_bench.analysis.figure import Figure, new_figure
from sp_bench.analysis.runs import Runs
from sp_bench.methods import REGISTRY
from sp_bench.records import Record

STEPS, RANKS = 200, 4
POINT = ("model=tiny", "cluster=local", "dtype=float32", "seqlen=64", "batch=2", "parts=false", "warmup=0", "seed=0")
"""The first step of a point is the one that measures memory."""
METHODS = tuple(name for name in REGISTRY if name != "reference")


SHARDED = ("method=mesh", "train.parameters=sharded")


def name(record: Record) -> str:
    """The method, and whether parameters are sharded."""
    return f"{record.method}, sharded" if record.sharded else record.method


def row(record: Record, one: np.ndarray) -> dict[str, str]:
    """A method's row: its first and last loss, and where it is furthest from one process."""
    losses = np.array(record.losses)
    apart = np.abs(losses / one - 1)
    return {
        "method": name(record),
        "variant": record.variant or "",
        "first loss": f"{losses[0]:.6f}",
        "last loss": f"{losses[-1]:.6f}",
        "largest relative difference": f"{apart.max():.1e}",
        "at step": str(int(apart.argmax()) + 1),
        "gradients against fp64": f"{record.err_gradient or 0:.1e}",
    }


@cache
def measured(runs: Runs) -> tuple[np.ndarray, list[Record]]:
    """The losses of one process, (steps,), and the records of all methods."""
    steps = f"iters={STEPS - 1}"
    (alone,) = runs.ok([(*POINT, steps, "gpus=1", "method=reference")])
    points = [*((f"method={method}",) for method in METHODS), SHARDED]
    return np.array(alone.losses), runs.ok([(*POINT, steps, f"gpus={RANKS}", *point) for point in points])


def first(runs: Runs) -> str:
    """The first loss of one process."""
    return f"{measured(runs)[0][0]:.6f}"


def last(runs: Runs) -> str:
    """Its last loss."""
    return f"{measured(runs)[0][-1]:.6f}"


def rows(runs: Runs) -> list[dict[str, str]]:
    """A row for each method."""
    one, records = measured(runs)
    return [row(record, one) for record in records]


def curves(runs: Runs) -> Figure:
    """Curves above, differences to one process below."""
    one, records = measured(runs)
    canvas, axes = new_figure(1, 2, width=7, height=5, sharex=True)
    above, below = axes[:, 0]
    steps = np.arange(1, STEPS + 1)
    for record in records:
        losses = np.array(record.losses)
        above.plot(steps, losses, lw=0.8, label=name(record))
        below.plot(steps, np.maximum(np.abs(losses / one - 1), 1e-9), lw=0.6)
    above.plot(steps, one, "k:", lw=1, label="one process")
    below.axhline(1e-5, color="k", lw=0.6, ls="--")
    below.set(yscale="log", xlabel="step", ylabel="relative difference")
    above.set(ylabel="loss")
    above.legend(ncols=4, fontsize=6, frameon=False)
    return Figure("training", "loss over steps, and differences to one process", canvas, ())
