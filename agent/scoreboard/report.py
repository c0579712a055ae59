"""The scoreboard as a text table, as Markdown for docs/scoreboard.md, and as JSON."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from agent.scoreboard.detectors import DetectorRun
from agent.scoreboard.incidents import CorpusSplit, LabelledIncident, LineOrigin, select_split
from agent.scoreboard.scores import (
    OWN_NAME,
    DetectorScore,
    Findings,
    IncidentScore,
    other_score,
    own_score,
)

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
    LineOrigin.DOCUMENT: "with an example of a document",
    LineOrigin.SYNTHETIC: "synthetic, in the form that a document states",
}
_INTRODUCTION: Final = """\
Each has its source, its kernel log lines, and the verdicts that are right by that source. The command
`python -m agent.scoreboard` lets each happen on a simulated node: the C core reads the lines, and the
agent's rules judge them. The other detectors are applied as their published patterns and tables state; they
may find more from other sources than the kernel log.""".splitlines()
_EXPLANATION: Final = """\
A fault is *detected* if a finding names its device or the node. The *device is right* if every faulty
device is named; a detector that reports only the node names none. The *severity is right* if the device is
taken out of use exactly if the label says so. A *false alarm* is a finding worse than an event or a note on
a harmless event, or on a device that has no fault.

The labels are those of NVIDIA's catalogue and, where the catalogue leaves a choice, of this project: for
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
    others: Iterable[DetectorRun],
) -> Scoreboard:
    """Return the scores of the agent and the other detectors on one part of the corpus.

    Args:
        incidents: All incidents.
        split: Part of the corpus; None: all.
        findings: The agent's findings on at least that part.
        version: Version of the agent.
        others: Other detectors.
    """
    chosen = select_split(incidents, split)
    logged = [each for each in chosen if each.log]
    silent = [each for each in chosen if not each.log]
    scores = (
        own_score(logged, findings, version),
        *(other_score(each, logged) for each in others),
    )
    return Scoreboard(split, chosen, scores, own_score(silent, findings, version))


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
    """Return a scoreboard as JSON."""

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
    incidents: Sequence[LabelledIncident], findings: Findings, version: str, others: Sequence[DetectorRun]
) -> str:
    """Return docs/scoreboard.md.

    Args:
        incidents: All incidents.
        findings: The agent's findings on them.
        version: Version of the agent.
        others: Other detectors.
    """
    reported = [each for each in incidents if each.origin is LineOrigin.ISSUE]
    everything, public, opened, held = (
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
        "# Scoreboard",
        "",
        f"<!-- written by {COMMAND} -->",
        "",
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
        (everything, "All incidents"),
        (public, "Incidents from public reports"),
        (opened, "Open incidents"),
        (held, "Held-out incidents"),
    ):
        lines += [f"## {title}", "", *_markdown_table(board), ""]
    lines += [*_EXPLANATION, "", "## The other detectors", "", *_others(others)]
    return "\n".join(lines).rstrip() + "\n"


def _others(others: Iterable[DetectorRun]) -> list[str]:
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
