"""How taints are spelled: key and value by the code of a cause. Pure.

A key is a label's name: a domain of at most 253 characters and, behind a slash, a name of at most 63.
"""

import hashlib
import re
from typing import Final, NamedTuple

from agent.errors import ConfigError

UNMONITORED: Final = "unmonitored"
"""The device has been Unknown for a while."""
MORE: Final = "more-causes"
"""There are more causes than a device may have taints."""
DOMAIN_CHARS: Final = 253
NAME_CHARS: Final = 63
"""Of a label's name behind its domain; so of a label's value."""

_DOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME: Final = re.compile(rf"(?=.{{1,{NAME_CHARS}}}\Z)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ILLEGAL: Final = re.compile(r"[^-A-Za-z0-9_.]")
_NUMBERED: Final = (
    (re.compile(r"gpu\.xid\.([0-9]{1,9})"), "xid"),
    (re.compile(r"gpu\.fabric\.sxid\.([0-9]{1,9})"), "sxid"),  # numbers that are no XIDs
)
"""Codes whose number becomes the taint's value."""
_NAMED: Final = {"gpu.lost": "gpu-lost"}
RESERVED: Final = frozenset({UNMONITORED, MORE, *_NAMED.values(), *(name for _, name in _NUMBERED)})
"""Names that mean something; a code that happens to be one gets another."""


class Spot(NamedTuple):
    """Which of a device's taints: at any time there is at most one of each key and value."""

    key: str
    value: str = ""


def spot_of(code: str, domain: str) -> Spot:
    """Where the taint of a cause stands: always a label's name and a label's value.

    A code is a name already, but for some that are spelled as NVIDIA's driver does, and some that are no
    label's name or mean something else here: those end in a hash of the code.
    """
    for pattern, name in _NUMBERED:
        if match := pattern.fullmatch(code):
            return Spot(f"{domain}/{name}", match[1])
    return Spot(f"{domain}/{_NAMED.get(code) or _name_of(code)}")


def check_domain(domain: str, key: str) -> None:
    """Whether labels' names may begin with it.

    Raises:
        ConfigError: it is no DNS subdomain of at most 253 characters; names the key that said it.
    """
    if len(domain) > DOMAIN_CHARS:
        raise ConfigError(f"{domain!r} is {len(domain)} characters, limit {DOMAIN_CHARS}", key=key)
    if not _DOMAIN.fullmatch(domain):
        raise ConfigError(f"{domain!r} is no DNS subdomain, such as gpu.example.com", key=key)


def _name_of(code: str) -> str:
    if _NAME.fullmatch(code) and code not in RESERVED:
        return code
    digest = hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    head = _ILLEGAL.sub("-", code)[: NAME_CHARS - len(digest) - 1].strip("-_.")
    return f"{head}-{digest}" if head else digest
