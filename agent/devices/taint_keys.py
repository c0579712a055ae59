"""Keys and values of device taints, derived from the code of a fault.

A key is ``<domain>/<name>``: a domain of at most 253 characters, a name of at most 63.
"""

import hashlib
import re
from typing import Final, NamedTuple

from agent.errors import ConfigError

UNMONITORED: Final = "unmonitored"
"""Name in the taint key for a device that has been Unknown for a minute."""
MORE_CAUSES: Final = "more-causes"
"""Name in the taint key for a device that has more faults than it may have taints."""
DOMAIN_CHARS: Final = 253
NAME_CHARS: Final = 63
"""Largest length of the name in a taint's key, and of a taint's value [characters]."""

_DOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME: Final = re.compile(rf"(?=.{{1,{NAME_CHARS}}}\Z)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ILLEGAL: Final = re.compile(r"[^-A-Za-z0-9_.]")
_NUMBERED: Final = (
    (re.compile(r"gpu\.xid\.([0-9]{1,9})"), "xid"),
    (re.compile(r"gpu\.fabric\.sxid\.([0-9]{1,9})"), "sxid"),  # SXid numbers are not XIDs
)
"""Patterns of finding codes whose number becomes the taint's value, each with the name in the taint key."""
_NAMED: Final = {"gpu.lost": "gpu-lost"}
RESERVED_NAMES: Final = frozenset(
    {UNMONITORED, MORE_CAUSES, *_NAMED.values(), *(name for _, name in _NUMBERED)}
)
"""Names in taint keys with a fixed meaning; a finding code that equals such a name gets another name."""


class TaintId(NamedTuple):
    """Key and value of a taint; a device has at most one taint with the same key and value."""

    key: str
    value: str = ""


def taint_id(code: str, domain: str) -> TaintId:
    """Return key and value of the taint for a fault with this code, such as ``gpu.xid.79``.

    The name is the code, NVIDIA's name where it has one, or, for a code that is no valid name, a part of the
    code with a hash.
    """
    for pattern, name in _NUMBERED:
        if match := pattern.fullmatch(code):
            return TaintId(f"{domain}/{name}", match[1])
    return TaintId(f"{domain}/{_NAMED.get(code) or _taint_name(code)}")


def validate_domain(domain: str, config_key: str) -> None:
    """Raise ConfigError if a domain is not valid in a taint's key."""
    if len(domain) > DOMAIN_CHARS:
        text = f"{domain!r} is {len(domain)} characters, limit {DOMAIN_CHARS}; shorten it"
        raise ConfigError(text, key=config_key)
    if not _DOMAIN.fullmatch(domain):
        raise ConfigError(f"{domain!r} is not a DNS subdomain, such as gpu.example.com", key=config_key)


def _taint_name(code: str) -> str:
    if _NAME.fullmatch(code) and code not in RESERVED_NAMES:
        return code
    digest = hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    head = _ILLEGAL.sub("-", code)[: NAME_CHARS - len(digest) - 1].strip("-_.")
    return f"{head}-{digest}" if head else digest
