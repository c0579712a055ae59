"""Files that outlive a process: written by a release, read back by the code under test.

Each file is read and written again: what comes out must be what went in. Its decoded values are compared as
plain lists, so that a field may be renamed in the code but never moved, lost or read as another.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from agent.driver.session import declaration_text, write_declaration
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef
from agent.model.device_usage import DeviceState, PodDeviceUsage, UsageEnd, UsageEndKind
from agent.model.health import Health, Severity
from agent.model.settings import UsageHistoryLimits
from agent.model.time import Instant
from agent.serve.driver_link.handler_interface import DeviceDeclaration
from agent.sources.declaration_file import parse_declaration
from agent.store import cdi_files, driver_files, gpu_fault_file, history_file
from golden.files import INPUTS, RELEASE, load, temporary_root
from golden.plain import plain

NODE: Final = "node-1"
JSON_FILES: Final[dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]]] = {
    "gpu-faults.json": (gpu_fault_file.decode_gpu_faults, gpu_fault_file.encode_gpu_faults),
    "prepares.json": (driver_files.decode_ledger, driver_files.encode_ledger),
    "prepares-nic.json": (driver_files.decode_ledger, driver_files.encode_ledger),
    "taints.json": (driver_files.decode_taints, driver_files.encode_taints),
}
"""Decoder and encoder of each JSON file."""
HISTORY: Final = "history.sqlite"
DECLARATION: Final = "gpu.example.com.toml"
CDI: Final = "example.com-gpu_c-gpus.json"


def write_again(name: str, data: bytes) -> bytes:
    """Read a JSON file and return the bytes that the code under test writes for it."""
    decode, encode = JSON_FILES[name]
    return encode(decode(data))


def values(name: str, data: bytes) -> Any:
    """Return the decoded values of a JSON file."""
    return plain(JSON_FILES[name][0](data))


# --- history -----------------------------------------------------------------------------------------------


def history_rows(path: Path) -> dict[str, Any]:
    """Return everything in a history file as SQLite gives it, its schema included."""
    with sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True) as db:
        schema = [list(row) for row in db.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name")]
        tables = [name for kind, name, _ in schema if kind == "table"]
        found: dict[str, Any] = {"schema": schema}
        for pragma in ("user_version", "application_id"):
            (found[pragma],) = db.execute(f"PRAGMA {pragma}").fetchone()
        for table in tables:
            found[table] = [list(row) for row in db.execute(f"SELECT * FROM {table} ORDER BY 1")]
    db.close()
    return found


def read_history(path: Path) -> Any:
    """Return the decoded values of a history file."""
    return plain(history_file.read_history(path))


def copy_history(source: Path, target: Path) -> None:
    """Read a history file and write everything in it into another."""
    found = history_file.read_history(source)
    uses = (*reversed(found[1]), *reversed(found[0]))
    history_file.HistoryFile(target, UsageHistoryLimits()).write_uses(uses, (), found[2], delete_by_age=False)


def write_history(path: Path) -> None:
    """Write the history that ``inputs/history.json`` describes."""
    given = load(INPUTS / "history.json")
    history_file.HistoryFile(path, UsageHistoryLimits()).write_uses(
        [_use(use) for use in given["uses"]], (), given["left_s"], delete_by_age=False
    )


def _use(given: dict[str, Any]) -> PodDeviceUsage:
    ended = given["ended"]
    return PodDeviceUsage(
        given["id"],
        PodRef(*given["pod"]),
        ClaimRef(*given["claim"]),
        DeviceRef(*given["device"]),
        Instant(0, given["began"]),
        given["before"],
        _state(given["state"]),
        _state(given["worst"]),
        tuple(map(Origin, given["told_by"])),
        tuple(given["requests"]),
        tuple(given["containers"]),
        given["owner"],
        tuple(given["maybe"]),
        False,
        UsageEnd(UsageEndKind(ended[0]), *ended[1:]) if ended else None,
    )


def _state(given: list[Any]) -> DeviceState:
    health, severity, code, evidence, since_s = given
    return DeviceState(Health(health), Severity(severity), code, evidence, since_s)


# --- declarations and CDI ----------------------------------------------------------------------------------


def declaration() -> bytes:
    """Return the file that declares the devices of ``inputs/declared.json``."""
    given = load(INPUTS / "declared.json")
    return declaration_text(given["driver"], [DeviceDeclaration(pool, keys) for pool, keys in given["rows"]])


def decode_declaration(data: bytes) -> Any:
    """Return the decoded devices of a declaration."""
    return plain(parse_declaration(data, "gpu.example.com", NODE))


def declare_again(directory: Path) -> int:
    """Declare the same devices in a directory that has the driver's file; return how many there are.

    Raises:
        Exception: The file is not recognized as one of ours.
    """
    given = load(INPUTS / "declared.json")
    rows = [DeviceDeclaration(pool, keys) for pool, keys in given["rows"]]
    return len(write_declaration(directory, given["driver"], NODE, rows))


def write_cdi(directory: Path) -> list[str]:
    """Write the CDI file that ``inputs/cdi.json`` describes; return the CDI ids."""
    given = load(INPUTS / "cdi.json")
    devices = [
        cdi_files.CdiDevice(
            name,
            env=env,
            mounts=tuple(
                cdi_files.CdiMount(host, inside, options=tuple(options), type=kind)
                for host, inside, options, kind in mounts
            ),
            nodes=tuple(
                cdi_files.CdiNode(path, host_path=host, permissions=letters) for path, host, letters in nodes
            ),
            annotations=annotations,
        )
        for name, env, mounts, nodes, annotations in given["devices"]
    ]
    return list(cdi_files.write_cdi_spec(directory, given["vendor_class"], given["claim"], devices))


def write_release() -> None:
    """Write every file of the release, with the code under test."""
    from golden.files import store

    RELEASE.mkdir(parents=True, exist_ok=True)
    for name in JSON_FILES:
        data = write_again(name, (INPUTS / name).read_bytes())
        (RELEASE / name).write_bytes(data)
        store(RELEASE / f"{name}.values.json", values(name, data))
    (RELEASE / HISTORY).unlink(missing_ok=True)
    write_history(RELEASE / HISTORY)
    store(RELEASE / f"{HISTORY}.rows.json", history_rows(RELEASE / HISTORY))
    store(RELEASE / f"{HISTORY}.values.json", read_history(RELEASE / HISTORY))
    (RELEASE / DECLARATION).write_bytes(declaration())
    store(RELEASE / f"{DECLARATION}.values.json", decode_declaration(declaration()))
    with temporary_root() as root:
        ids = write_cdi(root)
        (RELEASE / CDI).write_bytes((root / CDI).read_bytes())
    store(RELEASE / f"{CDI}.values.json", ids)
