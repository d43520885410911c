"""A function of the user's own: impl=my_module:my_attention.

    def my_attention(q, k, v, *, causal, group):
        ...
        return out

Every rank calls it with its own tokens in the layout method.layout, and with the torch.distributed group: q
(B, S / n, H, D), k and v (B, S / n, kv_heads, D). It returns out (B, S / n, H, D), which must be differentiable by
autograd unless phase=forward.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sp_bench.errors import RequestError, nearest
from sp_bench.peers.peer import Peer
from sp_bench.plan.mask import Mask
from sp_bench.plan.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from sp_bench.peers.peer import Attention


def function_named(name: str, asked: str) -> Callable[..., Any]:
    """The function module:name. Raises ImportError, and RequestError for `asked` if the module has no such function."""
    module, _, function = name.partition(":")
    contents = vars(importlib.import_module(module))
    if not callable(contents.get(function)):
        names = [key for key, value in contents.items() if callable(value) and not key.startswith("_")]
        raise RequestError(asked, f"{module} has no function {function}", nearest(function, names))
    return contents[function]


@dataclass(frozen=True, kw_only=True)
class User(Peer):
    """A user's function. Its layout may be any of ours; auto is the one that balances the mask."""

    name: ClassVar[str] = "user"
    distribution: ClassVar[str] = ""
    algorithms: ClassVar[tuple[str, ...]] = ("own",)

    function: str
    """module:name, the value of the key `impl`."""

    @classmethod
    def named(cls, function: str, options: Mapping[str, Any], *, mask: Mask, here: bool = True) -> User:
        """The user's function with these options; `here` is that of `build`."""
        return cls.build({**options, "function": function}, mask=mask, here=here)

    def wanted_layout(self) -> str:
        return self.mask.layout(self.layout).name

    def refuse_absence(self) -> None:
        """Raise RequestError if there is no such module. Ranks find out whether it has the function."""
        if self._file() is None:
            module = self.function.partition(":")[0]
            would_work = "the name of one on PYTHONPATH would work"
            raise RequestError(f"impl={self.function}", f"there is no module {module}", would_work)

    @property
    def version(self) -> str:
        """A hash of the module's file."""
        file = self._file()
        return hashlib.sha256(file.read_bytes() if file else b"").hexdigest()[:16]

    @property
    def impl(self) -> str:
        return self.function

    def kernel_on(self, device: str) -> str:
        return "its own"

    def refuse_device(self, device: str) -> None:
        """Refuse nothing: the function may take tensors of any device."""

    def variant(self, problem: Problem) -> str:
        return self.function

    def notes(self, device: str) -> list[str]:
        return [f"{self.function} is the user's own code; the hash of its file is {self.version}"]

    def attention(self, problem: Problem, device: torch.device, group: ProcessGroup | None = None) -> Attention:
        import torch.distributed as dist

        function = function_named(self.function, f"impl={self.function}")
        return lambda q, k, v: function(  # pyright: ignore[reportReturnType]
            q, k, v, causal=self.causal, group=group or dist.group.WORLD
        )

    def _file(self) -> Path | None:
        try:
            spec = importlib.util.find_spec(self.function.partition(":")[0])
        except (ImportError, ValueError):
            return None
        return Path(spec.origin) if spec and spec.origin and spec.has_location else None
