"""Print the timeline of a point."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from sp_bench import draw
from sp_bench.records.timeline import MeasuredTimeline, SimulatedTimeline, Timeline

NAME, FRAME = 12, 5
"""Characters of the name before a bar, and of the frame around both."""


def print_timeline(console: Console, method: str, timeline: Timeline) -> None:
    """Print bars. Simulated: arrivals, blocks and waits of one rank. Measured: each rank's mean step."""
    width = max(1, console.width - NAME - FRAME)
    about, bars = _simulated(timeline, width) if isinstance(timeline, SimulatedTimeline) else _measured(timeline, width)
    console.print(Text.assemble("\n", (method, "bold"), about))
    for name, bar in bars.items():
        console.print(f"  {name:>{NAME}} |{bar}|")


def _simulated(timeline: SimulatedTimeline, width: int) -> tuple[str, dict[str, str]]:
    """(the title, the bars by name)."""
    shown = {f"{lane} in": spans for lane, spans in timeline.lanes.items()}
    shown |= {"blocks": timeline.blocks, "waiting": timeline.waits}
    spans = [(name, start_s, end_s) for name, times in shown.items() for start_s, end_s in times]
    phases = " then ".join(timeline.phases)
    about = f", rank {timeline.rank}, what it waits for, simulated: {phases}, {timeline.end_s * 1e3:.4g} ms"
    return about, draw.timeline(spans, timeline.end_s, width)


def _measured(timeline: MeasuredTimeline, width: int) -> tuple[str, dict[str, str]]:
    """(the title, the bars by rank)."""
    means = enumerate(zip(timeline.blocks_s, timeline.waits_s, strict=True))
    bars = {f"rank {rank}": draw.shares(list(zip("█░", parts, strict=True)), width) for rank, parts in means}
    return ", every rank's mean step, measured: █ blocks and folds, ░ waiting", bars
