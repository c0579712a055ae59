"""drahealth: one health verdict with evidence for each device of a Kubernetes node, for kubelet and users.

All names of the public API :mod:`agent.api` are available here, such as ``agent.Monitor``. The API is
imported at first use, because most commands do not need it. Type checkers read ``__init__.pyi``.
"""

import sys
from importlib import import_module

from agent.version import VERSION as __version__

__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    from importlib.util import find_spec  # loads more modules than the start of the command line needs

    # "from agent import module" calls this function first and must not import the API
    if not name.startswith("_") and not find_spec(f"{__name__}.{name}"):
        api = import_module("agent.api")
        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'agent' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return [*globals(), *import_module("agent.api").__all__]
