"""Amounts as Kubernetes writes them: ``250m``, ``1.5Gi``, ``2e3``. Exact: no floating point anywhere.

What Kubernetes parses is parsed, to the same number: more digits than nano are rounded away from zero, and so
is what is asked for in whole or in thousandths. A text without a digit is refused: Kubernetes takes most of
these for zero, and writes none. Writing amounts the canonical way is not done here.

Source: k8s.io/apimachinery v0.37, pkg/api/resource, whose own parser the tests' tables come from.
"""

import re
from dataclasses import dataclass
from typing import Final

NANO: Final = 10**9
MILLI: Final = 10**6
"""Nanos in a thousandth."""
MOST: Final = 2**63 - 1
"""The largest that counts. Beyond it, the kubelet's own arithmetic overflows."""
_LONGEST: Final = 256
_EXPONENT_MAX: Final = 1000
"""Kubernetes has no limit, and takes minutes over 1e2147483648."""

_DECIMAL: Final = {
    "n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18,
}  # fmt: skip
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_TEXT: Final = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?([eEinumkKMGTP]*[+-]?[0-9]*)", re.ASCII)
_EXPONENT: Final = re.compile(r"[eE]([+-]?[0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Quantity:
    """An amount, to the nano."""

    nanos: int

    def __add__(self, other: "Quantity") -> "Quantity":
        return Quantity(self.nanos + other.nanos)

    def __mul__(self, times: int) -> "Quantity":
        return Quantity(self.nanos * times)

    def __bool__(self) -> bool:
        return self.nanos != 0

    @property
    def value(self) -> int:
        """In whole units, e.g. bytes: rounded away from zero, at most :data:`MOST`."""
        return _capped(_away(self.nanos, NANO))

    @property
    def milli(self) -> int:
        """In thousandths, e.g. of a CPU: rounded and limited likewise."""
        return _capped(_away(self.nanos, MILLI))


ZERO: Final = Quantity(0)


def parse_quantity(text: str) -> Quantity:
    """An amount from its text.

    Raises:
        ValueError: with the text, and what is wrong with it.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"{text[:64]!a}... is no quantity: {len(text)} characters, limit {_LONGEST}")
    match = _TEXT.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        raise ValueError(f"{text[:64]!a} is no quantity: a number, and a suffix such as m, k, Mi or e3")
    sign, whole, fraction, suffix = match.groups(default="")
    digits = int(whole + fraction)
    if suffix in _BINARY:
        nanos = min(_scaled(digits << _BINARY[suffix], -len(fraction)), MOST * NANO)
    else:
        nanos = _scaled(digits, _exponent(text, suffix) - len(fraction))
    return Quantity(-nanos if sign == "-" else nanos)


def _exponent(text: str, suffix: str) -> int:
    if suffix in _DECIMAL:
        return _DECIMAL[suffix]
    match = _EXPONENT.fullmatch(suffix)
    if match is None:
        raise ValueError(f"{text[:64]!a} is no quantity: there is no suffix {suffix[:16]!a}")
    if len(match[1]) > 8 or abs(int(match[1])) > _EXPONENT_MAX:
        raise ValueError(f"{text[:64]!a} is no quantity: its exponent is beyond {_EXPONENT_MAX}")
    return int(match[1])


def _scaled(digits: int, exponent: int) -> int:
    """``digits * 10**exponent`` in nanos; what is less than one of them, but not zero, is one."""
    exponent += 9
    return digits * 10**exponent if exponent >= 0 else _away(digits, 10**-exponent)


def _away(number: int, divisor: int) -> int:
    """Divided and rounded away from zero."""
    return -(-number // divisor) if number >= 0 else number // divisor


def _capped(number: int) -> int:
    return max(-MOST, min(number, MOST))
