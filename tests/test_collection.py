"""Python's search for garbage: left out of what is imported, and found again as it was."""

import gc
import subprocess
import sys

import pytest

from sp_bench.collection import importing, uncollected

ASKED = """
import gc
from sp_bench.__main__ import main
found = []
gc.callbacks.append(lambda phase, info: found.append(info["generation"]))
code = main(["method=ring", "gpus=8", "--cfg"])
print(code, gc.isenabled(), gc.get_freeze_count() > 10_000, found.count(2))
"""


def test_a_command_never_looks_for_garbage_in_its_modules() -> None:
    """A search of the oldest generation goes through every object that is not frozen."""
    shown = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "0 True True 0"


def test_nothing_is_frozen_where_all_modules_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = list[bool]()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled() and not frozen
    with importing():
        monkeypatch.setitem(sys.modules, "another", sys)
    assert frozen == [True]


def test_it_stays_off_where_it_was() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
