"""The error for requests that can't be served, and how memory that ran out is known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RequestError(ValueError):
    """A request can't be served. It is raised before any rank starts.

    The message names the value, the rule that it breaks, and what would work, in that order.
    """

    def __init__(self, value: str, rule: str, would_work: str) -> None:
        super().__init__(f"{value}: {rule}; {would_work}")
        self._parts = (value, rule, would_work)

    def __reduce__(self) -> tuple:
        return type(self), self._parts

    @property
    def rule(self) -> str:
        """The rule that the value breaks."""
        return self._parts[1]

    def under(self, path: str) -> RequestError:
        """The same error for a key in the section at `path`."""
        value, rule, would_work = self._parts
        same_key = would_work.startswith(value.partition("=")[0] + "=")
        return RequestError(f"{path}.{value}", rule, f"{path}.{would_work}" if same_key else would_work)


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint for an unknown `word`: the choice that it begins, or the nearest, then all choices."""
    names = sorted(choices)
    begun = [name for name in names if word and name.startswith(word)]
    close = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}known: {', '.join(names)}"


def unknown(key: str, word: str, choices: Iterable[str]) -> RequestError:
    """The error for a `key` whose value is none of the `choices`."""
    return RequestError(f"{key}={word}", f"there is no such {key.rpartition('.')[2]}", nearest(word, choices))


def impossible(value: str, rule: str, possible: Iterable[object], or_else: str = "") -> RequestError:
    """The error for a value that is none of the possible ones; `or_else` follows them."""
    return RequestError(value, rule, f"one of {', '.join(map(str, possible))}{or_else} would work")


def unknown_key(key: str, known: Iterable[str]) -> RequestError:
    """The error for an unknown key."""
    return RequestError(key, "there is no such key", nearest(key, known))


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out. torch reports that only by its message."""
    said = f"{type(error).__name__}: {error}"
    return any(words in said for words in ("MemoryError", "DefaultCPUAllocator", "out of memory"))
