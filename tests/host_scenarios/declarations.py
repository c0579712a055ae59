"""Contents of files in ``devices.d``."""

import json
from typing import Any


def device(name: str, kind: str, **keys: Any) -> str:
    """Return one device; strings, numbers and booleans are the same in TOML and JSON."""
    table = {"name": name, "kind": kind} | keys
    return "\n".join(["[[device]]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""])
