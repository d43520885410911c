"""before=CHECKOUT of a study."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sp_bench.analysis import earlier
from sp_bench.errors import RequestError
from sp_bench.resources import ROOT


@pytest.mark.parametrize("given", ["", "nowhere"])
def test_what_is_no_checkout_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # which has sp_bench itself
    with pytest.raises(RequestError, match=rf"before={given}: has no folder sp_bench; .*git worktree add.* would work"):
        earlier.checkout(given)


def test_a_process_runs_the_code_of_the_checkout(tmp_path: Path) -> None:
    """Not what is installed."""
    (tmp_path / "sp_bench").mkdir()
    (tmp_path / "sp_bench" / "__init__.py").write_text("print('that of before')")
    root = earlier.checkout(str(tmp_path))
    command = [sys.executable, "-c", "import sp_bench"]
    done = subprocess.run(command, cwd="/", env=earlier.environment(root), capture_output=True, text=True, check=True)
    assert done.stdout == "that of before\n"


def test_its_commit_is_named() -> None:
    assert earlier.in_words("") == ""
    assert "Before is the code of `" in (words := earlier.in_words(str(ROOT))) and "` of 20" in words
