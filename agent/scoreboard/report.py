"""The scoreboard as a text table, as Markdown for docs/scoreboard.md, and as JSON.

The module also has the scores of a detector: how many incidents it found, on which device, how severe, and
its false alarms.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from agent.model.health import Severity
from agent.scoreboard.detectors import BYSTANDER_GPU, Detection, PatternDetector, run_incident
from agent.scoreboard.incidents import (
    NODE,
    CorpusSplit,
    ExpectedVerdict,
    LabelledIncident,
    LineOrigin,
    select_split,
)

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

    @property
    def alarmed(self) -> tuple[IncidentScore, ...]:
        """Faults and harmless events for which the detector raised a false alarm."""
        return tuple(each for each in (*self.faults, *self.harmless) if each.false_alarms)

    @property
    def missed(self) -> tuple[IncidentScore, ...]:
        """Faults that were not found on the right devices with the right severity."""
        return tuple(each for each in self.faults if not (each.is_right_device and each.is_right_severity))

    def counts(self) -> Mapping[str, int]:
        """Return the numbers of the scoreboard's columns."""
        return {
            "faults": len(self.faults),
            "detected": sum(each.is_detected for each in self.faults),
            "right_device": sum(each.is_right_device for each in self.faults),
            "right_severity": sum(each.is_right_severity for each in self.faults),
            "exact": sum(each.is_exact for each in self.faults),
            "harmless": len(self.harmless),
            "false_alarms": len(self.alarmed),
        }


Findings = Mapping[str, tuple[Detection, ...]]
"""What a detector reports, by the name of the incident."""


def run_own(incidents: Iterable[LabelledIncident]) -> Findings:
    """Replay incidents on simulated nodes; return the agent's findings."""
    return {each.name: run_incident(each) for each in incidents}


def other_score(run: PatternDetector, incidents: Iterable[LabelledIncident]) -> DetectorScore:
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
    """Return whether a detector and the label agree on taking the devices out of use.

    The worst finding on the devices decides; without a finding, the result is False. A finding that names
    only the node counts for each of its devices.
    """
    places = {*devices, NODE, verdict.part}
    worst = max((each.severity for each in found if each.device in places), default=None)
    return worst is not None and (worst >= Severity.UNHEALTHY) is (verdict.level >= Severity.UNHEALTHY)


def _is_exact(verdict: ExpectedVerdict, devices: tuple[str, ...], found: tuple[Detection, ...]) -> bool:
    exact = {each.device for each in found if (each.severity, each.code) == (verdict.level, verdict.code)}
    return exact.issuperset(devices)


# --- output ------------------------------------------------------------------------------------------------

COLUMNS: Final[Mapping[str, str]] = {
    "detected": "detected",
    "right_device": "right device",
    "right_severity": "right severity",
    "false_alarms": "false alarms",
}
"""Titles of the columns that all detectors have, by count."""
COMMAND: Final = "python -m agent.scoreboard --write docs/scoreboard.md"

_ORIGINS: Final[Mapping[LineOrigin, str]] = {
    LineOrigin.ISSUE: "from public reports",
    LineOrigin.TEST_DATA: "from test data and sources of other projects",
    LineOrigin.DOCUMENT: "from an example in a document",
    LineOrigin.SYNTHETIC: "synthetic, in the form that a document states",
}
_SUBJECT: Final = """\
How many faults of nodes drahealth and other detectors find, and how many false alarms they raise: for authors
of rules, and for operators who want to know which faults are missed.""".splitlines()
_INTRODUCTION: Final = """\
Each has its source, its kernel log lines, and the verdicts that are right by that source. The command
`python -m agent.scoreboard` lets each happen on a simulated node: the C core reads the lines, and the
agent's rules evaluate them. The other detectors are applied as their published patterns and tables state;
they may find more from other sources than the kernel log.""".splitlines()
_EXPLANATION: Final = """\
A fault is *detected* if a finding names its device or the node. The *device is right* if every faulty
device is named; a detector that reports only the node names none. The *severity is right* if the device is
taken out of use exactly if the label says so. A *false alarm* is a finding worse than an event or a note on
a harmless event, or on a device that has no fault.

The labels are those of NVIDIA's catalog and, where the catalog leaves a choice, of this project: for
example, a fatal error of one port of an NVSwitch degrades its GPUs, and an XID 109 without a stated recovery
action needs a reset. A detector that decides otherwise on purpose has a wrong severity here.

The incidents were collected by searches for lines of the kinds that this project knows. So its share is
higher than it is for the faults of a fleet, and the held-out part comes from the same searches. The numbers
compare versions of drahealth, and show kinds of faults that a detector leaves out; they are no ranking.

A hash of an incident's name decides to which part it belongs. Rules are written from open incidents only;
the held-out ones measure whether they hold for others, so this page does not name them.""".splitlines()


class Scoreboard(NamedTuple):
    """Scores of all detectors on one part of the corpus."""

    split: CorpusSplit | None
    """None: all incidents."""
    incidents: tuple[LabelledIncident, ...]
    scores: tuple[DetectorScore, ...]
    """On the incidents with kernel log lines; the agent's first."""
    nvml: DetectorScore
    """The agent's scores on the incidents that only NVML shows."""

    @property
    def own(self) -> DetectorScore:
        """The agent's scores on the incidents with kernel log lines."""
        return self.scores[0]


def build_scoreboard(
    incidents: Iterable[LabelledIncident],
    split: CorpusSplit | None,
    findings: Findings,
    version: str,
    others: Iterable[PatternDetector],
) -> Scoreboard:
    """Return the scores of the agent and the other detectors on one part of the corpus.

    Args:
        incidents: All incidents.
        split: Part of the corpus; None: the whole corpus.
        findings: The agent's findings on the incidents of at least that part.
        version: Version of the agent.
        others: Other detectors.
    """
    chosen = select_split(incidents, split)
    logged = [each for each in chosen if each.log]
    silent = [each for each in chosen if not each.log]
    scores = (
        _score(OWN_NAME, version, logged, findings),
        *(other_score(each, logged) for each in others),
    )
    return Scoreboard(split, chosen, scores, _score(OWN_NAME, version, silent, findings))


def format_text(board: Scoreboard) -> str:
    """Format a scoreboard for a terminal."""
    table = [["", *COLUMNS.values()]]
    table += [[score.name, *_cells(score)] for score in board.scores]
    table.append([f"{OWN_NAME} (NVML)", *_cells(board.nvml)])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    counts = board.own.counts()
    split = board.split or "all"
    title = f"{split}: {counts['faults']} faults and {counts['harmless']} harmless events in the kernel log"
    exact = f"{OWN_NAME}: severity and code are those of the label for {_share(counts, 'exact')} faults"
    return "\n".join([title, "", *lines, "", exact, ""])


def format_misses(scores: Iterable[DetectorScore]) -> str:
    """Format the faults that detectors missed and their false alarms, one per line."""
    lines = []
    for score in scores:
        lines.append(f"{score.name}: {len(score.missed)} missed, {len(score.alarmed)} with false alarms")
        lines += [f"  {each.incident.name}: {_miss(each)}" for each in score.missed]
        lines += [f"  {each.incident.name}: {_alarm(each)}" for each in score.alarmed]
    return "\n".join(lines) + "\n"


def encode_json(board: Scoreboard) -> str:
    """Return the scores of all detectors as JSON."""

    def score(each: DetectorScore) -> dict[str, Any]:
        return {
            "name": each.name,
            "version": each.version,
            **each.counts(),
            "missed": [miss.incident.name for miss in each.missed],
            "falselyAlarmed": [alarm.incident.name for alarm in each.alarmed],
        }

    document = {
        "split": str(board.split or "all"),
        "incidents": len(board.incidents),
        "kernelLog": [score(each) for each in board.scores],
        "nvml": score(board.nvml),
    }
    return json.dumps(document, indent=2)


def format_markdown(
    incidents: Sequence[LabelledIncident], findings: Findings, version: str, others: Sequence[PatternDetector]
) -> str:
    """Return docs/scoreboard.md.

    Args:
        incidents: All incidents.
        findings: The agent's findings on them.
        version: Version of the agent.
        others: Other detectors.
    """
    reported = [each for each in incidents if each.origin is LineOrigin.ISSUE]
    all_incidents, public, opened, held = (
        build_scoreboard(some, split, findings, version, others)
        for some, split in (
            (incidents, None),
            (reported, None),
            (incidents, CorpusSplit.OPEN),
            (incidents, CorpusSplit.HELD_OUT),
        )
    )
    origins = Counter(each.origin for each in incidents)
    by_origin = [f"{origins[origin]} {text}" for origin, text in _ORIGINS.items() if origins[origin]]
    lines = [
        *("# Scoreboard", "", f"<!-- written by {COMMAND} -->", "", *_SUBJECT, ""),
        f"`corpus/` has {len(incidents)} labelled incidents:",
        ",\n".join(by_origin) + ".",
        *_INTRODUCTION,
        "",
        "## What drahealth misses",
        "",
        *_own_misses(opened, held),
        "",
    ]
    for board, title in (
        (all_incidents, "All incidents"),
        (public, "Incidents from public reports"),
        (opened, "Open incidents"),
        (held, "Held-out incidents"),
    ):
        lines += [f"## {title}", "", *_markdown_table(board), ""]
    lines += [*_EXPLANATION, "", "## The other detectors", "", *_other_lines(others)]
    return "\n".join(lines).rstrip() + "\n"


def _other_lines(others: Iterable[PatternDetector]) -> list[str]:
    lines = []
    for each in others:
        detector = each.detector
        links = ", ".join(f"[{number}]({link})" for number, link in enumerate(detector.origin, 1))
        lines.append(f"- {detector.name}, {detector.version} ({detector.licence}): {links}. {detector.note}")
    return lines


def _own_misses(opened: Scoreboard, held: Scoreboard) -> list[str]:
    scores = (opened.own, opened.nvml)
    missed = [each for score in scores for each in score.missed]
    alarmed = [each for score in scores for each in score.alarmed]
    lines = [f"- `{each.incident.name}`: {each.incident.what} {_miss(each).capitalize()}." for each in missed]
    lines += [
        f"- `{each.incident.name}`: {each.incident.what} {_alarm(each).capitalize()}." for each in alarmed
    ]
    hidden = len(held.own.missed) + len(held.nvml.missed), len(held.own.alarmed) + len(held.nvml.alarmed)
    return [
        *(lines or ["- No open incident."]),
        f"- Held-out incidents: {hidden[0]} missed, {hidden[1]} with false alarms.",
    ]


def _markdown_table(board: Scoreboard) -> list[str]:
    counts, silent = board.own.counts(), board.nvml.counts()
    title = f"{counts['faults']} faults and {counts['harmless']} harmless events"
    by_nvml = (
        f" Of the {silent['faults']} faults that only NVML shows, it detects {silent['detected']},"
        f" {silent['right_severity']} with the right severity; {silent['harmless']} harmless changes"
        f" there cause {silent['false_alarms']} false alarms."
    )
    return [
        f"| {title} | {' | '.join(COLUMNS.values())} |",
        "|---|" + "---|" * len(COLUMNS),
        *(f"| {score.name} | {' | '.join(_cells(score))} |" for score in board.scores),
        "",
        f"The agent's severity and code are those of the label for {_share(counts, 'exact')} faults."
        + (by_nvml if silent["faults"] else ""),
    ]


def _cells(score: DetectorScore) -> list[str]:
    counts = score.counts()
    return [str(counts[name]) if name == "false_alarms" else _share(counts, name) for name in COLUMNS]


def _share(counts: Mapping[str, int], name: str) -> str:
    return f"{counts[name]} of {counts['faults']}"


def _miss(score: IncidentScore) -> str:
    if not score.is_detected:
        return "not detected"
    wrong = [
        text
        for text, is_right in (("device", score.is_right_device), ("severity", score.is_right_severity))
        if not is_right
    ]
    return f"wrong {' and '.join(wrong)}"


def _alarm(score: IncidentScore) -> str:
    alarms = sorted(
        {f"{each.device} {each.severity.name.lower()} {each.code}" for each in score.false_alarms}
    )
    return f"false alarm: {', '.join(alarms)}"
