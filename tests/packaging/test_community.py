"""The files for those who cite the project or contribute to it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from sp_bench import __version__
from sp_bench.records.provenance import KEPT_VARIABLES
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
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())
        assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_workflow_runs_what_is_supported() -> None:
    """Each Python of requires-python with the pinned torch, and the oldest torch; .ci/run does the rest."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    matrix = job["strategy"]["matrix"]
    pythons = SpecifierSet(pyproject()["project"]["requires-python"])
    assert matrix["python"] == [f"3.{minor}" for minor in range(30) if f"3.{minor}" in pythons]
    (torch,) = map(Requirement, pyproject()["project"]["optional-dependencies"]["run"])
    (pinned,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (oldest,) = [spec.version for spec in torch.specifier if spec.operator == ">="]
    assert matrix["torch"] == [""]
    assert pinned in torch.specifier
    assert [one["torch"] for one in matrix["include"]] == [oldest]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    assert all(command.startswith("git config") for command in commands[:-1])


def test_another_torch_replaces_the_pinned_one(tmp_path: Path) -> None:
    """The commands of .ci/run with TORCH before it installs anything, with a make that says what it would install."""
    script, _, _ = (ROOT / ".ci" / "run").read_text().partition("NO_MKDOCS")
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(script)
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\ntorch==2.13.0\ntorchx==1\ntriton==3.9.0\n")
    for name, body in (("apt-get", ""), ("make", 'cat "$CONSTRAINTS"')):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)

    def installed(torch: str) -> list[str]:
        environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TORCH": torch}
        command = ["bash", str(tmp_path / ".ci" / "run")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    assert installed("") == ["numpy==2.4.6", "torch==2.13.0", "torchx==1", "triton==3.9.0"]
    assert installed("2.8") == ["numpy==2.4.6", "torchx==1", "torch==2.8.*"]


def test_issues_ask_for_what_an_answer_needs() -> None:
    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")]
    forms = [form for form in forms if "body" in form]
    assert len(forms) == 3
    for form in forms:
        assert {"name", "description", "labels", "body"} <= form.keys()
        assert all(
            field["type"] == "textarea" and field["id"] and field["attributes"]["label"] for field in form["body"]
        )
        assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_paths_that_templates_name_are_there() -> None:
    template = (ROOT / ".github" / "pull_request_template.md").read_text()
    paths = [name for name in re.findall(r"`([\w./]+)`", template) if "/" in name or name.endswith(".md")]
    assert paths
    assert [name for name in paths if not (ROOT / name).exists()] == []


def test_the_variables_that_records_keep_are_those_of_the_security_page() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    assert set(re.findall(r"\b([A-Z]+_)(?=\W)", page)) == set(KEPT_VARIABLES)
