"""Configs that are composed without Hydra are those that Hydra composes."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sp_bench.__main__ import main
from sp_bench.cli import compose as module
from sp_bench.cli.compose import Composer
from sp_bench.errors import RequestError
from sp_bench.resources import CONF, suite_config, yaml_of

GROUPS = ("method", "cluster", "kernel", "implementation", "data", "logger", "model")


def by_hydra(*choices: str) -> str:
    """The config in JSON, with its keys in order and what stands for variables as it is."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return json.dumps(OmegaConf.to_container(compose("config", overrides=list(choices))))


@pytest.mark.parametrize("group", GROUPS)
def test_every_file_is_read_as_by_hydra(group: str) -> None:
    """Numbers above all: YAML's own rules take 1e9 for a text."""
    for path in sorted((CONF / group).glob("*.yaml")):
        assert json.dumps(yaml_of(path)) == json.dumps(OmegaConf.to_container(OmegaConf.load(path))), path


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_is_composed_as_by_hydra(group: str) -> None:
    for path in sorted((CONF / group).glob("*.yaml")):
        assert json.dumps(suite_config({group: path.stem})) == by_hydra(f"{group}={path.stem}"), path


def test_choices_are_composed_together() -> None:
    chosen = {"model": "deepseek_v3", "cluster": "a800", "data": "long", "method": "usp"}
    assert json.dumps(suite_config(chosen)) == by_hydra(*(f"{group}={name}" for group, name in chosen.items()))


def test_other_files_and_groups_are_left_to_hydra() -> None:
    assert suite_config({"cluster": "mine"}) is None
    assert suite_config({"hydra/launcher": "basic"}) is None


def test_a_point_of_the_suites_files_needs_no_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    module._of_groups.cache_clear()
    monkeypatch.setattr(module, "compose", lambda *_, **__: pytest.fail("Hydra composed"))
    with Composer() as composer:
        assert composer.compose(["method=ring", "cluster=b200", "gpus=16"])["gpus"] == 16
    module._of_groups.cache_clear()


@pytest.mark.parametrize(
    "overrides",
    [
        "gpus=64 seqlen=256k causal=false method.tile=null method.fuse=true",
        "gpus=1e3 seed=007 dtype='float32' wire_dtype=none baseline=none kv_heads=null",
        "cluster.name=mine cluster.device.memory_bytes=8e10 cluster.inter.bytes_per_s=inf timeout_s=.5",
        "method=mesh method.tile=[4,16] stragglers.ranks={3:1.5} mask=window",
        "cluster=shaped cluster.hosts.link_bytes_per_s=1e6 cluster.hosts.ranks=2 results_dir=a/b:c notes='x y'",
        "gpus=${batch} batch=3",
        "results_dir='a\\${b}' seed=1",
        "gpus=many",
        "cluster.hosts.nothing=1",
        "cluster.hosts=null",
        "cluster.intra=3",
        "method.nothing=3",
        "cluster.device=b200",
    ],
)
def test_values_are_set_as_by_omegaconf(overrides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> str:
        with Composer() as composer:
            try:
                return json.dumps(composer.compose(overrides.split()))
            except RequestError as error:
                return str(error)

    ours = found()
    monkeypatch.setattr(module._Composed, "set_plainly", lambda *_: None)
    assert ours == found()


def test_a_value_may_be_that_of_another_key() -> None:
    with Composer() as composer:
        found = composer.compose(["gpus=${batch}", "batch=4", "train.batch_tokens=${gpus}"])
        assert found["gpus"] == found["train"]["batch_tokens"] == 4
        with pytest.raises(RequestError, match="nothing_such"):
            composer.compose(["gpus=${nothing_such}"])


def test_a_file_of_ones_own_is_composed_by_hydra(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "mine.yaml").write_text("defaults: [h100_ndr400, _self_]\nname: mine\n")
    with Composer(tmp_path) as composer:
        found = composer.compose(["cluster=mine"])["cluster"]
        assert found["name"] == "mine"
        assert {**found, "name": 0} == {**composer.compose([])["cluster"], "name": 0}


OF_EVERY_KIND = ("5", "0.5", "true", "word", "[1,2]", "[]", "{a: 1}", "{}", "null", "[null]", "''")


@pytest.mark.parametrize("key", sorted(yaml_of(CONF / "config.yaml").keys() - {"defaults"}))
def test_no_kind_of_value_ends_in_a_traceback(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table in place of a list, a number in place of a name: what is no value of a key is refused by name."""
    base = {"method": "ring", "gpus": "2", "seqlen": "1k", "heads": "2", "mode": "simulate", "trace": "0"}
    for value in OF_EVERY_KIND:
        if key == "results_dir" and not value.startswith(("[", "{", "n")):
            continue  # a folder here
        point = {**base, "results_dir": tmp_path, key: value}
        code, said = main([f"{name}={each}" for name, each in point.items()]), capsys.readouterr().err
        assert code in (0, 2), said
        assert code == 0 or said.startswith("sp_bench: "), said


@pytest.mark.parametrize("argument", ["results_dir=/tmp/Ergebnisse-für-alle", "results_dir=a=b", "impl=a,b:c=d"])
def test_values_that_take_quotes_are_shown_in_them(argument: str) -> None:
    key, _, value = argument.partition("=")
    with Composer() as composer:
        with pytest.raises(RequestError, match="is no value without quotes") as raised:
            composer.points([argument], sweep=False)
        quoted = str(raised.value).partition('"')[2].partition('"')[0]
        assert composer.compose([quoted])[key] == value
        with pytest.raises(RequestError, match="is not of the form key=value"):
            composer.points(["results_dir"], sweep=False)


def test_lists_of_every_kind_are_points_or_refused() -> None:
    with Composer() as composer:
        assert composer.points(["method=glob(z*)", "gpus=range(2,4)"], sweep=True) == [
            ("gpus=2", "method=zigzag"),
            ("gpus=3", "method=zigzag"),
        ]
        for argument, rule in (
            ("gpus=range(4,2)", "has no values"),
            ("method=glob(nothing*)", "has no values"),
            ("gpus=interval(1,4)", "has any number of values"),
        ):
            with pytest.raises(RequestError, match=rule):
                composer.point([argument])
            for sweep in (False, True):
                with pytest.raises(RequestError, match=rule):
                    composer.points([argument], sweep=sweep)
        with pytest.raises(RequestError, match=r"there are no sweeps here; gpus=8 would work$"):
            composer.point(["gpus=8,16"])
        assert composer.point(["gpus=8"]) == ("gpus=8",)
