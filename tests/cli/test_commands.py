"""The commands of `sp-bench`: one table, which --help, the dispatch and the page of the command line agree with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from sp_bench.__main__ import main
from sp_bench.cli.commands import COMMANDS
from sp_bench.cli.help import overview
from sp_bench.resources import CONF

ROOT = Path(__file__).parents[2]
OF_THE_SUITE = {
    "sp_bench.advise.workers", "sp_bench.loggers.wandb_writer", "sp_bench.slurm.task", "sp_bench.analysis.runs",
    "sp_bench.analysis.studies.mesh_paper.fit", "sp_bench.analysis.stale",
}  # fmt: skip
"""Modules that the suite itself starts, or a study, or that only a checkout can run."""


def test_every_module_that_runs_is_a_command() -> None:
    found = set()
    for folder in ("sp_bench", "slurm", "analysis"):
        for path in (ROOT / folder).rglob("*.py"):
            if '__name__ == "__main__"' in path.read_text():
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
                found.add(name if folder == "sp_bench" else f"sp_bench.{name}")
    assert found - OF_THE_SUITE == {command.module for command in COMMANDS.values()}


def test_the_overview_fits_a_screen() -> None:
    lines = overview().splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)


def test_the_page_of_the_command_line_has_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "command_line.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `sp-bench")]
    expected = [
        f"| `sp-bench {name} {command.usage.replace('|', chr(92) + '|')}` | `{command.module}` | {command.does} |"
        for name, command in COMMANDS.items()
    ]
    assert rows == expected


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("run", "records")])
def test_a_command_is_its_module(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each answers --help with its own text, and `sp-bench help NAME` is the same."""
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert re.search(COMMANDS[name].module.removeprefix("sp_bench.").split(".")[-1], said)
    assert main(["help", name]) == 0
    assert capsys.readouterr().out == said


def test_a_command_gets_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "method=ring", "gpus=4"]) == 0
    assert "ring" in capsys.readouterr().out
    assert main(["describe", "gpus=1000"]) == 2
    assert "its matrix would not fit a terminal" in capsys.readouterr().err
    assert main(["run", "--cfg", "gpus=8"]) == 0
    assert "gpus: 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("gpus", "gpus, default 256\n  ranks of the attention"),
        ("mesh.tile", r"method.tile, default auto\n  \[a,b\] with a \* b = gpus / ulysses(.|\n)*of method=mesh"),
        ("ulysses", "method.ulysses, default 1(.|\n)*of method=mesh"),
        ("train", "train.recompute, default attention\n(.|\n)*none, attention"),
        ("cluster", "cluster, default h100_ndr400(.|\n)*  local +This machine"),
        ("method", "  ring  +Ring Attention: every rank"),
        ("workload", "workload, default attention\n(.|\n)*  decode: attention of a decode step"),
        ("data.lengths", "data.lengths, default (.|\n)*of data=lengths"),
    ],
)
def test_help_explains_a_key(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", *words.split()]) == 0
    said = capsys.readouterr().out
    assert re.search(says, said), said
    assert max(map(len, said.splitlines())) <= 80


def test_help_lists_all_keys_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    said = capsys.readouterr().out
    assert re.search("gpus: 256(.|\n)*cluster: (.|\n)*h100_ndr400(.|\n)*method: all_gather", said)
    assert main(["help", "seqle"]) == 2
    assert "did you mean seqlen?" in capsys.readouterr().err


def test_help_has_something_to_say_of_every_key_of_a_point() -> None:
    config = yaml.safe_load((CONF / "config.yaml").read_text())
    lines = (CONF / "config.yaml").read_text().splitlines()
    silent = [key for key in config if key != "defaults" and any(re.match(rf"{key}: [^#]*$", line) for line in lines)]
    assert not silent
