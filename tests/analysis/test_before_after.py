"""The texts of an earlier commit are those of the study's commands, and tell nothing of the machine that made them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sp_bench.analysis.studies import before_after


def test_each_item_has_its_commands_before() -> None:
    kept = Path(before_after.__file__).with_name("before.json").read_text()
    before = json.loads(kept)
    assert [[one["command"] for one in item] for item in before] == [
        list(item.before or item.now) for item in before_after.ITEMS
    ]
    assert len(before) == 13
    assert not re.search(r"/(root|home|work)/|/tmp/tmp", kept)
    longest = max(len(line) for item in before for one in item for line in one["lines"])
    assert longest <= before_after.CUT + len("...")


def test_what_is_left_out_is_counted() -> None:
    output = {"command": "say", "lines": ["a", "b"], "count": 5, "widest": 200, "code": 2}
    counted = "[3 more lines; the widest has 200 characters]"
    assert before_after._block(output, last=False).split("\n") == ["$ say", "a", "b", counted, "[exit code 2]"]
    assert before_after._block(output, last=True).split("\n") == ["$ say", counted, "a", "b", "[exit code 2]"]
    whole = {**output, "count": 2, "widest": 1, "code": 0}
    assert before_after._block(whole, last=False) == "$ say\na\nb"
