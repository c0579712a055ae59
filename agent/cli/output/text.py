"""Formatting of names, words and numbers for tables and log lines. Pure.

Text from outside the agent is cleaned of escape sequences here, which could move the cursor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.model.health import Severity

if TYPE_CHECKING:
    from agent.cli.output.terminal import TextStyle
    from agent.model.health import DeviceHealth
    from agent.model.report import Report
    from agent.model.source_state import SourceSample

CONTAINER_ID: Final = re.compile(r"\b([0-9a-f]{13})[0-9a-f]{51}\b")

MIG_INSTANCE: Final = re.compile(r"(?P<gpu>.+)-mig-\d+-\d+")
"""Pattern of a MIG instance's name, which contains the name of its GPU."""

NUMBERED: Final = re.compile(r"(?P<stem>.*\D)(?P<number>0|[1-9]\d{0,8})")

MIN_RANGE: Final = 3
"""Least number of consecutive numbered names that are written as a range."""


class Badge(NamedTuple):
    """Sign, word and colour that show a severity or a verdict; ``ascii`` is the sign without Unicode."""

    sign: str
    ascii: str
    word: str
    colour: str

    def coloured_sign(self, style: TextStyle) -> str:
        return style.paint(self.sign if style.unicode else self.ascii, self.colour)

    def coloured_word(self, style: TextStyle) -> str:
        return style.paint(self.word, self.colour)


BADGES: Final = {
    Severity.OK: Badge("●", "+", "Healthy", "green"),
    Severity.INFO: Badge("●", "+", "Healthy", "green"),
    Severity.DEGRADED: Badge("▲", "!", "Degraded", "yellow"),
    Severity.UNHEALTHY: Badge("✖", "x", "Unhealthy", "red"),
    Severity.UNKNOWN: Badge("◌", "?", "Unknown", "magenta"),
}


def clean(text: str) -> str:
    """Return `text` with unprintable characters, which a terminal might obey, replaced by U+FFFD."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def shorten_ids(text: str) -> str:
    """Return `text` cleaned, with container IDs cut to the 13 digits that crictl shows and accepts."""
    return CONTAINER_ID.sub(r"\1", clean(text))


def escape_markdown(text: str) -> str:
    """Return `text` with angle brackets and bars escaped, which Markdown would read as markup."""
    return re.sub(r"[<>|]", r"\\\g<0>", text)


def markdown_table(rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table with escaped cells; the first row holds the titles."""
    titles, *cells = ([escape_markdown(cell) for cell in row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, ["---"] * len(titles), *cells))


# --- devices and sources -----------------------------------------------------------------------------------


def default_pool(report: Report) -> str:
    """Return the DRA pool that device names leave out: the node's own or, without one, the only pool."""
    pools = {device.pool for device in report.devices}
    return report.node or (pools.pop() if len(pools) == 1 else "")


def device_name(device: DeviceHealth, default: str) -> str:
    """Return ``driver/pool/name`` of a device, without an empty driver and without the pool `default`."""
    pool = "" if device.pool == default else device.pool
    return clean("/".join(filter(None, (device.driver, pool, device.device))))


def name_without_pool(subject: str, default: str) -> str:
    """Return a device name (``name`` or ``driver/pool/name``) without the pool `default`."""
    return clean(subject.replace(f"/{default}/", "/"))


def parent_gpu(name: str) -> str:
    """Return the name of the GPU that the MIG instance `name` belongs to; empty: not a MIG instance."""
    found = MIG_INSTANCE.fullmatch(name)
    return found["gpu"] if found else ""


def hardware_identity(device: DeviceHealth) -> str:
    """Return product, UUID, PCI address and serial number, as known, of a device; empty: none is known."""
    known = dict(device.attributes)
    serial = known.get("serial")
    parts = [known.get(name) for name in ("profile", "product", "uuid", "pciBusId")]
    return clean(", ".join(filter(None, [*parts, serial and f"serial {serial}"])))


def format_instances(folded: int, instances: int) -> str:
    """Return ``and its 7 instances`` or ``and 6 of its 7 instances``; empty if `folded` is 0."""
    if not folded:
        return ""
    many = f"{instances} instances" if instances > 1 else "instance"
    return f"and its {many}" if folded == instances else f"and {folded} of its {many}"


def format_ranges(names: Iterable[str]) -> str:
    """Return a list of names with consecutive numbered names as a range: ``cpus, gpu-0 to gpu-7``."""
    parts: list[str] = []
    for _, group in groupby(enumerate(names), key=lambda pair: _range_key(pair[1], pair[0])):
        run = [name for _, name in group]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) >= MIN_RANGE else run
    return ", ".join(parts)


def _range_key(name: str, position: int) -> tuple[str, int]:
    found = NUMBERED.fullmatch(name)
    return (found["stem"], int(found["number"]) - position) if found else (name, -position)


def explains_absence(source: SourceSample) -> bool:
    """Return whether to show the operator why a source is absent.

    False for an NVML library that is not installed, unless its path was configured: most machines have none.
    """
    is_path = "/" in source.detail.partition(":")[0]
    return bool(source.detail) and (is_path or not source.name.startswith("nvml"))


# --- numbers -----------------------------------------------------------------------------------------------


def format_bytes(size: int) -> str:
    """Return a size in bytes with a binary unit: ``512 B``, ``48.0 KiB``, ``33.1 MiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def format_count(number: int, singular: str, plural: str = "") -> str:
    """Return the number and its noun: ``1 device``, ``2 devices``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
