"""Packs: the document lengths of mask=document, from a list, a file, or a distribution drawn by a seed (conf/data).

Lengths that are drawn are cut to fill the sequence; those that are given must fill it.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from msgspec import Meta, field

from sp_bench.errors import RequestError
from sp_bench.plan.documents import Documents
from sp_bench.reading import Natural, Positive, Section, Tokens, read

Share = Annotated[float, Meta(gt=0, le=1, examples=[0.25])]
Given = Annotated[
    list[Tokens], Meta(description="a list of lengths, whole numbers of at least 1", examples=["[8k,1000,192]"])
]
Histories = Annotated[
    list[Natural], Meta(description="a list of numbers of tokens, whole and at least 0", examples=["[8k,0,64k]"])
]
MOST_DOCUMENTS = 1_000_000


class Data(Section, frozen=True, kw_only=True, tag_field="kind", tag="none"):
    """The data of a point without documents."""

    @property
    def histories(self) -> Sequence[int]:
        """The tokens before each document's queries; empty where there are none."""
        return ()

    def lengths_in(self, seqlen: int, seed: int) -> list[int]:
        """The tokens of each document in a sequence. Raises RequestError where there are none."""
        raise RequestError(
            "data=none", "mask=document needs documents", "data=magi_attention, or data=lengths with them, would work"
        )


class Lengths(Data, frozen=True, kw_only=True, tag="lengths"):
    """Documents of given lengths."""

    lengths: Given
    cached: Histories = field(default_factory=list)

    @property
    def histories(self) -> Sequence[int]:
        return self.cached

    def lengths_in(self, seqlen: int, seed: int) -> list[int]:
        if not self.lengths:
            raise RequestError("data.lengths=[]", "a pack has at least one document", "data.lengths=[8k] would work")
        return self.lengths


class File(Data, frozen=True, kw_only=True, tag="file"):
    """Documents whose lengths stand in a text file."""

    path: str

    def lengths_in(self, seqlen: int, seed: int) -> list[int]:
        return _lengths_in(self.path)


class Equal(Data, frozen=True, kw_only=True, tag="equal"):
    """Documents of equal length."""

    tokens: Tokens

    def lengths_in(self, seqlen: int, seed: int) -> list[int]:
        whole, rest = divmod(seqlen, self.tokens)
        return [self.tokens] * whole + [rest] * (rest > 0)


class Drawn(Data, frozen=True, kw_only=True):
    """Documents drawn from a distribution until they fill the sequence; the last one is cut."""

    longest: Share = 1.0
    """The longest document, as a share of the sequence; longer ones are cut into several."""

    @abstractmethod
    def draw(self, source: np.random.Generator) -> np.ndarray:
        """Some lengths: (documents,), whole numbers of at least 1."""

    def lengths_in(self, seqlen: int, seed: int) -> list[int]:
        source, most, left = np.random.default_rng(seed), max(1, math.floor(self.longest * seqlen)), seqlen
        lengths: list[int] = []
        while True:
            for length in self.draw(source):
                for part in _cut(min(int(length), left), most):
                    lengths.append(part)
                    left -= part
                if not left:
                    return lengths


class Lognormal(Drawn, frozen=True, kw_only=True, tag="lognormal"):
    """Lengths whose logarithm is normal."""

    median: Tokens
    sigma: Positive

    def draw(self, source: np.random.Generator) -> np.ndarray:
        return np.ceil(np.minimum(source.lognormal(math.log(self.median), self.sigma, 1024), 2.0**40))


class Histogram(Drawn, frozen=True, kw_only=True, tag="histogram"):
    """Lengths by a histogram: {the longest document of a bin: documents in it}, equally likely inside a bin."""

    bins: Annotated[dict[int, Positive], Meta(min_length=1, examples=["{1024: 3, 4096: 1}"])]

    def __post_init__(self) -> None:
        """Raises RequestError for a bin that ends below 1."""
        if min(self.bins) < 1:
            raise RequestError(f"bins.{min(self.bins)}", "a bin ends at a length of at least 1", "bins.1 would work")

    def draw(self, source: np.random.Generator) -> np.ndarray:
        ends = np.array(sorted(self.bins))
        counts = np.array([self.bins[end] for end in ends])
        which = source.choice(len(ends), 1024, p=counts / counts.sum())
        return source.integers(np.append(0, ends)[which], ends[which]) + 1


class Sample(Drawn, frozen=True, kw_only=True, tag="sample"):
    """Lengths drawn from those in a text file, each as likely: a data set, of any number of documents."""

    path: str

    def __post_init__(self) -> None:
        """Raises RequestError for a file that can't be read, or is empty."""
        _lengths_in(self.path, "path")

    def draw(self, source: np.random.Generator) -> np.ndarray:
        return source.choice(np.array(_lengths_in(self.path)), 1024)


Kind = Lengths | File | Equal | Lognormal | Histogram | Sample | Data


def data_of(data: Mapping[str, Any]) -> Data:
    """The section `data` of a config. Raises RequestError for values that make no sense."""
    return cast(Data, read(Kind, data, "data"))


def lengths_of(data: Mapping[str, Any], seqlen: int, seed: int) -> tuple[int, ...]:
    """The tokens of each document of a section `data`. Raises RequestError for values that make no sense."""
    lengths = data_of(data).lengths_in(seqlen, seed)
    if len(lengths) > MOST_DOCUMENTS:
        raise RequestError(
            f"data of {len(lengths):,} documents", f"at most {MOST_DOCUMENTS:,} are packed", "longer ones would work"
        )
    return tuple(lengths)


def histories_of(data: Mapping[str, Any]) -> Sequence[int]:
    """The tokens before each document's queries of a section `data`; empty where there are none."""
    return data_of(data).histories


def documents(
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window: tuple[int | None, int | None] = (None, None),
    histories: Sequence[int] = (),
) -> Documents:
    """A mask for SequenceParallelAttention: packed documents of these lengths, which together fill the sequence.

    `window` is (left, right), how many keys before and behind its own position a query sees; None for no limit.
    `histories` are the tokens of each document before its queries, 0 for one that has none: what is cached of sequences
    of which the lengths are new. Raises RequestError for a length below 1, and unless each document has a history.
    """
    mask = Documents(tuple(lengths), causal, *window)
    if histories and len(histories) != len(lengths):
        rule = f"there is one for each of the {len(lengths)} documents"
        raise RequestError(f"histories of {len(histories)} documents", rule, "0 for one that has none would work")
    return mask.behind([(tokens,) for tokens in histories]) if histories else mask


def _lengths_in(path: str, key: str = "data.path") -> list[int]:
    """The lengths in a text file. Raises RequestError, of this key, where it can't be read or has none, or a word is no
    length.
    """
    try:
        lengths = _lengths_of_file(path, Path(path).stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{key}={path}", f"can't be read: {error}", "a text file would work") from None
    if not lengths:
        raise RequestError(f"{key}={path}", "has no lengths", "a file of lengths would work")
    return lengths


@lru_cache(maxsize=4)  # a data set is large, and many packs are drawn from it
def _lengths_of_file(path: str, changed_ns: int) -> list[int]:
    lines = Path(path).read_text().splitlines()
    words = [(word, number) for number, line in enumerate(lines, start=1) for word in re.split(r"[\s,]+", line) if word]
    return [_length(word, f"{path}, line {number}") for word, number in words]


def _length(word: str, where: str) -> int:
    try:
        return int(word) if word.isdecimal() and int(word) else read(Tokens, word, "length")
    except RequestError:
        rule = "is no length; they are whole numbers of at least 1, apart by spaces, commas or new lines"
        raise RequestError(f"{where}: {word}", rule, "1000 or 8k would work") from None


def _cut(length: int, most: int) -> Iterator[int]:
    """A document's length in parts of at most `most`."""
    while length > 0:
        yield min(length, most)
        length -= most
