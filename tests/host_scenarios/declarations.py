"""What drivers write into ``devices.d``."""

import json
from typing import Any


def device(name: str, kind: str, **keys: Any) -> str:
    """One device: strings, numbers and truths are in TOML as they are in JSON."""
    table = {"name": name, "kind": kind} | keys
    return "\n".join(["[[device]]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""])
