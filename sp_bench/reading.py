"""Read values that users write, by types: `read(Count, "8k", "gpus")`, `read(Topology, {...}, "cluster")`.

A type says which values are valid. A `Section` is a mapping with known keys. `Annotated[..., Meta(...)]` has the bounds
of a number, a `description` for error messages, and `examples` of valid values.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from operator import getitem
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import msgspec
from msgspec import Meta, inspect, structs

from sp_bench.errors import RequestError, unknown, unknown_key

FINITE = sys.float_info.max
Count = Annotated[int, Meta(ge=1, examples=[8])]
Tokens = Annotated[int, Meta(ge=1, examples=[8, "8k", "1M"])]
Natural = Annotated[int, Meta(ge=0, examples=[0])]
Positive = Annotated[float, Meta(gt=0, le=FINITE, examples=[1.0])]
Seconds = Annotated[float, Meta(gt=0, le=FINITE, description="a positive number of seconds", examples=[60])]
NotNegative = Annotated[float, Meta(ge=0, le=FINITE, examples=[0.0])]


class Plausible(NamedTuple):
    """The range that a figure of a real machine is in."""

    low: float
    high: float
    unit: str
    """The unit, and what it is per: bytes/s of each NIC, in each direction."""


def figure(low: float, high: float, unit: str) -> Meta:
    """Marks a number as a figure in a plausible range: Annotated[Positive, figure(1e6, 1e12, "bytes/s of each GPU")].

    Others are valid, and warned of (`implausible`).
    """
    return Meta(extra={"plausible": Plausible(low, high, unit)})


_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_PLACE = re.compile(r"(?P<message>.*?)(?: - at (?P<of_a_key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
T = TypeVar("T")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of a config file. Its fields are the keys; those with a default may be missing or null.

    `__post_init__` checks rules between keys, and raises RequestError with keys relative to the section.
    """

    def replace(self, **changes: Any) -> Self:
        """A copy with other values for some keys."""
        return structs.replace(self, **changes)


def read(kind: type[T] | Any, value: Any, path: str = "") -> T:
    """The value that a user wrote at `path`, as a `kind`. Whole numbers may have a unit, k = 2**10 or M = 2**20.

    Raises RequestError with the path of an invalid value, the rule it breaks, and a value that would work.
    """
    plain = _plain(_info(kind), value)
    try:
        return msgspec.convert(plain, kind, str_keys=True)  # as those of a config that was read from a record
    except msgspec.ValidationError as error:
        raise _explained(error, kind, plain, path) from None


def implausible(kind: Any, value: Any, path: str) -> list[str]:
    """A warning for each figure of a valid section at `path` that is out of its range: its value, range and unit."""
    return [
        f"{where}={number:g} is implausible: it is in {unit}, and {low:g} to {high:g} are known of machines"
        for where, number, (low, high, unit) in figures(kind, value, path)
        if not low <= number <= high
    ]


def figures(kind: Any, value: Any, path: str) -> Iterator[tuple[str, float, Plausible]]:
    """The figures of a valid section at `path` that have a plausible range: (path, value, range)."""
    info = _info(kind)
    return _figures(info, _plain(info, value), path)


def _figures(info: inspect.Type, value: Any, path: str) -> Iterator[tuple[str, float, Plausible]]:
    if isinstance(value, int | float):
        if (range_of := plausible(info)) and math.isfinite(value):
            yield path, value, range_of
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            for below in _below(_section(info, value) or info, key):
                yield from _figures(below, entry, f"{path}.{key}")
    elif isinstance(value, list):
        for member in _members(info):
            if isinstance(member, inspect.VarTupleType | inspect.ListType):
                for i, entry in enumerate(value):
                    yield from _figures(member.item_type, entry, f"{path}[{i}]")


def plausible(info: inspect.Type) -> Plausible | None:
    """The range of a type that is marked as a figure; None for another."""
    if isinstance(info, inspect.Metadata):
        return (info.extra or {}).get("plausible") or plausible(info.type)
    if isinstance(info, inspect.UnionType):
        return next(filter(None, map(plausible, info.types)), None)
    return None


def has_key(kind: Any, key: str) -> bool:
    """Whether a section of this kind may have a dotted key, such as device.launch_s."""
    return bool(_at_key(kind, key.split(".")))


def keys_at(kind: Any, keys: Sequence[str]) -> set[str]:
    """The keys that the section at a path of `keys` may have; empty if it may have any."""
    members = [member for info in _at_key(kind, keys) for member in _members(info)]
    return {
        field.encode_name for member in members if isinstance(member, inspect.StructType) for field in member.fields
    }


def _at_key(kind: Any, keys: Sequence[str]) -> list[inspect.Type]:
    """The types that the value at a path of keys may have."""
    kinds = [_info(kind)]
    for key in keys:
        kinds = [below for each in kinds for below in _below(each, key)]
    return kinds


@lru_cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _members(info: inspect.Type) -> list[inspect.Type]:
    """The types that a value may have, without null."""
    if isinstance(info, inspect.Metadata):
        return _members(info.type)
    if isinstance(info, inspect.UnionType):
        return [member for part in info.types for member in _members(part)]
    return [] if isinstance(info, inspect.NoneType) else [info]


def _section(info: inspect.Type, value: Any) -> inspect.StructType | None:
    """The kind of section of a mapping: the one its tag names, or the first if it has no tag."""
    sections = [member for member in _members(info) if isinstance(member, inspect.StructType)]
    if not sections or not isinstance(value, Mapping):
        return None
    tag = value.get(sections[0].tag_field, sections[0].tag)
    return next((section for section in sections if section.tag == tag), sections[0])


def _below(info: inspect.Type, name: Any) -> list[inspect.Type]:
    """The types that the value of a key may have."""
    types: list[inspect.Type] = []
    for member in _members(info):
        if isinstance(member, inspect.StructType):
            types += [field.type for field in member.fields if field.encode_name == name]
            types += [inspect.StrType()] if name == member.tag_field else []
        elif isinstance(member, inspect.DictType):
            types.append(member.value_type)
        elif isinstance(member, inspect.AnyType):
            types.append(member)
    return types


def _plain(info: inspect.Type, value: Any) -> Any:
    """The value for msgspec: without nulls that mean defaults, with tags of sections, and with 256k as a number."""
    if isinstance(value, str) and any(isinstance(member, inspect.IntType) for member in _members(info)):
        number = re.fullmatch(r"(\d+)([km]?)", value.strip().lower())
        return int(number[1]) * _UNITS[number[2]] if number else value
    if isinstance(value, list):
        items = [member.item_type for member in _members(info) if isinstance(member, inspect.ListType)]
        return [_plain(items[0], entry) for entry in value] if items else value
    if not isinstance(value, Mapping):
        return value
    if section := _section(info, value):
        optional = {field.encode_name for field in section.fields if not field.required}
        tag = {section.tag_field: section.tag} if section.tag_field else {}
        value = tag | {str(key): entry for key, entry in value.items() if entry is not None or key not in optional}
    return {key: _plain(below[0], entry) if (below := _below(info, key)) else entry for key, entry in value.items()}


def _explained(error: msgspec.ValidationError, kind: Any, value: Any, path: str) -> RequestError:
    """The error for the user: the path of the invalid value, the rule, and what would work."""
    place = _PLACE.fullmatch(str(error))
    assert place
    parts = re.findall(r"\.([^.\[]+)|\[(.+?)\]", place["path"] or "")
    keys, value = _culprit(error, kind, value, parts)
    info, dotted = _info(kind), path
    for key in keys:
        section = _section(info, value)
        if section and key == section.tag_field:
            known = [str(member.tag) for member in _members(info) if isinstance(member, inspect.StructType)]
            return unknown(_dot(dotted, key), as_yaml(value[key]), known)
        info, value, dotted = _below(section or info, key)[0], value[key], _dot(dotted, key)
    if len(parts) == len(keys) + 1 and isinstance(value, list):
        lists = [member for member in _members(info) if isinstance(member, inspect.ListType)]
        if lists and len(lists) == len(_members(info)):  # of a pair, say, all are named together
            index = int(parts[-1][1])
            info, value, dotted = lists[0].item_type, value[index], f"{dotted}[{index}]"
    if isinstance(error.__cause__, RequestError):
        return error.__cause__.under(dotted) if dotted else error.__cause__
    section = _section(info, value)
    if section and (name := re.search(r"field `(.*)`", place["message"])):
        names = [field.encode_name for field in section.fields]
        if "unknown" in place["message"]:
            return unknown_key(_dot(dotted, name[1]), [_dot(dotted, known) for known in names])
        needed = ", ".join(field.encode_name for field in section.fields if field.required)
        return RequestError(_dot(dotted, name[1]), "is missing", f"all of {needed} are needed")
    members, would_work = _members(info), " or ".join(f"{dotted}={example}" for example in _would_work(info, value))
    if len(members) == 1 and isinstance(members[0], inspect.LiteralType) and isinstance(value, str):
        return unknown(dotted, value, map(str, members[0].values))
    if place["of_a_key"]:
        table = next(member for member in members if isinstance(member, inspect.DictType))
        info, value = table.key_type, next(iter(value))
    return RequestError(f"{dotted}={as_yaml(value)}", f"must be {_words(info)}", f"{would_work} would work")


def _would_work(info: inspect.Type, value: Any) -> list[Any]:
    """Valid values in place of an invalid one: the whole number that a count such as 1e6 is, else the examples."""
    examples = _examples(info)
    if any(isinstance(member, inspect.IntType) for member in _members(info)) and isinstance(value, float | str):
        with contextlib.suppress(ValueError, OverflowError):
            if (number := float(value)) == int(number) >= 1:
                return [int(number), *(["1M (1048576)"] if "1M" in examples else [])]
    return examples


def _dot(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _culprit(error: Exception, kind: Any, value: Any, found: list[tuple[str, str]]) -> tuple[list[Any], Any]:
    """The path of keys to the invalid value, and `value` reduced to the one entry of each table on that path.

    msgspec names only the keys of sections, so the entries of tables are tried one by one. A list is named as a whole.
    """
    keys: list[Any] = []
    for name, index in found:
        if index.isdigit():
            break
        keys.append(
            name or next(k for k in reduce(getitem, keys, value) if _same(error, kind, _with_only(value, keys, k)))
        )
        value = value if name else _with_only(value, keys[:-1], keys[-1])
    if "`key` in" in str(error):
        wrong = next(k for k in reduce(getitem, keys, value) if _same(error, kind, _with_only(value, keys, k)))
        value = _with_only(value, keys, wrong)
    return keys, value


def _same(error: Exception, kind: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as other:
        return str(other) == str(error)
    return False


def _with_only(value: Any, keys: list[Any], only: Any) -> Any:
    """The value with only one entry in its table at `keys`."""
    if not keys:
        return {only: value[only]}
    first, *rest = keys
    return {**value, first: _with_only(value[first], rest, only)}


def as_yaml(value: Any) -> str:
    """The value as YAML."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


_TYPES: dict[type, tuple[str, Any]] = {
    inspect.BoolType: ("true or false", "true"),
    inspect.StrType: ("a text", "WORD"),
    inspect.IntType: ("a whole number", 8),
    inspect.FloatType: ("a finite number", 1.0),
    inspect.DictType: ("a table", "..."),
    inspect.StructType: ("a section of keys", "..."),
    inspect.VarTupleType: ("a list", "[...]"),
    inspect.ListType: ("a list", "[...]"),
}
"""The rule for values of each type, in words, and an example."""


def _words(info: inspect.Type) -> str:
    """The rule for a value, in words."""
    if isinstance(info, inspect.Metadata):
        return (info.extra_json_schema or {}).get("description") or _words(info.type)
    if isinstance(info, inspect.UnionType):
        return ", or ".join(_words(part) for part in info.types if not isinstance(part, inspect.NoneType))
    if isinstance(info, inspect.LiteralType):
        return " or ".join(map(str, info.values))
    words, _ = _TYPES[type(info)]
    if isinstance(info, inspect.IntType | inspect.FloatType):
        words += f" above {info.gt}" if info.gt is not None else ""
        words += f" of at least {info.ge}" if info.ge is not None else ""
        words += f" and at most {info.le}" if info.le not in (None, FINITE) else ""
    return words


def _examples(info: inspect.Type) -> list[Any]:
    """Some valid values of a type."""
    if isinstance(info, inspect.Metadata):
        return (info.extra_json_schema or {}).get("examples") or _examples(info.type)
    if isinstance(info, inspect.UnionType):
        return _examples(info.types[0])
    if isinstance(info, inspect.LiteralType):
        return list(info.values)
    if isinstance(info, inspect.StructType):
        keys = [field.encode_name for field in info.fields if field.required]
        return ["{" + ", ".join(f"{key}: ..." for key in keys) + "}"]
    if isinstance(info, inspect.DictType):
        (key, *_), (entry, *_) = _examples(info.key_type), _examples(info.value_type)
        return [f"{{{key}: {entry}}}"]
    return [_TYPES[type(info)][1] if type(info) in _TYPES else "..."]
