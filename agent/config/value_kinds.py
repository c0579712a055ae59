"""Kinds of configuration values: how a value is parsed, written in a file, and described by a JSON schema."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent.config.values import (
    LOG_FORMATS,
    MS,
    S,
    format_duration,
    format_size,
    parse_bool,
    parse_cgroup_root,
    parse_count,
    parse_cpu_list,
    parse_duration,
    parse_hugepage_pools,
    parse_library,
    parse_listen_addresses,
    parse_names,
    parse_path,
    parse_size,
    parse_string,
    parse_whole_seconds,
    parse_xid_overrides,
)
from agent.errors import ConfigError
from agent.model.cpuset import format_cpus
from agent.model.health import Repair, XidOverride
from agent.model.prepare import ErrorClass
from agent.model.settings import CustomCheck, RuleOverride

if TYPE_CHECKING:
    from agent.prepare.error_tables import ErrorPattern


class ValueKind(NamedTuple):
    """Kind of the value of a setting, such as a duration or a list of CPUs."""

    parse: Callable[[object], object]
    """Function that converts the value in a file, variable or flag to the type of the field in Config.

    It raises ValueError or TypeError.
    """
    show: Callable[[Any], Any]
    """Function that converts the value of the field in Config to the value that a file has for it."""
    schema: Mapping[str, Any]
    """JSON schema of a value of this kind in a configuration file."""
    merge: Callable[[Any, Any], Any] | None = None
    """Function that joins the values of two files, the later one second.

    None: the later value replaces the earlier one.
    """


def _show_fractional_seconds(seconds: float) -> str:
    return format_duration(int(seconds * S) // MS * MS)  # not more than the value, which may be a limit


def _parse_patterns(value: object) -> tuple["ErrorPattern", ...]:
    from agent.prepare.error_tables import parse_patterns  # 4 ms, only if configured

    return parse_patterns(value)


def _join_patterns(
    earlier: tuple["ErrorPattern", ...], later: tuple["ErrorPattern", ...]
) -> tuple["ErrorPattern", ...]:
    from agent.prepare.error_tables import check_pattern_count

    joined = later + earlier  # the first match decides, and a later file takes precedence
    check_pattern_count(joined)
    return joined


def _show_patterns(patterns: tuple["ErrorPattern", ...]) -> list[dict[str, str]]:
    return [
        {"match": pattern.match.pattern, "code": pattern.code, "class": str(pattern.error_class)}
        | ({"summary": pattern.summary} if pattern.summary else {})
        for pattern in patterns
    ]


def _parse_rules(value: object) -> tuple[RuleOverride, ...]:
    from agent.config.tables import parse_rules  # needs the tables of all rules, only if configured

    return parse_rules(value)


def _join_rules(
    earlier: tuple[RuleOverride, ...], later: tuple[RuleOverride, ...]
) -> tuple[RuleOverride, ...]:
    from agent.config.tables import check_rule_count

    joined = earlier + later  # the last entry decides
    check_rule_count(joined)
    return joined


def _show_rules(rules: tuple[RuleOverride, ...]) -> list[dict[str, Any]]:
    if not rules:
        return []
    from agent.config.tables import rules_to_tables

    return rules_to_tables(rules)


def _parse_checks(value: object) -> tuple[CustomCheck, ...]:
    from agent.config.tables import parse_checks  # only if configured

    return parse_checks(value)


def _join_checks(earlier: tuple[CustomCheck, ...], later: tuple[CustomCheck, ...]) -> tuple[CustomCheck, ...]:
    from agent.config.tables import check_names

    joined = earlier + later
    check_names(joined)
    return joined


def _show_checks(checks: tuple[CustomCheck, ...]) -> list[dict[str, Any]]:
    if not checks:
        return []
    from agent.config.tables import checks_to_tables

    return checks_to_tables(checks)


def _parse_codes(value: object) -> frozenset[str]:
    from agent.config.tables import check_evicting_codes  # imported only if configured
    from agent.devices.taints import TaintPolicy

    try:
        codes = TaintPolicy(evict=frozenset(parse_names(value))).evict
    except ConfigError as error:
        raise ValueError(error.text) from None
    except TypeError:
        raise TypeError(f"{value!r} is not a list of finding codes, such as ['gpu.lost']") from None
    check_evicting_codes(codes)
    return codes


def _merge_tables(earlier: Mapping[Any, Any], later: Mapping[Any, Any]) -> dict[Any, Any]:
    return {**earlier, **later}


_DURATION_SCHEMA: Final = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? *(ns|us|ms|s|m|h|d)$"}
_SIZE_PATTERN: Final = r"^(0|[0-9]{1,12} *(KiB|MiB|GiB))$"
_SIZE_SCHEMA: Final = {"type": ["string", "integer"], "pattern": _SIZE_PATTERN, "minimum": 0, "maximum": 0}
_TEXT_SCHEMA: Final = {"type": "string"}
_NAMES_SCHEMA: Final = {"type": "array", "items": {"type": "string"}}

DURATION: Final = ValueKind(parse_duration, format_duration, _DURATION_SCHEMA)
"""Kind of a setting whose value is a duration; its field in Config has nanoseconds."""
SECONDS: Final = ValueKind(parse_whole_seconds, lambda s: format_duration(s * S), _DURATION_SCHEMA)
"""Kind of a setting whose value is a duration of whole seconds; its field in Config has seconds."""
FRACTIONAL_SECONDS: Final = ValueKind(
    lambda value: parse_duration(value) / S, _show_fractional_seconds, _DURATION_SCHEMA
)
"""Kind of a setting whose value is a duration; its field in Config has seconds."""
SIZE: Final = ValueKind(parse_size, format_size, _SIZE_SCHEMA)
COUNT: Final = ValueKind(parse_count, int, {"type": "integer"})
SWITCH: Final = ValueKind(parse_bool, bool, {"type": "boolean"})
TEXT: Final = ValueKind(parse_string, str, _TEXT_SCHEMA)
LOG_FORMAT: Final = ValueKind(parse_string, str, {"type": "string", "enum": list(LOG_FORMATS)})
"""Kind of a setting whose value is a format of the log: ``text`` or ``json``."""
PATH: Final = ValueKind(parse_path, str, _TEXT_SCHEMA)
LIBRARY: Final = ValueKind(parse_library, str, _TEXT_SCHEMA)
"""Kind of a setting whose value is the name or path of a shared library."""
CGROUP: Final = ValueKind(parse_cgroup_root, str, _TEXT_SCHEMA)
"""Kind of a setting whose value is a cgroup: a path from the root of the cgroup tree."""
CPUS: Final = ValueKind(
    parse_cpu_list, format_cpus, {"type": "string", "pattern": r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$"}
)
"""Kind of a setting whose value is a set of CPUs in the kernel's list format, such as ``0-3,8``."""
NAMES: Final = ValueKind(parse_names, list, _NAMES_SCHEMA)
"""Kind of a setting whose value is a list of names, such as those of DRA drivers."""
ADDRESSES: Final = ValueKind(parse_listen_addresses, lambda found: list(map(str, found)), _NAMES_SCHEMA)
"""Kind of a setting whose value is a list of addresses of listening sockets."""
CODES: Final = ValueKind(_parse_codes, sorted, _NAMES_SCHEMA)
"""Kind of a setting whose value is a list of finding codes and of families of codes."""
POOLS: Final = ValueKind(
    parse_hugepage_pools,
    dict,
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
    _merge_tables,
)
"""Kind of a setting whose value is a table: number of pages by name of the hugepage device."""
XIDS: Final = ValueKind(
    parse_xid_overrides,
    lambda xids: {str(code): str(severity) for code, severity in sorted(xids.items())},
    {
        "type": "object",
        "patternProperties": {"^[1-9][0-9]{0,2}$": {"enum": [str(override) for override in XidOverride]}},
        "additionalProperties": False,
    },
    _merge_tables,
)
"""Kind of a setting whose value is a table: severity by number of the XID."""
PATTERNS: Final = ValueKind(
    _parse_patterns,
    _show_patterns,
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "match": _TEXT_SCHEMA,
                "code": _TEXT_SCHEMA,
                "class": {"enum": [str(name) for name in ErrorClass]},
                "summary": _TEXT_SCHEMA,
            },
            "required": ["match", "code", "class"],
            "additionalProperties": False,
        },
    },
    _join_patterns,
)
"""Kind of a setting whose value is a list of patterns of prepare errors."""
RULES: Final = ValueKind(
    _parse_rules,
    _show_rules,
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "code": _TEXT_SCHEMA,
                "device": _TEXT_SCHEMA,
                "off": {"type": "boolean"},
                "severity": {"enum": ["info", "degraded", "unhealthy"]},
                "probation": _DURATION_SCHEMA,
                "limit": {"type": "integer", "minimum": 1, "maximum": 1_000_000},
            },
            "required": ["code"],
            "additionalProperties": False,
        },
    },
    _join_rules,
)
"""Kind of the setting ``[[rules]]``: a list of changes of rules."""
CHECKS: Final = ValueKind(
    _parse_checks,
    _show_checks,
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 40},
                "command": {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": 64},
                "devices": _TEXT_SCHEMA,
                "period": _DURATION_SCHEMA,
                "timeout": _DURATION_SCHEMA,
                "severity": {"enum": ["info", "degraded", "unhealthy"]},
                "advice": _TEXT_SCHEMA,
                "repair": {"enum": [str(repair) for repair in Repair]},
                "raise-after": {"type": "integer", "minimum": 1, "maximum": 1000},
                "clear-after": {"type": "integer", "minimum": 1, "maximum": 1000},
                "user": {"type": ["string", "integer"]},
                "memory": _SIZE_SCHEMA,
                "processes": {"type": "integer", "minimum": 1, "maximum": 4096},
            },
            "required": ["name", "command"],
            "additionalProperties": False,
        },
    },
    _join_checks,
)
"""Kind of the setting ``[[check]]``: a list of checks that the operator configures as commands."""
