"""Kubernetes quantities (``250m``, ``1.5Gi``, ``2e3``) as exact integers.

The parser accepts what Kubernetes accepts, with the same rounding: away from zero. It refuses a text without
a digit, which Kubernetes parses as zero but never writes.

Source: k8s.io/apimachinery v0.37, pkg/api/resource.
"""

import re
from dataclasses import dataclass
from typing import Final

NANO: Final = 10**9
MILLI: Final = 10**6
"""Number of nanos in one thousandth."""
MAX_VALUE: Final = 2**63 - 1
"""Largest amount that a quantity returns: larger ones are cut to it, the largest 64-bit integer."""
_LONGEST: Final = 256
_EXPONENT_MAX: Final = 1000
"""Largest exponent. Kubernetes has no limit and needs minutes for 1e2147483648."""

_DECIMAL: Final = {
    "n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18,
}  # fmt: skip
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_TEXT: Final = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?([eEinumkKMGTP]*[+-]?[0-9]*)", re.ASCII)
_EXPONENT: Final = re.compile(r"[eE]([+-]?[0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Quantity:
    """Kubernetes quantity, held as an integer number of nanos (10^-9)."""

    nanos: int

    def __add__(self, other: "Quantity") -> "Quantity":
        return Quantity(self.nanos + other.nanos)

    def __mul__(self, times: int) -> "Quantity":
        return Quantity(self.nanos * times)

    def __bool__(self) -> bool:
        return self.nanos != 0

    @property
    def value(self) -> int:
        """Amount in whole units, such as bytes, rounded away from zero, at most :data:`MAX_VALUE`."""
        return _limit_to_max(_divide_away_from_zero(self.nanos, NANO))

    @property
    def milli(self) -> int:
        """Amount in thousandths, such as millicores, rounded away from zero, at most :data:`MAX_VALUE`."""
        return _limit_to_max(_divide_away_from_zero(self.nanos, MILLI))


ZERO: Final = Quantity(0)


def parse_quantity(text: str) -> Quantity:
    """Parse a Kubernetes quantity.

    Raises:
        ValueError: The text is not a quantity; the message has the text and the reason.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"{text[:64]!a}... is not a quantity: {len(text)} characters, limit {_LONGEST}")
    match = _TEXT.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        raise ValueError(
            f"{text[:64]!a} is not a quantity: expected a number and a suffix such as m, k, Mi or e3"
        )
    sign, whole, fraction, suffix = match.groups(default="")
    digits = int(whole + fraction)
    if suffix in _BINARY:
        nanos = min(_scale_to_nanos(digits << _BINARY[suffix], -len(fraction)), MAX_VALUE * NANO)
    else:
        nanos = _scale_to_nanos(digits, _exponent(text, suffix) - len(fraction))
    return Quantity(-nanos if sign == "-" else nanos)


def _exponent(text: str, suffix: str) -> int:
    if suffix in _DECIMAL:
        return _DECIMAL[suffix]
    match = _EXPONENT.fullmatch(suffix)
    if match is None:
        raise ValueError(f"{text[:64]!a} is not a quantity: unknown suffix {suffix[:16]!a}")
    if len(match[1]) > 8 or abs(int(match[1])) > _EXPONENT_MAX:
        raise ValueError(f"{text[:64]!a} is not a quantity: exponent {match[1][:12]}, limit {_EXPONENT_MAX}")
    return int(match[1])


def _scale_to_nanos(digits: int, exponent: int) -> int:
    """Return ``digits * 10**exponent`` in nanos, rounded away from zero."""
    exponent += 9
    return digits * 10**exponent if exponent >= 0 else _divide_away_from_zero(digits, 10**-exponent)


def _divide_away_from_zero(number: int, divisor: int) -> int:
    """Return ``number / divisor``, rounded away from zero."""
    return -(-number // divisor) if number >= 0 else number // divisor


def _limit_to_max(number: int) -> int:
    return max(-MAX_VALUE, min(number, MAX_VALUE))
