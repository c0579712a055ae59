"""Keys and values of taints, derived from the code of a cause. Pure.

A key has the form of a label name: a domain of at most 253 characters, a slash, a name of at most 63.
"""

import hashlib
import re
from typing import Final, NamedTuple

from agent.errors import ConfigError

UNMONITORED: Final = "unmonitored"
"""Name of the taint of a device that has been Unknown for a minute."""
MORE: Final = "more-causes"
"""Name of the taint of a device with more causes than taints are allowed."""
DOMAIN_CHARS: Final = 253
NAME_CHARS: Final = 63
"""Limit of a label name after its domain, and of a label value."""

_DOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME: Final = re.compile(rf"(?=.{{1,{NAME_CHARS}}}\Z)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ILLEGAL: Final = re.compile(r"[^-A-Za-z0-9_.]")
_NUMBERED: Final = (
    (re.compile(r"gpu\.xid\.([0-9]{1,9})"), "xid"),
    (re.compile(r"gpu\.fabric\.sxid\.([0-9]{1,9})"), "sxid"),  # SXid numbers are not XIDs
)
"""Patterns of cause codes whose number becomes the taint's value, each with the taint's name."""
_NAMED: Final = {"gpu.lost": "gpu-lost"}
RESERVED: Final = frozenset({UNMONITORED, MORE, *_NAMED.values(), *(name for _, name in _NUMBERED)})
"""Names of taints with a fixed meaning; a code that equals such a name gets another name."""


class TaintId(NamedTuple):
    """Identity of a taint of a device: at most one taint per key and value exists."""

    key: str
    value: str = ""


def taint_id(code: str, domain: str) -> TaintId:
    """Return key and value of the taint of a cause, in the form of label name and value.

    Most codes are used as names. Some are spelled as NVIDIA's driver does; a code that is not a label name,
    or that is reserved, gets a name with a hash of the code.
    """
    for pattern, name in _NUMBERED:
        if match := pattern.fullmatch(code):
            return TaintId(f"{domain}/{name}", match[1])
    return TaintId(f"{domain}/{_NAMED.get(code) or _name_of(code)}")


def check_domain(domain: str, key: str) -> None:
    """Check that a domain is valid in a label name.

    Raises:
        ConfigError: The domain is not a DNS subdomain of at most 253 characters; the message names the
        configuration key.
    """
    if len(domain) > DOMAIN_CHARS:
        raise ConfigError(f"{domain!r} is {len(domain)} characters, limit {DOMAIN_CHARS}", key=key)
    if not _DOMAIN.fullmatch(domain):
        raise ConfigError(f"{domain!r} is not a DNS subdomain, such as gpu.example.com", key=key)


def _name_of(code: str) -> str:
    if _NAME.fullmatch(code) and code not in RESERVED:
        return code
    digest = hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    head = _ILLEGAL.sub("-", code)[: NAME_CHARS - len(digest) - 1].strip("-_.")
    return f"{head}-{digest}" if head else digest
