"""The files for those who cite the project or contribute to it."""

from __future__ import annotations

import re

import yaml

from sp_bench import __version__
from tests.packaging.conftest import ROOT, pyproject


def test_the_citation_is_of_this_version() -> None:
    """With the keys that the Citation File Format 1.2.0 requires."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    assert citation["license"] == pyproject()["project"]["license"]


def test_commits_are_checked_as_make_check_does() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    makefile = (ROOT / "Makefile").read_text()
    checks = re.search(r"^check: (.*)\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert checks
    for hook in local["hooks"]:
        tool, *rest = hook["entry"].removeprefix(".venv/bin/").replace(" --fix", "").split()
        assert rest[0] in checks[1].split() if tool == "make" else " ".join([tool, *rest]) in checks[2]


def test_links_between_the_pages_at_the_top_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())
        assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
