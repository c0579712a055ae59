"""Detectors that the scoreboard compares: the agent on a simulated node, and others by their published
patterns.

The simulated node feeds the log lines of an incident to the C core's reader through a file, and simulates
NVML; the agent's own code evaluates them. Each line or NVML change is followed by evaluations,
as the agent's engine would make them.

The patterns of other detectors are facts in the files of ``corpus/detectors``, with origin and version.
"""

import os
import re
import select
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agent.engine.step import initial_state, step
from agent.health.gpu.h100_readings import IDLE_H100, LINKS
from agent.health.gpu.xid.log_lines import GPU_LOG_PATTERNS
from agent.health.kernel_log.facts import HOST_PATTERNS
from agent.model.declared_devices import DeclaredFile, DeclaredPciDevice, DriverDevice
from agent.model.gpu import (
    WHOLE_GPU,
    GpuEvent,
    GpuField,
    GpuOsSample,
    GpuSample,
    NvmlReturnCode,
    NvmlSample,
    XidCount,
)
from agent.model.health import Severity
from agent.model.machine_samples import LogSample, MachineSample, NumaMemorySample, PciSample, PressureSample
from agent.model.reading import Absence, Missing, Reading, SourceSample, SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import CpuSetsSample, NativeCoreStats, NumaCpuSample, Snapshot
from agent.model.time import NS, Instant
from agent.native.kernel_events import KernelLogReader
from agent.scoreboard.incidents import NODE, CorpusError, LabelledIncident, NvmlChange, SeverityName

BYSTANDER_GPU: Final = "00fe:fe:00.0"
"""Healthy GPU of every node: a verdict on it is a false alarm."""
BYSTANDER_NIC: Final = "00fd:fd:00.0"
"""Healthy NIC that a driver has declared on every node."""
SETTLE_PASSES: Final = 6
SETTLE_S: Final = 10
"""Evaluations after the last line, and the time between two of them [s]: faults that need to last are then
reported."""
READ_S: Final = 60.0
"""Time that the log reader has to read a line [s]; it needs under 1 ms."""
_ABSENT: Final = Missing(Absence.ABSENT, 2)
_SOURCES: Final = (
    "cpus", "throttle", "hugepages", "cgroups", "edac", "memory", "cores", "pressure", "pci",
)  # fmt: skip
_NVML_SOURCES: Final = ("nvml", "nvml-events")
_CPUS: Final = 64
_GIB_KIB: Final = 1 << 20
_READ: Final = "scoreboard: line %d is read"
_HEALTHY_GPU: Final[Mapping[GpuField, Reading]] = {
    **dict.fromkeys(GpuField, 0),
    **IDLE_H100,
    # no line states the recovery action that the driver would report
    GpuField.RECOVERY_ACTION: _ABSENT,
    GpuField.RETIRED_SBE: _ABSENT,
    GpuField.RETIRED_DBE: _ABSENT,
    GpuField.RETIRED_PENDING: _ABSENT,
}
"""Readings of an idle, healthy H100."""


class Detection(NamedTuple):
    """Fault that a detector found."""

    device: str
    """PCI address, name of another device, or ``node``."""
    severity: Severity
    code: str
    evidence: str = ""


class SimulatedNode:
    """Simulated node with the GPUs and PCI functions of an incident; a file is its kernel log.

    Args:
        incident: Incident that :meth:`run` replays.
        folder: Empty folder for the log.
    """

    def __init__(self, incident: LabelledIncident, folder: Path) -> None:
        self._incident = incident
        self._log_path = folder / "kmsg"
        os.mkfifo(self._log_path)  # the reader is woken by each record; it polls a plain file
        self._now_ns = 1_000 * NS
        self._passes = 0
        self._records = 0
        self._log = LogSample((), self._source("kmsg", is_vital=False))
        self._gpus = {
            address: _healthy_gpu(number, address)
            for number, address in enumerate((*incident.gpus, BYSTANDER_GPU))
        }
        self._functions = tuple(
            PciSample(address, 0x15B3, 0x1021, "mlx5_core", "", 16, 16, 0, 0, 0)
            for address in (*incident.functions, BYSTANDER_NIC)
        )
        devices = tuple(
            DriverDevice("corpus.example.com", "node", each.address, DeclaredPciDevice(each.address, ""), 0)
            for each in self._functions
        )
        self._declared = (DeclaredFile("corpus.example.com", devices),)
        self._state = initial_state(EngineSettings("node"))
        self._found: dict[tuple[str, str], Detection] = {}

    def run(self) -> tuple[Detection, ...]:
        """Replay the incident; return the agent's worst verdict per device and code.

        Raises:
            TimeoutError: The log reader did not read a line.
        """
        wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pipe = os.open(self._log_path, os.O_RDWR | os.O_CLOEXEC)
        patterns = (*GPU_LOG_PATTERNS, *HOST_PATTERNS, _READ)
        reader = KernelLogReader(self._log_path, patterns, wake, any_facility=False)
        try:
            reader.start()
            self._evaluate(passes=2)
            start_ns = self._now_ns
            for after_s, change in self._changes():
                self._now_ns = max(self._now_ns, start_ns + after_s * NS)
                if isinstance(change, str):
                    self._print(change, reader, wake)
                else:
                    self._change_gpu(change)
                self._evaluate()
            self._evaluate(SETTLE_PASSES, SETTLE_S)
        finally:
            reader.stop(READ_S)
            os.close(self._pipe)
            os.close(wake)
        return tuple(self._found.values())

    def _changes(self) -> Iterator[tuple[int, str | NvmlChange]]:
        incident = self._incident
        lines = [(number * incident.interval_s, line) for number, line in enumerate(incident.log)]
        changes: list[tuple[int, str | NvmlChange]] = [
            *lines,
            *((change.after_s, change) for change in incident.nvml),
        ]
        yield from sorted(changes, key=lambda each: each[0])

    def _print(self, line: str, reader: KernelLogReader, wake: int) -> None:
        """Append a line to the simulated kernel log, and wait until the C core has read it."""
        us = self._now_ns // 1000
        escaped = line.replace("\n", "\\x0a")
        os.write(self._pipe, f"4,{self._records},{us},-;{escaped}\n".encode())
        mark = _READ.replace("%d", str(self._records))
        os.write(self._pipe, f"4,{self._records + 1},{us},-;{mark}\n".encode())
        self._records += 2
        deadline = time.monotonic() + READ_S
        while True:
            sample = reader.read()
            if sample and any(each.seq == self._records - 1 for each in sample.lines):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"incident {self._incident.name!r}: the log reader did not read {line!r}")
            if select.select([wake], [], [], 0.1)[0]:
                os.eventfd_read(wake)
        own = len(GPU_LOG_PATTERNS) + len(HOST_PATTERNS)
        self._log = replace(sample, lines=tuple(each for each in sample.lines if each.pattern != own))

    def _change_gpu(self, change: NvmlChange) -> None:
        gpu = self._gpus[change.gpu]
        readings = {**gpu.readings, **change.readings}
        if change.status:
            readings = {
                name: Missing(Absence.UNREADABLE) if isinstance(value, int) else value
                for name, value in readings.items()
            }
        elif gpu.status:
            readings = {**_HEALTHY_GPU, **change.readings}
        xids = gpu.xids
        if change.xid:
            xids = (*xids, XidCount(change.xid, WHOLE_GPU, WHOLE_GPU, 1, self._now_ns, self._now_ns))
        self._gpus[change.gpu] = replace(gpu, readings=readings, status=change.status, xids=xids)

    def _evaluate(self, passes: int = 1, pause_s: int = 1) -> None:
        for _ in range(passes):
            self._now_ns += pause_s * NS
            self._passes += 1
            now = Instant(self._now_ns, 1_700_000_000.0 + self._now_ns / NS)
            self._state, report = step(self._state, self._snapshot(), now)
            for each in self._detections(report):
                known = self._found.get((each.device, each.code))
                if known is None or known.severity < each.severity:
                    self._found[each.device, each.code] = each

    def _detections(self, report: Report) -> Iterator[Detection]:
        addresses = {f"gpu-{gpu.index}": gpu.bus for gpu in self._gpus.values()}
        for device in report.devices:
            for cause in device.causes:
                name = addresses.get(device.device, device.device)
                yield Detection(name, cause.severity, cause.code, cause.evidence)
        for note in report.notes:
            yield Detection(NODE, note.cause.severity, note.cause.code, note.cause.evidence)

    def _source(self, name: str, *, is_vital: bool = True) -> SourceSample:
        return SourceSample(
            name, SourceState.OK, self._now_ns, NS, 0, "", passes=self._passes, vital=is_vital
        )

    def _snapshot(self) -> Snapshot:
        sources = tuple(self._source(name) for name in _SOURCES)
        throttle = next(i for i, source in enumerate(sources) if source.name == "throttle")
        sources = (
            *sources[:throttle],
            sources[throttle]._replace(state=SourceState.ABSENT),
            *sources[throttle + 1 :],
        )
        nvml, events = (self._source(name, is_vital=False) for name in _NVML_SOURCES)
        log = replace(self._log, source=self._source("kmsg", is_vital=False))
        gpus = tuple(replace(gpu, passes=self._passes, beat_ns=self._now_ns) for gpu in self._gpus.values())
        cpus = (1 << _CPUS) - 1
        machine = MachineSample(
            dimms=(),
            # no counters of pages and modules: the log alone reports their faults
            numa=(NumaMemorySample(0, 512 * _GIB_KIB, _ABSENT, 128, 0),),
            cores=(),
            pressure=PressureSample(0, 0, 0),
            nodes_online=1,
            nodes_memory=1,
            corrupted_kib=_ABSENT,
            surplus_failed=0,
            smt_active=0,
            sources=tuple(
                source for source in sources if source.name in ("edac", "memory", "cores", "pressure")
            ),
        )
        return Snapshot(
            seq=self._passes,
            cpus=CpuSetsSample(cpus, cpus, 0),
            nodes=(NumaCpuSample(0, cpus, _ABSENT, _ABSENT),),
            gpus=NvmlSample(gpus, nvml, events, generation=1, count=len(gpus), driver="570.86.15"),
            host=GpuOsSample(bus_gpus=tuple(sorted(gpu.bus for gpu in gpus)), fabric_manager=True),
            log=log,
            machine=machine,
            pci=self._functions,
            declared=self._declared,
            sources=(*sources, nvml, events, log.source),
            core=NativeCoreStats(passes=self._passes),
        )


def run_incident(incident: LabelledIncident) -> tuple[Detection, ...]:
    """Replay an incident on a simulated node; return the agent's worst verdict per device and code."""
    with tempfile.TemporaryDirectory(prefix="drahealth-scoreboard-") as folder:
        return SimulatedNode(incident, Path(folder)).run()


def _healthy_gpu(number: int, address: str) -> GpuSample:
    return GpuSample(
        index=number,
        uuid=f"GPU-{number:08x}",
        bus=address,
        name="NVIDIA H100 80GB HBM3",
        serial=f"{number}",
        status=NvmlReturnCode.OK,
        passes=0,
        beat_ns=0,
        period_ns=NS,
        probe_p50_ns=400_000,
        links=LINKS,
        link_errors=(0,) * LINKS,
        readings=_HEALTHY_GPU,
        event_mask=int(GpuEvent.XID),
    )


DETECTORS_FOLDER: Final = "detectors"

# --- other detectors ---------------------------------------------------------------------------------------

_NVLINK_FILE: Final = "nvlink5.tsv"
_NVLINK: Final = re.compile(
    r"Xid \(PCI:[^)]*\): (\d+),(?: pid=[^,]*,)?(?: name=[^,]*,)? (\S+) (Fatal|Nonfatal) .*?"
    r"Link -?\d+ \((0x[0-9a-f]+) (0x[0-9a-f]+)"
)
"""XID, unit, severity and the first two registers of a line about NVLink 5."""
_LOW_BITS: Final = 10
_SUB_SHIFT: Final = 20
_SUB_BITS: Final = 6


class DetectorPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Regular expression of a detector, and what the detector reports for a match."""

    code: str
    regex: str
    """Its group ``device``, if any, is the PCI address of the faulty device."""
    severity: SeverityName


class NumberedLinePattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Regular expression that captures a number, and the severity of each number.

    Numbers that are in none of the lists are ignored.
    """

    code: str
    regex: str
    """Has the groups ``device`` and ``code``."""
    unhealthy: frozenset[int] = frozenset()
    degraded: frozenset[int] = frozenset()
    info: frozenset[int] = frozenset()
    nvlink: str = ""
    """How the rows of NVLink 5 are used: ``gpud``: the worse of the row and the line's word; ``nvsentinel``:
    the row, and no action without one; empty: not at all."""


class NvlinkRow(NamedTuple):
    """Row of NVIDIA's catalog for an error of NVLink 5."""

    xid: int
    units: frozenset[str]
    bits: tuple[str, str]
    """Lowest bits of the first register, from drivers before 575 and from later ones."""
    sub: str
    status: int
    action: str


class OtherDetector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Published patterns of a detector other than this agent."""

    name: str
    version: str
    licence: str
    origin: tuple[str, ...]
    note: str
    to_end: bool = False
    """True: a pattern matches only up to the end of the line."""
    pattern: tuple[DetectorPattern, ...] = ()
    table: tuple[NumberedLinePattern, ...] = ()


class PatternDetector:
    """Detector that finds faults in an incident by the patterns of its log lines.

    Args:
        detector: Patterns of the detector.
        rows: Rows of NVIDIA's catalog for errors of NVLink 5.
    """

    def __init__(self, detector: OtherDetector, rows: tuple[NvlinkRow, ...]) -> None:
        self.detector = detector
        self._rows = rows
        end = r"\Z" if detector.to_end else ""
        self._patterns = [(each, re.compile(each.regex + end)) for each in detector.pattern]
        self._tables = [(each, re.compile(each.regex)) for each in detector.table]
        if any("code" not in pattern.groupindex for _, pattern in self._tables):
            raise ValueError("the regex of a table has no group (?P<code>...)")

    def find(self, incident: LabelledIncident) -> tuple[Detection, ...]:
        """Return what the detector reports for the kernel log lines of an incident."""
        return tuple(found for line in incident.log for found in self._find_in_line(line))

    def _find_in_line(self, line: str) -> Iterator[Detection]:
        for fact, pattern in self._patterns:
            if match := pattern.search(line):
                yield Detection(_device(match), Severity[fact.severity.upper()], fact.code, line)
        for table, pattern in self._tables:
            if match := pattern.search(line):
                code = int(match["code"])
                severity = self._severity(table, code, line)
                if severity is not None:
                    yield Detection(_device(match), severity, f"{table.code} {code}", line)

    def _severity(self, table: NumberedLinePattern, code: int, line: str) -> Severity | None:
        by_list = {
            Severity.UNHEALTHY: table.unhealthy,
            Severity.DEGRADED: table.degraded,
            Severity.INFO: table.info,
        }
        listed = next((severity for severity, codes in by_list.items() if code in codes), None)
        nvlink = _NVLINK.search(line) if table.nvlink else None
        if nvlink is None:
            return listed
        actions = {row.action for row in self._rows if _is_row_of(row, nvlink)}
        if table.nvlink == "gpud":
            is_fatal = nvlink[3] == "Fatal" or "fatal" in actions
            return Severity.UNHEALTHY if is_fatal else Severity.INFO
        return Severity.UNHEALTHY if actions - {"none"} else Severity.INFO


def load_detectors(corpus: Path) -> tuple[PatternDetector, ...]:
    """Load the other detectors from a corpus folder, in the order of their names. Raises CorpusError."""
    folder = corpus / DETECTORS_FOLDER
    rows = _load_rows(folder / _NVLINK_FILE)
    runs = []
    for path in sorted(folder.glob("*.toml")):
        try:
            detector = msgspec.convert(tomllib.loads(path.read_text()), OtherDetector)
            runs.append(PatternDetector(detector, rows))
        except (OSError, ValueError, msgspec.ValidationError, re.error) as error:
            raise CorpusError(f"detector file {path}: {error}") from None
    return tuple(runs)


def _load_rows(path: Path) -> tuple[NvlinkRow, ...]:
    try:
        lines = path.read_text().splitlines()
        fields = [line.split("\t") for line in lines if line and not line.startswith(("#", "xid"))]
        return tuple(
            NvlinkRow(int(xid), frozenset(unit.split("/")), (old, new), sub, int(status, 16), action)
            for xid, unit, old, new, sub, status, action in fields
        )
    except (OSError, ValueError) as error:
        raise CorpusError(f"detector file {path}: {error}") from None


def _is_row_of(row: NvlinkRow, match: re.Match[str]) -> bool:
    first, status = int(match[4], 16), int(match[5], 16)
    low = f"{first:032b}"[-_LOW_BITS:]
    sub = f"{first >> _SUB_SHIFT & (1 << _SUB_BITS) - 1:0{_SUB_BITS}b}"
    return (
        row.xid == int(match[1])
        and bool(row.units & set(match[2].split("/")))
        and low.endswith(row.bits)  # a log line does not state the driver's version
        and row.sub == sub
        and row.status == status
    )


def _device(match: re.Match[str]) -> str:
    """Return the PCI address that a match names, ``0000:3b:00.0``; ``node`` if it names none."""
    address = match.groupdict().get("device")
    if not address:
        return NODE
    domain, *rest = address.removeprefix("PCI:").rstrip(":.").lower().split(":")
    if len(rest) == 1:  # without a domain
        domain, rest = "0", [domain, *rest]
    slot = rest[-1] if "." in rest[-1] else f"{rest[-1]}.0"
    return f"{int(domain, 16):04x}:{rest[0]}:{slot}"
