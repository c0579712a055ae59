"""Modules whose code runs when they are first used, and not when they are imported.

Trio, asyncio, msgspec and argparse import modules that an agent does not use on most nodes: ``ssl`` and
``hmac`` alone load OpenSSL, which takes 5 MiB. ``importlib.util.LazyLoader`` does not help, because in
CPython each further import of such a module runs its code, and because it is not thread-safe before
Python 3.12.
"""

import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from importlib.abc import Loader
else:  # importlib.abc imports eleven more modules
    Loader = object

DEFERRED: Final = frozenset(
    {
        "asyncio.sslproto",  # asyncio: TLS
        "hmac",  # trio: DTLS
        "idna",  # trio: names of hosts
        "ipaddress",  # urllib.parse: checks of URLs
        "msgspec.inspect",  # msgspec: JSON schemas
        "shutil",  # argparse and ctypes.util: help, and searches for programs
        "ssl",  # trio and asyncio: TLS
        "tempfile",  # ctypes.util: searches for libraries
        "tokenize",  # inspect and linecache: source lines of tracebacks
        "tomllib",  # agent: configuration files and declarations, which many nodes lack
    }
)
"""Names of the deferred modules, which are pure Python, with the module that imports each and its purpose."""

_NAMES_OF_IMPORT: Final = frozenset(
    {"__class__", "__dict__", "__name__", "__spec__", "__loader__", "__path__", "__file__"}
)
"""Names of a module that an import sets and reads; they do not need the module's code."""


def defer_modules() -> None:
    """Run the code of the modules in DEFERRED at the first access to one of their names.

    Only for a process of drahealth itself, before it imports these modules.
    """
    sys.meta_path.insert(0, _DeferringFinder())


class DeferredModule(ModuleType):
    """Imported module whose code has not run; the first access to one of its names runs the code.

    Thread-safe. Afterwards the object is an ordinary module.
    """

    def __getattribute__(self, name: str) -> Any:
        # not __getattr__(): the names that another thread has defined while it runs the code would be found
        if name not in _NAMES_OF_IMPORT:
            loader = self.__spec__.loader if self.__spec__ else None
            if isinstance(loader, _DeferringLoader):
                loader.run_code(self)
        return ModuleType.__getattribute__(self, name)  # not super(): this may be an ordinary module by now


class _DeferringFinder:
    """Finder of the modules in DEFERRED, which gives their specs a deferring loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in DEFERRED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


class _DeferringLoader(Loader):
    """Loader of one module that leaves the module's code to :meth:`run_code`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._lock = threading.RLock()
        self._is_running = False
        self._has_run = False

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = DeferredModule

    def run_code(self, module: ModuleType) -> None:
        """Run the code of a module unless it ran or is running in this thread.

        Thread-safe: other threads wait for the end. Raises what the code raises; the next access to a name of
        the module then runs the code again.
        """
        with self._lock:
            if self._is_running or self._has_run:
                return
            self._is_running = True
            try:
                self._loader.exec_module(module)
            finally:
                self._is_running = False
            self._has_run = True
            if module.__spec__ is not None:
                module.__spec__.loader = self._loader
            module.__loader__ = self._loader
            module.__class__ = ModuleType
