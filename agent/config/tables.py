"""Parsers of the configuration's tables ``[[rules]]`` and ``[[check]]``. Imported only if one is configured.

``[[rules]]`` changes single rules and needs the tables of all rules; ``[[check]]`` defines a check that runs
a command.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

from agent.config.values import (
    S,
    format_duration,
    format_size,
    number_within,
    parse_bool,
    parse_count,
    parse_duration,
    parse_size,
    parse_string,
    parse_whole_seconds,
    seconds_within,
    size_within,
)
from agent.errors import suggestion
from agent.health.declared.verdicts import DECLARED_GPU_RULES
from agent.health.gpu.faults.decide_severity import is_latched_fault_code
from agent.health.gpu.faults.fault_log import ROW_BY_CODE
from agent.health.gpu.rule_state import gpu_rules
from agent.health.gpu.xid.xid_table import XIDS
from agent.health.host.verdicts import ALL_HOST_RULES
from agent.health.rules import FAMILY, SXID_PREFIX, XID_PREFIX, Rule, matches_code
from agent.model.health import Repair, Severity
from agent.model.json_values import format_short
from agent.model.settings import CustomCheck, GpuLimits, RuleOverride
from agent.prepare.failure_kinds import FAILURE_KINDS

RULES_MAX: Final = 64
TYPO_SIMILARITY: Final = 0.85
"""Least similarity to a known code of a code that can only be a typo, see :func:`suggestion`."""
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


def rules_to_tables(rules: Iterable[RuleOverride]) -> list[dict[str, Any]]:
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
    rules = _rules_of_code(code, f"rule {number}: code: no rule that can be changed has")
    if "*" in code.removesuffix(FAMILY):
        raise ValueError(f"rule {number}: code: {code!r}: '*' may only be the last part, as in gpu.ecc.*")
    if not entry.keys() & set(KEYS[2:]):
        raise ValueError(f"rule {number}: nothing is changed; set {', '.join(KEYS[2:-1])} or {KEYS[-1]}")
    keys = _RULE_KEYS | {"limit": ("limit", partial(_limit, code, rules))}
    return RuleOverride(**_parse_keys(f"rule {number}", entry, keys))


def _parse_keys(
    label: str, entry: Mapping[str, Any], keys: Mapping[str, tuple[str, Callable[[object], Any]]]
) -> dict[str, Any]:
    """Return the fields for a table's values. An error names the table by its label, and the key."""
    fields: dict[str, Any] = {}
    for key, value in entry.items():
        field, parse = keys[key]
        try:
            fields[field] = parse(value)
        except ValueError as error:
            raise ValueError(f"{label}: {key}: {error}") from None
        except TypeError as error:
            raise TypeError(f"{label}: {key}: {error}") from None
    return fields


def check_evicting_codes(codes: Iterable[str]) -> None:
    """Check the codes and families in ``taints.evict``; raises ValueError if one is nearly a known one.

    Drivers choose the codes of their checks and errors, also in the agent's families.
    """
    more = [kind.code for kind in FAILURE_KINDS] + [rule.code for rule in DECLARED_GPU_RULES]
    for code in sorted(codes):
        _rules_of_code(code, "no fault has", more)


def _rules_of_code(code: str, problem: str, more: Sequence[str] = ()) -> list[Rule]:
    """Return the rules on readings whose finding code matches `code`, a code or a family as ``gpu.ecc.*``.

    A code outside the agent's families belongs to a driver's own check. Raises ValueError, with `problem`
    first, if `code` is in one of the agent's families, and neither such a rule nor `more` has the code. With
    `more` it has to be nearly a known one, too.
    """
    rules: tuple[Rule, ...] = tuple(chain(ALL_HOST_RULES, gpu_rules(GpuLimits())))
    known = [*(rule.code for rule in rules), *ROW_BY_CODE]
    numbered = (f"{XID_PREFIX}*", f"{SXID_PREFIX}*")
    is_known = (
        code in numbered
        or is_latched_fault_code(code)
        or any(matches_code(code, name) for name in (*known, *more))
    )
    is_own = code.partition(".")[0] in {name.partition(".")[0] for name in known}
    if not is_known and (is_own or "." not in code):
        known += [*numbered, *(f"{XID_PREFIX}{number}" for number in XIDS), *more]
        is_strict = not more or "." not in code
        near = suggestion(code, known, 0.6 if is_strict else TYPO_SIMILARITY)
        if near or is_strict:
            near = near or "; 'drahealth checks' lists the codes"
            raise ValueError(f"{problem} the code {code!r}{near}")
    return [rule for rule in rules if matches_code(code, rule.code)]


def _rule_severity(value: object) -> Severity:
    try:
        return _severity(value)
    except ValueError as error:
        raise ValueError(f"{error}; or set off") from None


def _probation_s(value: object) -> int:
    seconds = parse_whole_seconds(value)
    seconds_within(0, PROBATION_MAX_S)(seconds)
    return seconds


def _limit(code: str, rules: Sequence[Rule], value: object) -> int:
    """Return the value of ``limit`` in a table ``[[rules]]``.

    Raises ValueError if one of `rules` has no limit that can be set, or if the value is not valid.
    """
    without = [rule.code for rule in rules if not rule.limit_in_view]
    if without or not rules:
        raise ValueError(
            f"rule {without[0] if without else code} has no limit that can be set; remove the key limit"
        )
    most = 100 if any(rule.limit_in_view.endswith("percent") for rule in rules) else LIMIT_MAX
    return _count(most, value)


# --- [[check]] ---------------------------------------------------------------------------------------------

CHECKS_MAX: Final = 64
NAME_BYTES: Final = 40
DEVICES_CHARS: Final = 320
"""Longest pattern of device names [characters]: names have a driver, a pool and a device."""
ADVICE_BYTES: Final = 300
ARGUMENTS_MAX: Final = 64
COMMAND_BYTES: Final = 4096
PERIOD_MIN_S, PERIOD_MAX_S = 1, 86_400
TIMEOUT_MIN_S, TIMEOUT_MAX_S = 0.1, 600
RUNS_MAX: Final = 1000
MEMORY_MIN, MEMORY_MAX = 4 << 20, 1 << 40
PROCESSES_MAX: Final = 4096
USER_MAX: Final = 2**32 - 2
_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_USER: Final = re.compile(r"[a-zA-Z_][-.\w]{0,31}", re.ASCII)


def parse_checks(value: object) -> tuple[CustomCheck, ...]:
    """Parse the tables ``[[check]]`` of the configuration.

    Raises:
        ValueError: A value is wrong; the text has the name of the check, the value and the limit.
        TypeError: A value has the wrong type; the text has the name of the check and the value.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is not a list of checks; begin each check with [[check]]")
    checks = tuple(_parse_check(number, entry) for number, entry in enumerate(value, 1))
    check_names(checks)
    return checks


def check_names(checks: Sequence[CustomCheck]) -> None:
    """Check that there are at most CHECKS_MAX checks, each with a unique name; raises ValueError."""
    if len(checks) > CHECKS_MAX:
        raise ValueError(f"{len(checks)} custom checks, limit {CHECKS_MAX}; merge some into one command")
    names = [check.name for check in checks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"check {twice!r} is defined {names.count(twice)} times; give each a name of its own"
        )


def checks_to_tables(checks: Iterable[CustomCheck]) -> list[dict[str, Any]]:
    """Return checks as the tables ``[[check]]`` of a configuration file."""
    return [
        {
            key: shown
            for key, shown in (
                ("name", check.name),
                ("command", list(check.command)),
                ("devices", check.devices),
                ("period", format_duration(check.period_s * S)),
                ("timeout", format_duration(check.timeout_s * S)),
                ("severity", check.severity.name.lower()),
                ("advice", check.advice),
                ("repair", str(check.repair)),
                ("raise-after", check.raise_after),
                ("clear-after", check.clear_after),
                ("user", int(check.user) if check.user.isdecimal() else check.user),
                ("memory", format_size(check.memory)),
                ("processes", check.processes),
            )
            if shown != ""
        }
        for check in checks
    ]


def _parse_check(number: int, entry: object) -> CustomCheck:
    if not isinstance(entry, Mapping):
        raise TypeError(f"check {number}: {entry!r} is not a table of {', '.join(_KEYS)}")
    label = repr(entry["name"]) if isinstance(entry.get("name"), str) else str(number)
    for key in entry:
        if key not in _KEYS:
            raise ValueError(f"check {label}: unknown key {key!r}{suggestion(str(key), _KEYS)}")
    for key in ("name", "command"):
        if key not in entry:
            raise ValueError(f"check {label}: {key} is missing; each check needs a name and a command")
    check = CustomCheck(**_parse_keys(f"check {label}", entry, _KEYS))
    if "timeout" not in entry and check.timeout_s > check.period_s:
        check = check._replace(timeout_s=check.period_s)
    if check.timeout_s > check.period_s:
        timeout, period = format_duration(check.timeout_s * S), format_duration(check.period_s * S)
        raise ValueError(f"check {label}: timeout: {timeout} is over the period ({period}); lower it")
    if check.is_per_device and not check.devices:
        raise ValueError(
            f"check {label}: command: {{device}} needs a pattern of device names; set the key devices"
        )
    return check


def _name(value: object) -> str:
    name = parse_string(value)
    if len(name) > NAME_BYTES or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a DNS label of at most {NAME_BYTES} bytes, such as fabric-up")
    return name


def _command(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(argument, str) for argument in value):
        raise TypeError(f"{value!r} is not a list of strings: a program and its arguments")
    if not 1 <= len(value) <= ARGUMENTS_MAX:
        raise ValueError(
            f"the command has {len(value)} arguments; it must have 1 to {ARGUMENTS_MAX}, with the program"
        )
    size = sum(len(argument.encode(errors="surrogateescape")) + 1 for argument in value)
    if size > COMMAND_BYTES:
        raise ValueError(f"the command has {size} bytes, limit {COMMAND_BYTES}; put it into a script")
    if not value[0].startswith("/"):
        raise ValueError(f"program {value[0]!r} is not an absolute path; PATH is not searched")
    if any("\0" in argument for argument in value):
        raise ValueError("an argument of the command has a zero byte; remove it")
    return tuple(value)


def _devices(value: object) -> str:
    pattern = parse_string(value)
    if not 1 <= len(pattern) <= DEVICES_CHARS:
        raise ValueError(
            f"pattern of device names is {len(pattern)} characters long; it must have 1 to {DEVICES_CHARS}"
        )
    return pattern


def _period_s(value: object) -> int:
    seconds = parse_whole_seconds(value)
    seconds_within(PERIOD_MIN_S, PERIOD_MAX_S)(seconds)
    return seconds


def _timeout_s(value: object) -> float:
    seconds = parse_duration(value) / S
    seconds_within(TIMEOUT_MIN_S, TIMEOUT_MAX_S)(seconds)
    return seconds


def _severity(value: object) -> Severity:
    if not isinstance(value, str) or value not in SEVERITIES:
        raise ValueError(f"{format_short(value)} is not one of {', '.join(SEVERITIES)}")
    return SEVERITIES[value]


def _advice(value: object) -> str:
    advice = " ".join(parse_string(value).split())
    if (size := len(advice.encode())) > ADVICE_BYTES:
        raise ValueError(f"text is {size} bytes, limit {ADVICE_BYTES}; shorten it")
    return advice


def _repair(value: object) -> Repair:
    try:
        return Repair(parse_string(value))
    except ValueError:
        raise ValueError(f"{value!r} is not one of {', '.join(Repair)}") from None


def _count(most: int, value: object) -> int:
    number = parse_count(value)
    number_within(1, most)(number)
    return number


def _memory(value: object) -> int:
    size = parse_size(value)
    size_within(MEMORY_MIN, MEMORY_MAX)(size)
    return size


def _user(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        number_within(0, USER_MAX)(value)
        return str(value)
    name = parse_string(value)
    if not _USER.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a user; write a name, or a user id without quotes")
    return name


_KEYS: Final[dict[str, tuple[str, Callable[[object], Any]]]] = {
    "name": ("name", _name),
    "command": ("command", _command),
    "devices": ("devices", _devices),
    "period": ("period_s", _period_s),
    "timeout": ("timeout_s", _timeout_s),
    "severity": ("severity", _severity),
    "advice": ("advice", _advice),
    "repair": ("repair", _repair),
    "raise-after": ("raise_after", partial(_count, RUNS_MAX)),
    "clear-after": ("clear_after", partial(_count, RUNS_MAX)),
    "user": ("user", _user),
    "memory": ("memory", _memory),
    "processes": ("processes", partial(_count, PROCESSES_MAX)),
}

_RULE_KEYS: Final[dict[str, tuple[str, Callable[[object], Any]]]] = {
    "code": ("code", parse_string),
    "device": ("device", _devices),
    "off": ("off", parse_bool),
    "severity": ("severity", _rule_severity),
    "probation": ("probation_s", _probation_s),
}
