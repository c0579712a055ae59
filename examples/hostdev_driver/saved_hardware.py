"""File of the hardware that the driver offers, so that a restart of the driver hides no loss.

Without it, a device that lost pages, CPUs or its GPU would return smaller, or not at all, and Healthy. The
next instance of a rolling update reads the file, too. A boot ends its effect, except for what claims hold.
"""

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from hostdev_driver.grants import Holdings
from hostdev_driver.host import CpuPlace, Hardware, Pool, parse_size_kib

VERSION: Final = 1
SIZE_MAX: Final = 1 << 20
"""Size limit of the file: several times that of a host with 8,192 CPUs [bytes]."""
BOOT_ID: Final = "sys/kernel/random/boot_id"

log = logging.getLogger(__name__)


class SavedHardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file."""

    version: int
    boot_id: str
    """Boot in which the hardware was found; empty: unknown."""
    pages: list[tuple[Pool, int]] = []
    cpus: list[tuple[int, CpuPlace]] = []
    gpus: Mapping[str, int] = {}

    @property
    def hardware(self) -> Hardware:
        """The saved hardware."""
        return Hardware(dict(self.pages), dict(self.cpus), self.gpus)


def offered_hardware(
    path: Path,
    found: Hardware,
    holdings: Holdings,
    *,
    boot_id: str,
    shares: int = 1,
    given: Mapping[Pool, int] | None = None,
) -> Hardware:
    """Return the hardware to offer, and save it for the next instance of the driver. Raises nothing.

    Args:
        path: File of the hardware; a file that cannot be read or written is logged.
        found: Hardware that the host has now.
        holdings: What claims hold; they hold it also if the host no longer has it.
        boot_id: Running boot; empty: unknown, as after a boot.
        shares: Number of devices per hugepage pool.
        given: Sizes of pools that the operator gives instead of the found ones.
    """
    saved = _load(path)
    known = saved.hardware
    held = _held(known, holdings, shares)
    kept = known if boot_id and saved.boot_id == boot_id else held
    inherited = Hardware(
        _larger(found.pages, kept.pages, held.pages),
        {**found.cpus, **kept.cpus},
        {**found.gpus, **kept.gpus},
    )
    new = SavedHardware(
        VERSION, boot_id, sorted(inherited.pages.items()), sorted(inherited.cpus.items()), inherited.gpus
    )
    if new != saved:
        _save(path, new)
    return inherited._replace(pages=_larger({**inherited.pages, **(given or {})}, held.pages))


def read_boot_id(procfs: Path) -> str:
    """Return the id of the running boot; empty: it cannot be read."""
    try:
        return (procfs / BOOT_ID).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _larger(*pages_of: Mapping[Pool, int]) -> dict[Pool, int]:
    """Return the largest number of pages of each pool."""
    found: dict[Pool, int] = {}
    for counts in pages_of:
        found |= {pool: max(pages, found.get(pool, 0)) for pool, pages in counts.items()}
    return found


def _held(known: Hardware, holdings: Holdings, shares: int) -> Hardware:
    """Return the hardware that claims hold, as far as its place is known."""
    grants = [grant for holding in holdings.values() for grant in holding.grants]
    by_device: dict[tuple[Pool, str], int] = {}
    for grant in grants:
        if grant.pages:
            key = Pool(grant.numa, parse_size_kib(grant.size)), grant.device
            by_device[key] = by_device.get(key, 0) + grant.pages
    pages: dict[Pool, int] = {}
    for (pool, _), of_device in by_device.items():
        pages[pool] = max(pages.get(pool, 0), of_device * shares)
    cpus = {cpu for grant in grants for cpu in grant.cpus}
    devices = {grant.device for grant in grants}
    return Hardware(
        pages,
        {cpu: place for cpu, place in known.cpus.items() if cpu in cpus},
        {address: minor for address, minor in known.gpus.items() if f"gpu-{minor}" in devices},
    )


def _load(path: Path) -> SavedHardware:
    nothing = SavedHardware(VERSION, "")
    try:
        with open(path, "rb") as file:
            saved = msgspec.json.decode(file.read(SIZE_MAX), type=SavedHardware)
    except FileNotFoundError:
        return nothing
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
    else:
        if saved.version == VERSION:
            return saved
        reason = f"it has version {saved.version}, this driver reads version {VERSION}"
    log.warning("%s: not usable: %s; losses since the driver before are not reported", path, reason)
    return nothing


def _save(path: Path, saved: SavedHardware) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # two instances of a rolling update can write at the same time
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(msgspec.json.encode(saved))
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).rename(path)
    except OSError as error:
        log.warning("%s: could not be written: %s; a restart of the driver hides losses", path, error)
