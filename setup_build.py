"""Build the C core as ``agent.native._core``: cffi in API mode, one abi3 module for Python 3.11 and later.

pyproject.toml declares the extension and names the two commands below. cffi reads the same header as the
compiler, from ``/* cffi: begin */`` to ``/* cffi: end */``, so both have the same record layouts.

A wheel without the core would install, and fail at its first import on a node. So mistakes in the
declarations stop the build:

* the extension's only declared source is a header, which setuptools' own ``build_ext`` cannot compile;
* ``build`` fails if the extension is not declared;
* ``build_ext`` fails without C files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import cffi
from setuptools import Extension
from setuptools.command.build import build as _build
from setuptools.command.build_ext import build_ext as _build_ext
from setuptools.errors import SetupError

MODULE: Final = "agent.native._core"
HEADER: Final = Path("native/include/drahealth.h")
SOURCES: Final = Path("native/src")
PREAMBLE: Final = f'#include "{HEADER.name}"\n'

# No -Werror: a new warning of a newer compiler must not stop an installation. The C tests compile the same
# files with -Werror.
WARNINGS: Final = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion"]
CFLAGS: Final = ["-std=c11", "-O2", "-pthread", "-fvisibility=hidden"]  # PyInit__core is visible by itself
LIMITED_API: Final = "0x030B0000"  # as requires-python; a build on 3.13 must import on 3.11


def cffi_declarations(header: str) -> str:
    """Return the part of the header between the two marks in the form that cffi's parser accepts.

    cffi accepts only bare integers in a ``#define``, so ``(-1)`` loses its parentheses; the compiler checks
    every value again when the module is built.

    Raises:
        SetupError: A mark is missing or occurs twice.
    """
    parts = re.split(r"^/\* cffi: (?:begin|end) \*/$", header, flags=re.MULTILINE)
    if len(parts) != 3:
        raise SetupError(f"{HEADER}: {len(parts) - 1} lines are a cffi mark, expected 2: begin and end")
    return re.sub(r"^(#define \w+) \((-?\d+)\)", r"\1 \2", parts[1], flags=re.MULTILINE)


class build(_build):
    """The ``build`` command of setuptools, which here requires the extension."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if MODULE not in [ext.name for ext in self.distribution.ext_modules or ()]:
            raise SetupError(f"pyproject.toml declares no extension {MODULE}: no wheel without the C core")


class build_ext(_build_ext):
    """The ``build_ext`` command of setuptools, which here replaces the header by the sources of the core."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name == MODULE:
            self._complete(ext)
        super().build_extension(ext)

    def _complete(self, ext: Extension) -> None:
        sources = sorted(SOURCES.rglob("*.c"))
        if not sources:
            raise SetupError(f"{SOURCES}/ has no C files: no wheel without the C core")
        ffi = cffi.FFI()
        ffi.cdef(cffi_declarations(HEADER.read_text("utf-8")))
        ffi.set_source(MODULE, PREAMBLE)
        generated = Path(self.build_temp) / "_core.c"
        generated.parent.mkdir(parents=True, exist_ok=True)
        ffi.emit_c_code(str(generated))
        ext.sources = [str(generated), *map(str, sources)]
        ext.depends = [str(HEADER), *map(str, sorted(SOURCES.rglob("*.h")))]
        ext.include_dirs = [str(HEADER.parent), str(SOURCES)]
        ext.define_macros = [("_GNU_SOURCE", None), ("Py_LIMITED_API", LIMITED_API)]
        ext.extra_compile_args = [*CFLAGS, *WARNINGS]
        ext.extra_link_args = ["-pthread"]
