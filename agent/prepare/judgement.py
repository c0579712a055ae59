"""The words of a judgement: how much evidence shows, what it shows, and what is known beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from agent.model.claim import Claim, DeviceRef
from agent.model.health import DeviceHealth
from agent.model.prepare import ErrorClass, Operation, PrepareVerdict, Scope
from agent.prepare.patterns import Pattern


class Weight(IntEnum):
    """How much a piece of evidence shows."""

    TYPE = 0
    """The type of an exception."""
    CODE = 1
    """A number that shows nothing of the kind."""
    TEXT = 2
    LOOSE = 3
    """A number or type that shows something, whatever was being done."""
    FACT = 4
    """A number, with what was being done."""
    WORD = 5
    """The driver's own."""
    VERDICT = 6
    """It was judged before."""


@dataclass(frozen=True, slots=True)
class Context:
    """What is known beside the exception."""

    claim: Claim
    health: Mapping[DeviceRef, DeviceHealth] = field(default_factory=dict)
    """What the health engine says, at least of the claim's devices; those it does not know are left out."""
    operation: Operation | None = None
    """What was being done, where nothing else says so."""
    engine_up: bool = True
    """The health engine is running."""
    patterns: tuple[Pattern, ...] = ()
    """Of the configuration; looked at before ours."""


class EvidenceScore(NamedTuple):
    """What one piece of evidence shows."""

    weight: Weight
    code: str
    error_class: ErrorClass
    summary: str
    confidence: float
    said: tuple[str, ...] = ()
    """The evidence, as it is told; empty: as it says itself."""
    notes: tuple[str, ...] = ()
    """What else is to be said of it."""
    detail: str = ""
    requests: tuple[str, ...] = ()
    devices: tuple[DeviceRef, ...] = ()
    """Those to blame."""
    retry_after_s: float | None = None
    scope: Scope | None = None
    advice: str = ""
    before: PrepareVerdict | None = None
    """As it was judged before."""
