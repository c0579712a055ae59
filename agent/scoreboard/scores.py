"""Scores of a detector: how many incidents it found, on which device, how severe, and its false alarms."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from agent.model.health import Severity
from agent.scoreboard.detectors import DetectorRun
from agent.scoreboard.incidents import NODE, ExpectedVerdict, LabelledIncident
from agent.scoreboard.simulated_node import BYSTANDER_GPU, Detection, run_incident

OWN_NAME: Final = "drahealth"
ALL_GPUS: Final = "gpus"
"""Device name of an expected verdict on every GPU of the node."""


class IncidentScore(NamedTuple):
    """Comparison of what a detector reports with the label of one incident."""

    incident: LabelledIncident
    is_detected: bool
    """A finding names an expected device, or the node."""
    is_right_device: bool
    """Findings name every expected device."""
    is_right_severity: bool
    """Every expected device is taken out of use if, and only if, it must be."""
    is_exact: bool
    """Every expected device has a finding with the expected severity and code."""
    false_alarms: tuple[Detection, ...]
    """Findings that are worse than "info" on a device without a fault, or in a harmless event."""


class DetectorScore(NamedTuple):
    """Scores of one detector."""

    name: str
    version: str
    faults: tuple[IncidentScore, ...]
    harmless: tuple[IncidentScore, ...]

    def count(self, is_counted: Callable[[IncidentScore], bool]) -> int:
        """Return the number of faults whose score fulfils the condition ``is_counted``."""
        return sum(map(is_counted, self.faults))

    @property
    def alarmed(self) -> tuple[IncidentScore, ...]:
        """Faults and harmless events with a false alarm."""
        return tuple(each for each in (*self.faults, *self.harmless) if each.false_alarms)

    @property
    def missed(self) -> tuple[IncidentScore, ...]:
        """Faults that were not found on the right devices with the right severity."""
        return tuple(each for each in self.faults if not (each.is_right_device and each.is_right_severity))

    def counts(self) -> Mapping[str, int]:
        """Return the numbers of the scoreboard's columns."""
        return {
            "faults": len(self.faults),
            "detected": self.count(lambda each: each.is_detected),
            "right_device": self.count(lambda each: each.is_right_device),
            "right_severity": self.count(lambda each: each.is_right_severity),
            "exact": self.count(lambda each: each.is_exact),
            "harmless": len(self.harmless),
            "false_alarms": len(self.alarmed),
        }


Findings = Mapping[str, tuple[Detection, ...]]
"""What a detector reports, by the name of the incident."""


def run_own(incidents: Iterable[LabelledIncident]) -> Findings:
    """Replay incidents on simulated nodes; return the agent's findings."""
    return {each.name: run_incident(each) for each in incidents}


def own_score(incidents: Iterable[LabelledIncident], findings: Findings, version: str) -> DetectorScore:
    """Return the agent's score on incidents, from its findings on them."""
    return _score(OWN_NAME, version, incidents, findings)


def other_score(run: DetectorRun, incidents: Iterable[LabelledIncident]) -> DetectorScore:
    """Return the score of another detector on the incidents that have kernel log lines."""
    logged = tuple(each for each in incidents if each.log)
    findings = {each.name: run.find(each) for each in logged}
    return _score(run.detector.name, run.detector.version, logged, findings)


def _score(
    name: str, version: str, incidents: Iterable[LabelledIncident], findings: Findings
) -> DetectorScore:
    scores = [score_incident(each, findings[each.name]) for each in incidents]
    return DetectorScore(
        name,
        version,
        tuple(each for each in scores if not each.incident.harmless),
        tuple(each for each in scores if each.incident.harmless),
    )


def score_incident(incident: LabelledIncident, found: tuple[Detection, ...]) -> IncidentScore:
    """Compare what a detector reports with the label of an incident."""
    if incident.harmless:
        alarms = tuple(each for each in found if each.severity > Severity.INFO)
        return IncidentScore(incident, False, False, False, False, alarms)
    expected = [(each, _devices(each, incident)) for each in incident.expect]
    known = {device for _, devices in expected for device in devices} | {
        NODE, *(each.part for each in incident.expect)
    }  # fmt: skip
    return IncidentScore(
        incident,
        is_detected=any(each.device in known for each in found),
        is_right_device=all(_names_device(verdict, devices, found) for verdict, devices in expected),
        is_right_severity=all(_has_severity(verdict, devices, found) for verdict, devices in expected),
        is_exact=all(_is_exact(verdict, devices, found) for verdict, devices in expected),
        false_alarms=tuple(
            each for each in found if each.device not in known and each.severity > Severity.INFO
        ),
    )


def _devices(verdict: ExpectedVerdict, incident: LabelledIncident) -> tuple[str, ...]:
    """Return the devices that an expected verdict concerns."""
    return (*incident.gpus, BYSTANDER_GPU) if verdict.device == ALL_GPUS else (verdict.device,)


def _names_device(verdict: ExpectedVerdict, devices: tuple[str, ...], found: Iterable[Detection]) -> bool:
    named = {each.device for each in found}
    return bool(verdict.part and verdict.part in named) or named.issuperset(devices)


def _has_severity(verdict: ExpectedVerdict, devices: tuple[str, ...], found: tuple[Detection, ...]) -> bool:
    """Return True if a finding exists and the worst one agrees on whether the device is taken out of use.

    A finding that names only the node counts for each of its devices.
    """
    places = {*devices, NODE, verdict.part}
    worst = max((each.severity for each in found if each.device in places), default=None)
    return worst is not None and (worst >= Severity.UNHEALTHY) is (verdict.level >= Severity.UNHEALTHY)


def _is_exact(verdict: ExpectedVerdict, devices: tuple[str, ...], found: tuple[Detection, ...]) -> bool:
    exact = {each.device for each in found if (each.severity, each.code) == (verdict.level, verdict.code)}
    return exact.issuperset(devices)
