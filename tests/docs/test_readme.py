"""The README shows what its commands print, and is short."""

from __future__ import annotations

import re

import pytest

from benchmarks.readme import ADVISE, COMMAND, PICTURE, README, advice, shown, table


@pytest.mark.long
def test_the_table_is_what_the_command_prints() -> None:
    """`python -m benchmarks.readme` writes it anew."""
    assert shown(COMMAND) == table()


@pytest.mark.long
def test_the_answer_is_what_advise_says() -> None:
    assert shown(ADVISE) == advice()


def test_it_is_short_and_has_its_picture() -> None:
    """A screen and a half."""
    lines = README.read_text().splitlines()
    assert len(lines) <= 85 and max(map(len, lines)) <= 100
    assert f"docs/{PICTURE.name}" in README.read_text()
    assert PICTURE.stat().st_size > 1000


def test_figures_stand_in_blocks_alone() -> None:
    """Commands make those of blocks. In prose nobody would notice that they have changed."""
    prose = re.sub(r"^```.*?^```$", "", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"\d ?(?:%|ms\b|GB\b|x\b)|rank \d+", prose)
