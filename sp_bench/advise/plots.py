"""The three plots of an answer in one figure: time, memory, and volume against the bound."""

from __future__ import annotations

from pathlib import Path

from sp_bench.advise.candidates import Answer
from sp_bench.cli.arguments import writable_folder
from sp_bench.errors import RequestError
from sp_bench.extras import require


def check(path: Path) -> None:
    """Raise RequestError if matplotlib is missing, or no figure can be written there."""
    require("analysis", f"plots={path}")
    from matplotlib.figure import Figure

    known = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in known:
        raise RequestError(f"plots={path}", f"ends in none of {', '.join(known)}", "plots=advice.svg would work")
    writable_folder("plots", str(path.parent))


def write(path: Path, found: Answer, memory_bytes: float | None) -> None:
    """Write the figure to a path that `check` lets pass; its suffix says the format."""
    from matplotlib.figure import Figure

    best = [*reversed(found.feasible)]
    names = [each.name for each in best]
    figure = Figure(figsize=(13, 1.2 + 0.32 * len(best)), layout="constrained")
    time, memory, volume = figure.subplots(1, 3, sharey=True)
    steps = [each.time for each in best]
    # A step that nothing validates has no ends.
    low = [t.step_ms - t.low_ms if t.low_ms is not None else 0 for t in steps]
    high = [t.high_ms - t.step_ms if t.high_ms is not None else 0 for t in steps]
    time.barh(names, [t.step_ms for t in steps], xerr=[low, high], color="#4477aa", ecolor="#222222", capsize=2)
    time.set_xlabel("step, simulated, ms")
    memory.barh(names, [(each.record.peak_mem_bytes_max or 0) / 1e9 for each in best], color="#66aa77")
    memory.set_xlabel("memory of one attention, GB a GPU")
    if memory_bytes:
        memory.axvline(memory_bytes / 1e9, color="#cc3311", label="limit")
        memory.legend()
    sent = [(each.record.comm_bytes_per_gpu or 0) / 1e9 for each in best]
    volume.barh(names, sent, color="#ddaa33")
    bounds = [(each.record.comm_bytes_lower_bound or 0) / 1e9 for each in best]
    volume.plot(bounds, range(len(best)), "k|", markersize=12, label="fewest with the same head split")
    least = [each.record.comm_bytes_least for each in best]
    if known := [size / 1e9 for size in least if size is not None]:
        places = [i for i, size in enumerate(least) if size is not None]
        volume.plot(known, places, "kx", markersize=5, label="fewest with any split of heads")
    volume.set_xlabel("sent, GB a GPU")
    volume.legend()
    figure.savefig(path)
