"""drahealth: one verdict for each of a node's devices, with its evidence, for the kubelet and for people.

What a DRA driver embeds is :mod:`agent.api`, all of it reachable from here: ``agent.Monitor``. It is imported
when it is first asked for: a command that looks at the node once needs none of it. ``__init__.pyi`` is what
type checkers read.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

from agent.version import VERSION as __version__

__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    # "from agent import daemon" asks here first: who wants a module wants none of what is embedded
    if not name.startswith("_") and not find_spec(f"{__name__}.{name}"):
        api = import_module("agent.api")
        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'agent' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return [*globals(), *import_module("agent.api").__all__]
