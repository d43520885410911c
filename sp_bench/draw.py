"""Draw timelines as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SHADES = " ░▒▓█"


def timeline(spans: Iterable[tuple[str, float, float]], end_s: float, width: int) -> dict[str, str]:
    """A bar for each stream: (stream, start_s, end_s) spans over `width` columns from 0 to end_s.

    A column is shaded by the share of its time that the stream was busy.
    """
    busy: dict[str, list[float]] = {}
    column_s = end_s / width if end_s > 0 else 1.0
    for stream, start_s, stop_s in spans:
        columns = busy.setdefault(stream, [0.0] * width)
        first, last = int(start_s / column_s), min(int(stop_s / column_s), width - 1)
        for i in range(first, last + 1):
            columns[i] += max(0.0, min(stop_s, (i + 1) * column_s) - max(start_s, i * column_s)) / column_s
    return {stream: "".join(_shade(share) for share in columns) for stream, columns in busy.items()}


def shares(parts: Sequence[tuple[str, float]], width: int) -> str:
    """One bar of `width` columns, divided among (character, amount) parts."""
    total = sum(amount for _, amount in parts) or 1.0
    bar, upto = "", 0.0
    for character, amount in parts:
        upto += amount
        bar += character * (round(width * upto / total) - len(bar))
    return bar


def _shade(share: float) -> str:
    return SHADES[min(len(SHADES) - 1, max(0, round(share * (len(SHADES) - 1))))]
