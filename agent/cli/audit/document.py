"""What ``drahealth audit`` found, for programs: all of it. Keys are only ever added. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from agent.allocatable.knobs import Knob, file_of
from agent.cli.audit.text import Shown, compared_of, limited, unread_of
from agent.cli.output.document import API_VERSION
from agent.model.cgroup import NO_LIMIT
from agent.model.cpuset import format_cpus
from agent.model.reading import Missing
from agent.model.time import rfc3339

if TYPE_CHECKING:
    from agent.allocatable.evaluate import JudgedPod
    from agent.allocatable.facts import NodeFacts
    from agent.allocatable.verdicts import Compared


def document(shown: Shown) -> dict[str, Any]:
    """As JSON has it."""
    audit, facts, told = shown.audit, shown.audit.facts, shown.told
    return {
        "apiVersion": API_VERSION,
        "node": shown.node,
        "at": rfc3339(shown.now_s),
        "cgroups": facts and _facts(facts),
        "source": {
            "origin": told.witness.origin,
            "read": rfc3339(told.witness.read.wall_s),
            "written": rfc3339(told.witness.written_s) if told.witness.written_s else None,
            "pods": len(told.items),
            "absence": told.absence,
            "why": told.why,
        },
        "pods": [_pod(pod, facts) for pod in audit.pods],
        "classes": [_knob(one, facts) for one in audit.classes],
        "unread": list(unread_of(shown)),
        "notKnown": list(audit.gaps),
        "summary": dict(Counter(one.verdict.value for one in compared_of(audit))),
    }


def _facts(facts: NodeFacts) -> dict[str, Any]:
    return {
        "version": facts.version,
        "driver": facts.driver,
        "pageBytes": facts.page_bytes,
        "hugepageSizesKiB": list(facts.hugepages_kib),
        "countsClaims": facts.counts_claims,
    }


def _pod(pod: JudgedPod, facts: NodeFacts | None) -> dict[str, Any]:
    return {
        "namespace": pod.pod.namespace,
        "name": pod.pod.name,
        "uid": pod.pod.uid,
        "qosClass": pod.pod.qos,
        "claims": list(pod.pod.claims),
        "knobs": [_knob(one, facts) for one in pod.compared],
        "risks": [
            {"code": risk.code, "container": risk.container, "what": risk.what, "advice": risk.advice}
            for risk in pod.risks
        ],
        "notRunning": list(pod.idle),
    }


def _knob(one: Compared, facts: NodeFacts | None) -> dict[str, Any]:
    accepted = one.expected.accepted
    return {
        "level": one.group.level,
        "qosClass": one.group.qos,
        "container": one.group.container,
        "knob": one.knob.knob,
        "sizeKiB": one.knob.size_kib or None,
        "file": file_of(one.knob, facts.version).name if facts else None,
        "expected": [_value(one, option.value) for option in accepted],
        "arithmetic": one.expected.arithmetic,
        "actual": None if isinstance(one.actual, Missing) else _value(one, limited(one, one.actual)),
        "verdict": one.verdict,
        "why": one.why,
        "risk": one.risk,
    }


def _value(one: Compared, value: int) -> int | str:
    """Sets of CPUs as the kernel lists them, and ``max`` for no limit: JSON's numbers end at 2^53."""
    if one.knob.knob in {Knob.CPUS, Knob.EFFECTIVE}:
        return format_cpus(value) if value else ""
    return "max" if value == NO_LIMIT else value
