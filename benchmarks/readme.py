"""python -m benchmarks.readme writes the README's example, the output of its command, and docs/readme.svg."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import seaborn as sns

from sp_bench.__main__ import main as sp_bench
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.point import resolve
from sp_bench.point.simulated import simulate_point
from sp_bench.resources import ROOT

README, PICTURE = ROOT / "README.md", ROOT / "docs" / "readme.svg"
COMMAND = "python -m sp_bench method=mesh gpus=256"
METHODS = ("ring", "tokenring", "startrail", "ulysses", "usp", "mesh")
GPUS = (32, 64, 128, 256, 512, 1024)


def example() -> str:
    """The output of the README's command, indented as code. Run ids, which change with the code, are left open."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        code = sp_bench([*COMMAND.split()[3:], "mode=simulate", f"results_dir={folder}"])
    assert code == 0
    text = re.sub(r"\S+/[0-9a-f]{16}\.json", "results/<run_id>.json", printed.getvalue())
    # mode=simulate makes a machine with GPUs print the same.
    text = text.replace("not measured: mode=simulate asks for it, and", "not measured: this machine has 0 GPUs, and")
    return "".join(f"    {line}".rstrip() + "\n" for line in [f"$ {COMMAND}", *text.splitlines()])


def shown() -> str:
    """The example in the README, from its command to the end of the code."""
    text = README.read_text()
    start = text.index(f"    $ {COMMAND}\n")
    return text[start : re.compile(r"^(?=\S)", re.MULTILINE).search(text, start).start()].rstrip() + "\n"  # pyright: ignore[reportOptionalMemberAccess]


def mfu_by_gpus() -> dict[str, list[float | None]]:
    """The simulated MFU of each method on each number of GPUS; None where it can't be served."""
    found: dict[str, list[float | None]] = {}
    with Composer() as composer:
        for method in METHODS:
            for gpus in GPUS:
                config = composer.compose([f"method={method}", f"gpus={gpus}", "mode=simulate"])
                try:
                    mfu = simulate_point(resolve(config))[0].mfu
                except RequestError:
                    mfu = None
                found.setdefault(method, []).append(mfu)
    return found


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
    """Write the example and the picture."""
    README.write_text(README.read_text().replace(shown(), example()))
    draw(mfu_by_gpus(), PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
