"""Parser of ``[[rules]]``: changes of single rules by the operator.
Imported only if configured: it needs the tables of all rules."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from agent.config.values import (
    S,
    format_duration,
    number_within,
    parse_bool,
    parse_count,
    parse_whole_seconds,
    seconds_within,
)
from agent.errors import suggestion
from agent.health.gpu.catalog import gpu_rules
from agent.health.gpu.faults.evaluate import is_latched_fault_code
from agent.health.gpu.faults.event_fault_table import ROW_BY_CODE
from agent.health.gpu.faults.fault_log import SXID_PREFIX, XID_PREFIX
from agent.health.host.catalog import ALL_HOST_RULES
from agent.health.rule_changes import FAMILY, matches_code
from agent.health.rules import Rule
from agent.model.health import Severity
from agent.model.settings import GpuLimits, RuleOverride

RULES_MAX: Final = 64
DEVICE_CHARS: Final = 320
"""Longest pattern of device names [characters]: names have a driver, a pool and a device."""
PROBATION_MAX_S: Final = 86_400
LIMIT_MAX: Final = 1_000_000
KEYS: Final = ("code", "device", "off", "severity", "probation", "limit")
SEVERITIES: Final = {
    str(severity.name.lower()): severity
    for severity in (Severity.INFO, Severity.DEGRADED, Severity.UNHEALTHY)
}


def parse_rules(value: object) -> tuple[RuleOverride, ...]:
    """Parse the tables ``[[rules]]`` of the configuration.

    Raises:
        ValueError: A value is wrong; the text has the number of the table, the value and the limit.
        TypeError: A value has the wrong type; the text has the number of the table and the value.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is not a list of rules; begin each rule with [[rules]]")
    check_rule_count(value)
    return tuple(_parse_rule(number, entry) for number, entry in enumerate(value, 1))


def check_rule_count(rules: Sequence[object]) -> None:
    """Check that the configuration has at most RULES_MAX tables ``[[rules]]``; raises ValueError."""
    if len(rules) > RULES_MAX:
        raise ValueError(f"{len(rules)} rules, limit {RULES_MAX}; use patterns such as gpu.ecc.*")


def show_rules(rules: Iterable[RuleOverride]) -> list[dict[str, Any]]:
    """Return changes of rules as the tables ``[[rules]]`` of a configuration file."""
    return [
        {
            name: shown
            for name, shown in (
                ("code", rule.code),
                ("device", rule.device or None),
                ("off", rule.off),
                ("severity", rule.severity.name.lower() if rule.severity else None),
                ("probation", None if rule.probation_s is None else format_duration(rule.probation_s * S)),
                ("limit", rule.limit),
            )
            if shown is not None
        }
        for rule in rules
    ]


def _parse_rule(number: int, entry: object) -> RuleOverride:
    if not isinstance(entry, Mapping):
        raise TypeError(f"rule {number}: {entry!r} is not a table of {', '.join(KEYS)}")
    for key in entry:
        if key not in KEYS:
            raise ValueError(f"rule {number}: unknown key {key!r}{suggestion(str(key), KEYS)}")
    if "code" not in entry:
        raise ValueError(f"rule {number}: code is missing; each rule needs a code, and what to change")
    code = entry["code"]
    if not isinstance(code, str):
        raise TypeError(f"rule {number}: code: {code!r} is not a string; put it in quotes")
    rules = _check_code(number, code)
    if not entry.keys() & set(KEYS[2:]):
        raise ValueError(f"rule {number}: nothing is changed; set {', '.join(KEYS[2:-1])} or {KEYS[-1]}")
    try:
        return RuleOverride(
            code,
            _device(entry),
            parse_bool(entry["off"]) if "off" in entry else None,
            _severity(entry),
            _probation_s(entry),
            _limit(entry, code, rules),
        )
    except TypeError as error:
        raise TypeError(f"rule {number}: {error}") from None
    except ValueError as error:
        raise ValueError(f"rule {number}: {error}") from None


def _check_code(number: int, code: str) -> list[Rule]:
    """Return the rules on readings whose finding code matches ``code``, a code or a family of codes.

    Codes that do not belong to the agent's families are those of drivers' own checks. Raises ValueError if
    ``code`` is one of the agent's, but no rule has it that can be changed.
    """
    rules: tuple[Rule, ...] = tuple(chain(ALL_HOST_RULES, gpu_rules(GpuLimits())))
    known = [rule.code for rule in rules] + list(ROW_BY_CODE)
    numbered = (f"{XID_PREFIX}*", f"{SXID_PREFIX}*")
    is_known = (
        code in numbered or is_latched_fault_code(code) or any(matches_code(code, one) for one in known)
    )
    is_own = code.partition(".")[0] in {one.partition(".")[0] for one in known}
    if not is_known and (is_own or "." not in code):
        near = suggestion(code, known) or "; 'drahealth checks' lists the codes"
        raise ValueError(f"rule {number}: code: no rule that can be changed has the code {code!r}{near}")
    if "*" in code.removesuffix(FAMILY):
        raise ValueError(f"rule {number}: code: {code!r}: '*' may only be the last part, as in gpu.ecc.*")
    return [rule for rule in rules if matches_code(code, rule.code)]


def _device(entry: Mapping[str, Any]) -> str:
    device = entry.get("device", "*")
    if not isinstance(device, str):
        raise TypeError(f"device: {device!r} is not a string; put it in quotes")
    if not device or len(device) > DEVICE_CHARS:
        raise ValueError(
            f"device: pattern of device names is {len(device)} characters long; it must have 1 to "
            f"{DEVICE_CHARS}"
        )
    return "" if device == "*" and "device" not in entry else device


def _severity(entry: Mapping[str, Any]) -> Severity | None:
    if "severity" not in entry:
        return None
    if entry["severity"] not in SEVERITIES:
        raise ValueError(f"severity: {entry['severity']!r} is not one of {', '.join(SEVERITIES)}; or set off")
    return SEVERITIES[entry["severity"]]


def _probation_s(entry: Mapping[str, Any]) -> int | None:
    if "probation" not in entry:
        return None
    try:
        seconds = parse_whole_seconds(entry["probation"])
        seconds_within(0, PROBATION_MAX_S)(seconds)
    except ValueError as error:
        raise ValueError(f"probation: {error}") from None
    return seconds


def _limit(entry: Mapping[str, Any], code: str, rules: Sequence[Rule]) -> int | None:
    """Return the ``limit`` of a table ``[[rules]]``; None: it has none.

    All rules with its code must have a limit that can be set; raises ValueError.
    """
    if "limit" not in entry:
        return None
    without = [rule.code for rule in rules if not rule.limit_in_view]
    if without or not rules:
        raise ValueError(
            f"limit: rule {without[0] if without else code} has no limit that can be set; remove the key "
            "limit"
        )
    most = 100 if any(rule.limit_in_view.endswith("percent") for rule in rules) else LIMIT_MAX
    try:
        limit = parse_count(entry["limit"])
        number_within(1, most)(limit)
    except ValueError as error:
        raise ValueError(f"limit: {error}") from None
    except TypeError as error:
        raise TypeError(f"limit: {error}") from None
    return limit
