"""The README shows what its command prints, and is short."""

from __future__ import annotations

import pytest

from benchmarks.readme import PICTURE, README, example, shown


@pytest.mark.exhaustive
def test_the_example_is_what_the_command_prints() -> None:
    """`python -m benchmarks.readme` writes it anew."""
    assert shown() == example()


def test_it_is_short_and_has_its_picture() -> None:
    text = README.read_text()
    assert len(text.splitlines()) < 120
    assert f"docs/{PICTURE.name}" in text
    assert PICTURE.stat().st_size > 1000
