"""Redaction of secrets in text: passwords, tokens and private keys are replaced. Pure.

No file of the agent needs a secret. A log line, a configuration file or a text of a driver can have one.
"""

from __future__ import annotations

import re
from typing import Final

REDACTED: Final = "<redacted>"

_SECRET_WORD: Final = (
    r"(?:token|passw(?:or)?d|passphrase|secret|api[_-]?key|authorization|credentials?|cookie)"
)
_NAME: Final = rf"(?<![\w.-])[\w.-]{{0,64}}?{_SECRET_WORD}[\w.-]{{0,64}}"

_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
)
_VALUE: Final = re.compile(
    rf"""(?P<name>{_NAME}(?P<quote>\\?["'])?\s{{0,8}}[:=]\s{{0,8}})
    (?P<value> \\"(?:[^"\\]|\\[^"])*\\" | "(?:[^"\\]|\\.)*" | '[^']*'
    | \[[^\]]{{0,4096}}\] | \{{[^{{}}]{{0,4096}}\}}
    | (?:bearer|basic|digest)\s+[^\s,;"'\\]+ | [^\s,;\}}\]"'\\]+ )""",
    re.IGNORECASE | re.VERBOSE,
)
"""Pattern of a name such as ``api-key`` with its value.

It matches in TOML, YAML, JSON, environment variables and headers.
"""
_FLAG: Final = re.compile(
    rf"(?P<name>--[\w-]{{0,64}}?{_SECRET_WORD}[\w-]{{0,64}}\s+)(?P<value>[^\s\"'\\-][^\s\"'\\]*)", re.I
)
_SHAPES: Final = (
    re.compile(r"(?P<name>\b(?:bearer|basic)\s+)(?P<value>[\w.~+/=-]{8,})", re.IGNORECASE),
    re.compile(r"(?P<name>\b\w{1,32}://)(?P<value>[^\s/@:\"']{0,256}:[^\s/@\"']{1,256})(?=@)"),
    re.compile(r"(?P<name>)(?P<value>\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"),
    re.compile(r"(?P<name>)(?P<value>\b(?:AKIA|ASIA)[A-Z0-9]{16}\b)"),
    re.compile(r"(?P<name>)(?P<value>\bgh[pousr]_\w{20,})"),
)
"""Patterns of values that are secrets under any name.

They are parts of HTTP headers and URLs, JSON web tokens, and keys of AWS and GitHub.
"""


def redact(text: str) -> tuple[str, int]:
    """Return `text` with secrets replaced by REDACTED, and how many were replaced. JSON stays JSON."""
    text, count = _PRIVATE_KEY.subn(REDACTED, text)
    for pattern in (_VALUE, _FLAG, *_SHAPES):
        text, found = pattern.subn(_without_value, text)
        count += found
    return text, count


def _without_value(found: re.Match[str]) -> str:
    value, groups = found["value"], found.groupdict()
    if value.startswith('\\"'):
        return f'{found["name"]}\\"{REDACTED}\\"'
    quote = value[0] if value[0] in "\"'" else groups.get("quote") or ""
    return f"{found['name']}{quote}{REDACTED}{quote}"
