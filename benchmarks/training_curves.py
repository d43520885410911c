"""Loss curves of every method against one process: `python -m benchmarks.training_curves`.

`model=tiny` is trained for 200 steps on 4 ranks with each method, once with sharded parameters (FSDP2), and on one
process with `method=reference`, from the same parameters and on the same batches, in fp32. Nothing is random but what
the seed makes, so that the curves may differ by rounding only. A label that is shifted after tokens are dealt, a loss
divided by a rank's own tokens, a wrong position or a wrong block would be larger than that from the first steps on.
"""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.reports import RESULTS, about, records_folder, run_ok
from sp_bench.markdown import of_rows
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


def plot(records: list[Record], one: np.ndarray) -> None:
    """Curves above, differences to one process below."""
    matplotlib.rcParams["svg.hashsalt"] = "sp_bench"
    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
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
    figure.savefig(RESULTS / "training.svg", metadata={"Date": None})


def main() -> None:
    folder = records_folder(__doc__, "training_curves")
    steps = f"iters={STEPS - 1}"
    (alone,) = run_ok([(*POINT, steps, "gpus=1", "method=reference")], folder)
    one = np.array(alone.losses)
    points = [*((f"method={method}",) for method in METHODS), SHARDED]
    records = run_ok([(*POINT, steps, f"gpus={RANKS}", *point) for point in points], folder)
    rows = [row(record, one) for record in records]
    plot(records, one)
    text = f"""# Training: loss curves

Made by `python -m benchmarks.training_curves` (measured, CPU ranks; times don't matter here).

{about(__doc__)}

One process begins at {one[0]:.6f} and ends at {one[-1]:.6f}. The dashed line is 1e-5.

{of_rows(rows)}

![loss over steps, and differences to one process](training.svg)
"""
    (RESULTS / "training.md").write_text(text)
    print(of_rows(rows))


if __name__ == "__main__":
    main()
