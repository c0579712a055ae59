"""Simulated node with GPUs: faults from NVML and the kernel log, time, and restarts of the agent.

Log lines are counted as the native reader counts them, and evaluations run when the engine would run them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from gpu_samples import ABSENT, H100, gpu_sample
from paper import PaperNode, codes, device_of

from agent.engine.step import initial_state
from agent.health.gpu.faults.checkpoint import restore_faults
from agent.health.gpu.xid.log_lines import GPU_LOG_PATTERNS
from agent.health.kernel_log.facts import compile_pattern
from agent.model.gpu import (
    WHOLE_GPU,
    EventCount,
    GpuEvent,
    GpuField,
    GpuOsSample,
    GpuSample,
    MigSample,
    NvmlReturnCode,
    NvmlSample,
    XidCount,
)
from agent.model.health import Cause, DeviceHealth, Health
from agent.model.machine_samples import LogLine, LogSample
from agent.model.persistent_faults import PersistentState
from agent.model.reading import Absence, Missing, Reading, SourceSample, SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings, GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS
from agent.store.gpu_fault_file import decode_gpu_faults, encode_gpu_faults

GONE_DARK: Final = Missing(Absence.UNREADABLE)
HEARTBEAT_NS: Final = 10 * NS
FIRST_BOOT: Final = "6b1c3f6a-8f0f-4d4d-9f30-1d2f3e4a5b6c"
SECOND_BOOT: Final = "7c2d4071-9010-4e5e-a041-2e30405b6c7d"
THIRD_BOOT: Final = "8d3e5182-a121-4f6f-b152-3f41516c7d8e"
RESET: Final = (
    GpuField.RECOVERY_ACTION,
    GpuField.REMAP_PENDING,
    *(
        field
        for field in GpuField
        if re.fullmatch("ecc_(un)?correctable(_dram|_sram)?|sram_(parity|secded)", field)
    ),
)
"""Readings that a reset clears."""
_TABLE: Final = [
    (compile_pattern(pattern), [word != "%*" for word in re.findall("%[bdxwk*]", pattern)])
    for pattern in GPU_LOG_PATTERNS
]


class PaperLog:
    """Kernel log of one boot, counted as the native reader does."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, tuple[str, ...]], LogLine] = {}
        self._seq = 0

    def write(self, text: str, now_ns: int, times: int = 1) -> None:
        """Write equal lines at one time."""
        for index, (pattern, counts) in enumerate(_TABLE):
            if found := pattern.match(text):
                words = zip(found.groups(), counts, strict=True)
                self._count((index, tuple(word for word, counted in words if counted)), text, now_ns, times)
                return
        raise ValueError(f"no pattern of the reader matches: {text}")

    def _count(self, key: tuple[int, tuple[str, ...]], text: str, now_ns: int, times: int) -> None:
        self._seq += times
        us = now_ns // 1000
        known = self._lines.get(key) or LogLine(key[0], 0, us, us, text, text, self._seq)
        self._lines[key] = known._replace(times=known.times + times, last_us=us, text=text, seq=self._seq)

    def forget(self) -> None:
        """Drop all lines, as the reader does when too many others arrive."""
        self._lines.clear()

    def lines(self) -> tuple[LogLine, ...]:
        """Return all lines by their first time."""
        return tuple(sorted(self._lines.values(), key=lambda line: (line.first_us, line.seq)))


class GpuNode(PaperNode):
    """Node whose NVML and log are changed by methods; the next evaluation shows the effect."""

    def __init__(
        self,
        gpus: int = 2,
        *,
        migs: Mapping[int, Iterable[tuple[int, int]]] | None = None,
        readings: Mapping[GpuField, Reading] = H100,
        kmsg: bool = True,
        **limits: Any,
    ) -> None:
        super().__init__(EngineSettings("node-a", gpu=GpuLimits(**limits)))
        self.settings = self.state.settings
        self.kmsg = PaperLog() if kmsg else None
        self.boot_id = FIRST_BOOT
        self.state = initial_state(
            self.settings,
            restore_faults(
                decode_gpu_faults(encode_gpu_faults(self.checkpoint)), self.boot_id, self.limits, self.now
            ),
            PersistentState(),
            self.boot_id,
        )
        self.nvml = SourceSample("nvml", SourceState.OK, self.now_ns, 10 * NS, 0, "", passes=1, vital=False)
        self.library: dict[str, Any] = {"generation": 1, "driver": "570.86.15"}
        """Attributes of the GPU set."""
        self.gpus: dict[int, GpuSample] = {
            number: gpu_sample(
                readings=readings,
                number=number,
                bus=f"{number // 15:04x}:{number % 15 + 1:x}b:00.0",
                passes=0,
                beat_ns=0,
                event_mask=int(GpuEvent.XID),
            )
            for number in range(gpus)
        }
        """GPUs by number."""
        for number, instances in (migs or {}).items():
            self.partition(number, *instances)
        self.hanging: set[int] = set()
        self.host = GpuOsSample(fabric_manager=True)
        self.next()

    @property
    def limits(self) -> GpuLimits:
        """Limits for GPUs."""
        return self.settings.gpu

    @property
    def checkpoint(self) -> Any:
        """Faults and GPUs that the agent would restore after a restart."""
        return self.state.gpus.checkpoint

    # --- changes of a GPU

    def change(self, number: int, **attributes: Any) -> None:
        """Change a GPU's sample without a pass."""
        self.gpus[number] = replace(self.gpus[number], **attributes)

    def set_readings(self, number: int, **readings: Reading) -> None:
        """Change some readings of a GPU."""
        changed = {GpuField(name): value for name, value in readings.items()}
        self.change(number, readings={**self.gpus[number].readings, **changed})

    def partition(self, number: int, *instances: tuple[int, int]) -> None:
        """Set the MIG instances of a GPU."""
        migs = tuple(MigSample(gi, ci, f"MIG-{number}-{gi}-{ci}") for gi, ci in instances)
        self.change(number, migs=migs)
        self.set_readings(number, mig_mode=int(bool(migs)))

    def lose(self, number: int, status: int = NvmlReturnCode.LOST) -> None:
        """Let every call on a GPU return ``status``, and make all readings unreadable."""
        dark = {
            field: GONE_DARK if isinstance(value, int) else value
            for field, value in self.gpus[number].readings.items()
        }
        self.change(number, status=status, readings=dark)

    def recover(self, number: int, readings: Mapping[GpuField, Reading] = H100) -> None:
        """Let a lost GPU answer again, through a new handle."""
        self.change(number, status=0, readings=readings, handles=self.gpus[number].handles + 1)

    def reset(self, number: int) -> None:
        """Reset a GPU: no recovery action is requested, and its counters are cleared."""
        had = self.gpus[number].readings
        self.set_readings(number, **{field: 0 for field in RESET if isinstance(had[field], int)})

    def hang(self, *numbers: int, call: str = "nvmlDeviceGetFieldValues") -> None:
        """Let a call on the GPUs hang."""
        for number in numbers:
            self.hanging.add(number)
            self.change(number, call=call, call_ns=self.now_ns)

    def return_from_hang(self, *numbers: int) -> None:
        """Let the hanging call on the GPUs return."""
        for number in numbers:
            self.hanging.discard(number)
            self.change(number, call="", call_ns=0)

    def reload_stopped(self, **how: Any) -> None:
        """Restart the agent, and reload the driver while it is stopped."""
        self.library["module"] += 1
        self.restart(**how)

    def reload(self) -> None:
        """Reload the driver."""
        self.library["generation"] += 1
        for number, gpu in self.gpus.items():
            self.change(number, handles=gpu.handles + 1)

    # --- reports of faults

    def nvml_xid(
        self, number: int, code: int, gi: int = WHOLE_GPU, ci: int = WHOLE_GPU, times: int = 1
    ) -> None:
        """Report an XID by NVML."""
        gpu = self.gpus[number]
        at = (code, gi, ci)
        known = {(xid.code, xid.gi, xid.ci): xid for xid in gpu.xids}
        before = known.get(at) or XidCount(code, gi, ci, 0, self.now_ns, self.now_ns)
        known[at] = before._replace(times=before.times + times, last_ns=self.now_ns)
        self.change(number, xids=tuple(known.values()))

    def nvml_event(self, number: int, event: GpuEvent, times: int = 1) -> None:
        """Report an event other than an XID by NVML."""
        events = dict(self.gpus[number].events)
        before = events.get(event, EventCount(0, 0, 0))
        events[event] = EventCount(before.times + times, self.now_ns, 0)
        self.change(number, events=events)

    def log(self, text: str, times: int = 1) -> None:
        """Write a line to the kernel log."""
        assert self.kmsg is not None, "the node has no kernel log"
        self.kmsg.write(text, self.now_ns, times)

    def log_xid(self, number: int, code: int, detail: str = "", instance: str = "", times: int = 1) -> None:
        """Write the line of an XID to the kernel log."""
        bus = self.gpus[number].bus.removesuffix(".0")
        detail = detail or "pid=1234, name=python, something failed"
        self.log(f"NVRM: Xid (PCI:{bus}{instance}): {code}, {detail}", times)

    def xid(self, number: int, code: int, gi: int = WHOLE_GPU, ci: int = WHOLE_GPU, times: int = 1) -> None:
        """Report an XID by NVML and by the kernel log, as usual."""
        self.nvml_xid(number, code, gi, ci, times)
        if self.kmsg is not None:
            self.log_xid(number, code, times=times)

    # --- time

    def read(self) -> None:
        """Finish a pass of all sources that do not hang, one period after the last."""
        super().read()
        self._pass_over_gpus()

    def _pass_over_gpus(self) -> None:
        for number, gpu in self.gpus.items():
            if number not in self.hanging and self.nvml.state is SourceState.OK:
                self.change(number, passes=gpu.passes + 1, beat_ns=self.now_ns)
        if (
            self.nvml.state is not SourceState.STARTING
            and self.now_ns - self.nvml.beat_ns >= self.nvml.period_ns
        ):
            self.nvml = self.nvml._replace(beat_ns=self.now_ns, passes=self.nvml.passes + 1)

    def rest(self, seconds: float) -> Report:
        """Let time pass without events: evaluations run when they are due, and for heartbeats."""
        end_ns = self.now_ns + int(seconds * NS)
        report = self.evaluate()
        while self.now_ns < end_ns:
            due_ns = self.state.due_ns or end_ns
            until_ns = min(end_ns, self.now_ns + HEARTBEAT_NS, max(due_ns, self.now_ns + 1))
            passes = (until_ns - self.now_ns) // NS
            for _ in range(passes):
                self.read()
            self.wait((until_ns - self.now_ns) / NS)
            self.now_ns = until_ns
            report = self.evaluate()
        return report

    def restart(self, *, away_s: float = 5.0, boot_id: str = "", evaluate: bool = True) -> Report | None:
        """Restart the agent with its checkpoint; after a reboot if ``boot_id`` is given."""
        kept = decode_gpu_faults(encode_gpu_faults(self.state.checkpoint))
        self.wait(away_s)
        if boot_id:
            self._boot(boot_id)
        for number in self.gpus:
            self.change(number, xids=(), events={}, handles=1, passes=0)
        self.library["generation"] = 1
        self.nvml = self.nvml._replace(beat_ns=self.now_ns, passes=1)
        restored = restore_faults(kept, self.boot_id, self.limits, self.now, self.settings.rules)
        self.state = initial_state(self.settings, restored, kept, self.boot_id)
        return self.next() if evaluate else None

    def _boot(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.now_ns = 30 * NS
        self.hanging.clear()
        if self.kmsg is not None:
            self.kmsg = PaperLog()
        for number in self.gpus:
            self.change(number, call="", call_ns=0)
            self.reset(number)
        for name, (passes, _) in self._beats.items():
            self._beats[name] = (passes, self.now_ns)

    # --- snapshots and verdicts

    def snapshot(self) -> Snapshot:
        """Return the snapshot of all sources."""
        plain = super().snapshot()
        events = self.nvml._replace(name="nvml-events", period_ns=NS, beat_ns=self.now_ns)
        found = self.nvml.state not in (SourceState.STARTING, SourceState.ABSENT)
        gpus = tuple(self.gpus.values()) if found else ()
        library = {"count": len(gpus), **self.library}
        log = None
        if self.kmsg is not None:
            source = SourceSample("kmsg", SourceState.OK, self.now_ns, NS, 0, "", passes=1, vital=False)
            log = LogSample(self.kmsg.lines(), source)
        return replace(
            plain,
            gpus=NvmlSample(gpus, self.nvml, events, **library),
            log=log,
            host=self.host,
            sources=(*plain.sources, self.nvml, events, *([log.source] if log else [])),
        )

    def verdict(self, name: str = "gpu-0") -> DeviceHealth:
        """Evaluate the node and return the verdict on a device."""
        return device_of(self.evaluate(), name)

    def health(self, name: str = "gpu-0") -> Health:
        """Evaluate the node and return the health of a device."""
        return self.verdict(name).health

    def codes(self, name: str = "gpu-0") -> list[str]:
        """Evaluate the node and return the codes of a device's causes, worst first."""
        return codes(self.verdict(name))

    def cause(self, code: str, name: str = "gpu-0") -> Cause:
        """Evaluate the node and return one cause of a device."""
        return next(cause for cause in self.verdict(name).causes if cause.code == code)

    def times(self, number: int, code: int) -> int:
        """Evaluate the node and return the count of an unresolved XID of a GPU and its instances."""
        self.evaluate()
        faults = self.state.gpus.fault_log.faults.items()
        return sum(f.times for key, f in faults if key[:2] == (number, f"gpu.xid.{code}") and not f.resolved)


OLD_DRIVER: Final[Mapping[GpuField, Reading]] = {**H100, GpuField.RECOVERY_ACTION: ABSENT}
"""Readings of an H100 whose driver does not report a recovery action."""
