"""One name for each module of analysis, conf, methods and slurm, which stand beside sp_bench in a checkout.

`sp_bench.methods.mesh` is the module of methods/mesh.py. `slurm.sweep`, as in `python -m slurm.sweep`, is another name
of `sp_bench.slurm.sweep`, not another module. In a wheel these folders are inside sp_bench, and nothing is done.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

PACKAGE = Path(__file__).parent
BESIDE = ("analysis", "conf", "methods", "slurm")
"""Packages of sp_bench that a checkout has beside it."""
INSTALLED = (PACKAGE / BESIDE[0] / "__init__.py").exists()
"""Whether they are inside, as in a wheel."""


def place(name: str) -> Path:
    """The path of a file or folder of the package, `name` as in a wheel. It may not exist."""
    beside = not INSTALLED and name.partition("/")[0] in BESIDE
    return (PACKAGE.parent if beside else PACKAGE) / name


def one_name(name: str) -> None:
    """Have the name of a package of BESIDE stand for sp_bench's. Its __init__.py calls this with its own __name__."""
    if name in BESIDE:
        sys.modules[name] = import_module(f"sp_bench.{name}")


class Finder(MetaPathFinder):
    """Finds packages that stand beside sp_bench, and modules by the name they have in a checkout."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of sp_bench.TOP, or of a module of TOP where the top level's TOP is sp_bench's; None of all else."""
        top, _, rest = name.partition(".")
        if top == "sp_bench" and rest in BESIDE:
            folder = place(rest)
            return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        ours = sys.modules.get(f"sp_bench.{top}")
        if top in BESIDE and rest and ours is not None and sys.modules.get(top) is ours:
            real = find_spec(f"sp_bench.{name}")
            return real and _alias(name, real)
        return None


def _alias(name: str, real: ModuleSpec) -> ModuleSpec:
    spec = ModuleSpec(name, _Alias(real), origin=real.origin)
    spec.submodule_search_locations = real.submodule_search_locations
    return spec


class _Alias(InspectLoader):
    """Loads a module by importing it under its one name."""

    def __init__(self, real: ModuleSpec) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(self._real.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its spec, in whose place the import system has put the alias's."""
        module.__spec__ = self._real

    def get_code(self, fullname: str) -> CodeType | None:
        """The module's code, which `python -m` executes."""
        assert isinstance(self._real.loader, InspectLoader)
        return self._real.loader.get_code(self._real.name)

    def get_source(self, fullname: str) -> str | None:
        assert isinstance(self._real.loader, InspectLoader)
        return self._real.loader.get_source(self._real.name)


if not INSTALLED:
    sys.meta_path.insert(0, Finder())
