"""Records made with files of one's own are explored and drawn without these files: a record has all that is drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from sp_bench.analysis import explore, pictures
from sp_bench.analysis.number import command
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.point import resolve, run_points
from sp_bench.records import Record

FILES = {
    "cluster": {"defaults": ["h100_ndr400", "_self_"], "name": "acme", "inter": {"nics_per_node": 4}},
    "kernel": {"name": "cudnn"},
    "implementation": {"name": "acme", "joins_blocks": True},
    "method": {"name": "ring", "layout": "striped", "fuse": False},
    "data": {"kind": "equal", "tokens": 300},
}
"""A file of one's own of each group that a point has, named acme.yaml."""
GIVEN = {"data": ["mask=document"]}
POINT = ["gpus=2", "seqlen=1k", "heads=4", "mode=simulate", "logger=none", "baseline=null", "method=ring"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine") / "my_conf"
    for group, content in FILES.items():
        (folder / group).mkdir(parents=True)
        (folder / group / "acme.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder


def words(group: str) -> list[str]:
    return [*(word for word in POINT if not word.startswith(f"{group}=")), f"{group}=acme", *GIVEN.get(group, [])]


@pytest.fixture(params=FILES)
def kept(request: pytest.FixtureRequest, own: Path, tmp_path: Path) -> tuple[str, Path, Record]:
    """A group, a folder with the record of a point that takes one's own file of it, and the record."""
    with Composer(own) as composer:
        asked = resolve(composer.compose(words(request.param)))
    (outcome,) = run_points([asked], folder=tmp_path, reuse=False)
    assert outcome.record.status == "ok", outcome.record.error
    return request.param, tmp_path, outcome.record


def test_explored_and_drawn(kept: tuple[str, Path, Record], capsys: pytest.CaptureFixture[str]) -> None:
    group, folder, record = kept
    assert explore.main([str(folder)]) == 0, capsys.readouterr().err
    if group != "cluster":  # pictures name their source by the same function as the page
        return
    assert pictures.main([str(folder / f"{record.run_id}.json"), f"out={folder}/drawn"]) == 0, capsys.readouterr().err
    assert len([*(folder / "drawn").glob("*.svg")]) == 4


def test_the_command_needs_the_folder_of_somebodys_files(kept: tuple[str, Path, Record], own: Path) -> None:
    """And says so; with the folder it composes to the same config, changed files included."""
    group, _, record = kept
    config = json.loads(json.dumps(record.config))
    named = group in ("cluster", "implementation")  # files of other groups don't have their own file's name
    assert ("--config-dir DIR " in command(config)) == named
    arguments = command(config, own).split()
    if named:
        assert arguments[:2] == ["--config-dir", str(own)]
        assert f"{group}=acme" in arguments
        del arguments[:2]
    with Composer(own) as composer:
        composed = json.loads(json.dumps(composer.compose([*arguments, "logger=none", "baseline=null"])))
    assert composed == config


def test_changes_of_ones_own_cluster_are_in_the_command(own: Path) -> None:
    with Composer(own) as composer:
        config = composer.compose([*words("cluster"), "cluster.inter.bytes_per_s=5e10"])
    assert "cluster.inter.bytes_per_s=50000000000.0" in command(config, own)


@pytest.mark.parametrize("overrides", [["model=tiny", "model.layers=3"], ["model=tiny", "heads=32", "kernel=cudnn"]])
def test_all_groups_are_in_the_command(overrides: list[str]) -> None:
    """A file's setting that an argument takes back counts, too."""
    with Composer() as composer:
        config = composer.compose(overrides)
    arguments = command(config).split()
    with Composer() as composer:
        assert composer.compose(arguments) == config


def test_a_page_names_the_folder_alone(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("sp_bench.analysis.explorer.page.packed", lambda content: seen.append(content) or "")
    with Composer(own) as composer:
        asked = resolve(composer.compose(words("cluster")))
    run_points([asked], folder=tmp_path, reuse=False)
    assert explore.main([str(tmp_path), "--config-dir", str(own)]) == 0
    (said,) = (content["command"] for content in seen if "command" in content)
    assert re.match(r"python -m sp_bench --config-dir my_conf .*cluster=acme", said)
    assert explore.main([str(tmp_path), "--config-dir", "/nowhere"]) == 2


def test_an_unknown_file_is_a_refusal() -> None:
    """Not Hydra's own error."""
    with Composer() as composer, pytest.raises(RequestError, match="cluster=acme: there is no such cluster"):
        composer.compose(["cluster=acme"])
