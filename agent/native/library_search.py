"""Search for the shared libraries of imported packages, without running programs.

``ctypes.util.find_library`` runs ldconfig, or else gcc with a temporary file. Trio and pyudev call it at
their import: each command would start a program, and fail where gcc is, but neither ldconfig nor a writable
temporary directory.
"""

import ctypes.util
import os
from typing import Final

FILES: Final = {"pthread": "libpthread.so.0", "udev": "libudev.so.1"}
"""File names of shared libraries by name; a file name is part of the library's binary interface."""


def find_libraries_by_name() -> None:
    """Replace ``ctypes.util.find_library`` in this process, so that it starts no program.

    The dynamic linker then searches the libraries in FILES. Only for a process of drahealth itself, before it
    imports Trio. Without glibc, nothing is replaced.
    """
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return
    search = ctypes.util.find_library

    def find_library(name: str) -> str | None:
        if name not in FILES:
            return search(name)
        try:
            ctypes.CDLL(FILES[name])
        except OSError:
            return None
        return FILES[name]

    ctypes.util.find_library = find_library
