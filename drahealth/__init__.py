"""Public API of drahealth for DRA drivers written in Python; docs/embedding.md is its guide.

:mod:`agent.api` has the list of names. All modules of ``agent`` may change at any time.
"""

from agent.api import *
from agent.api import __all__ as __all__
from agent.version import VERSION as __version__  # noqa: F401  # read as drahealth.__version__
