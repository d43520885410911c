"""Kernels name the packages whose code they run: a record is reused only where these have the same versions."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from sp_bench import kernels
from sp_bench.kernels import KERNELS, BlockKernel, fold
from sp_bench.kernels.cuda import CudaKernel, beneath
from sp_bench.measure.devices import gpu_packages
from sp_bench.peers.registry import PEERS
from sp_bench.plan.regions import RegionKind
from tests.kernels.fakes import installed
from tests.support.typed import of_kind

HOME = Path(kernels.__file__).parent
OURS = {*sys.stdlib_module_names, "torch", "sp_bench"}
"""The record has torch's version, and the code's own hash, whatever the kernel."""


def file_of(kernel: type[BlockKernel]) -> Path:
    """The file that defines a kernel."""
    return Path(inspect.getfile(kernel))


def modules(source: str) -> Iterator[str]:
    """The modules that a file imports, wherever it does, and those that it gives to a function by name or `package`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(module)), *_]
            ):
                if name in ("import_module", "find_spec", "__import__"):
                    yield module
            case ast.Assign(targets=[ast.Name(id="package")], value=ast.Constant(value=str(module))) if module:
                yield module
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="ops"), attr=library):
                yield from () if library == "aten" else (library,)


def unnamed(source: str, named: Iterable[str]) -> set[str]:
    """The modules of other packages that a file uses, and that are in none of those that are `named`."""
    others = {module for module in modules(source) if module.partition(".")[0] not in OURS}
    return {module for module in others if not any(f"{module}.".startswith(f"{one}.") for one in named)}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_a_kernel_names_what_it_imports(kernel: type[BlockKernel]) -> None:
    assert unnamed(file_of(kernel).read_text(), kernel.packages) == set()


def test_other_files_import_what_folds_name() -> None:
    others = {*HOME.glob("*.py")} - {file_of(kernel) for kernel in KERNELS.values()}
    assert set().union(*(unnamed(path.read_text(), fold.PACKAGES) for path in others)) == set()


@pytest.mark.parametrize(
    "line",
    [
        "import fancy.attention",
        "from fancy.attention import forward",
        "def f(): import fancy.attention",
        "module = importlib.import_module('fancy.attention')",
        "class Fancy(CudaKernel): package = 'fancy.attention'",
    ],
)
def test_every_way_to_use_a_package_is_seen(line: str) -> None:
    assert [module.partition(".")[0] for module in unnamed(line, ["flash_attn", "fan"])] == ["fancy"]
    assert unnamed(line, ["fancy"]) == set()


def test_points_on_gpus_depend_on_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fancy(BlockKernel):
        name = "fancy"
        packages = {"fancy": "fancy-attention"}  # noqa: RUF012

    there = set(gpu_packages())
    assert {"flash-attn", "flash-attn-3", "flash-attn-4", "triton"} <= there
    assert {peer.distribution for peer in PEERS.values()} - {"torch", ""} <= there
    monkeypatch.setitem(KERNELS, "fancy", Fancy)
    gpu_packages.cache_clear()
    try:
        assert set(gpu_packages()) == there | {"fancy-attention"}
    finally:
        gpu_packages.cache_clear()


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "flash_attn_4"])
def test_a_package_is_looked_up_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each block: flash-attn 4's signatures take as long to read as all else of a block."""
    q, k, v, dout = (torch.randn(1, 8, 2, 16).bfloat16() for _ in range(4))
    with installed(name):
        kernel, looked_up = of_kind(CudaKernel, KERNELS[name]()), []
        module = type(kernel).module
        monkeypatch.setattr(type(kernel), "module", classmethod(lambda cls: looked_up.append(1) or module()))
        for _ in range(3):
            out, lse = kernel.forward(q, k, v, RegionKind.FULL)
            kernel.backward(dout, q, k, v, out, lse, RegionKind.FULL)
    assert looked_up == [1]


def test_functions_are_called_beneath_torchs_wrapper() -> None:
    """flash-attn 2.7 and 2.8 wrap theirs by torch.library.custom_op, older and newer ones may not."""

    def forward(q: torch.Tensor, causal: bool) -> torch.Tensor:
        return q.clone()

    wrapped = torch.library.custom_op("sp_bench_test::forward", forward, mutates_args=())
    assert wrapped is not forward
    assert beneath(wrapped) is beneath(forward) is forward
