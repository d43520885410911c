"""Lines that are printed fit the terminal, and what is copied from them stays whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sp_bench.terminal import fitted

DOCTOR = "python -m sp_bench.doctor"
ROW = "  ok    alone     one rank of any number, without its peers: python -m sp_bench mode=alone device=cpu"
ERROR = (
    "sp_bench: method.tile: is a key of method=mesh, not of method=ring; did you mean method=mesh method.tile=[4,4]?"
)
HELP = """\
Measures the costs of this machine's block kernels and links, and writes a cluster file. It
takes a minute.

  out=null  the file; null: cluster/NAME.yaml in the folder of the user's configuration, where
            it is found
  key=value"""


def test_a_long_row_goes_on_in_its_last_column_and_its_command_stays_whole() -> None:
    assert fitted(ROW, width=80).split("\n") == [
        "  ok    alone     one rank of any number, without its peers:",
        "                  python -m sp_bench mode=alone device=cpu",
    ]


def test_keys_stay_together_if_they_fit() -> None:
    lines = fitted(ERROR, width=80).split("\n")
    assert lines[1] == "method=mesh method.tile=[4,4]?" and " ".join(lines) == ERROR
    assert all(len(line) <= 40 for line in fitted(ERROR, width=40).split("\n"))


def test_a_command_that_is_wider_stays_on_one_line() -> None:
    command = f"{DOCTOR} ranks=2 dtype=float32 head_dim=64 out=/a/long/path/to/a/file.json"
    assert fitted(f"try {command}", width=40).split("\n") == ["try", command]


def test_paragraphs_are_filled_anew_and_columns_kept() -> None:
    assert fitted(HELP, width=60, reflow=85).split("\n") == [
        "Measures the costs of this machine's block kernels and",
        "links, and writes a cluster file. It takes a minute.",
        "",
        "  out=null  the file; null: cluster/NAME.yaml in the folder",
        "            of the user's configuration, where it is found",
        "  key=value",
    ]
    assert fitted(HELP, width=120) == HELP, "what fits stays"


@pytest.mark.parametrize("columns", [80, 60])
def test_help_and_errors_fit(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (["help"], ["sweep", "--help"], ["method=ring", "method.tile=[4,4]"]):
        done = subprocess.run([sys.executable, "-m", "sp_bench", *words], capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).splitlines()
        assert lines and max(map(len, lines)) <= columns, max(lines, key=len)
