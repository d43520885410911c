"""The machine code of the flow solver: numba makes it once, and later processes load it without numba.

They need llvmlite alone, on which numba is built: a twentieth of a second in place of half a one. What is compiled has
pointers in place of arrays and calls nothing outside itself, so that nothing else has to be there: no references to
arrays are counted, and no index is checked.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from sp_bench.resources import write_whole
from sp_bench.simulate import _flows_numba as kernel

ARGUMENTS = (kernel.Graph, kernel.Tasks, kernel.Links, kernel.Seats, kernel.Heaps, kernel.Heaps, kernel.Heaps)
"""The tuples of arrays that `kernel.run` is called with."""
NAME = "run"
"""The name of the function in the machine code."""
DIGEST_BYTES = hashlib.sha256().digest_size


def can_be_had() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


@cache
def run() -> Callable[..., bool]:
    """`kernel.run` as machine code, for tuples of arrays of the types that they declare. It is loaded where an earlier
    process has kept it, and else compiled, which takes about ten seconds.

    The function raises TypeError for an array of another type, or that isn't in one piece, and ArithmeticError where
    Python would raise ZeroDivisionError. ImportError if numba is missing.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    host = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(*host, opt=3, jit=True, codemodel="jitdefault")
    key = _key(*host)
    code = kept(key)
    if code is None:
        print("Compiling the simulator's solver: ten seconds or more.", file=sys.stderr, flush=True)
        code = machine.emit_object(_compiled())
        keep(key, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    types = _types()
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * (2 + len(types)))
    function = prototype(engine.get_function_address(NAME))

    def call(*arguments: tuple[np.ndarray, ...]) -> bool:
        arrays = chain.from_iterable(arguments)
        pointers = [_pointer(array, kind) for array, kind in zip(arrays, types, strict=True)]
        result, error = ctypes.c_uint8(), ctypes.c_void_p()
        if function(ctypes.addressof(result), ctypes.addressof(error), *pointers):
            raise ArithmeticError("the flow solver divided by zero")
        return bool(result.value)

    call.engine = engine  # type: ignore[attr-defined]  # the code goes with it
    return call


def _pointer(array: np.ndarray, kind: type[np.generic]) -> int:
    if array.dtype != kind or not array.flags.c_contiguous:
        raise TypeError(f"an array of {array.dtype}, {array.strides}: must be {np.dtype(kind)} in one piece")
    return array.ctypes.data


def _types() -> list[type[np.generic]]:
    """The type of each array of ARGUMENTS, as their annotations say."""
    return [next(_scalars(hint)) for of in ARGUMENTS for hint in get_type_hints(of).values()]


def _scalars(hint: Any) -> Iterator[type[np.generic]]:
    """The types of NumPy's scalars that an annotation names: its NDArray is one of several types, by its version."""
    if isinstance(hint, type) and issubclass(hint, np.generic):
        yield hint
    for each in get_args(hint):
        yield from _scalars(each)


def _compiled() -> Any:
    """An LLVM module of `kernel.run`, by numba, with one function that others see, NAME."""
    import llvmlite.binding as llvm
    import numba
    from numba.extending import register_jitable

    # A call copies every pointer of the tuples it passes, which takes longer than what most of these functions do.
    for function in kernel.CALLED_BY_RUN:
        register_jitable(forceinline=function not in kernel.LOOPS, _nrt=False)(function)
    compiled: Any = numba.njit
    inner = compiled(_nrt=False)(kernel.run)
    names = ("uint8" if kind is np.bool_ else np.dtype(kind).name for kind in _types())
    signature = numba.types.boolean(*(numba.types.CPointer(getattr(numba.types, name)) for name in names))
    alone = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    entry = compiled(signature, **alone)(_of_pointers(inner))
    module = llvm.parse_assembly(entry.inspect_llvm(entry.signatures[0]))
    if outside := [each.name for each in module.functions if each.is_declaration and not each.name.startswith("llvm.")]:
        raise ImportError(
            f"numba {numba.__version__} makes machine code that needs {', '.join(outside)}: another numba would work"
        )
    (outer,) = (each for each in module.functions if not each.is_declaration and _of_pointers.__name__ in each.name)
    outer.name = NAME
    return module


def _of_pointers(inner: Callable[..., bool]) -> Callable[..., bool]:
    """A function with a parameter for each array, that calls `inner` with the tuples of them."""
    names = [[f"{of.__name__}{i}_{field}" for field in of._fields] for i, of in enumerate(ARGUMENTS)]
    tuples = [f"{of.__name__}({', '.join(each)})" for of, each in zip(ARGUMENTS, names, strict=True)]
    known: dict[str, Any] = {"inner": inner, **{of.__name__: of for of in ARGUMENTS}}
    parameters = ", ".join(name for each in names for name in each)
    exec(f"def _of_pointers({parameters}):\n    return inner({', '.join(tuples)})\n", known)
    return known["_of_pointers"]


def _key(*host: str) -> str:
    """A name that is another one wherever the machine code might be."""
    sources = [Path(file).read_text() for file in (kernel.__file__, __file__)]
    versions = [version("numba"), version("llvmlite"), sys.platform, *host]
    return hashlib.sha256("\0".join([*sources, *versions]).encode()).hexdigest()[:16]


def files(key: str) -> Iterator[Path]:
    """The files that machine code may be kept in: beside the bytecode and, if that can't be written, the user's own."""
    name = f"flows-{key}.o"
    yield Path(__file__).parent / "__pycache__" / name
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sp_bench" / name


def kept(key: str) -> bytes | None:
    """The machine code that an earlier process has kept, if it is whole."""
    for file in files(key):
        with suppress(OSError):
            content = file.read_bytes()
            digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
            if hashlib.sha256(code).digest() == digest:
                return code
    return None


def keep(key: str, code: bytes) -> None:
    """Keep machine code for later processes, if it can be, and say so if it can't."""
    for file in files(key):
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, hashlib.sha256(code).digest() + code)
            return
    folders = " and ".join(str(file.parent) for file in files(key))
    warnings.warn(
        f"{folders} can't be written, so that every process compiles the solver: a writable XDG_CACHE_HOME would work",
        stacklevel=2,
    )
