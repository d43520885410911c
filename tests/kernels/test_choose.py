"""The choice of a kernel, and what each refuses: GPUs, versions and packages are made up, as is what they can do."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch
import yaml

from sp_bench.cluster.head_dims import BUILT
from sp_bench.errors import RequestError
from sp_bench.kernels import KERNELS, auto_order, choose, cuda
from sp_bench.kernels.contract import empty_output
from sp_bench.kernels.cuda import CudaKernel
from sp_bench.plan.regions import RegionKind
from sp_bench.resources import CONF
from tests.kernels import fakes
from tests.kernels.cases import ON_CPU
from tests.support.dense import block_of

A100, ADA, H100, B200, RTX5090, V100 = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (7, 0)


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cudnn: int | None = 91002) -> None:
    """From now on torch says that there is such a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)


def packages(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """From now on these packages of kernels are installed, and no others."""
    modules = {KERNELS[name].package for name in names}  # pyright: ignore[reportAttributeAccessIssue]

    def find(package: str) -> ModuleType:
        if package not in modules:
            raise ModuleNotFoundError(f"No module named '{package}'")
        return fakes.CuteInterface(package) if package.endswith("cute.interface") else ModuleType(package)

    monkeypatch.setattr(cuda, "import_module", find)
    monkeypatch.setattr(cuda, "find_spec", lambda package: package if package in modules else None)


def refusal(name: str, dtype: str = "bfloat16", head_dim: int = 128) -> str:
    return KERNELS[name].refuses("cuda", dtype, head_dim)


def test_on_a_cpu() -> None:
    assert choose("auto", "cpu", "bfloat16", 64).name == "aten_cpu"
    assert choose("auto", "cuda", "float64", 64).name == "reference"
    for name in ON_CPU:
        assert choose(name, "cpu", "float32", 64).name == name
    with pytest.raises(RequestError, match="kernel=referense: there is no such kernel; did you mean reference"):
        choose("referense", "cpu", "float32", 64)
    with pytest.raises(RequestError, match="kernel=aten_cpu: it runs on cpu only, not on cuda; kernel=auto would work"):
        choose("aten_cpu", "cuda", "float32", 64)


@pytest.mark.parametrize("name", fakes.FAKED)
def test_what_is_for_gpus_refuses_all_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KERNELS[name].refuses("cpu", "bfloat16", 64) == "it runs on cuda only, not on cpu"
    assert refusal(name, "float32") == "it takes float16 and bfloat16, not float32"
    assert refusal(name, head_dim=60) == "it takes a head_dim that is a multiple of 8, not 60"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(name) == "torch sees no CUDA device here"
    gpu(monkeypatch, V100)
    assert "for GPUs of compute capability" in refusal(name) and "this one has 7.0" in refusal(name)
    gpu(monkeypatch, H100)
    assert refusal(name, head_dim=264) == "it takes a head_dim of at most 256 on this GPU, not 264"


def test_what_breaks_at_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whatever error: packages are made for one torch, one CUDA, one compiler."""

    def find(package: str) -> ModuleType:
        raise AttributeError(f"module '{package}.arch' has no attribute 'fmin'")

    gpu(monkeypatch, H100)
    monkeypatch.setattr(cuda, "import_module", find)
    assert "has no attribute 'fmin'" in refusal("flash_attn_4")
    assert choose("auto", "cuda", "bfloat16", 128).name == "cudnn"


def test_cudnn_before_torch_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, H100)
    for version, refused in (("2.8.0+cu128", True), ("2.9.0a0+git", False), ("2.13.0", False), ("3.0.0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        assert (refusal("cudnn") == f"it needs torch 2.9, and this is {version}") == refused


def test_flash_attn_3_is_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    with fakes.installed("flash_attn_3"):
        for capability in (A100, ADA, B200, RTX5090):
            gpu(monkeypatch, capability)
            assert refusal("flash_attn_3").startswith("it is for GPUs of compute capability 9.x, and this one has")
        gpu(monkeypatch, H100)
        assert refusal("flash_attn_3") == ""


def test_flash_attn_3_without_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, H100)
    packages(monkeypatch, "flash_attn_3")
    assert "has no operators flash_attn_3::fwd and bwd, or an older release's" in refusal("flash_attn_3")
    library = torch.library.Library("an_older_flash_attn_3", "DEF")
    library.define("fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, float softmax_scale, int sm_margin=0) -> Tensor")
    library.define("bwd(Tensor dout, Tensor q, Tensor k, Tensor v, bool is_causal, int sm_margin=0) -> Tensor")
    monkeypatch.setattr(torch.ops, "flash_attn_3", torch.ops.an_older_flash_attn_3, raising=False)
    assert "or an older release's" in refusal("flash_attn_3")
    library._destroy()


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "flash_attn_4"])
def test_packages_that_are_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, H100)
    packages(monkeypatch)
    kernel = KERNELS[name]
    package, install = kernel.package, kernel.install  # pyright: ignore[reportAttributeAccessIssue]
    assert refusal(name) == f"import {package}: No module named '{package}'; {install} would install it"
    # What stands in for flash_attn where peers run on CPUs takes no tensor of a GPU.
    monkeypatch.setattr(cuda, "import_module", lambda _: ModuleType("sp_bench.stand_in"))
    assert refusal(name) == f"import {package}: is not installed; {install} would install it"


@pytest.mark.parametrize(
    ("name", "capability", "most"),
    [
        ("cudnn", A100, 128),
        ("cudnn", H100, 256),
        ("cudnn", B200, 128),
        ("aten_flash", A100, 256),
        ("aten_flash", ADA, 192),
        ("aten_flash", RTX5090, 192),
        ("flash_attn_4", H100, 256),
        ("flash_attn_4", B200, 128),
    ],
)
def test_head_dims(name: str, capability: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, capability)
    packages(monkeypatch, name)
    assert refusal(name, head_dim=most) == ""
    assert refusal(name, head_dim=most + 8) == f"it takes a head_dim of at most {most} on this GPU, not {most + 8}"


class OldCute(ModuleType):
    """flash_attn.cute.interface as flash-attn 2.8 brings it."""

    def _flash_attn_fwd(self, q, k, v, softmax_scale=None, causal=False, window_size_left=None) -> None: ...

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0) -> None: ...


def test_an_old_flash_attn_4_under_the_same_name_is_passed_over_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, H100)
    packages(monkeypatch, "flash_attn", "flash_attn_4")
    monkeypatch.setattr(cuda, "import_module", OldCute)
    lacks = "_flash_attn_fwd takes no return_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
    assert lacks in refusal("flash_attn_4")
    with pytest.warns(UserWarning, match=r"kernel=auto passes over flash_attn_4, which is there: .*return_lse"):
        chosen = choose("auto", "cuda", "bfloat16", 128)
    assert chosen.name == "cudnn" and lacks in chosen.notes[0], "for the record"
    with pytest.raises(RequestError, match="of another release"):
        choose("flash_attn_4", "cuda", "bfloat16", 128)


@pytest.mark.parametrize(
    ("name", "capability", "head_dim", "said"),
    [
        ("flash_attn_3", H100, 192, ""),
        ("flash_attn_3", H100, 200, "its deterministic backward takes a head_dim of at most 192, not 200"),
        ("flash_attn_4", B200, 128, ""),
        ("flash_attn_4", RTX5090, 128, "its backward is not deterministic on GPUs of compute capability 12.x"),
    ],
)
def test_backwards_that_are_not_deterministic_are_refused_early(
    name: str, capability: tuple[int, int], head_dim: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, capability)
    packages(monkeypatch, name)
    with fakes.installed("flash_attn_3"):
        assert refusal(name, head_dim=head_dim) == ""
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert refusal(name, head_dim=head_dim) == said


def test_cudnn_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, H100, cudnn=None)
    assert refusal("cudnn") == "it needs cuDNN 9, and torch has none"
    gpu(monkeypatch, H100, cudnn=8906)
    assert refusal("cudnn") == "it needs cuDNN 9, and torch has 8906"
    gpu(monkeypatch, H100, cudnn=90500)
    assert refusal("cudnn") == ""
    assert refusal("cudnn", head_dim=256) == "it takes a head_dim of at most 128 on this GPU, not 256"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert refusal("cudnn").startswith("its backward is not deterministic")


@pytest.mark.parametrize(
    ("capability", "there", "head_dim", "chosen"),
    [
        (H100, ("flash_attn", "flash_attn_3", "flash_attn_4"), 128, "flash_attn_4"),
        (H100, ("flash_attn", "flash_attn_3"), 128, "flash_attn_3"),
        (H100, ("flash_attn",), 128, "cudnn"),
        (H100, (), 128, "cudnn"),
        (B200, (), 128, "cudnn"),
        (B200, ("flash_attn",), 256, "flash_attn"),
        (B200, (), 256, "aten_flash"),
        (A100, ("flash_attn", "flash_attn_4"), 128, "flash_attn"),
        (A100, (), 128, "aten_flash"),
        (V100, (), 128, "reference"),
        (H100, (), 60, "reference"),
    ],
)
def test_auto_takes_the_fastest_that_takes_it(
    capability: tuple[int, int], there: tuple[str, ...], head_dim: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, capability)
    packages(monkeypatch, *there)
    with fakes.installed("flash_attn_3"):  # its operators; the package is there or not
        assert choose("auto", "cuda", "bfloat16", head_dim).name == chosen
        assert choose("auto", "cuda", "float32", head_dim).name == "reference"


def test_every_kernel_has_a_name_and_auto_ends_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered kernel is not in auto's order before its author puts it there."""
    for capability in (A100, H100):
        gpu(monkeypatch, capability)
        for order in (auto_order("cpu"), auto_order("cuda")):
            assert set(order) <= {*KERNELS.values()}
            assert order[-1] is KERNELS["reference"]
            assert len(order) == len(set(order))
    files = (CONF / "kernel").glob("*.yaml")
    assert {path.stem: yaml.safe_load(path.read_text())["name"] for path in files} == {
        name: name for name in ("auto", *KERNELS)
    }


def test_sizes_that_simulations_pad_to_are_those_of_registered_kernels() -> None:
    """Simulations have no torch, so no kernel either: its sizes stand with the figures. `splash` has figures alone."""
    assert BUILT.keys() - KERNELS.keys() == {"splash"}
    for name in BUILT.keys() & KERNELS.keys():
        kernel = KERNELS[name]
        assert issubclass(kernel, CudaKernel)
        most = max(kernel.most_head_dim((major, 0)) for major in kernel.majors)
        assert max(BUILT[name]) >= most
        assert list(BUILT[name]) == sorted(BUILT[name])


@pytest.mark.parametrize("name", ["aten_flash", "cudnn"])
@pytest.mark.parametrize("mask", list(RegionKind), ids=lambda mask: mask.value)
def test_shapes_that_torch_says_its_gpu_kernels_have(name: str, mask: RegionKind) -> None:
    """On meta tensors: torch's own account of what its operators take and return, which runs everywhere."""
    kernel = KERNELS[name]()
    for tokens, kv_heads in ((2, 4), (33, 2), (64, 1)):
        block = block_of(tokens, tokens, kv_heads, torch.bfloat16, device="meta")
        out, lse = kernel.forward(block.q, block.k, block.v, mask)
        wanted = empty_output(block.q)
        assert (out.shape, lse.shape) == (wanted[0].shape, wanted[1].shape)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32) and lse.is_contiguous()
        gradients = kernel.backward(block.dout, block.q, block.k, block.v, out, lse, mask)
        for operand, gradient in zip(block[:3], gradients, strict=True):
            assert (gradient.shape, gradient.dtype) == (operand.shape, operand.dtype)


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "flash_attn_4"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_gradients_are_asked_for(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    with fakes.installed(name):
        kernel, block = KERNELS[name](), block_of(4, 4, 2, torch.bfloat16)
        out, lse = kernel.forward(block.q, block.k, block.v, RegionKind.FULL)
        kernel.backward(block.dout, block.q, block.k, block.v, out, lse, RegionKind.FULL)
        package = kernel.package  # pyright: ignore[reportAttributeAccessIssue]
        assert sys.modules[package].deterministic is deterministic


@pytest.mark.parametrize("name", fakes.FAKED)
def test_fakes_break_on_what_gpus_break_on(name: str) -> None:
    """Or they would prove nothing: an lse of -inf is not harmless to them, nor a narrow head or another dtype."""
    with fakes.installed(name):
        kernel, block = KERNELS[name](), block_of(4, 4, 2, torch.bfloat16)
        out, lse = kernel.forward(block.q, block.k, block.v, RegionKind.FULL)
        everyone = torch.full_like(lse, -math.inf)
        grads = kernel._backward(block.dout, block.q, block.k, block.v, torch.zeros_like(out), everyone, False)
        assert not all((grad == 0).all() for grad in grads)
        for wrong in (block_of(4, 4, 2, torch.float32), type(block)(*(x[..., :4] for x in block))):
            with pytest.raises(AssertionError):
                kernel.forward(wrong.q, wrong.k, wrong.v, RegionKind.FULL)
