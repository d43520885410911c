"""benchmarks/gpu_kernels.py on this machine's CPU, with tiny shapes; and on a GPU that only its fakes have."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import gpu_kernels
from benchmarks.gpu_kernels import BENCHES, PUBLISHED, main, published, report
from sp_bench.kernels import KERNELS
from sp_bench.kernels.aten_cpu import AtenCpu
from sp_bench.plan.method import PHASES

TINY = replace(
    BENCHES["cpu"], error_tokens=(1, 5), rate_tokens=(16,), total_tokens=32, block_tokens=(16,), memory_tokens=32,
    repetitions=1,
)  # fmt: skip


def cells(text: str, title: str) -> list[dict[str, str]]:
    """The rows of the table under a title."""
    lines = [line for line in text.split(f"## {title}")[1].split("##")[0].splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def text() -> str:
    """All tables of a tiny bench."""
    return "\n".join(text for text, _ in report(TINY))


def test_every_kernel_is_there_or_said_why_not(text: str) -> None:
    here = {row["kernel"] for row in cells(text, "Errors against fp64")}
    refused = {row["kernel"]: row["why not"] for row in cells(text, "Not here")}
    assert here == {"aten_cpu"} and here | set(refused) | {"reference"} == {*KERNELS}
    assert refused["cudnn"] == "it runs on cuda only, not on cpu"


def test_errors_are_those_of_bf16(text: str) -> None:
    rows = cells(text, "Errors against fp64")
    assert [(row["mask"], row["heads/kv"]) for row in rows] == [
        (mask, heads) for mask in ("full", "causal", "strict", "upper") for heads in ("4/4", "4/2")
    ]
    for row in rows:
        assert all(0 < float(row[name]) < 1e-2 for name in ("out", "dq", "dk", "dv")) and float(row["lse"]) < 1e-3


@pytest.mark.parametrize("spoilt", ["dq", "dv"])
def test_a_wrong_kernel_fails(spoilt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = AtenCpu._backward

    def wrong(self: AtenCpu, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = right(self, *arguments)  # pyright: ignore[reportArgumentType]
        if dq.shape[1] in (4, 5):  # a strict block is shifted by one
            dq, dv = (2 * dq, dv) if spoilt == "dq" else (dq, dv * torch.nan)
        return dq, dk, dv

    monkeypatch.setattr(AtenCpu, "_backward", wrong)
    monkeypatch.setitem(BENCHES, "cpu", replace(TINY, error_tokens=(5, 16)))
    assert main(["device=cpu"]) == 1
    text = capsys.readouterr().out
    for mask in ("full", "causal", "strict", "upper"):
        (said,) = re.findall(rf"- aten_cpu, {mask}, 2: ArithmeticError: (.*)", text)
        together, one_size = ("inf", "inf") if spoilt == "dv" else (r"5\.\de-01", r"(1\.0e\+00|9\.9e-01)")
        limits = rf"{spoilt} is off by {together} \(at most 1e-02\), {spoilt} is off by {one_size} \(at most 4e-02\)"
        assert re.fullmatch(limits, said)
    assert "| aten_cpu |" not in text.split("## Errors against fp64")[1].split("##")[0]
    assert len(cells(text, "Rates, TFLOP/s")) == 4


def test_rates_and_efficiency(text: str) -> None:
    full, causal, strict, upper = cells(text, "Rates, TFLOP/s")
    for row in (full, causal, strict, upper):
        assert (row["tokens"], row["batch"]) == ("16", "2")
        assert all(float(row[phase]) > 0 and row[f"published {phase}"] == "" for phase in PHASES)
    (row,) = cells(text, "Blocks and folds of a rank")
    for phase in PHASES:
        blocks_ms, whole_ms = (float(row[key].split()[0]) for key in (phase, f"{phase}, one call"))
        assert float(row[f"{phase} efficiency"].rstrip("%")) == pytest.approx(
            100 * whole_ms / blocks_ms, rel=2e-2, abs=0.1
        )


def test_what_it_takes_to_queue_is_the_host_s_time(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """With a GPU that has nothing left to do before each, and isn't waited for after it."""
    (row,) = cells(text, "Blocks and folds of a rank")
    assert [row[f"{phase}, queueing"] for phase in PHASES] == ["", ""], "calls on CPUs end with their work"
    happened: list[str] = []
    now = [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("idle"))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def call() -> None:
        happened.append("queued")
        now[0] += 0.25 * len(happened)

    assert replace(BENCHES["cuda"], repetitions=3).queueing_seconds(call) == 0.25 * 6
    assert happened == ["idle", "queued"] * 4


def test_blocks_of_the_efficiency_give_the_whole() -> None:
    """The alternative that is timed against one call computes the same as it."""
    kernel = AtenCpu()
    q, k, v, dout = (TINY.random(tokens, seed=seed) for seed, tokens in enumerate((16, 64, 64, 16)))
    out, lse = kernel.forward(q, k, v, gpu_kernels.RegionKind.FULL)
    wanted = kernel.backward(dout, q, k, v, out, lse, gpu_kernels.RegionKind.FULL)
    torch.testing.assert_close(gpu_kernels._forward_blocks(kernel, q, k, v, 16), out, rtol=2e-2, atol=1e-2)
    dq, *dkv = gpu_kernels._backward_blocks(kernel, dout, q, k, v, out, lse, 16)
    torch.testing.assert_close(dq, wanted[0], rtol=2e-2, atol=1e-2)
    for i in (0, 1):
        torch.testing.assert_close(torch.cat(dkv[i::2], dim=1), wanted[1 + i], rtol=2e-2, atol=1e-2)


def test_folds_are_shares_of_a_copy(text: str) -> None:
    folds = cells(text, "Folds")
    assert [row[""] for row in folds] == ["fold", "fold in torch"]
    for row in folds:
        share = float(row["GB/s"]) / float(row["fp32 copy, GB/s"])
        assert float(row["fold / copy"].rstrip("%")) == pytest.approx(100 * share, rel=1e-2, abs=0.1)


def test_what_fails_is_named_and_the_rest_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = AtenCpu._backward

    def sometimes(self: AtenCpu, *arguments: Any) -> tuple[torch.Tensor, ...]:
        if arguments[-1]:
            raise RuntimeError("no plan for it")
        return right(self, *arguments)

    monkeypatch.setattr(AtenCpu, "_backward", sometimes)
    monkeypatch.setitem(BENCHES, "cpu", TINY)
    assert main(["device=cpu", "kernels=aten_cpu"]) == 1
    text = capsys.readouterr().out
    assert [row["mask"] for row in cells(text, "Errors against fp64")] == ["full", "full"]
    assert [row["mask"] for row in cells(text, "Rates, TFLOP/s")] == ["full"]
    for failed in ("aten_cpu, causal, 4: RuntimeError: no plan for it", "aten_cpu, strict, 16: RuntimeError: no plan"):
        assert f"- {failed}" in text
    assert len(cells(text, "Folds")) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "device=cuda: torch sees no GPU here; device=cpu would work"),
        (["device=cuda"], "device=cuda: torch sees no GPU here; device=cpu would work"),
        (["device=tpu"], "device=tpu: there is no such device"),
        (["quick"], "quick: is not of the form key=value; device=cuda would work"),
        (["device=cpu", "kernels=cudnn"], "kernels=cudnn: cudnn doesn't run here; of aten_cpu, any would work"),
    ],
)
def test_without_a_gpu_it_exits_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err and not shown.out


def test_it_prints_all_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_kernels, "report", lambda bench: iter(((f"# {bench.device}", True), ("## Folds", True))))
    assert main(["device=cpu"]) == 0
    assert capsys.readouterr().out == "# cpu\n\n## Folds\n\n"


def test_published_figures_are_found_by_the_gpu_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert published("cudnn", "forward", "full", 8192, 128) is None, "no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, kernel, wanted in (
        ("NVIDIA H200", "cudnn", 701),
        ("NVIDIA H100 80GB HBM3", "cudnn", 600),
        ("NVIDIA H100 80GB HBM3", "flash_attn_4", None),
        ("NVIDIA H100 80GB HBM3", "aten_flash", 370),
        ("NVIDIA A10", "flash_attn", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert published(kernel, "forward", "full", 8192, 128) == wanted
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    assert published("flash_attn", "backward", "full", 16384, 128) == 179
    assert published("flash_attn", "backward", "full", 16384, 64) is None


def test_published_figures_have_sources_and_no_two_values() -> None:
    with PUBLISHED.open(newline="") as file:
        entries = list(csv.DictReader(file))
    cases = [tuple(entry[key] for key in ("gpu", "kernel", "phase", "mask", "head_dim", "tokens")) for entry in entries]
    assert len(set(cases)) == len(cases) > 30
    for entry in entries:
        assert entry["kernel"] in KERNELS and entry["phase"] in PHASES and entry["mask"] in ("full", "causal")
        assert re.search(r"20\d\d|conf/cluster/", entry["source"]) and 50 < float(entry["tflops"]) < 2250
    assert {kernel.published_as for kernel in KERNELS.values()} - {""} < set(KERNELS)
