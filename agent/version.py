"""Which version this is; apart from the package's front, which imports everything that it offers."""

from typing import Final

VERSION: Final = "0.1.0"
