"""Compose configs from `key=value` arguments with Hydra, one for each point of a sweep."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sp_bench.cluster.cluster import ClusterSection
from sp_bench.cluster.implementation import Implementation
from sp_bench.errors import RequestError, unknown, unknown_key
from sp_bench.loggers import logger_by_default
from sp_bench.loggers.wandb_client import WandbSettings
from sp_bench.reading import has_key, keys_at
from sp_bench.resources import CONF, conf_folders

SECTIONS = {"cluster": ClusterSection, "implementation": Implementation, "logger": WandbSettings}
"""Groups whose keys can be set even if the chosen file lacks them."""

SEQLEN, SEQLEN_HERE = 2**20, 2**10
"""The sequence length that is meant where none is given, and that on this machine, whose measurement takes seconds."""


class Composer(ExitStack):
    """Composes configs from conf/ and similar folders: the user's, and `own`. Use it as a context manager."""

    def __init__(self, own: Path | None = None) -> None:
        """`own` is a folder of the form of conf/. Raises RequestError if it is not a folder."""
        super().__init__()
        if own and not own.is_dir():
            raise RequestError(
                f"--config-dir {own}", "is not a folder", "a folder with method/, cluster/ ... would work"
            )
        beside = [folder.resolve() for folder in (own, *conf_folders()[1:]) if folder]
        self._folders = [CONF, *beside]
        self.enter_context(initialize_config_dir(str(CONF), version_base="1.3"))
        self._search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in beside)}]"] if beside else []

    def points(self, arguments: Sequence[str], *, sweep: bool) -> list[tuple[str, ...]]:
        """The overrides of each point. Methods vary fastest, so that those compared with each other are neighbours.

        Raises RequestError for an argument that is no override, an unknown key or choice, or a list without `sweep`.
        """
        axes: list[tuple[bool, list[str]]] = []  # (whether it is the method, values)
        keys: set[str] = set()
        for argument in arguments:
            override = self._parsed(argument)
            if override.key_or_group in keys:
                raise RequestError(argument, f"{override.key_or_group} is given twice", "one of them would work")
            keys.add(override.key_or_group)
            if not override.is_sweep_override():
                self._check(override, str(override.value()))
                axes.append((False, [argument]))
                continue
            if not sweep:
                raise RequestError(argument, "is a list of values", f"-m {argument} would run one point for each")
            values = list(override.sweep_string_iterator())
            for value in values:
                self._check(override, value)
            axes.append((override.key_or_group == "method", [f"{override.key_or_group}={value}" for value in values]))
        axes.sort(key=lambda axis: axis[0])
        return list(itertools.product(*(values for _, values in axes)))

    def compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The resolved config of one point; its logger, unless chosen, is wandb where its keys or variables are set.

        Raises RequestError for an unknown choice of a group, or nested key."""
        parsed = [self._parsed(override) for override in overrides]
        if not any(override.key_or_group == "logger" for override in parsed):
            its_keys = any(override.key_or_group.startswith("logger.") for override in parsed)
            parsed.append(self._parsed("logger=wandb" if its_keys else f"logger={logger_by_default()}"))
        for override in parsed:
            if override.key_or_group in self.groups():
                self._check(override, str(override.value()))
        of_hydra = [o for o in parsed if o.key_or_group in self.groups() or o.package]
        # The last choice of a group counts. They are sorted, so that `_composed` knows them in any order.
        chosen = {(o.key_or_group, o.package): str(o.input_line) for o in of_hydra}
        try:
            config = deepcopy(_composed((*sorted(chosen.values()), *self._search)))
            for override in parsed:
                if override not in of_hydra:
                    group, _, key = override.key_or_group.partition(".")
                    optional = group in SECTIONS and has_key(SECTIONS[group], key)
                    OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=optional)
        except (HydraException, OmegaConfBaseException) as error:
            raise self._explained(overrides, error) from None
        try:
            resolved = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException as error:
            what = str(error).splitlines()[0]
            raise RequestError(" ".join(overrides), what, "a plain value would work") from None
        assert isinstance(resolved, dict)
        if resolved["seqlen"] is None:
            resolved["seqlen"] = SEQLEN_HERE if resolved["cluster"].get("this_machine") is True else SEQLEN
        return {str(key): value for key, value in resolved.items()}

    def baseline(self, config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any] | None:
        """The config of a point's baseline: another method at its defaults, all else the same; None without one."""
        name = config["baseline"]
        if name is None or name == config["method"]["name"]:
            return None
        if name not in self.choices("method"):
            raise unknown("baseline", str(name), self.choices("method"))
        kept = [o for o in overrides if o.partition("=")[0].partition(".")[0] != "method"]
        return self.compose([*kept, f"method={name}"])

    def choices(self, group: str) -> list[str]:
        """The names of a config group's files."""
        return sorted({path.stem for folder in self._folders for path in (folder / group).glob("*.yaml")})

    @cache  # noqa: B019  # few composers a process
    def groups(self) -> list[str]:
        """The names of the config groups."""
        return sorted({path.name for folder in self._folders for path in folder.iterdir() if list(path.glob("*.yaml"))})

    def _parsed(self, argument: str) -> Override:
        would_work = "method=mesh gpus=256 would work"
        try:
            override = _parsed(argument)
        except HydraException:
            raise RequestError(argument, "is not of the form key=value", would_work) from None
        if override.is_add() or override.is_force_add():
            plain = argument.lstrip("+")
            self._check(_parsed(plain), plain.partition("=")[2])
            self.compose([plain])
            raise RequestError(argument, "every key, optional ones too, is set without +", f"{plain} would work")
        if override.is_delete():
            raise RequestError(argument, "keys can't be removed, but null is a key's default", would_work)
        return override

    def _check(self, override: Override, value: str) -> None:
        key, groups = override.key_or_group, self.groups()
        if key in groups:
            if value not in self.choices(key):
                raise unknown(key, value, self.choices(key))
        elif key.partition(".")[0] not in self._top_keys():
            raise unknown_key(key, self._top_keys())

    @cache  # noqa: B019  # one composer a process
    def _top_keys(self) -> list[str]:
        config = OmegaConf.load(CONF / "config.yaml")
        return [str(key) for key in config if key != "defaults"] + self.groups()

    def _explained(self, overrides: Sequence[str], error: Exception) -> RequestError:
        """The error for an override that Hydra can't apply, with the keys of its group."""
        choices = [o for o in overrides if "." not in o.partition("=")[0]]
        plain = OmegaConf.to_container(compose("config", overrides=[*choices, *self._search]))
        for override in overrides:
            key = override.partition("=")[0]
            parents, known = [], plain
            for name in key.split("."):
                if not isinstance(known, dict):
                    break
                section = SECTIONS.get(parents[0]) if parents else None
                names = {str(k) for k in known if k != "name"} | (keys_at(section, parents[1:]) if section else set())
                if name not in names:
                    return unknown_key(".".join((*parents, name)), [".".join((*parents, each)) for each in names])
                parents, known = [*parents, name], known.get(name)
        return RequestError(" ".join(overrides), str(error).splitlines()[0], "python -m sp_bench --help lists the keys")


@lru_cache(maxsize=256)
def _composed(choices: tuple[str, ...]) -> DictConfig:
    """The config with these choices of groups. Kept, because Hydra takes a tenth of a second."""
    return compose("config", overrides=list(choices))


@lru_cache(maxsize=1024)
def _parsed(argument: str) -> Override:
    return OverridesParser.create().parse_override(argument)
