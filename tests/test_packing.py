"""Sections `data`: what is said of lengths that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_bench.errors import RequestError
from sp_bench.packing import lengths_of


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "lengths", "lengths": []}, r"data.lengths=\[\]: a pack has at least one document; data.lengths=.8k."),
        ({"kind": "lengths", "lengths": [8, 0]}, r"data.lengths\[1\]=0: must be a whole number of at least 1"),
        ({"kind": "lengths", "lengths": [8, "x"]}, r"data.lengths\[1\]=x: must be a whole number of at least 1"),
        (
            {"kind": "lengths", "lengths": [8], "cached": [-3]},
            r"data.cached\[0\]=-3: must be a whole number",
        ),
        ({"kind": "equal", "tokens": 0}, "data.tokens=0: must be a whole number of at least 1"),
    ],
)
def test_lengths_that_make_no_sense(section: dict, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        lengths_of(section, 16, 0)


@pytest.mark.parametrize("kind", ["file", "sample"])
def test_files_that_make_no_sense(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "lengths.txt"
    section = {"kind": kind, "path": str(file)}
    with pytest.raises(RequestError, match=f"^data.path={file}: can't be read"):
        lengths_of(section, 16, 0)
    file.write_text("\n")
    with pytest.raises(RequestError, match=f"^data.path={file}: has no lengths"):
        lengths_of(section, 16, 0)
    file.write_text("8 8\n3 x\n")
    with pytest.raises(RequestError, match="lengths.txt, line 2: x: is no length"):
        lengths_of(section, 16, 0)
    file.write_text("16\n")
    assert lengths_of(section, 16, 0) == (16,)
