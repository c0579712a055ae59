"""Version of drahealth. A module of its own, because importing the public API for it takes long."""

VERSION = "0.2.0"
