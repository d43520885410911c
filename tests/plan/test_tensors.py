"""Tensors of plans: one object for each, whose properties answer what may be asked of them."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

from sp_bench.plan import KV, Q
from sp_bench.plan.tensors import TENSORS, Kind, Tensor, named

PACKAGE = Path(__file__).parents[2] / "sp_bench"
OF_TENSORS = ("plan", "lower", "simulate", "run", "methods", "cluster", "labs", "point")
"""The packages that read tensors of plans, beside the readers that are one file."""
ASKS_A_NAME = re.compile(r'["\']_h["\']|\}_h["\']|tensor\.(name\.)?(removesuffix|endswith|startswith|replace)\(')

tensors = pytest.mark.parametrize("tensor", TENSORS.values(), ids=str)


@tensors
def test_each_is_one_object(tensor: Tensor) -> None:
    """Ranks and processes exchange chunks and counts, which are compared by identity."""
    assert named(str(tensor)) is tensor
    assert pickle.loads(pickle.dumps(tensor)) is copy.deepcopy(tensor) is tensor


@tensors
def test_by_heads_and_by_tokens_are_each_others_counterparts(tensor: Tensor) -> None:
    pair = (tensor.by_tokens, tensor.by_heads)
    assert pair[tensor.is_by_heads] is tensor
    assert [each.is_by_heads for each in pair] == [False, True]
    assert {field.by_heads for field in tensor.fields} == {tensor.is_by_heads}
    assert (pair[0].role, pair[0].of_keys) == (pair[1].role, pair[1].of_keys)
    assert [field.name for field in pair[0].fields] == [field.name for field in pair[1].fields]


@tensors
def test_roles_and_fields_agree(tensor: Tensor) -> None:
    """A partial is accumulated, with or without statistics; what has rows of keys has key heads."""
    kinds = {field.kind for field in tensor.fields}
    assert tensor.is_partial == (Kind.PARTIAL in kinds)
    assert tensor.is_output == (tensor.is_partial and Kind.STATISTIC in kinds)
    assert {field.of_keys for field in tensor.fields} == {tensor.of_keys}


def test_chunks_are_written_as_the_papers_write_them() -> None:
    assert [str(tensor) for tensor in (Q, Q.by_heads, KV)] == ["q", "q_h", "kv"]


def test_nobody_asks_a_name() -> None:
    """Properties say what a tensor is: a suffix or prefix of its name is read nowhere but where it is given."""
    files = [*PACKAGE.glob("*.py"), *(file for name in OF_TENSORS for file in (PACKAGE / name).rglob("*.py"))]
    asking = {
        f"{file.relative_to(PACKAGE)}:{number}"
        for file in files
        if file != PACKAGE / "plan" / "tensors.py"
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if ASKS_A_NAME.search(line)
    }
    assert len(files) > 50
    assert asking == set()
