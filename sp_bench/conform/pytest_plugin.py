"""pytest --sp-conform my_module:fn: each check of sp_bench.conform is a test.

Installed as a plugin of pytest with the package. Until the option is given it imports nothing of sp_bench.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sp_bench.conform.catalogue import Check
    from sp_bench.conform.ranks import Worlds
    from sp_bench.conform.subjects import Subject

WORLDS: pytest.StashKey[Worlds] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plug-in."""
    group = parser.getgroup("sp_bench", "conformance of sequence-parallel attention")
    group.addoption(
        "--sp-conform",
        action="append",
        default=[],
        metavar="TARGET[,key=value...]",
        help="check my_module:fn, a package or a method (python -m sp_bench.conform --help); may be repeated. "
        "Without paths, nothing else is collected",
    )
    group.addoption("--sp-conform-profile", choices=("short", "long"), default="short", help="how many cases")
    group.addoption("--sp-conform-sizes", default="", metavar="N,N", help="numbers of ranks; all if not given")
    group.addoption("--sp-conform-checks", default="", metavar="NAME,NAME", help="checks; all if not given")


def pytest_configure(config: pytest.Config) -> None:
    """Collect nothing else where a target is given without paths."""
    if config.getoption("--sp-conform") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the tests of each target."""
    for target in _option(config, "--sp-conform"):
        items += _items(session, config, target)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks."""
    if worlds := config.stash.get(WORLDS, None):
        worlds.__exit__()


def _option(config: pytest.Config, name: str) -> Any:
    return config.getoption(name)


def _items(session: pytest.Session, config: pytest.Config, target: str) -> Iterator[ConformItem]:
    """A test for each check of each subject that the target names."""
    import yaml

    from sp_bench.conform.__main__ import checks_named, sizes_named
    from sp_bench.conform.subjects import subjects_named
    from sp_bench.errors import RequestError
    from sp_bench.extras import require

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    name, *options = target.split(",")
    try:
        require("conform", "--sp-conform")
        given = {key: yaml.safe_load(value) for key, _, value in (option.partition("=") for option in options)}
        subjects = subjects_named(name, given)
        sizes = sizes_named(_option(config, "--sp-conform-sizes"))
        checks = checks_named(_option(config, "--sp-conform-checks"))
    except RequestError as error:
        raise pytest.UsageError(f"--sp-conform {error}") from None
    for subject in subjects:
        for check in checks:
            yield ConformItem.from_parent(
                session, name=f"{subject.title}::{check.name}", subject=subject, check=check, sizes=sizes
            )


class ConformItem(pytest.Item):
    """One check of one subject."""

    def __init__(self, *, subject: Subject, check: Check, sizes: list[int], **rest: Any) -> None:
        super().__init__(**rest)
        self.subject, self.check, self.sizes = subject, check, sizes

    def runtest(self) -> None:
        from sp_bench.conform.ranks import Worlds
        from sp_bench.conform.report import remark
        from sp_bench.conform.run import rows_of

        if WORLDS not in self.config.stash:
            self.config.stash[WORLDS] = Worlds()
        long = self.config.getoption("--sp-conform-profile") == "long"
        worlds = self.config.stash[WORLDS]
        (row,) = rows_of(self.subject, worlds, long=long, sizes=self.sizes, checks=[self.check])
        if row.status == "fails":
            raise NotConforming(remark(row))
        if row.status != "holds":
            pytest.skip(remark(row) or row.status)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if isinstance(excinfo.value, NotConforming):
            return f"{self.check.looks_for}: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        return "sp_bench.conform", None, self.name


class NotConforming(Exception):
    """A check fails; the message has the smallest failing case."""
