"""A case: one small attention on real ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from sp_bench.plan.documents import Documents, Window
from sp_bench.plan.layout import Layout
from sp_bench.plan.mask import Mask, mask_named
from sp_bench.plan.problem import Problem

PAD_TOKENS = 5
"""The tail that a case with padding ends in: a document of its own, which nobody reads."""


@dataclass(frozen=True, kw_only=True, order=True)
class Case:
    """An attention over n * tokens + more tokens. Defaults are the simplest: failures are shrunk towards them."""

    n: int = 1
    """How many ranks there are."""
    heads: int = 1
    kv_heads: int = 1
    tokens: int = 2
    """Tokens of each rank."""
    more: int = 0
    """Tokens beyond these, which not all ranks get."""
    batch: int = 1
    head_dim: int = 8
    dtype: str = "float32"
    mask: str = "full"
    documents: int = 0
    """The sequence is packed from so many documents of unlike lengths; 0: it is one."""
    padded: bool = False
    """Whether the last document is padding, whose outputs don't count."""
    window: int = 0
    """How many keys before its own position a query sees; without a causal mask it sees half as many behind it. 0: all
    of them."""
    scale: float = 0.0
    """The factor of scores; 0: the usual one, 1 / sqrt(head_dim)."""

    def __str__(self) -> str:
        words = [f"n={self.n}", self.mask, f"seqlen={self.seqlen}", f"heads={self.heads}"]
        words += [f"kv_heads={self.kv_heads}"] if self.kv_heads != self.heads else []
        words += [f"head_dim={self.head_dim}", self.dtype]
        words += [f"batch={self.batch}"] if self.batch > 1 else []
        words += [f"documents={list(self.lengths)}"] if self.documents else []
        words += ["padded"] if self.padded else []
        words += [f"window_size={self.window_size}"] if self.window else []
        words += [f"scale={self.scale:g}"] if self.scale else []
        return " ".join(words)

    @property
    def seqlen(self) -> int:
        """Tokens of the whole sequence."""
        return self.n * self.tokens + self.more

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document: the first ones longer, by turns odd and even; the tail of padding is the last."""
        if not self.documents:
            return ()
        left = self.seqlen - (PAD_TOKENS if self.padded else 0)
        cuts = [left * (i * (i + 1)) // (self.documents * (self.documents + 1)) for i in range(self.documents + 1)]
        between_cuts = [end - start for start, end in zip(cuts, cuts[1:], strict=False)]
        return tuple(length for length in (*between_cuts, *([PAD_TOKENS] if self.padded else [])) if length > 0)

    @property
    def valid(self) -> bool:
        """Whether the numbers fit together."""
        padding = PAD_TOKENS + self.documents if self.padded else 0
        return self.heads % self.kv_heads == 0 and self.documents <= self.seqlen - padding

    @property
    def window_size(self) -> tuple[int, int]:
        """(left, right): how many keys before and behind its own position a query sees, if there is a window."""
        return self.window, 0 if self.mask == "causal" else self.window // 2

    def whole_mask(self) -> Mask:
        """The mask of the whole sequence."""
        sides = self.window_size if self.window else (None, None)
        if self.documents:
            return Documents(self.lengths, self.mask == "causal", *sides)
        return Window((self.seqlen,), self.mask == "causal", *sides) if self.window else mask_named(self.mask)

    def problem(self, layout: Layout) -> Problem:
        """The case as a problem on a layout."""
        return Problem(
            n=self.n,
            seqlen=self.seqlen,
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            mask=self.whole_mask(),
            dtype=self.dtype,
            layout=layout,
        )

    def simpler(self, **changes: object) -> Case:
        """A copy with other values."""
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]


AXES: dict[str, tuple[object, ...]] = {
    "n": (1, 2, 3, 4, 6, 8),
    "heads": (1, 2, 3, 4, 6, 8, 12, 14, 16, 24, 28),
    "kv_heads": (1, 2, 3, 4, 6, 7, 8, 12, 16, 24),
    "tokens": (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    "more": (0, 1, 2, 3, 5),
    "batch": (1, 2),
    "head_dim": (8, 16, 64, 80, 128, 192, 256),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "mask": ("full", "causal"),
    "documents": (0, 1, 2, 3, 5),
    "padded": (False, True),
    "window": (0, 1, 2, 3, 11),
    "scale": (0.0, 0.5),
}
"""The values that a failing case is shrunk over, the simplest first."""

assert {*AXES} == {f.name for f in fields(Case)}
