"""Redaction of records: names of pods, namespaces, claims, nodes and NFS servers, serial numbers and UUIDs
are replaced by pseudonyms. Pure.

The first step collects the sensitive texts from the fields that have them. The second step replaces these
texts in every text, also in log lines and evidence, and replaces every UUID and container ID. With one key,
equal originals have equal pseudonyms.
"""

import hmac
import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Any, Final

from agent.engine.step import EngineState
from agent.health.gpu.xid.log_lines import GPU_LOG_PATTERNS
from agent.health.kernel_log.facts import HOST_PATTERNS, KernelLogFact
from agent.model.machine_samples import LogLine
from agent.model.pod_findings import PodsSample
from agent.model.reading import SourceSample
from agent.model.settings import DEVICE_ARGUMENT, CustomCheck
from agent.record.events import CLASSES, DeviceVerdict, RecordedStep, SegmentHead

UUID: Final = re.compile(r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32,}", re.IGNORECASE)
"""Pattern of a UUID, with underscores as in a cgroup's name, and of a container id in a cgroup path."""
_NAME: Final = r"[A-Za-z0-9_.-]"
_NAME_GOES_ON: Final = r"[A-Za-z0-9]|[_.-]+[A-Za-z0-9]"
"""Pattern of the text after a sensitive text that is only a part of a longer name."""
_NODE_GOES_ON: Final = r"[A-Za-z0-9]|[_-]+[A-Za-z0-9]"
"""As _NAME_GOES_ON, for the name of a node: a domain can follow the whole name."""
_HEX: Final = "0123456789abcdef"
_NFS_SERVER: Final = re.compile(r"(?:nfs|nfsacl|lockd): server (\S+) ")
"""Pattern of the kernel log's lines about an NFS server."""


class TermKind(StrEnum):
    """Kind of a sensitive text, such as the name of a node.

    The pseudonym of a name begins with its kind.
    """

    NODE = "node"
    NAMESPACE = "ns"
    POD = "pod"
    CLAIM = "claim"
    SERVER = "server"
    IDENTIFIER = "identifier"
    """UUID, UID, container id, GUID or serial number: the pseudonym has the same shape."""


SENSITIVE: Final[Mapping[str, Mapping[str, TermKind]]] = {
    "EngineSettings": {"node": TermKind.NODE},
    "DriverDevice": {"pool": TermKind.NODE},
    "DeviceRef": {"pool": TermKind.NODE},
    "DeviceHealth": {"pool": TermKind.NODE},
    "ClaimRef": {"namespace": TermKind.NAMESPACE, "name": TermKind.CLAIM, "uid": TermKind.IDENTIFIER},
    "CgroupSample": {"pod_uid": TermKind.IDENTIFIER, "container": TermKind.IDENTIFIER},
    "PodFinding": {"pod_uid": TermKind.IDENTIFIER},
    "GpuSample": {"uuid": TermKind.IDENTIFIER, "serial": TermKind.IDENTIFIER},
    "GpuAttributes": {"uuid": TermKind.IDENTIFIER, "serial": TermKind.IDENTIFIER},
    "GpuOsSample": {"boot_id": TermKind.IDENTIFIER},
    "MigSample": {"uuid": TermKind.IDENTIFIER},
    "KnownGpu": {"uuid": TermKind.IDENTIFIER},
    "PersistentFault": {"uuid": TermKind.IDENTIFIER, "boot_id": TermKind.IDENTIFIER},
    "DeclaredGpuDevice": {"uuid": TermKind.IDENTIFIER},
    "NicSample": {"guid": TermKind.IDENTIFIER},
    "NicBaseline": {"guid": TermKind.IDENTIFIER},
    "BootBaseline": {"boot_id": TermKind.IDENTIFIER},
    "GpuBaseline": {"uuid": TermKind.IDENTIFIER},
}
"""Fields with sensitive texts and their kind, by name of the recorded class."""

_FIELDS: Final = {kind.type: kind.names for kind in CLASSES if not kind.is_enum}
_RESERVED: Final = frozenset(
    str(member.value)
    for kind in CLASSES
    if kind.is_enum
    for member in kind.type  # type: ignore[attr-defined]
).union(*(re.findall(f"{_NAME}+", pattern) for pattern in (*HOST_PATTERNS, *GPU_LOG_PATTERNS)))
"""Values of enums and words of kernel-log patterns, which are kept although a name may equal one."""
_KEPT_FIELDS: Final = frozenset({"check", "checks", "code", "device", "driver", "drivers"})
"""Fields whose texts are kept although a name may equal one, because verdicts depend on them."""


class Redactor:
    """Replacement of sensitive texts in a record by pseudonyms.

    Call :meth:`collect` with all values of the record before any text is replaced.
    """

    def __init__(self, key: bytes) -> None:
        """Create a redactor with the secret `key`.

        A reader who has the key can compute the pseudonym of a guessed name.
        """
        self._key = key
        self._terms: dict[str, TermKind] = {}
        self._kept: set[str] = set()
        """Names of devices, drivers, checks and sources, and codes of causes."""
        self._pattern: re.Pattern[str] | None = None
        self._texts: dict[str, str] = {}
        self._collected: dict[int, Any] = {}
        """Parts of the last collected value by identity; equal objects need no second search."""
        self._memo: dict[int, tuple[Any, Any]] = {}
        """Parts of the last redacted snapshot by identity, each with its redacted form."""

    # --- first pass ------------------------------------------------------------------------------------

    def collect(self, value: Any) -> None:
        """Collect the sensitive texts in a recorded value and its parts, so that they are replaced later."""
        if isinstance(value, RecordedStep):
            for verdict in value.verdicts:
                self._kept.update([verdict.subject.rpartition("/")[2], *(code for code, _ in verdict.causes)])
            value = value.snapshot
        seen: dict[int, Any] = {}
        self._collect(value, seen)
        self._collected = seen

    def _collect(self, value: Any, seen: dict[int, Any]) -> None:
        if isinstance(value, (str, int, float, bytes, type(None))) or id(value) in seen:
            return
        seen[id(value)] = value
        if id(value) in self._collected:
            return
        names = _FIELDS.get(type(value))
        if isinstance(value, PodsSample):
            for uid in (*value.uses, *value.names):
                self._add(uid, TermKind.IDENTIFIER)
            for name in value.names.values():
                namespace, _, pod = str(name).partition("/")
                self._add(namespace, TermKind.NAMESPACE)
                self._add(pod, TermKind.POD)
        if names is not None:
            for name, kind in SENSITIVE.get(type(value).__name__, {}).items():
                self._add(getattr(value, name), kind)
            for server in _NFS_SERVER.findall(value.text) if type(value) in (LogLine, KernelLogFact) else ():
                self._add(server, TermKind.SERVER)
            for name in names:
                part = getattr(value, name)
                is_kept_name = name == "name" and type(value) in (SourceSample, CustomCheck)
                if is_kept_name or name in _KEPT_FIELDS:
                    texts = part if type(part) is tuple else (part,)
                    self._kept.update(text for text in texts if type(text) is str)
                self._collect(part, seen)
        elif isinstance(value, Mapping):
            for part in (*value, *value.values()):
                self._collect(part, seen)
        elif isinstance(value, Iterable):
            for part in value:
                self._collect(part, seen)

    def _add(self, text: Any, kind: TermKind) -> None:
        if isinstance(text, str) and text and text not in _RESERVED:
            self._terms.setdefault(text, kind)

    def add_head(self, head: SegmentHead) -> None:
        """Collect the sensitive texts in a segment's head, which names the node and its boot."""
        self._add(head.node, TermKind.NODE)
        if not (host := head.node.partition(".")[0]).isdecimal():  # an address has no host name
            self._add(host, TermKind.NODE)
        self._add(head.boot_id, TermKind.IDENTIFIER)

    # --- second pass -----------------------------------------------------------------------------------

    def head(self, head: SegmentHead) -> SegmentHead:
        """Return the head of a segment without sensitive texts."""
        return head._replace(node=self.text(head.node), boot_id=self.text(head.boot_id), is_redacted=True)

    def state(self, state: EngineState) -> EngineState:
        """Return the engine's state without sensitive texts."""
        redacted: EngineState = self._redact(state, {})
        return redacted

    def step(self, step: RecordedStep) -> RecordedStep:
        """Return a recorded evaluation without sensitive texts.

        If a value is the same object as in the evaluation before, its redacted value is the same object, too.
        """
        memo: dict[int, tuple[Any, Any]] = {}
        snapshot = self._redact(step.snapshot, memo)
        self._memo = memo
        verdicts = tuple(DeviceVerdict(self.text(verdict.subject), *verdict[1:]) for verdict in step.verdicts)
        return step._replace(snapshot=snapshot, verdicts=verdicts)

    def _redact(self, value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
        if type(value) is str:
            return self.text(value)
        if isinstance(value, (str, int, float, bytes, type(None))):
            return value
        if known := memo.get(id(value)) or self._memo.get(id(value)):
            memo[id(value)] = known
            return known[1]
        result = self._redact_parts(value, memo)
        memo[id(value)] = (value, result)
        return result

    def _redact_parts(self, value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
        kind = type(value)
        if isinstance(value, CustomCheck):  # arguments may be passwords; with {device} each device has a run
            kept = (DEVICE_ARGUMENT if DEVICE_ARGUMENT in arg else "redacted" for arg in value.command[1:])
            value = value._replace(command=(*value.command[:1], *kept), user=value.user and "redacted")
        if names := _FIELDS.get(kind):
            parts = [self._redact(getattr(value, name), memo) for name in names]
            return kind._make(parts) if issubclass(kind, tuple) else kind(*parts)  # type: ignore[attr-defined]
        if isinstance(value, Mapping):
            return {self._redact(key, memo): self._redact(part, memo) for key, part in value.items()}
        if isinstance(value, AbstractSet):
            return frozenset(self._redact(part, memo) for part in value)
        if isinstance(value, (tuple, list)):
            return kind(self._redact(part, memo) for part in value)
        return value

    def text(self, text: str) -> str:
        """Return a text with each sensitive part replaced by its pseudonym."""
        known = self._texts.get(text)
        if known is None:
            if self._pattern is None:
                terms = sorted(self._terms.keys() - self._kept, key=len, reverse=True)
                ends = {TermKind.NODE: _NODE_GOES_ON}  # a text is replaced that is no part of a longer name
                names = "|".join(
                    f"{re.escape(term)}(?!{ends.get(self._terms[term], _NAME_GOES_ON)})" for term in terms
                )
                bounded = rf"(?<!{_NAME})(?:{names})|" if names else ""
                self._pattern = re.compile(f"{bounded}(?i:{UUID.pattern})")
            known = self._texts[text] = self._pattern.sub(lambda found: self._pseudonym(found[0]), text)
        return known

    def _pseudonym(self, text: str) -> str:
        kind = self._terms.get(text, TermKind.IDENTIFIER)
        prefix, dash, rest = text.partition("-")
        if kind is not TermKind.IDENTIFIER or not dash or prefix not in ("GPU", "MIG"):
            prefix, dash, rest = "", "", text
        original = rest.replace("_", "-") if kind is TermKind.IDENTIFIER else rest
        digest = hmac.digest(self._key, original.encode("utf-8", "surrogatepass"), "sha256").hex()
        if kind is not TermKind.IDENTIFIER:
            return f"{kind}-{digest[:10]}"
        digits = "0123456789" if rest.isdecimal() else _HEX
        stream = iter(digest * (len(rest) // len(digest) + 1))
        shaped = (digits[int(next(stream), 16) % len(digits)] if char.isalnum() else char for char in rest)
        return prefix + dash + "".join(shaped)
