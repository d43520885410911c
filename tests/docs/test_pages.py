"""The tutorial and the guides do what they say, and each page of results names the command that makes it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from sp_bench.analysis.studies import studies, study_named
from sp_bench.checkout import place
from tests.support.walkthrough import follow, patched, run, steps

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("sp_bench", "methods", "conf", "analysis", "slurm", "tests", "docs", "benchmarks")
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / "skills").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
RESULTS = sorted(path for path in (DOCS / "results").glob("*.md") if path.stem != "index")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A terminal of 120 columns, and a user without a configuration folder: no worker of pytest-xdist, and not CI."""
    here = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_XDIST", "SP_BENCH_CI"))}
    return {**here, "COLUMNS": "120", "XDG_CONFIG_HOME": str(tmp_path / "config"), "PYTHONPATH": str(ROOT)}


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [
        "docs/tutorial/first_points.md",
        "docs/how-to/own_attention.md",
        "docs/how-to/choose.md",
        "docs/how-to/decode.md",
        "docs/how-to/dit.md",
        "skills/sp_bench/SKILL.md",
    ],
)
def test_pages_that_need_no_checkout(page: str, tmp_path: Path, environment: dict[str, str]) -> None:
    assert follow(ROOT / page, tmp_path, environment)


GUIDES = ("add_a_method", "add_a_cluster", "add_a_kernel", "add_a_mask", "add_a_workload")
FROM_REGISTRIES = (
    *("tests/test_house.py", "tests/test_describe.py", "tests/methods/test_options.py", "tests/plan/test_mask.py"),
    *("tests/plan/test_vocabulary.py", "tests/check/test_accepted.py", "tests/records/test_identity.py"),
    *("tests/cli/test_commands.py", "tests/cli/test_options.py"),
    *("tests/kernels/test_packages.py", "tests/kernels/test_choose.py", "tests/cluster/test_kernel_table.py"),
    "tests/golden/test_figures.py::test_all_that_is_registered_has_figures",
)
"""Tests that hold for all that is registered: methods, masks, kernels, clusters and workloads."""


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_guides_in_a_checkout_of_their_own(tmp_path: Path, environment: dict[str, str]) -> None:
    """Guides lead to something complete: no list that they don't name lacks the new ones."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)
    environment |= {"PYTHONPATH": str(checkout)}
    for page in GUIDES:
        assert follow(DOCS / "how-to" / f"{page}.md", checkout, environment)
    run(f"$ pytest -q -m 'not exhaustive and not long' {' '.join(FROM_REGISTRIES)}\n", checkout, environment)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_files_and_commands_that_pages_name_are_there(page: Path) -> None:
    """But for names in capitals, which stand for any, and files that the page itself tells to write."""
    text, made = page.read_text(), {step.path for step in steps(page)}
    files = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text)
    modules = [
        place_of(name.replace(".", "/")) for name in re.findall(rf"python -m ((?:{'|'.join(FOLDERS)})[\w.]*)", text)
    ]
    files += [f"{name}/__main__.py" if (ROOT / name).is_dir() else f"{name}.py" for name in modules]
    assert {name for name in files if not re.search("[A-Z]{2}", name) and not (ROOT / name).exists()} <= made


def place_of(module: str) -> str:
    """The path of a module in a checkout, where sp_bench/analysis is analysis."""
    top, _, rest = module.partition("/")
    return str(place(rest).relative_to(ROOT)) if top == "sp_bench" else module


@pytest.mark.parametrize("page", RESULTS, ids=lambda path: path.stem)
def test_results_name_their_command(page: Path) -> None:
    """A module that is there and the study, which the list of results names too."""
    named = re.findall(r"`python -m ([\w.]+)( study=\w+)?", page.read_text().replace("\n", " "))
    assert named, "no command"
    module = ROOT / named[0][0].replace(".", "/")
    assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()
    (row,) = [line for line in (DOCS / "results" / "index.md").read_text().splitlines() if f"({page.name})" in line]
    assert f"`python -m {''.join(named[0])}" in row


@pytest.mark.parametrize("page", [page for page in RESULTS if page.stem in studies()], ids=lambda path: path.stem)
def test_pages_have_the_words_of_their_study(page: Path) -> None:
    """All but the figures: words that were changed in one of the two are a page that nobody has made."""
    words = [re.escape(part) for part in re.split(r"\{[\w.]+\}", study_named(page.stem).page.rstrip())]
    made, _, _ = page.read_text().rpartition("\n\nMade at commit ")
    assert re.fullmatch("(.*?)".join(words), made, re.DOTALL)


def test_a_walkthrough_fails_where_it_says_more_than_happens(tmp_path: Path, environment: dict[str, str]) -> None:
    assert run("$ echo one two\none ...\n$ echo \\\n    three\nthree\n", tmp_path, environment) == 2
    with pytest.raises(AssertionError, match="doesn't print: four"):
        run("$ echo three\nfour\n", tmp_path, environment)
    with pytest.raises(AssertionError, match="exit 3"):
        run("$ exit 3\n", tmp_path, environment)


def test_changes_are_made_where_they_say() -> None:
    assert patched("a\nb\nc\n", " a\n+x\n+y\n-b\n c\n+z\n") == "a\nx\ny\nc\nz\n"
    with pytest.raises(AssertionError, match="no line 'd'"):
        patched("a\n", " d\n+x\n")
