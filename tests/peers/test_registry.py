"""Rules that a request for a peer is held to, before any rank starts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from sp_bench.errors import RequestError
from sp_bench.peers.deepspeed_ulysses import DeepSpeedUlysses
from sp_bench.peers.registry import PEERS, build
from sp_bench.peers.ring_flash_attn import RingFlashAttn
from sp_bench.peers.torch_context_parallel import TorchContextParallel
from sp_bench.peers.transformer_engine import TransformerEngine
from sp_bench.peers.user import User
from sp_bench.peers.yunchang import Yunchang
from sp_bench.plan import Problem
from sp_bench.plan.documents import Documents
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL, FULL
from tests.support.problems import mask_of

ROOT = Path(__file__).parents[2]
DEFAULTS = {"algorithm": "auto", "layout": "auto", "ulysses": "auto"}
OWN = "tests.peers.jobs:gathered"
PACK, FULL_PACK = Documents((16, 5, 43)), Documents((16, 5, 43), causal=False)


def problem(n: int = 4, heads: int = 8, kv_heads: int = 8, **others: object) -> Problem:
    given = {"mask": CAUSAL, "dtype": "float32", "layout": LAYOUTS["contiguous"], **others}
    return Problem(n=n, seqlen=16 * n, heads=heads, kv_heads=kv_heads, head_dim=8, **given)  # pyright: ignore


def test_the_options_are_those_of_the_config() -> None:
    config = yaml.safe_load((ROOT / "conf" / "method" / "peer.yaml").read_text())
    assert config == {"name": "peer", **DEFAULTS}
    assert yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())["impl"] is None


def test_no_torch_before_the_ranks() -> None:
    """Refusing a request takes no import of torch or of a package."""
    code = (
        "import sys; from sp_bench.peers.registry import build; from sp_bench.plan.mask import CAUSAL;"
        f"build('torch_context_parallel', {DEFAULTS}, mask=CAUSAL); build({OWN!r}, {DEFAULTS}, mask=CAUSAL).version;"
        "print({'torch', 'yunchang', 'deepspeed', 'ring_flash_attn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("impl", "options", "says"),
    [
        (None, {}, "impl=null: method=peer needs an implementation to run; known: deepspeed_ulysses, ring_flash_attn"),
        ("yunchan", {}, "impl=yunchan: there is no such implementation; did you mean yunchang? known:"),
        ("nowhere.at_all:attention", {}, "impl=nowhere.at_all:attention: there is no module nowhere.at_all; "),
        ("torch_context_parallel", {"algorithm": "all_gathr"}, "there is no such algorithm; did you mean all_gather?"),
        (
            "torch_context_parallel",
            {"layout": "striped"},
            "torch_context_parallel's all_gather needs another layout; method.layout=zigzag would work",
        ),
        (
            "torch_context_parallel",
            {"ulysses": 2},
            "method.ulysses=2: impl=torch_context_parallel has no such option; method.ulysses=auto would work",
        ),
        (OWN, {"layout": "stripd"}, "method.layout=stripd: there is no such layout; did you mean striped?"),
        (OWN, {"algorithm": "ring"}, "method.algorithm=ring: there is no such algorithm"),
    ],
)
def test_refused_by_name_or_option(impl: str | None, options: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        build(impl, {**DEFAULTS, **options}, mask=CAUSAL)
    assert says in str(caught.value)


@dataclass(frozen=True, kw_only=True)
class Absent(DeepSpeedUlysses):
    """A package that nobody has."""

    name: ClassVar[str] = "absent"
    distribution: ClassVar[str] = "absent-attention"
    module: ClassVar[str] = "absent_attention"


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(RequestError) as caught:
        Absent.build(DEFAULTS, mask=CAUSAL)
    assert str(caught.value) == (
        'impl=absent: absent-attention is not installed; pip install "sp-bench[peers]" would work'
    )


@pytest.mark.parametrize("impl", ["ring_flash_attn", "yunchang", "deepspeed_ulysses"])
def test_a_package_is_there_or_refused(impl: str) -> None:
    if importlib.util.find_spec(PEERS[impl].module):
        assert build(impl, DEFAULTS, mask=CAUSAL).version[0].isdigit()
    else:
        with pytest.raises(RequestError, match=f"impl={impl}: .* is not installed"):
            build(impl, DEFAULTS, mask=CAUSAL)


def test_auto_is_the_balanced_algorithm_or_the_default() -> None:
    chosen = {
        (cls.name, causal): (peer.algorithm, peer.layout)
        for cls in PEERS.values()
        for causal in (True, False)
        for peer in [cls(mask=mask_of(causal))]
    }
    assert chosen == {
        ("torch_context_parallel", True): ("all_gather", "zigzag"),
        ("torch_context_parallel", False): ("all_gather", "contiguous"),
        ("ring_flash_attn", True): ("zigzag", "zigzag"),
        ("ring_flash_attn", False): ("ring", "contiguous"),
        ("yunchang", True): ("zigzag", "zigzag"),
        ("yunchang", False): ("ring", "contiguous"),
        ("deepspeed_ulysses", True): ("ulysses", "contiguous"),
        ("deepspeed_ulysses", False): ("ulysses", "contiguous"),
        ("transformer_engine", True): ("p2p", "zigzag"),
        ("transformer_engine", False): ("p2p", "zigzag"),
    }
    own = {causal: User(function=OWN, mask=mask_of(causal)).layout for causal in (True, False)}
    assert own == {True: "striped", False: "contiguous"}


def test_flash_attn_is_for_gpus_and_its_stand_in_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = DeepSpeedUlysses(mask=CAUSAL)
    device: dict[str, Any] = {"mode": "measure", "kernel": "auto"}
    assert (peer.kernel_on("cpu"), peer.kernel_on("cuda")) == ("aten_cpu", "flash_attn")
    peer.refuse_run(device="cpu", **device)
    with pytest.raises(RequestError, match="flash_attn is not installed, and what stands in .* pip install flash-attn"):
        peer.refuse_run(device="cuda", **device)
    (tmp_path / "flash_attn.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    peer.refuse_run(device="cuda", **device)
    with pytest.raises(RequestError, match="impl=deepspeed_ulysses: flash_attn is installed here, and takes no"):
        peer.refuse_run(device="cpu", **device)
    for either in ("cpu", "cuda"):
        TorchContextParallel(mask=CAUSAL).refuse_run(device=either, **device)
    with pytest.raises(RequestError, match="impl=transformer_engine: transformer-engine takes tensors of GPUs only"):
        TransformerEngine(mask=CAUSAL).refuse_run(device="cpu", **device)
    TransformerEngine(mask=CAUSAL).refuse_run(device="cuda", **device)


@pytest.mark.parametrize(
    ("peer", "of", "says"),
    [
        (RingFlashAttn(mask=CAUSAL, algorithm="zigzag"), problem(1), "gpus=1: .* gpus=2 would work"),
        (
            RingFlashAttn(mask=FULL, algorithm="zigzag"),
            problem(mask=FULL),
            "mask=full: .*algorithm=ring would",
        ),
        (
            RingFlashAttn(mask=FULL, algorithm="stripe"),
            problem(mask=FULL),
            "mask=full: .*algorithm=ring would",
        ),
        (RingFlashAttn(mask=CAUSAL, algorithm="llama3"), problem(batch=2), "batch=2: .* batch=1 would work"),
        (RingFlashAttn(mask=CAUSAL, algorithm="ring"), problem(dtype="float64"), "dtype=float64: .*float32 would work"),
        (RingFlashAttn(mask=PACK), problem(), "document 1 has length 5: .*cuts each document into 8 equal pieces"),
        (RingFlashAttn(mask=PACK, algorithm="llama3"), problem(batch=2), "batch=2: .* batch=1 would work"),
        (RingFlashAttn(mask=PACK, algorithm="ring"), problem(), "mask=document: .*algorithm=zigzag or llama3 would"),
        (RingFlashAttn(mask=PACK, algorithm="stripe"), problem(), "mask=document: .*algorithm=zigzag or llama3 would"),
        (RingFlashAttn(mask=FULL_PACK), problem(), "document 1 has length 5: .*cuts each document into 4 equal pieces"),
        (Yunchang(mask=CAUSAL, algorithm="stripe"), problem(dtype="float64"), "dtype=float64: .*float32 would work"),
        (Yunchang(mask=CAUSAL, ulysses=4), problem(), "method.ulysses=4: .*leave rings of two; one of 1, 2 would work"),
        (Yunchang(mask=CAUSAL, ulysses="2"), problem(), "method.ulysses=2: .*one of 1, 2 would work"),
        (Yunchang(mask=CAUSAL, algorithm="ulysses"), problem(heads=6, kv_heads=6), "heads=6: .* heads=8 would work"),
        (TransformerEngine(mask=CAUSAL, algorithm="a2a"), problem(kv_heads=2), "kv_heads=2: .* kv_heads=4 would work"),
        (TransformerEngine(mask=CAUSAL, algorithm="a2a+p2p"), problem(2), "gpus=2.*method.algorithm=p2p would work"),
        (
            TransformerEngine(mask=CAUSAL, algorithm="a2a+p2p", ulysses=3),
            problem(),
            "method.ulysses=3: .* one of 2 would work",
        ),
        (DeepSpeedUlysses(mask=CAUSAL), problem(kv_heads=2), "kv_heads=2: .* kv_heads=4 would work"),
        (DeepSpeedUlysses(mask=CAUSAL), problem(wire_dtype="bfloat16"), "wire_dtype=bfloat16: .*null would work"),
        (TorchContextParallel(mask=CAUSAL), problem(wire_dtype="bfloat16"), "wire_dtype=bfloat16: .*null would work"),
    ],
)
def test_refused_problems(peer: TorchContextParallel, of: Problem, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        peer.refuse(of)


def test_ulysses_ranks_of_yunchang_share_a_chunk() -> None:
    """As many as divide ranks and key heads, but for a ring of at least two."""
    shared = {
        (n, kv_heads): Yunchang(mask=CAUSAL).assigned(problem(n, 8, kv_heads)).layout.head_parallel
        for n, kv_heads in ((2, 8), (4, 8), (4, 1), (6, 8), (8, 2))
    }
    assert shared == {(2, 8): 1, (4, 8): 2, (4, 1): 1, (6, 8): 2, (8, 2): 2}
    assert Yunchang(mask=CAUSAL).variant(problem(8, 8, 2)) == "zigzag 2x4"


def test_no_simulation_and_no_other_kernel() -> None:
    peer = build("torch_context_parallel", DEFAULTS, mask=CAUSAL)
    peer.refuse_run(mode="measure", kernel="auto", device="cpu")
    with pytest.raises(RequestError, match="method=peer mode=simulate: .* cluster=local would work"):
        peer.refuse_run(mode="simulate", kernel="auto", device="cpu")
    with pytest.raises(RequestError, match="kernel=reference: .* kernel=auto would work"):
        peer.refuse_run(mode="measure", kernel="reference", device="cpu")


def test_the_version_of_an_own_function_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "mine_for_this_test.py"
    versions = []
    for text in ("x = 1\n", "x = 1\n", "x = 2\n"):
        module.write_text(text)
        peer = build("mine_for_this_test:attention", DEFAULTS, mask=CAUSAL)
        versions.append(peer.version)
        assert peer.notes("cpu") == [
            f"mine_for_this_test:attention is the user's own code; the hash of its file is {peer.version}"
        ]
    assert versions[0] == versions[1] != versions[2]
