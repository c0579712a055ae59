"""What the kubelet shows of a device: one line, stable to the byte while the facts are."""

from collections.abc import Sequence
from typing import Final

from agent.model.health import Cause, Severity

LIMIT: Final = 1024
"""Bytes. The kubelet cuts longer ones at a byte, through a character if need be (KEP-4680)."""
_CUT: Final = "..."


def cut(text: str, limit: int = LIMIT) -> str:
    """Valid UTF-8 of at most ``limit`` bytes; what is cut ends in ``...`` on a character's boundary."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - len(_CUT)].decode("utf-8", "ignore") + _CUT


def message(causes: Sequence[Cause]) -> str:
    """The causes, worst first, each with its code first; then what to do about the worst.

    ``info`` causes are not for the wire.
    """
    told = [cause for cause in causes if cause.severity > Severity.INFO]
    if not told:
        return ""
    facts = "; ".join(f"{cause.code}: {cause.evidence}" for cause in told)
    return cut(f"{facts}. Advice: {told[0].advice}" if told[0].advice else facts)
