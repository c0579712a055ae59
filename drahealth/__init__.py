"""Public API of drahealth for DRA drivers written in Python; docs/embedding.md is its guide.

:mod:`agent.api` has the list of names, whose modules are imported when they are first used. All modules of
``agent`` may change at any time.
"""

import typing as _typing

import agent.api as _api
from agent.api import __all__ as __all__
from agent.version import VERSION as __version__  # noqa: F401  # read as drahealth.__version__

if _typing.TYPE_CHECKING:  # type checkers know this constant by its own name only
    from agent.api import *
else:

    def __getattr__(name: str) -> _typing.Any:
        """Return a name of the API."""
        value = globals()[name] = getattr(_api, name)
        return value

    def __dir__() -> list[str]:
        """Return the names of the API and those of the module itself."""
        return sorted({*globals(), *__all__})
