"""Labelled incidents of ``corpus/``: what happened, what the node printed, and which verdicts are right."""

import hashlib
import tomllib
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal

import msgspec

import agent
from agent.model.gpu import GpuField
from agent.model.health import Severity

FOLDER: Final = "corpus"
"""Folder of the incident files in a checkout."""
NODE: Final = "node"
"""Device name of an expected cause that concerns no device."""
HELD_OUT_SHARE: Final = 0.3
"""Share of incidents that rules are not written from."""
SeverityName = Literal["ok", "info", "degraded", "unhealthy", "unknown"]
_HASH_RANGE: Final = 1 << 32
_ROOT: Final = Path(agent.__file__).resolve().parents[1]


class CorpusError(Exception):
    """An incident file is invalid or missing. The text names the file."""


class LineOrigin(StrEnum):
    """Kind of the source from which the log lines of an incident come."""

    ISSUE = "issue"
    """A report on a public issue tracker."""
    TEST_DATA = "test-data"
    """Test data or a comment in another project's sources."""
    DOCUMENT = "document"
    """A vendor's document."""
    SYNTHETIC = "synthetic"
    """Written for this corpus in the form that the linked source documents; no machine printed it."""


class CorpusSplit(StrEnum):
    """Part of the labelled incidents: those for writing rules, or those only for measuring the rules."""

    OPEN = "open"
    """Incidents that rules may be written from."""
    HELD_OUT = "held-out"
    """Incidents that only measure."""


class ExpectedVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Right verdict on one device of an incident."""

    device: str
    """PCI address, ``cpu-node0``, ``memory-node0``, or ``node`` for a cause that concerns no device."""
    severity: SeverityName
    """Name of a :class:`agent.model.health.Severity` in lower case."""
    code: str
    """Code of the cause."""
    health: str = ""
    """``healthy``, ``unhealthy`` or ``unknown``; empty for ``node``."""
    part: str = ""
    """Address of an NVSwitch whose fault concerns the device."""

    @property
    def level(self) -> Severity:
        """Expected severity of the device, as a member of Severity."""
        return Severity[self.severity.upper()]


class NvmlChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Change of what NVML returns for one GPU."""

    gpu: str
    """PCI address."""
    after_s: int
    """Time after the first line [s]."""
    readings: dict[GpuField, int] = {}
    """Readings that change, by the names of drahealth.h."""
    status: int = 0
    """Return code of all calls on the GPU; 15: lost, 16: reset required."""
    xid: int = 0
    """XID event; 0: none."""


class LabelledIncident(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fault with the verdicts that are right for it (label), or a harmless event that looks like a fault."""

    name: str
    what: str
    """What happened, in one sentence."""
    origin: LineOrigin
    source: str
    """Link to the source."""
    licence: str
    """Licence of the source, or why the lines may be quoted."""
    log: tuple[str, ...] = ()
    """Kernel log lines in their order, without priority and time."""
    interval_s: int = 1
    """Time between two lines [s]."""
    nvml: tuple[NvmlChange, ...] = ()
    gpus: tuple[str, ...] = ()
    """PCI addresses of the node's GPUs, apart from one healthy GPU that every node has."""
    functions: tuple[str, ...] = ()
    """PCI addresses of functions that a driver has declared, apart from one healthy NIC."""
    harmless: bool = False
    """True: no verdict may be worse than "info"."""
    expect: tuple[ExpectedVerdict, ...] = ()

    def __post_init__(self) -> None:
        if unknown := {each.gpu for each in self.nvml} - set(self.gpus):
            raise ValueError(f"incident {self.name!r}: gpus lacks {min(unknown)}, which nvml names")

    @property
    def split(self) -> CorpusSplit:
        """Part of the corpus to which the incident belongs.

        A hash of the incident's name selects the part, so that a new incident moves no other incident.
        """
        number = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big")
        return CorpusSplit.HELD_OUT if number < HELD_OUT_SHARE * _HASH_RANGE else CorpusSplit.OPEN

    @property
    def level(self) -> Severity:
        """Worst severity that is expected of a device of the incident."""
        return max((each.level for each in self.expect), default=Severity.OK)


class IncidentFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File of incidents about one theme."""

    incident: tuple[LabelledIncident, ...]


def find_corpus(root: Path = _ROOT) -> Path:
    """Return the folder of the labelled incidents. Raises CorpusError if the installation has no such folder.

    Args:
        root: Folder that has the package.
    """
    folder = root / FOLDER
    if not folder.is_dir():
        raise CorpusError(
            f"corpus directory {folder}: has no incidents: they are in a checkout and in the source "
            "distribution, not in an "
            "installed package; run it from a checkout of drahealth"
        )
    return folder


def load_incidents(folder: Path) -> tuple[LabelledIncident, ...]:
    """Load all incident files of a folder, in the order of their names. Raises CorpusError."""
    incidents: dict[str, LabelledIncident] = {}
    for path in sorted(folder.glob("*.toml")):
        for incident in _load_file(path):
            if incident.name in incidents:
                raise CorpusError(
                    f"incident file {path}: incident {incident.name!r} exists twice; give each a name of its "
                    "own"
                )
            incidents[incident.name] = incident
    if not incidents:
        raise CorpusError(
            f"corpus directory {folder}: has no incident files; name the directory of the corpus"
        )
    return tuple(incidents.values())


def select_split(
    incidents: Iterable[LabelledIncident], split: CorpusSplit | None
) -> tuple[LabelledIncident, ...]:
    """Return the incidents of one part of the corpus; ``split`` None: return all incidents."""
    return tuple(each for each in incidents if split is None or each.split is split)


def _load_file(path: Path) -> tuple[LabelledIncident, ...]:
    try:
        document = tomllib.loads(path.read_text())
        return msgspec.convert(document, IncidentFile).incident
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise CorpusError(f"incident file {path}: {error}") from None
