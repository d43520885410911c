"""python -m sp_bench.validate steps [out=FOLDER]

Simulates the published training steps of analysis/published/steps.csv with their settings, through the same code as any
point, and writes FOLDER/published_steps.csv with the error of each. No figure is fitted to them. Two settings that
nobody printed were chosen with them: that torchtitan's tokens lay in order, unbalanced, and that NeMo's attention had
the rates of flash-attn 2. `error_left_out` is with what would be assumed without the source (the column `left_out`):
the balance that PyTorch has by default, and cuDNN, which TransformerEngine prefers on H100.

With pipeline parallelism one stage is simulated. By 1F1B the step is (microbatches + stages - 1) times its forward and
backward, and its update.

  out=docs/results    the folder
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sp_bench import markdown
from sp_bench.cli.compose import Composer
from sp_bench.cli.words import tokens
from sp_bench.point import resolve
from sp_bench.point.backing import Backing, Kind, figures_of
from sp_bench.point.training import simulate_training
from sp_bench.validate.common import by_kind, most_measured, published_rows
from sp_bench.workload.train import Train

if TYPE_CHECKING:
    import pandas as pd

SOURCES = {"torchtitan": "torchtitan", "NeMo": "NeMo", "trl": "TRL", "transformers": "TRL"}
"""The short names of sources, by a word of theirs. TRL's example is measured in transformers' pull requests too."""


NO_LIMIT = "1e13"
"""The device's memory: what a step must fit is not judged here, and some kept parameters on the host."""
LEAST = 3
"""Fewer published steps of a kind back nothing."""


class Step(NamedTuple):
    """A simulated training step."""

    step_s: float
    attention_s: float
    """Its attention, with the pipeline's bubble."""
    peak_bytes: float
    kind: Kind
    figures: str
    """The hash of the figures that its time depends on (backing.figures_of)."""


def write(out: Path) -> None:
    """Simulate all steps, write the table, and print it with the errors by source."""
    frame = simulated(published_rows("steps"))
    frame.to_csv(out / "published_steps.csv", index=False)
    print(f"{out / 'published_steps.csv'}: {len(frame)} steps\n\n{table(frame)}\n\n{words(frame)}")


def source_of(row: Mapping[str, str]) -> str:
    """The short name of a row's source."""
    return next(name for word, name in SOURCES.items() if word in row["source"])


def overrides(row: Mapping[str, str], *, left_out: bool = False) -> tuple[str, ...]:
    """The point of a row, as arguments of `python -m sp_bench`; `left_out`: as without what was chosen with it."""
    asked = _keys(row["variant"])
    if left_out:
        asked |= _keys(row["left_out"])
    given = {key: row[key] for key in ("model", "method", "cluster", "gpus", "seqlen")}
    fixed = {"mode": "simulate", "logger": "none", "dtype": "bfloat16", "trace": "0", "baseline": "null"}
    fixed["cluster.device.memory_bytes"] = NO_LIMIT
    return tuple(f"{key}={value}" for key, value in {**given, **asked, **fixed}.items())


def _keys(words: str) -> dict[str, str]:
    """The values of key=value words by key."""
    return dict(word.split("=", 1) for word in words.split())


def simulation(row: Mapping[str, str], *, left_out: bool = False) -> Step:
    """The simulation of a row."""
    return _simulation(overrides(row, left_out=left_out), int(row["stages"]), int(row["microbatches"]))


@cache
def _simulation(keys: tuple[str, ...], stages: int, microbatches: int) -> Step:
    with Composer() as composer:
        request = resolve(composer.compose(keys))
    record, times = simulate_training(request), microbatches + stages - 1
    forward_ms, backward_ms = record.forward_ms_median or 0.0, record.backward_ms_median or 0.0
    kind = Kind(**(record.validation_kind or {}))
    return Step(
        step_s=1e-3 * (times * (forward_ms + backward_ms) + (record.update_ms_median or 0.0)),
        attention_s=1e-3 * times * (record.attention_ms or 0.0),
        peak_bytes=record.peak_mem_bytes_max or 0.0,
        kind=kind,
        figures=figures_of(request.config["cluster"], kind, record.kernel or "")[0],
    )


def simulated(rows: Sequence[Mapping[str, str]]) -> pd.DataFrame:
    """A row for each published step: what it is of, seconds measured and simulated, and their errors."""
    import pandas as pd

    table = []
    for row in rows:
        run, without = simulation(row), simulation(row, left_out=True)
        asked = _keys(row["variant"])
        measured_s = float(row["measured_ms"]) / 1e3
        table.append(
            {
                "source": source_of(row),
                **{name: row[name] for name in ("hardware", "gpus", "model", "seqlen", "method", "variant")},
                "stages": row["stages"],
                "cluster": row["cluster"],
                "kernel": asked["kernel"],
                "implementation": asked["implementation"],
                "transfers": run.kind.transfers,
                "links": run.kind.links,
                "mask": run.kind.mask,
                "figures": run.figures,
                "measured_s": measured_s,
                "simulated_s": run.step_s,
                "left_out_s": without.step_s,
                "attention_s": run.attention_s,
                "error": run.step_s / measured_s - 1,
                "error_left_out": without.step_s / measured_s - 1,
            }
        )
    return pd.DataFrame(table)


def table(found: pd.DataFrame) -> str:
    """The steps as a table in Markdown."""
    heads = ("source", "model", "GPUs", "tokens", "measured (s)", "simulated (s)", "error", "left out")
    rows = [
        (
            row["source"], row["model"], str(int(row["gpus"]) * int(row["stages"])), tokens(int(row["seqlen"])),
            f"{row['measured_s']:.4g}", f"{row['simulated_s']:.4g}", f"{row['error']:+.1%}",
            f"{row['error_left_out']:+.1%}",
        )
        for row in found.to_dict("records")
    ]  # fmt: skip
    return markdown.table(heads, rows)


def words(found: pd.DataFrame) -> str:
    """The errors by source, a line each."""
    lines = []
    for source, rows in found.groupby("source"):
        off, without = rows["error"].abs(), rows["error_left_out"].abs()
        lines.append(
            f"{source}: {len(rows)} steps, median error {off.median():.1%}, largest {off.max():.1%}; "
            f"with what would be assumed without the source {without.median():.1%}, {without.max():.1%}"
        )
    off, without = found["error"].abs(), found["error_left_out"].abs()
    lines.append(f"all: {len(found)} steps, median error {off.median():.1%}; left out {without.median():.1%}")
    return "\n".join(lines)


def backing(found: pd.DataFrame) -> list[Backing]:
    """The rows that back simulated steps: their errors by kind, with what was chosen with the sources left out.

    A kind has the implementation of which most steps are known, if they are LEAST or more.
    """

    def figures(rows: pd.DataFrame) -> dict[str, str]:
        return {f"{row['cluster']} ({row['kernel']})": row["figures"] for row in rows.to_dict("records")}

    return most_measured(
        Backing.of(kind, rows["error_left_out"], implementation, figures(rows))
        for kind, implementation, rows in by_kind(found, Train.name)
        if len(rows) >= LEAST
    )
