"""Pages of studies say at which commit they were made, and those of older code are found."""

from __future__ import annotations

import subprocess
import warnings
from pathlib import Path

import pytest

from sp_bench.analysis import stale, studies
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import Study
from sp_bench.records.provenance import git_state
from sp_bench.resources import ROOT

PAGES = ROOT / "docs" / "results"
MADE = [name for name in studies.studies() if (PAGES / f"{name}.md").is_file()]


@pytest.mark.parametrize("name", MADE)
def test_a_page_says_at_which_commit_it_was_made(name: str) -> None:
    assert stale.STAMP.search((PAGES / f"{name}.md").read_text())


@pytest.mark.long
def test_those_of_older_code_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """As a warning of the session: code changes more often than pages are made."""
    if git_state(ROOT)["git_commit"] is None:  # an archive of the files has no history
        assert stale.main([]) == 2
        return
    assert stale.main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    found = stale.pages(PAGES, studies.studies().values())
    assert len(found) == len(MADE)
    old = [page for page in found if not page.is_of_todays_code]
    assert printed == [*map(str, old), f"{len(found) - len(old)} of {len(found)} pages are of today's code"]
    if old:
        warnings.warn(f"pages of older code: {', '.join(page.name for page in old)}", stacklevel=1)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a study, whose page is made, and one file of code."""
    monkeypatch.setattr(stale, "place", lambda name: tmp_path / name)
    monkeypatch.setattr(stale, "MEASURED_CODE", ("run", "launch.py"))
    for name, text in {"studies/one/page.md": "# One\n\nSome words.\n", "run/a.py": "A = 1\n", "launch.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    _git(tmp_path, "init", "-q")
    _commit(tmp_path)
    return tmp_path


def test_what_has_changed_since(repository: Path) -> None:
    study = Study(repository / "studies" / "one")
    page = repository / "one.md"
    page.write_text(f"# One\n\nMade at commit `{_git(repository, 'rev-parse', '--short', 'HEAD')}` of today.\n")
    _commit(repository)
    (found,) = stale.pages(repository, [study], repository)
    assert (found.commits, found.changed) == (0, ())
    for text in ("A = 2\n", "A = 3\n"):
        (repository / "run" / "a.py").write_text(text)
        _commit(repository)
    (repository / "launch.py").write_text("B = 1\n")
    _commit(repository)
    (found,) = stale.pages(repository, [study], repository)
    assert (found.commits, found.changed) == (3, ("run", "launch.py"))
    page.write_text("# One\n\nMade at commit `0123456` of a day that this repository doesn't know.\n")
    assert [str(each) for each in stale.pages(repository, [study], repository)] == ["one: made at an unknown commit"]


def test_a_page_is_stamped_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# One\n\nSome words.\n")
    text = Study(tmp_path).write(Runs(tmp_path / "records"), tmp_path).read_text()
    assert bool(stale.STAMP.search(text)) == (git_state(ROOT)["git_commit"] is not None)


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _commit(folder: Path) -> None:
    _git(folder, "add", "-A")
    _git(folder, "commit", "-qm", "a change")
