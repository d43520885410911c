"""python -m benchmarks.readme writes the README's examples, the output of their commands, and docs/readme.svg."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import matplotlib.pyplot as plt
import seaborn as sns

from sp_bench.__main__ import main as sp_bench
from sp_bench.advise.__main__ import heading
from sp_bench.advise.candidates import Question, answer
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.point import resolve
from sp_bench.point.simulated import simulate_point
from sp_bench.resources import ROOT

README, PICTURE = ROOT / "README.md", ROOT / "docs" / "readme.svg"
COMMAND = "python -m sp_bench method=mesh gpus=256"
ADVISE = "python -m sp_bench.advise gpus=8 seqlen=128k model=llama3_8b cluster=a100_hdr200"
METHODS = ("ring", "tokenring", "startrail", "ulysses", "usp", "mesh")
GPUS = (32, 64, 128, 256, 512, 1024)


def table() -> str:
    """The README's first table: what its command prints in a terminal of 80 columns, up to the timelines."""
    printed = io.StringIO()
    in_80_columns = patch.dict(os.environ, COLUMNS="80")
    with in_80_columns, tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        code = sp_bench([*COMMAND.split()[3:], "mode=simulate", f"results_dir={folder}"])
    assert code == 0
    # mode=simulate makes a machine with GPUs print the same, with another reason, in the lines before the title.
    text = printed.getvalue().partition("\n\n")[0]
    lines = text[text.index("256 GPUs on") :].splitlines()
    return block(COMMAND, lines)


def advice() -> str:
    """The README's first answer: what advise says is the fastest, and by what figures."""
    advised = answer(Question(ADVISE.split()[3:]))
    said, figures = heading(advised)[2:4]
    return block(ADVISE, [*textwrap.wrap(said, 80), *textwrap.wrap(figures, 80)])


def block(command: str, lines: Sequence[str]) -> str:
    """A fenced block of a command and what it prints."""
    return "\n".join(["```console", f"$ {command}", *(line.rstrip() for line in lines), "```"])


def shown(command: str) -> str:
    """The block of a command in the README."""
    text = README.read_text()
    start = text.index(f"```console\n$ {command}\n")
    return text[start : text.index("\n```", start) + 4]


def mfu_by_gpus() -> dict[str, list[float | None]]:
    """The simulated MFU of each method on each number of GPUS; None where it can't be served."""
    mfu_of: dict[str, list[float | None]] = {}
    with Composer() as composer:
        for method in METHODS:
            for gpus in GPUS:
                config = composer.compose([f"method={method}", f"gpus={gpus}", "mode=simulate"])
                try:
                    mfu = simulate_point(resolve(config))[0].mfu
                except RequestError:
                    mfu = None
                mfu_of.setdefault(method, []).append(mfu)
    return mfu_of


def draw(mfu: dict[str, list[float | None]], path: Path) -> None:
    """Draw the MFU of each method over the number of GPUs."""
    sns.set_theme(style="whitegrid")
    plt.rcParams.update({"svg.hashsalt": "sp_bench", "svg.fonttype": "none"})
    figure, ax = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    for method, marker in zip(METHODS, "osvD^P", strict=True):
        points = [(n, 100 * x) for n, x in zip(GPUS, mfu[method], strict=True) if x is not None]
        ax.plot(*zip(*points, strict=True), marker=marker, label=method)
    ax.set_xscale("log", base=2)
    ax.set_xticks(GPUS, [str(n) for n in GPUS])
    ax.set_ylim(0)
    ax.set_xlabel("H100 GPUs, 8 to a node, NDR400")
    ax.set_ylabel("MFU, %")
    ax.set_title("Simulated: attention of 1M tokens, 32 heads of 128, causal, forward + backward", fontsize="medium")
    ax.legend(ncols=3, fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    """Write the examples and the picture."""
    for command, made in ((COMMAND, table), (ADVISE, advice)):
        README.write_text(README.read_text().replace(shown(command), made()))
    draw(mfu_by_gpus(), PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
