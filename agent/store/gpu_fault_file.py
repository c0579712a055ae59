"""State file of GPU faults and of the machine's values at the agent's start, with its background writer.

A changed fault is written at once, changed event counts once a minute: many events in a short time must not
cause as many writes.
"""

import threading
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import trio

from agent.model.cleared_faults import ClearedFault
from agent.model.cpuset import parse_cpus
from agent.model.gpu import WHOLE_GPU
from agent.model.health import Severity
from agent.model.persistent_faults import (
    NO_MODULE,
    BootBaseline,
    DriverModule,
    KnownGpu,
    PersistentCondition,
    PersistentFault,
    PersistentState,
)
from agent.store import state_files
from agent.store.state_files import StateWriteError, UnusableFile, decode_json, encode_json, struct_type_of
from agent.system.files import ReadError, read_bounded
from agent.system.output import get_logger
from agent.system.threads.thread_start import DaemonThread, ThreadStartError
from agent.system.threads.trio_calls import call_in_thread_when_possible

FILE: Final = "gpu-faults.json"
VERSION: Final = 1
SIZE_MAX: Final = 1 << 20
"""Largest accepted state file of GPU faults [bytes]: hundreds of times the faults of 32 GPUs."""
TEXT_STEPS: Final = 16
"""Number of steps in which the log lines of faults are left out of a file that would be too large."""
DEBOUNCE_S: Final = 0.2
"""Delay of a write after a changed fault [s]; changes within this time are written together."""
COUNTS_INTERVAL_S: Final = 60.0
"""Time between two writes of changed event counts, and before a failed write is tried again [s]."""

log = get_logger(__name__)


class _FaultTimes(NamedTuple):
    """Identity of one fault, and its monotonic times, which release 0.1 does not have."""

    uuid: str
    code: str
    gi: int
    ci: int
    first_ns: int
    last_ns: int
    healed_ns: int
    bursts_ns: tuple[int, ...]


_MONOTONIC: Final = _FaultTimes._fields[4:]
_NATURAL: Final = msgspec.Meta(ge=0)
_INSTANCE: Final = msgspec.Meta(ge=0, le=WHOLE_GPU)
_GPU: Final = struct_type_of(KnownGpu, number=_NATURAL)
_FAULT: Final = struct_type_of(
    PersistentFault,
    without=_MONOTONIC,
    gi=_INSTANCE,
    ci=_INSTANCE,
    times=_NATURAL,
    log_us=_NATURAL,
    severity=msgspec.Meta(ge=int(min(Severity)), le=int(max(Severity))),
)
_CLEARED: Final = struct_type_of(ClearedFault)


@dataclass(frozen=True, slots=True)
class _Start(BootBaseline):
    """Object ``start`` of the file. Release 0.1 ignores unknown keys only here."""

    module: DriverModule = NO_MODULE
    pci_repaired: tuple[tuple[str, int], ...] = ()
    """Address and ``repaired_ns`` of each PCI function that an operator cleared."""
    fault_times: tuple[_FaultTimes, ...] = ()
    gpu_checks: tuple[PersistentCondition, ...] = ()
    """Conditions of rules, and those of health checks in their probation: with all of their fields."""


_BASELINE: Final = tuple(field.name for field in fields(BootBaseline))
_PCI_FIELDS: Final = 5
"""Number of fields of a PCI function in the file: release 0.1 refuses the whole file for one more."""


class _FaultsFile(msgspec.Struct):
    version: int
    gpus: list[_GPU]  # type: ignore[valid-type]  # made at run time from the model's
    faults: list[_FAULT]  # type: ignore[valid-type]
    cleared: list[_CLEARED] = []  # type: ignore[valid-type]
    start: _Start = _Start()
    checks: list[PersistentCondition] = []
    runs: Annotated[int, _NATURAL] = 0


def load_gpu_faults(path: Path) -> tuple[PersistentState, str]:
    """Load GPU faults and the machine's values at start from the state file, and return the problem of the
    file.

    The text of the problem is empty if there is no problem. Raises nothing.
    """
    return state_files.load_state_file(path, SIZE_MAX, decode_gpu_faults, PersistentState())


def decode_gpu_faults(data: bytes) -> PersistentState:
    """Decode the GPU faults from the content of the state file.

    Raises:
        UnusableFile: The content is not valid; the text has the reason and the JSON path.
    """
    file = decode_json(data, _FaultsFile, VERSION)
    faults = (PersistentFault(*msgspec.structs.astuple(fault)) for fault in file.faults)
    times = {entry[:4]: entry for entry in file.start.fault_times}
    memory = PersistentState(
        gpus=tuple(KnownGpu(*msgspec.structs.astuple(gpu)) for gpu in file.gpus),
        faults=tuple(_with_times(fault, times.get(_fault_times(fault)[:4])) for fault in faults),
        cleared=tuple(ClearedFault(*msgspec.structs.astuple(record)) for record in file.cleared),
        start=_baseline(file.start),
        conditions=(*file.checks, *file.start.gpu_checks),
        runs=file.runs,
        module=file.start.module,
    )
    numbers = [gpu.number for gpu in memory.gpus]
    for number in numbers:
        if numbers.count(number) > 1:
            raise UnusableFile(
                f"GPU fault file has {numbers.count(number)} GPUs with number {number}; numbers must differ"
            )
    _check_cpu_lists(file.start)
    return memory


def _baseline(start: _Start) -> BootBaseline:
    """Return the values at start of the file's object ``start``."""
    found = BootBaseline(**{name: getattr(start, name) for name in _BASELINE})
    repaired = dict(start.pci_repaired)
    rows = (row._replace(repaired_ns=repaired.get(row.address, row.repaired_ns)) for row in found.pci)
    return replace(found, pci=tuple(rows))


def _check_cpu_lists(start: BootBaseline) -> None:
    lists = [start.isolated or "", *(of.online for of in start.cpus)]
    lists += [cpus for _, cpus in (*start.frequencies, *start.numa_cpus)]
    try:
        for cpus in lists:
            parse_cpus(cpus)
    except ValueError as error:
        raise UnusableFile(f"GPU fault file has an invalid list of CPUs: {error}") from None


def encode_gpu_faults(memory: PersistentState) -> bytes:
    """Encode GPU faults and the baseline (values at start) as the content of their state file.

    If it would be larger than SIZE_MAX, log lines of the least needed faults are left out.
    """
    data = _encode(memory)
    least_needed_first = sorted(
        memory.faults, key=lambda fault: (not fault.healed, fault.severity, fault.last_wall_s)
    )
    at_once = len(least_needed_first) // TEXT_STEPS + 1
    while len(data) > SIZE_MAX and least_needed_first:
        dropped, least_needed_first = least_needed_first[:at_once], least_needed_first[at_once:]
        shorter = {fault: fault._replace(texts=()) for fault in dropped}
        memory = replace(memory, faults=tuple(shorter.get(fault, fault) for fault in memory.faults))
        data = _encode(memory)
    return data


def _encode(memory: PersistentState) -> bytes:
    content: dict[str, object] = {
        "version": VERSION,
        "gpus": [gpu._asdict() for gpu in memory.gpus],
        "faults": [
            {name: value for name, value in fault._asdict().items() if name not in _MONOTONIC}
            for fault in memory.faults
        ],
    }
    if memory.cleared:  # without it, earlier versions of the agent can read the file
        content["cleared"] = [record._asdict() for record in memory.cleared]
    start: dict[str, object] = {}
    if memory.start != BootBaseline():
        start = {name: getattr(memory.start, name) for name in _BASELINE}
        start["pci"] = [row[:_PCI_FIELDS] for row in memory.start.pci]
        if repaired := [(row.address, row.repaired_ns) for row in memory.start.pci if row.repaired_ns]:
            start["pci_repaired"] = repaired
    if memory.module != NO_MODULE:
        start["module"] = memory.module
    if times := [entry for entry in map(_fault_times, memory.faults) if any(entry[4:])]:
        start["fault_times"] = times
    if whole := [fault for fault in memory.conditions if fault.ended_ns or not fault.check]:
        start["gpu_checks"] = whole
    if start:
        content["start"] = start
    if of_checks := [fault[:-1] for fault in memory.conditions if fault not in whole]:
        content["checks"] = of_checks  # release 0.1 accepts no more fields
    if memory.runs:
        content["runs"] = memory.runs
    return encode_json(content)


def _fault_times(fault: PersistentFault) -> _FaultTimes:
    return _FaultTimes(*(getattr(fault, name) for name in _FaultTimes._fields))


def _with_times(fault: PersistentFault, times: _FaultTimes | None) -> PersistentFault:
    if times is None:
        return fault
    return fault._replace(
        first_ns=times.first_ns, last_ns=times.last_ns, healed_ns=times.healed_ns, bursts_ns=times.bursts_ns
    )


def save_gpu_faults(path: Path, memory: PersistentState) -> None:
    """Write the state file of GPU faults. Blocks on the disk. Raises StateWriteError."""
    state_files.replace_file(path, encode_gpu_faults(memory), SIZE_MAX)


class GpuFaultWriter:
    """Background writer of the state file of GPU faults.

    It writes changed faults at once, and event counts once a minute.
    """

    def __init__(self, path: Path, saved: PersistentState) -> None:
        """Create the writer; :meth:`run` writes.

        Args:
            path: State file; the first write creates its directory.
            saved: Content of the file now.
        """
        self._path = path
        self._saved = saved
        self._newest = saved
        self._changed = trio.Event()
        self._urgent = trio.Event()
        self._writing = threading.Lock()
        self._logged_errno: int | None = None
        self.error = ""
        """Error of the last write; empty: it succeeded, or there was none."""

    def set_newest(self, memory: PersistentState) -> None:
        """Set the GPU faults that the next write stores.

        Only the core thread calls this method. Never blocks.
        """
        self._newest = memory
        self._changed.set()
        if _urgent_part(memory) != _urgent_part(self._saved):
            self._urgent.set()

    async def run(self) -> None:
        """Write changed GPU faults to the state file until cancelled."""
        while True:
            await self._changed.wait()
            with trio.move_on_after(COUNTS_INTERVAL_S):
                await self._urgent.wait()
            await trio.sleep(DEBOUNCE_S)
            self._changed, self._urgent = trio.Event(), trio.Event()
            if not await call_in_thread_when_possible(self._write, "dh-faults"):
                await trio.sleep(COUNTS_INTERVAL_S)
            elif _urgent_part(self._newest) == _urgent_part(self._saved):
                continue
            # the write failed, or set_newest() compared with the file as it was before the write
            self._changed.set()
            self._urgent.set()

    def close(self, timeout_s: float) -> bool:
        """Write pending GPU faults at shutdown.

        Returns False if the write takes longer than `timeout_s` seconds.
        """
        thread = DaemonThread(self._write, "dh-faults")
        try:
            thread.start()
        except ThreadStartError:  # here a hung disk would block, but without the write the changes are lost
            self._write()
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _write(self) -> bool:
        """Write changed GPU faults.

        Returns False if the write failed. Waits for an earlier write that is still running.
        """
        with self._writing:
            memory = newest = self._newest
            if memory == self._saved:
                self._logged_errno, self.error = None, ""
                return True
            # the next instance of a driver, in a rolling update, has counted its start already
            memory = replace(memory, runs=max(memory.runs, _saved_runs(self._path)))
            try:
                save_gpu_faults(self._path, memory)
            except StateWriteError as error:
                self.error = str(error)
                if error.errno != self._logged_errno:
                    log.warning(
                        "GPU fault file %s; GPU faults are lost on restart; make its directory writable",
                        error,
                    )
                self._logged_errno = error.errno
                return False
            self._saved = replace(memory, runs=newest.runs)
            self._logged_errno, self.error = None, ""
            return True


def _saved_runs(path: Path) -> int:
    """Return how many starts of the agent the state file has counted; 0: no start, or the file is not usable.

    Raises nothing.
    """
    try:
        return decode_gpu_faults(read_bounded(path, SIZE_MAX, is_own=True).data).runs
    except (ReadError, UnusableFile):
        return 0


def _urgent_part(memory: PersistentState) -> object:
    """Return the part of the stored GPU faults that is written at once after a change: all but counts, times
    and mild conditions of rules, which may come and go with each reading."""
    faults = [
        fault._replace(times=0, last_wall_s=0, last_ns=0, log_us=0, texts=(), counters=())
        for fault in memory.faults
    ]
    conditions = [
        (*fault[:4], fault.ended_ns)
        for fault in memory.conditions
        if fault.check or fault.severity is Severity.UNHEALTHY
    ]
    return memory.gpus, faults, memory.cleared, memory.start, memory.runs, memory.module, conditions
