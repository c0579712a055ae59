"""Output of ``drahealth prepares``: prepared and failed claims, and error codes, as text and JSON. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent.cli.output.json import API_VERSION, DEVICE_REF, REMEDIATION, ObjectKeys, encode_each
from agent.cli.output.text import (
    BADGES,
    GAP,
    Badge,
    ListEntry,
    RowText,
    TableCell,
    TextTable,
    advice,
    clean,
    format_count,
    format_entries,
    markdown_table,
)
from agent.model.health import Health, Severity
from agent.model.prepare import ErrorClass
from agent.model.time import format_age, rfc3339
from agent.prepare.prepare_ledger import CACHED_CLASSES

if TYPE_CHECKING:
    from pathlib import Path

    from agent.cli.output.terminal import TextStyle
    from agent.cli.subcommand import UnreadablePath
    from agent.model.claim import ClaimRef, DeviceRef
    from agent.model.prepare import DriverFault, LastPrepareResult
    from agent.prepare.failure_kinds import FailureKind
    from agent.store.driver_files import LedgerFileContent

EMPTY_HINTS: Final = (
    ListEntry("written by", "DRA drivers that embed drahealth, and the agent for drivers of its sockets"),
    ListEntry("elsewhere", "--kubelet-dir for another root of the kubelet, --file for one driver's file"),
    ListEntry("to try", "drahealth classify --errno ENOSPC --doing cdi: how an error would be classified"),
)
"""Hints for an operator if no claim is listed."""

MAX_NAMED_DEVICES: Final = 4

URGENCY_BADGES: Final = (
    Badge("·", "-", "over", "dim"),
    BADGES[Severity.OK],
    BADGES[Severity.DEGRADED],
    BADGES[Severity.UNHEALTHY],
)
"""Badges of claims, by :attr:`PrepareRecord.urgency`."""


class PrepareRecord(NamedTuple):
    """Result of a driver's last attempt to prepare a claim."""

    driver: str
    version: str
    outcome: LastPrepareResult
    unprepared_wall_s: float
    """Time at which the claim was unprepared [s since 1970]; 0: it was not."""

    @property
    def claim(self) -> ClaimRef:
        return self.outcome.claim

    @property
    def names(self) -> tuple[str, str, str]:
        """Names that find the claim: namespace/name, name, UID."""
        return str(self.claim), self.claim.name, self.claim.uid

    @property
    def state(self) -> str:
        """State of the claim: ``prepared``, ``failing`` or ``over``.

        ``over``: the prepare failed, and the claim was unprepared later.
        """
        if self.unprepared_wall_s:
            return "over"
        return "failing" if self.outcome.verdict else "prepared"

    @property
    def urgency(self) -> int:
        """Rank of the claim in lists, highest first.

        3: the prepare fails for good; 2: a retry may succeed; 1: prepared; 0: unprepared.
        """
        verdict = self.outcome.verdict
        if self.unprepared_wall_s:
            return 0
        return 1 if verdict is None else 2 + (verdict.error_class in CACHED_CLASSES)


def prepare_records(found: Iterable[LedgerFileContent]) -> tuple[PrepareRecord, ...]:
    """Return the last prepare of each prepared or failed claim in the drivers' files, most urgent first."""
    records = [
        PrepareRecord(stored.driver, entry.driver_version, entry.outcome, entry.unprepared_wall_s)
        for stored in found
        for entry in stored.ledger.claims.values()
        if entry.outcome.verdict or not entry.unprepared_wall_s
    ]
    return tuple(
        sorted(
            records,
            key=lambda record: (-record.urgency, -record.outcome.at_wall_s, record.driver, record.claim),
        )
    )


def exit_of(records: Iterable[PrepareRecord]) -> int:
    """Return the exit code of ``drahealth prepares``.

    0: no claim fails; 1: a retry may resolve each failure; 2: one failure is permanent.
    """
    return max(0, max((record.urgency for record in records), default=0) - 1)


# --- table -------------------------------------------------------------------------------------------------


def render(
    records: Sequence[PrepareRecord],
    found: Iterable[LedgerFileContent],
    style: TextStyle,
    *,
    now_s: float,
    whole: bool,
) -> str:
    """Return the table of claims and the faults that drivers reported; empty: there is no claim.

    With `whole`, the text has all details of each claim.
    """
    if not records:
        return ""
    table = TextTable("DRIVER", "CLAIM", "CLASS", "CODE", "COUNT", "SINCE", "LAST", text_below=True)
    for record in records:
        verdict, badge = record.outcome.verdict, URGENCY_BADGES[record.urgency]
        cells = ["prepared", "", "", ""]
        if verdict is not None:
            since = format_age(now_s - verdict.first_wall_s)
            cells = [verdict.error_class, clean(verdict.code), f"{verdict.count:,}", since]
        is_over = not record.urgency
        table.add(
            clean(record.driver),
            clean(str(record.claim)),
            TableCell(cells[0], () if is_over else (badge.colour,)),
            *cells[1:],
            f"{format_age(now_s - record.outcome.at_wall_s)} ago",
            sign=(badge.sign if style.unicode else badge.ascii) if is_over else badge.coloured_sign(style),
            text=_message(record, style, now_s),
            paint=(badge.colour,) if is_over else (),
        )
        if whole:
            facts = [ListEntry(title, clean(text)) for title, text in _facts(record) if text]
            table.add_lines(format_entries(facts, style, indent=4))
    lines = [_headline(records, style), "", *table.lines(style)]
    faults = [fault for stored in found for fault in stored.ledger.driver_faults.faults]
    entries = [_fault_entry(fault, now_s) for fault in faults if not fault.expired_wall_s]
    if entries and not whole:
        lines += ["", *format_entries(entries, style)]
    return "\n".join(lines) + "\n"


def render_none(
    found: Iterable[LedgerFileContent],
    searched: Iterable[Path],
    absent: Iterable[Path],
    style: TextStyle,
    *,
    unread: int,
) -> str:
    """Return the text for an operator if no claim is listed: drivers found, paths searched, and hints.

    `absent` are directories that do not exist; `unread` is the number of paths that could not be read.
    """
    head = "no prepare of a claim could be read" if unread else "no prepare of a claim is known"
    entries = [
        ListEntry("found", clean(f"{stored.driver} {stored.version}".rstrip() + ": no claim"))
        for stored in found
    ]
    for path in searched:
        missing = next((f" ({top} does not exist)" for top in absent if path.is_relative_to(top)), "")
        entries.append(ListEntry("looked for", clean(f"{path}{missing}")))
    return "\n".join([head, "", *format_entries([*entries, *EMPTY_HINTS], style)]) + "\n"


def _headline(records: Sequence[PrepareRecord], style: TextStyle) -> str:
    words = ("over", "prepared", "failing", "failing for good")
    counts = Counter(record.urgency for record in records)
    tally = ", ".join(
        style.paint(f"{counts[rank]} {words[rank]}", URGENCY_BADGES[rank].colour)
        for rank in sorted(counts, reverse=True)
    )
    return f"{format_count(len(records), 'claim')}: {tally}"


def _message(record: PrepareRecord, style: TextStyle, now_s: float) -> Iterator[RowText]:
    verdict = record.outcome.verdict
    if verdict is None:
        return
    has_culprits = verdict.error_class is ErrorClass.FAILED_DEVICE and verdict.devices
    lead = f"{_device_names(verdict.devices)}: " if has_culprits else ""
    yield RowText(f"{lead}{clean(verdict.summary)}")
    if record.unprepared_wall_s:
        yield RowText(f"unprepared {format_age(now_s - record.unprepared_wall_s)} ago", ("dim",))
    elif verdict.advice:
        yield advice(verdict.advice, style)


def _facts(record: PrepareRecord) -> Iterator[tuple[str, str]]:
    outcome = record.outcome
    yield "uid", record.claim.uid
    yield "driver", f"{record.driver} {record.version}".rstrip()
    yield "devices", ", ".join(f"{device.pool}/{device.device}" for device in outcome.devices)
    if verdict := outcome.verdict:
        if verdict.error_class is ErrorClass.FAILED_DEVICE:
            yield "to blame", ", ".join(map(str, verdict.devices))
        yield "requests", ", ".join(verdict.requests)
        yield "scope", verdict.scope
        yield "detail", verdict.detail
        for evidence in verdict.evidence:
            yield "evidence", evidence
        yield "first", rfc3339(verdict.first_wall_s)
    yield "last", rfc3339(outcome.at_wall_s)


def _device_names(devices: Sequence[DeviceRef]) -> str:
    names = [clean(device.device) for device in devices[:MAX_NAMED_DEVICES]]
    more = len(devices) - MAX_NAMED_DEVICES
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _fault_entry(fault: DriverFault, now_s: float) -> ListEntry:
    age = format_age(now_s - fault.reported_wall_s)
    text = f"{fault.subject}: {fault.code}: {fault.evidence} ({age} ago, while preparing {fault.claim})"
    return ListEntry("found broken", clean(text))


# --- error codes -------------------------------------------------------------------------------------------

CLASSES: Final = {
    ErrorClass.BAD_CONFIG: "The request can never be satisfied: the claim must change.",
    ErrorClass.FAILED_DEVICE: "A device of the claim is broken: it becomes Unhealthy and gets a taint.",
    ErrorClass.PERMANENT: "Neither the claim nor a device is at fault: the node or the driver must change.",
    ErrorClass.TRANSIENT: "A retry can help: by the embedded library within the call, then by the kubelet.",
    ErrorClass.UNKNOWN: "The cause is not known. The kubelet retries.",
}
"""Meaning of each class of prepare errors, permanent ones first."""

CLASS_COLOURS: Final = {
    ErrorClass.BAD_CONFIG: "red",
    ErrorClass.FAILED_DEVICE: "red",
    ErrorClass.PERMANENT: "red",
    ErrorClass.TRANSIENT: "yellow",
    ErrorClass.UNKNOWN: "yellow",
}

PREFACE: Final = """\
# Prepare errors

The codes and classes that drahealth gives to a claim which a driver could not prepare, what follows from
them, and what to do. This page is the output of `drahealth prepares --codes -o markdown`;
`drahealth prepares` lists the result of the last prepare of each claim on a node.

A pod's event shows them on one line, `[class=... code=... device=... request=... retry=...]`, followed by the
error and its consequence. `drahealth prepares --codes CODE` explains the code; `drahealth checks CODE`
explains one that belongs to a check. An event without this line comes from a failure before the driver was
called: the kubelet's own (the driver is not registered, the claim is not allocated or not reserved for the
pod), or one of the driver's helper, which fetches the claims first (`retrieve claim`). `retry` states what
must happen before another attempt can succeed:

* `later`: only time has to pass;
* `after-release`: another consumer releases what the claim needs;
* `after-reset`, `after-repair`: the device is reset or repaired;
* `after-fix`: the node or the driver is fixed;
* `never`: the claim must change.

The kubelet retries in any case, 60 to 90 s later and after changes of the pod, until the pod is deleted. A
lasting failure answers these calls without another attempt: `permanent`, and a failed device that only the
driver reported, for 60 s, so that the kubelet's regular retry is an attempt; `bad-config` for 10 minutes;
another failed device until its state changes, for a day at most.

A code may be in two classes: for a failure that may pass, and for the same failure once it is shown to be
permanent. A code that ends in `.*` is a family. Drivers can report codes of their own, which are handled like
the last row of their class. `gpu.not_found` is also a [health check](checks.md#gpunot_found): a driver
declared a GPU that the node does not have.

To see how an error would be classified, describe it: `drahealth classify --errno ENOSPC --doing cdi`,
`drahealth classify --nvml 15`, `drahealth classify 'bank 3 is locked'`. The command also uses the patterns of
the configuration; [configuration.md](configuration.md) explains how to add some.
"""


def _rows_by_class(rows: Iterable[FailureKind]) -> Iterator[tuple[ErrorClass, list[FailureKind]]]:
    rows = list(rows)
    for error_class in CLASSES:
        if members := [row for row in rows if row.error_class is error_class]:
            yield error_class, members


def consequence(row: FailureKind) -> str:
    """Return the consequences of an error code: ``retry after-repair, Unhealthy, taint NoSchedule``."""
    parts = [f"retry {row.retry}"]
    if row.health is not None:
        parts.append(Health(row.health).name.capitalize())
    if row.taint is not None:
        parts.append(f"taint {row.taint.effect}")
    return ", ".join(parts)


def render_codes(rows: Iterable[FailureKind], style: TextStyle) -> str:
    """Return the list of prepare error codes by class, with meaning, consequence and advice, as text."""
    table = TextTable()
    for error_class, members in _rows_by_class(rows):
        heading = style.paint(error_class, "bold", CLASS_COLOURS[error_class])
        table.add_lines(["", f"{heading}{GAP}{CLASSES[error_class]}"])
        for row in members:
            text = [RowText(f"{row.explanation} ({consequence(row)})"), advice(row.advice, style)]
            table.add(row.code, text=text)
    return "\n".join(list(table.lines(style))[1:]) + "\n"


def render_codes_markdown(rows: Iterable[FailureKind]) -> str:
    """Return the list of prepare error codes as the Markdown page docs/prepare-errors.md."""
    parts = [PREFACE]
    for error_class, members in _rows_by_class(rows):
        parts.append(f"## {error_class}\n\n{CLASSES[error_class]}\n")
        titles = ["code", "meaning", "scope", "consequence", "advice"]
        cells = (
            (f"`{row.code}`", row.explanation, row.scope, consequence(row), row.advice) for row in members
        )
        parts.append(markdown_table([titles, *cells]))
    return "\n".join(parts)


# --- JSON --------------------------------------------------------------------------------------------------

VERDICT: Final = ObjectKeys(
    """
    class:error_class code scope requests devices summary detail evidence confidence advice repair
    retryAfterSeconds:retry_after_s health taint count since:first_wall_s last:last_wall_s
    """,
    devices=encode_each(DEVICE_REF),
    taint=REMEDIATION,
)
RECORD: Final = ObjectKeys(
    """
    driver driverVersion:version namespace:claim.namespace name:claim.name uid:claim.uid state
    devices:outcome.devices last:outcome.at_wall_s unprepared?:unprepared_wall_s verdict:outcome.verdict
    """,
    devices=encode_each(DEVICE_REF),
    verdict=VERDICT,
)
FAULT: Final = ObjectKeys(
    """
    driver:device.driver pool:device.pool name:device.device code evidence advice repair claim
    since:reported_wall_s excused?:expired_wall_s
    """,
    claim=ObjectKeys("namespace name uid"),
)
CODE: Final = ObjectKeys(
    "code class:error_class scope retry stickySeconds:cached_s health taint why:explanation advice repair",
    taint=REMEDIATION,
)


def document(
    records: Iterable[PrepareRecord],
    found: Iterable[LedgerFileContent],
    problems: Iterable[UnreadablePath],
    searched: Iterable[Path],
) -> dict[str, Any]:
    """Return the list of claims as JSON. Later versions only add keys."""
    return {
        "apiVersion": API_VERSION,
        "claims": [RECORD(record) for record in records],
        "foundBroken": [FAULT(fault) for stored in found for fault in stored.ledger.driver_faults.faults],
        "problems": [{"file": str(problem.path), "reason": problem.reason} for problem in problems],
        "lookedFor": [str(path) for path in searched],
    }


def codes_document(rows: Iterable[FailureKind]) -> dict[str, Any]:
    """Return the prepare error codes as JSON. Later versions only add keys."""
    return {"apiVersion": API_VERSION, "codes": [CODE(row) for row in rows]}
