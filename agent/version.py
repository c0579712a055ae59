"""Version of drahealth. A module of its own, because importing the public API for it takes long."""

from typing import Final

VERSION: Final = "0.1.0"
