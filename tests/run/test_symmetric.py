"""Symmetric memory: the fake has torch's signatures, and the protocol of one_sided.py needs each of its signals."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed
from torch.distributed import _symmetric_memory

from sp_bench.errors import RequestError
from sp_bench.run.one_sided import DATA, FREE, Signal
from sp_bench.run.symmetric_memory import SymmetricMemory, refuse_backend
from tests.run.symmetric import Handle, Module


def stubs(name: str) -> dict[str, list[str]]:
    """The names of the arguments of each method of a class of torch's C++, as its stubs declare them."""
    text = (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()
    classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == name)
    methods = (node for found in classes for node in found.body if isinstance(node, ast.FunctionDef))
    return {method.name: [argument.arg for argument in method.args.args] for method in methods}


@pytest.mark.parametrize("name", ["get_buffer", "put_signal", "wait_signal"])
def test_a_handle_has_torchs_arguments(name: str) -> None:
    assert [*inspect.signature(getattr(Handle, name)).parameters] == stubs("_SymmetricMemory")[name]


@pytest.mark.parametrize("name", ["empty", "rendezvous"])
def test_the_module_has_torchs_arguments(name: str) -> None:
    def arguments(function: object) -> list[tuple[str, object]]:
        found = inspect.signature(function).parameters.values()  # pyright: ignore[reportArgumentType]
        return [(p.name, p.kind) for p in found if p.name != "self"]

    assert arguments(getattr(Module, name)) == arguments(getattr(_symmetric_memory, name))
    assert callable(_symmetric_memory.get_backend)
    assert "signal_pad_size" in (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()


def test_a_pad_that_is_too_small_is_refused() -> None:
    """torch lets channels beyond its end pass."""
    handle = SimpleNamespace(signal_pad_size=256)
    module = SimpleNamespace(
        empty=lambda size, *, dtype, device: torch.empty(size, dtype=dtype), rendezvous=lambda tensor, group: handle
    )

    def of(ranks: int) -> SymmetricMemory:
        return SymmetricMemory(range(ranks), 0, lambda lane: lane, torch.device("cpu"), module)

    of(32).connect((), lanes=1)
    with pytest.raises(RequestError, match="33 GPUs: its signals take 264 bytes, and torch's pads have 256"):
        of(33).connect((), lanes=1)


def test_gpus_without_access_to_each_other_are_refused() -> None:
    def rendezvous(tensor: torch.Tensor, group: object) -> None:
        raise RuntimeError("no peer access")

    module = SimpleNamespace(empty=lambda size, *, dtype, device: torch.empty(size, dtype=dtype), rendezvous=rendezvous)
    memory = SymmetricMemory(range(2), 0, lambda lane: lane, torch.device("cpu"), module)
    with pytest.raises(RequestError, match="don't share memory .no peer access.; transport=nccl would work"):
        memory.empty((2,), torch.float32)


def test_other_backends_of_torch_are_refused() -> None:
    refuse_backend("CUDA")
    with pytest.raises(RequestError, match="NVSHMEM.*unsetting TORCH_SYMMMEM"):
        refuse_backend("NVSHMEM")


def test_a_lane_signals_in_its_own_group() -> None:
    """Later versions of torch order the signals of one group as they were launched, on whatever streams."""
    groups: list[object] = []
    signals: list[tuple] = []

    def rendezvous(tensor: torch.Tensor, group: object) -> SimpleNamespace:
        groups.append(group)
        return SimpleNamespace(
            signal_pad_size=2048,
            put_signal=lambda *to: signals.append(("put", group, *to)),
            wait_signal=lambda *of: signals.append(("wait", group, *of)),
        )

    module = SimpleNamespace(empty=lambda size, *, dtype, device: torch.empty(size, dtype=dtype), rendezvous=rendezvous)
    memory = SymmetricMemory((4, 5, 6, 7), 5, lambda lane: f"lane {lane}", torch.device("cpu"), module)
    memory.connect((), lanes=2)
    assert groups == ["lane 0", "lane 1"]
    memory.put(Signal(6, 1, FREE))
    memory.wait(Signal(4, 0, DATA))
    assert signals == [("put", "lane 1", 2, FREE), ("wait", "lane 0", 0, DATA)], "by their places in the node"
