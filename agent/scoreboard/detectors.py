"""Other detectors, as far as their published patterns and tables state what they report for a log line.

The patterns are facts in the files of ``corpus/detectors``, with origin and version.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agent.model.health import Severity
from agent.scoreboard.incidents import NODE, CorpusError, LabelledIncident
from agent.scoreboard.simulated_node import Detection

FOLDER: Final = "detectors"
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
    """Regular expression of a detector, and what it reports for a match."""

    code: str
    regex: str
    """Its group ``device``, if any, is the PCI address of the faulty device."""
    severity: str


class DetectorCodePattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Regular expression with a number, and the severity of each number; numbers in no list are ignored."""

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
    """Row of NVIDIA's catalogue for an error of NVLink 5."""

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
    table: tuple[DetectorCodePattern, ...] = ()


class DetectorRun:
    """Detector that is applied to incidents.

    Args:
        detector: Patterns of the detector.
        rows: Rows of NVIDIA's catalogue for errors of NVLink 5.
    """

    def __init__(self, detector: OtherDetector, rows: tuple[NvlinkRow, ...]) -> None:
        self.detector = detector
        self._rows = rows
        end = r"\Z" if detector.to_end else ""
        self._patterns = [(each, re.compile(each.regex + end)) for each in detector.pattern]
        self._tables = [(each, re.compile(each.regex)) for each in detector.table]

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

    def _severity(self, table: DetectorCodePattern, code: int, line: str) -> Severity | None:
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


def load_detectors(corpus: Path) -> tuple[DetectorRun, ...]:
    """Load the other detectors from a corpus folder, in the order of their names. Raises CorpusError."""
    folder = corpus / FOLDER
    rows = _load_rows(folder / _NVLINK_FILE)
    runs = []
    for path in sorted(folder.glob("*.toml")):
        try:
            detector = msgspec.convert(tomllib.loads(path.read_text()), OtherDetector)
            runs.append(DetectorRun(detector, rows))
        except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError, re.error) as error:
            raise CorpusError(f"detector file {path}: {error}") from None
    return tuple(runs)


def _load_rows(path: Path) -> tuple[NvlinkRow, ...]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise CorpusError(f"detector file {path}: {error}") from None
    fields = [line.split("\t") for line in lines if line and not line.startswith(("#", "xid"))]
    return tuple(
        NvlinkRow(int(xid), frozenset(unit.split("/")), (old, new), sub, int(status, 16), action)
        for xid, unit, old, new, sub, status, action in fields
    )


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
