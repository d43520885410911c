"""Compose configs from `key=value` arguments with Hydra, one for each point of a sweep."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sp_bench.cli.keys import Keys
from sp_bench.cluster.cluster import ClusterSection
from sp_bench.cluster.implementation import Implementation
from sp_bench.errors import RequestError, unknown, unknown_key
from sp_bench.loggers import logger_by_default
from sp_bench.loggers.wandb_client import WandbSettings
from sp_bench.machine import gpus_here
from sp_bench.reading import has_key, keys_at
from sp_bench.resources import CONF, conf_folders, suite_config, yaml_of
from sp_bench.workload import WORKLOADS

SECTIONS = {"cluster": ClusterSection, "implementation": Implementation, "logger": WandbSettings}
"""Groups whose keys can be set even if the chosen file lacks them."""

SEQLEN, SEQLEN_HERE = 2**20, 2**9
"""The sequence length that is meant where none is given, and that on this machine, whose measurement takes seconds."""
DTYPE, DTYPE_HERE = "bfloat16", "float32"
"""The same of the dtype: many CPUs emulate bfloat16, which takes ten times as long."""
PHASE = "forward_backward"
"""The phase that is meant where none is given, unless the workload has another."""
METHOD = ("method", None)
"""The group of methods, in its own package."""


class Composer(ExitStack):
    """Composes configs from conf/ and similar folders: the user's, and `own`. Use it as a context manager."""

    def __init__(self, own: Path | None = None, *, gpus: int | None = None) -> None:
        """`own` is a folder of the form of conf/. Raises RequestError if it is not a folder.

        `gpus` are those of the machine that runs the points, if it isn't this one.
        """
        super().__init__()
        self._gpus = gpus_here() if gpus is None else gpus
        if own and not own.is_dir():
            works = "a folder with method/, cluster/ ... would work"
            raise RequestError(f"--config-dir {own}", "is not a folder", works)
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
        parsed = [self._parsed(argument) for argument in arguments]
        for argument, override in zip(arguments, parsed, strict=True):
            if override.key_or_group in keys:
                raise RequestError(argument, f"{override.key_or_group} is given twice", "one of them would work")
            keys.add(override.key_or_group)
            if not override.is_sweep_override():
                self._check(override, str(override.value()), parsed)
                axes.append((False, [str(override.input_line)]))
                continue
            values = self._listed(argument, override)
            if not sweep:
                raise RequestError(argument, "is a list of values", f"-m {argument} would run one point for each")
            for value in values:
                self._check(override, value, parsed)
            axes.append((override.key_or_group == "method", [f"{override.key_or_group}={value}" for value in values]))
        axes.sort(key=lambda axis: axis[0])
        points = list(itertools.product(*(values for _, values in axes)))
        baseline = None if sweep else _given(parsed).get("baseline", self._keys().values["baseline"])
        self._refuse_options(parsed, list(dict.fromkeys(map(self._method, points))), baseline)
        return list(dict.fromkeys(self._of_its_method(point) for point in points))

    def point(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """The overrides of the one point of a command that has no sweeps. Raises RequestError as `points` does."""
        for argument in arguments:
            override = self._parsed(argument)
            if override.is_sweep_override():
                would_work = f"{override.key_or_group}={self._listed(argument, override)[0]} would work"
                raise RequestError(argument, "is a list of values, and there are no sweeps here", would_work)
        (point,) = self.points(arguments, sweep=False)
        return point

    def compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The resolved config of one point; its logger, unless chosen, is wandb where its keys or variables are set.

        Raises RequestError for an unknown choice of a group, or nested key.
        """
        parsed = [self._parsed(override) for override in overrides]
        if not any(override.key_or_group == "logger" for override in parsed):
            its_keys = any(override.key_or_group.startswith("logger.") for override in parsed)
            parsed.append(self._parsed("logger=wandb" if its_keys else f"logger={logger_by_default()}"))
        for override in parsed:
            if override.key_or_group in self.groups():
                self._check(override, str(override.value()), parsed)
        of_hydra = [o for o in parsed if o.key_or_group in self.groups() or o.package]
        # The last choice of a group counts. They are sorted, so that `_composed` knows them in any order.
        chosen = {(o.key_or_group, o.package): str(o.input_line) for o in of_hydra}
        # A method's file of the suite's is all of it, and no other group depends on it: methods share a config.
        method = CONF / "method" / f"{chosen.get(METHOD, '').partition('=')[2]}.yaml"
        by_itself = method.is_file()
        shared = sorted(text for group, text in chosen.items() if not (by_itself and group == METHOD))
        others = [override for override in parsed if override not in of_hydra]
        try:
            found = _composed((*shared, *self._search), method if by_itself else None)
            resolved = found.set_plainly(others)
            if resolved is None:
                resolved = found.content() | _resolved(found.set_by_hydra(others), overrides)
        except (HydraException, OmegaConfBaseException) as error:
            raise self._explained(overrides, error) from None
        on_this_machine = resolved["cluster"].get("this_machine") is True
        if workload := WORKLOADS.get(str(resolved["workload"])):
            resolved |= workload.filled(resolved, here=on_this_machine)
        if resolved["seqlen"] is None:
            resolved["seqlen"] = SEQLEN_HERE if on_this_machine else SEQLEN
        if resolved["dtype"] is None:
            on_cpus = on_this_machine and (resolved["device"] == "cpu" or not self._gpus)
            resolved["dtype"] = DTYPE_HERE if on_cpus else DTYPE
        if resolved["phase"] is None:
            resolved["phase"] = PHASE
        return resolved

    def baseline(self, config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any] | None:
        """The config of a point's baseline: another method at its defaults, all else the same; None without one."""
        name = config["baseline"]
        if workload := WORKLOADS.get(str(config["workload"])):
            name = workload.baselines.get(str(name), name)
        if name is None or name == config["method"]["name"]:
            return None
        if name not in self.choices("method"):
            raise unknown("baseline", str(name), self.choices("method"))
        kept = [o for o in overrides if _head(o) != "method"]
        return self.compose(self._of_its_method([*kept, f"method={name}"]))

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
            if groups := [group for group in self.groups() if argument in self.choices(group)]:
                would_work = f"{groups[0]}={argument} would work"
            raise _quoted(argument) or RequestError(argument, "is not of the form key=value", would_work) from None
        if override.value() is None and "none" in self.choices(override.key_or_group):
            override = _parsed(f"{override.key_or_group}=none")
        if override.is_add() or override.is_force_add():
            plain = argument.lstrip("+")
            self._check(_parsed(plain), plain.partition("=")[2], [])
            self.compose([plain])
            raise RequestError(argument, "every key, optional ones too, is set without +", f"{plain} would work")
        if override.is_delete():
            raise RequestError(argument, "keys can't be removed, but null is a key's default", would_work)
        return override

    def _listed(self, argument: str, override: Override) -> list[str]:
        """The values of an override that lists some. Raises RequestError if there are none, or no end of them."""
        key, listed = override.key_or_group, override.value()
        if override.is_interval_sweep():
            raise RequestError(argument, "has any number of values", f"-m {key}=range(1,4) would have three")
        names = listed.filter(self.choices(key)) if isinstance(listed, Glob) else override.sweep_string_iterator()
        if not (values := list(names)):
            raise RequestError(argument, "has no values", f"-m {key}=A,B would have two")
        return values

    def _check(self, override: Override, value: str, beside: Sequence[Override]) -> None:
        """Raise RequestError for an unknown choice of a group, or a key that no point has."""
        key, groups = override.key_or_group, self.groups()
        if key in groups:
            choices = self.choices(key)
            if value not in choices and not (value == "null" and "none" in choices):
                raise unknown(key, value, choices)
        elif _head(key) not in self._keys().values and _head(key) not in groups and not self._is_option(key):
            raise self._keys().unknown(key, _value(override), _given(beside))

    def _is_option(self, key: str) -> bool:
        """Whether the key is of the form METHOD.OPTION."""
        return "." in key and _head(key) in self.choices("method")

    def _refuse_options(self, parsed: Sequence[Override], asked: Sequence[str], baseline: str | None) -> None:
        """Raise RequestError for an option METHOD.OPTION whose method isn't asked for, or lacks it.

        And for method.OPTION if some of the methods `asked` for have it and others don't.
        """
        for override in parsed:
            key, value = override.key_or_group, _value(override)
            name, _, option = key.partition(".")
            if self._is_option(key):
                if name not in (*asked, baseline):
                    rule = f"is an option of method={name}, and asked for is method={','.join(asked)}"
                    works = f"-m method={','.join([*asked, name])} {key}={value}, or leaving it out, would work"
                    raise RequestError(key, rule, works)
                if option not in (known := self._keys().options(name)):
                    raise unknown_key(key, [f"{name}.{each}" for each in known])
            elif name == "method" and option and len(asked) > 1:
                having = [method for method in asked if option in self._keys().options(method)]
                if 0 < len(having) < len(asked):
                    lacking = ", ".join(method for method in asked if method not in having)
                    own = " ".join(f"{method}.{option}={value}" for method in having)
                    raise RequestError(key, f"method={lacking} has no such key", f"{own} would work")

    def _of_its_method(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """The overrides of a point: those of its own method as method.OPTION, last, and none of other methods."""
        method = self._method(overrides)
        own = [f"method.{o.removeprefix(f'{method}.')}" for o in overrides if o.startswith(f"{method}.")]
        return (*(o for o in overrides if not self._is_option(o.partition("=")[0])), *own)

    def _method(self, overrides: Sequence[str]) -> str:
        """The name of a point's method."""
        chosen = (o.partition("=")[2] for o in reversed(overrides) if o.startswith("method="))
        return next(chosen, self._keys().chosen["method"])

    @cache  # noqa: B019  # one composer a process
    def _keys(self) -> Keys:
        return Keys(self._folders)

    def _explained(self, overrides: Sequence[str], error: Exception) -> RequestError:
        """The error for an override that Hydra can't apply, with the keys of its group."""
        choices = [o for o in overrides if o.partition("=")[0] in self.groups()]
        plain = OmegaConf.to_container(compose("config", overrides=[*choices, *self._search]))
        given = _given([_parsed(override) for override in overrides])
        for override in overrides:
            key = override.partition("=")[0]
            parents, known = [], plain
            for name in key.split("."):
                if not isinstance(known, dict):
                    break
                section = SECTIONS.get(parents[0]) if parents else None
                names = {str(k) for k in known if k != "name"} | (keys_at(section, parents[1:]) if section else set())
                if name not in names and section is None:
                    return self._keys().unknown(key, override.partition("=")[2], given)
                if name not in names:
                    return unknown_key(".".join((*parents, name)), [".".join((*parents, each)) for each in names])
                parents, known = [*parents, name], known.get(name)
        return RequestError(" ".join(overrides), str(error).splitlines()[0], "`sp-bench help` lists the keys")


def _quoted(argument: str) -> RequestError | None:
    """The error for a value that Hydra takes in quotes alone, as one with = or an é; None where quotes don't help."""
    key, _, value = argument.partition("=")
    quoted = f"{key}='{value}'"
    try:
        _parsed(quoted)
    except HydraException:
        return None
    return RequestError(argument, "is no value without quotes", f'"{quoted}" is one') if value else None


def _head(key: str) -> str:
    """The first name of a key, or of an override."""
    return key.partition("=")[0].partition(".")[0]


def _value(override: Override) -> str:
    """The value of an override as it was given."""
    return str(override.input_line).partition("=")[2]


def _given(overrides: Sequence[Override]) -> dict[str, str]:
    """The values of overrides, as they were given, by key."""
    return {o.key_or_group: _value(o) for o in overrides}


def _or_null(override: Override, before: Any) -> Any:
    """The value of an override. `none` is null for a baseline, and where null is the default."""
    key, value = override.key_or_group, override.value()
    return None if value == "none" and (key == "baseline" or before is None) else value


def _set(config: DictConfig, override: Override, *, optional: bool) -> None:
    """Set what an override says: a section's keys beside its others. Raises RequestError for a section of no keys."""
    key, section = override.key_or_group, OmegaConf.select(config, override.key_or_group)
    value = _or_null(override, section)
    is_section = isinstance(value, Mapping)
    if "." not in key and OmegaConf.is_dict(section) and not is_section:
        first = next(iter(section), "KEY")
        raise RequestError(str(override.input_line), "is a section of keys", f"{key}.{first}=... would work")
    OmegaConf.update(config, key, value, merge=is_section and OmegaConf.is_dict(section), force_add=optional)


@dataclass(frozen=True)
class _Composed:
    """The config with some choices of groups, in which a point's other overrides are set."""

    pickled: bytes
    names_others: bool
    """Whether some of its values name others, in ${}."""

    def content(self) -> dict[str, Any]:
        """A copy of it."""
        return pickle.loads(self.pickled)

    def set_plainly(self, overrides: Sequence[Override]) -> dict[str, Any] | None:
        """The config with overrides that put one plain value in the place of another, as nearly all do: OmegaConf takes
        ten times as long. None if one of them is another kind, which OmegaConf alone knows the meaning of.
        """
        content = self.content()
        plain = not self.names_others and all(_set_plainly(content, override) for override in overrides)
        return content if plain else None

    def set_by_hydra(self, overrides: Sequence[Override]) -> DictConfig:
        """The sections that overrides change, in which they are set; all of it where values name others."""
        content = self.content()
        named = self.names_others or any("${" in str(override.input_line) for override in overrides)
        heads = content if named else {_head(override.key_or_group) for override in overrides}
        config = OmegaConf.create({head: section for head, section in content.items() if head in heads})
        OmegaConf.set_struct(config, True)
        for override in overrides:
            group, _, key = override.key_or_group.partition(".")
            _set(config, override, optional=group in SECTIONS and has_key(SECTIONS[group], key))
        return config


def _resolved(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """The content of a config, in which values that name others are theirs. Raises RequestError where they can't be."""
    try:
        content = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise RequestError(" ".join(overrides), str(error).splitlines()[0], "a plain value would work") from None
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _set_plainly(content: dict[str, Any], override: Override) -> bool:
    """Set a plain value in the place of one, if that is what an override says; returns whether it is."""
    *parents, last = override.key_or_group.split(".")
    section: Any = content
    for name in parents:
        section = section.get(name) if isinstance(section, dict) else None
    text, value = str(override.input_line), override.value()
    known = isinstance(section, dict) and last in section and not isinstance(section[last], dict)
    plain = value is None or isinstance(value, str | int | float)
    if not known or not plain or override.is_sweep_override() or any(sign in text for sign in SIGNS):
        return False
    section[last] = _or_null(override, section[last])
    return True


SIGNS = ("$", "\\", "???")
"""Signs that OmegaConf has a meaning of its own for."""


@lru_cache(maxsize=256)
def _composed(choices: tuple[str, ...], method: Path | None) -> _Composed:
    """The config with these choices of groups, and with a method's own file."""
    content = pickle.loads(_of_groups(choices)) | ({"method": yaml_of(method)} if method else {})
    return _Composed(pickle.dumps(content), "${" in str(content))


@lru_cache(maxsize=256)
def _of_groups(choices: tuple[str, ...]) -> bytes:
    """The config with these choices of groups, pickled. Kept, because composing it takes long."""
    # Folders beside the suite's are searched last.
    content = suite_config(dict(each.split("=", 1) for each in choices if not each.startswith("hydra.searchpath=")))
    return pickle.dumps(content or OmegaConf.to_container(compose("config", overrides=list(choices))))


@lru_cache(maxsize=1024)
def _parsed(argument: str) -> Override:
    return OverridesParser.create().parse_override(argument)
