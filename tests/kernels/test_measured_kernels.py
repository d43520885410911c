"""benchmarks/measured_kernels.py, with files whose kernels are as fast as published ones, or half as fast."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.measured_kernels import compare, main
from sp_bench.resources import conf_files

H200 = conf_files("cluster")["h200_ndr400"]
SIZE = ["8", "32k"]
"""GPUs and tokens."""


def written(folder: Path, *, slower: float = 1.0, **device: object) -> Path:
    """The file that calibrate would write of an H200 whose cuDNN is so much slower than published."""
    config = yaml.safe_load(H200.read_text())
    cudnn = config["device"]["rates"]["cudnn"] | {"figures": "measured"}
    for phase in ("forward", "backward"):
        for mask in ("full", "causal"):
            cudnn[f"{phase}_{mask}"] = {size: rate / slower for size, rate in cudnn[f"{phase}_{mask}"].items()}
    config["device"] |= {
        "name": "NVIDIA H200",
        "kernel": None,
        "rates": {"bfloat16": cudnn | {"kernel": "cudnn"}},
        **device,
    }
    path = folder / "h200.yaml"
    path.write_text(yaml.safe_dump(config | {"name": "mine"}))
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    """The cells of the table, by column."""
    gpus, tokens = SIZE
    head, _, *rows = (
        line.strip("| ").split(" | ") for line in compare(path, gpus=int(gpus), tokens=[tokens]).splitlines()
    )
    return [dict(zip(head, row, strict=True)) for row in rows]


def number(row: dict[str, str], column: str) -> float:
    """The number of a cell with a unit."""
    return float(row[column].split()[0])


def test_kernels_as_published_change_nothing(tmp_path: Path) -> None:
    cudnn, flash, mine = rows_of(written(tmp_path))
    assert [row["kernel"] for row in (cudnn, flash, mine)] == [
        "published (cudnn)", "published (flash_attn_4)", "measured (cudnn)",
    ]  # fmt: skip
    assert {**cudnn, "kernel": ""} == {**mine, "kernel": ""} and mine["fastest measured / step"] == "1.000"
    assert all((row["GPUs"], row["tokens"]) == ("8", "32k") for row in (cudnn, flash, mine))


@pytest.mark.long
def test_slower_kernels_make_longer_steps(tmp_path: Path) -> None:
    cudnn, flash, mine = rows_of(written(tmp_path, slower=2.0))
    assert 1.7 < number(mine, "blocks and folds") / number(cudnn, "blocks and folds") < 2.0, "folds are as fast"
    for row in (cudnn, flash, mine):
        longer = number(mine, "step") / number(row, "step")
        assert number(row, "fastest measured / step") == pytest.approx(longer, rel=2e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "no FILE: must be one cluster file; what python -m sp_bench.calibrate device=cuda",
        ),
        (["a.yaml", "b.yaml"], "a.yaml b.yaml: must be one cluster file"),
        (["no_such.yaml"], "no_such.yaml: can't be read as a cluster file"),
        ([str(H200)], "has figures that were not measured, of cudnn, flash_attn_4"),
        (["links=h200_ndr400"], "links: there is no such key"),
    ],
)
def test_what_is_no_calibrated_gpu_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err and not shown.out


@pytest.mark.long
def test_both_have_the_same_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU that no file is for, only beside the cluster whose links it was calibrated with."""
    path = written(tmp_path, name="NVIDIA T4")
    assert main([str(path)]) == 2
    assert "no cluster file has the links of NVIDIA T4" in capsys.readouterr().err
    assert main([str(path), "cluster=a100_hdr200"]) == 2
    assert "cluster=a100_hdr200: has other links than" in capsys.readouterr().err
    assert "measured (cudnn)" in compare(path, "h200_ndr400", gpus=8, tokens=["32k"])
