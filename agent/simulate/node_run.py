"""Run of one fault script: the agent's real decisions on a simulated machine, with all invariants checked.

The agent's own code runs for the engine's step(), the schedule of publications, the selection of devices that
health streams send, taints, the classification and the ledger (stored results) of prepares, the history of
verdicts, and the contents of state files. Machine, kubelet, disk and driver are models.

Time advances from event to event. Between events the agent evaluates at heartbeats, and most of them repeat
the last report. Because step() is pure, :meth:`NodeRun._skip_quiet_time` evaluates the last heartbeat before
the next event first. If its report and the phases of all conditions equal the present ones, the heartbeats
between were equal, too, and are skipped; otherwise a binary search finds the first difference. Without a
new reading a verdict changes only because a time limit passes, which it does once, so that no change and its
opposite can lie between two equal states. A test compares runs that skip with runs that evaluate every
heartbeat.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from agent.devices.inventory import mig_device
from agent.devices.taints import TaintPolicy, TaintState, decide_taints, restore_taints
from agent.engine.loop import LoopTiming, PublicationSchedule, visible_state
from agent.engine.step import EngineState, initial_state, step
from agent.health.gpu.faults.checkpoint import restore_faults
from agent.health.verdict import VerdictChangeLog
from agent.model.claim import Claim, ClaimDevice, DeviceRef
from agent.model.gpu import GpuField, NvmlReturnCode
from agent.model.health import DeviceHealth
from agent.model.history import GONE, StoredVerdicts
from agent.model.persistent_faults import PersistentState
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.time import NS
from agent.prepare import prepare_ledger as ledgers
from agent.prepare.classify import PrepareContext, classify
from agent.prepare.errors import FailedDeviceError
from agent.prepare.prepare_ledger import health_without_faults, next_expiry_wall_s
from agent.simulate.fault_model import FAULT_KINDS, SOURCES, FaultKind, NodeScript, ScriptEvent
from agent.simulate.invariants import (
    InvariantChecker,
    InvariantViolation,
    KubeletModel,
    TrueFault,
    Truth,
    subject_of,
)
from agent.simulate.machine import DRIVER, NODE, SOURCE_DEVICES, Machine
from agent.store.driver_files import (
    LedgerFileContent,
    decode_ledger,
    decode_taints,
    encode_ledger,
    encode_taints,
)
from agent.store.gpu_fault_file import decode_gpu_faults, encode_gpu_faults

HOST_DRIVER: Final = "host.example.com"
"""Driver that declares nothing, so that its socket reports the host's devices."""
HEARTBEAT_S: Final = 10.0
JITTER: Final = 0.5
"""Random number of the heartbeats' jitter, always the same."""
SETTLED_NS: Final = 20 * NS
"""Time after an event or a change until quiet time may be skipped [ns]."""
REREAD_NS: Final = NS // 4
RETRY_S: Final = 75
"""Time between two prepares of a claim by the kubelet [s]."""
VERSION: Final = "1"
EVICT: Final = frozenset({"gpu.xid.*"})
RESET_CURES: Final = ("reset",)
RELOAD_CURES: Final = ("reset", "reload")
ALL_CURES: Final = ("reset", "reload", "reboot", "itself")


@dataclass
class NodeResult:
    """Result of the run of one fault script: the violated invariant, if any, and counts."""

    device_s: float = 0.0
    """Simulated time of all devices [s]."""
    evaluations: int = 0
    skipped: int = 0
    """Heartbeats that were computed and not evaluated."""
    checks: int = 0
    violation: InvariantViolation | None = None
    """First violation, with which the run ends; None: none."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Number of events by kind."""
    verdicts: list[tuple[float, tuple[tuple[str, int, str], ...]]] = field(default_factory=list)
    """Changed verdicts with their time [s], if they are recorded."""


def phases_of(state: EngineState) -> tuple[object, ...]:
    """Return the parts of the engine's state that a passed time limit can change, without a new reading.

    They are the phase of each condition (pending, raised or clearing fault), the resolved latched faults, the
    open driver-reported faults, and the stalled sources.
    """
    faults = state.gpus.fault_log.faults
    return (
        {key: condition.phase for key, condition in state.conditions.items()},
        {key: fault.resolved is None for key, fault in faults.items()},
        state.driver_faults.keys(),
        state.stalled.keys(),
    )


class NodeRun:
    """Run of one fault script on a simulated node. The result has the first violation of an invariant."""

    def __init__(self, script: NodeScript, *, skips: bool = True, records: bool = False) -> None:
        """Prepare a run of a fault script.

        Args:
            script: Complete input of the node.
            skips: True: skip heartbeats that repeat the last report; False: evaluate every heartbeat.
            records: True: keep the changed verdicts in the result.
        """
        self.result = NodeResult()
        self._script = script
        self._skips = skips
        self._records = records
        self._end_ns = script.length * NS
        self._t_ns = 0
        self._actions: list[tuple[int, int, Callable[[], None]]] = []
        self._action_count = 0
        self._machine = Machine(script.machine)
        drivers = (DRIVER, HOST_DRIVER) if script.machine.declares else (HOST_DRIVER,)
        self._settings = EngineSettings(NODE, drivers)
        self._policy = TaintPolicy(evict=EVICT)
        self._truth = Truth()
        self._checker = InvariantChecker(self._truth, self._machine, self._policy)
        self._kubelet = KubeletModel(drivers, self._checker.mark_sent)
        self._checkpoint = self._stored_checkpoint = PersistentState()
        """State that the agent has handed to its disk, and state that a start would read."""
        self._taints = TaintState()
        self._ledger = ledgers.PrepareLedger()
        self._broken: set[int] = set()
        """Declared devices that the driver cannot prepare."""
        self._hanging_sources: set[str] = set()
        self._slow_disks = 0
        self._down_ns: int | None = None
        """Time since which the agent does not run [ns]; None: it runs."""
        self._stopped = self._stopped_ns = 0
        """Number of reasons for which the agent's process is stopped, and since when it is [ns]."""
        self._is_booting = False
        self._runs = 0
        self._history = StoredVerdicts()
        self._settled_ns = 0
        self._blocked_ns = 0
        """Time until which heartbeats are evaluated, because a verdict changes before it [ns]."""
        self._visible: tuple[object, ...] | None = None
        self._verdicts: tuple[tuple[str, int, str], ...] = ()
        self._report: Report | None = None
        self._start_agent()

    def run(self) -> NodeResult:
        """Run the script of events to its end, or until an invariant is violated."""
        for event in self._script.events:
            self._at(event.at * NS, lambda event=event: self._begin(event))  # type: ignore[misc]
        try:
            while self._t_ns < self._end_ns:
                self._advance()
            self._check_history()
        except InvariantViolation as violation:
            self.result.violation = violation
        devices = len(self._report.devices) if self._report else 0
        self.result.device_s = devices * self._t_ns / NS
        self.result.checks = self._checker.checks
        return self.result

    # --- time ------------------------------------------------------------------------------------------

    def _at(self, t_ns: int, action: Callable[[], None]) -> None:
        self._action_count += 1
        heapq.heappush(self._actions, (t_ns, self._action_count, action))

    def _advance(self) -> None:
        """Advance the simulated time to the next event, evaluation, change of taints or expiry of a fault."""
        action_ns = self._actions[0][0] if self._actions else self._end_ns
        if not self._is_agent_running:
            self._t_ns = min(action_ns, self._end_ns, self._t_ns + NS)
            self._check()
            self._run_actions()
            self._check()
            return
        decision_ns = self._next_decision_ns()
        other_ns = min(action_ns, decision_ns, self._end_ns)
        if self._skips and self._t_ns >= max(self._settled_ns, self._blocked_ns):
            self._skip_quiet_time(other_ns)
        evaluation_ns = self._script_ns(
            self._schedule.next_evaluation_ns(self._state.due_ns, self._schedule.heartbeat_ns)
        )
        evaluation_ns = max(evaluation_ns, self._t_ns)
        self._t_ns = min(evaluation_ns, other_ns)
        if action_ns <= self._t_ns:
            self._check()
            self._run_actions()
            if self._is_agent_running:
                self._evaluate(is_woken=True)
        elif decision_ns <= self._t_ns:
            self._decide()
        elif evaluation_ns <= self._t_ns < self._end_ns:
            self._evaluate(is_woken=False)

    @property
    def _is_agent_running(self) -> bool:
        return self._down_ns is None and not self._stopped

    def _run_actions(self) -> None:
        while self._actions and self._actions[0][0] <= self._t_ns:
            heapq.heappop(self._actions)[2]()
        self._settled_ns = self._t_ns + SETTLED_NS

    def _script_ns(self, mono_ns: int) -> int:
        return mono_ns + self._machine.boot_ns

    @property
    def _now_wall_s(self) -> float:
        return self._machine.now(self._t_ns).wall_s

    def _next_decision_ns(self) -> int:
        """Return when a taint changes or a driver-reported fault expires next, without a new report [ns]."""
        due = [self._end_ns]
        if self._taints.due_ns is not None:
            due.append(self._script_ns(self._taints.due_ns))
        expiry_s = next_expiry_wall_s(self._ledger.driver_faults, self._now_wall_s)
        if expiry_s is not None:
            due.append(self._t_ns + round(max(0.0, expiry_s - self._now_wall_s) * NS))
        return max(min(due), self._t_ns)

    def _decide(self) -> None:
        expired = ledgers.expire_entries(self._ledger, self._now_wall_s)
        if expired is not self._ledger:
            self._set_ledger(expired)
            self._settled_ns = self._t_ns + SETTLED_NS
            self._evaluate(is_woken=True)
        if self._report is not None:
            self._decide_taints(self._report)

    # --- the agent -------------------------------------------------------------------------------------

    def _start_agent(self) -> None:
        """Start the agent with the contents of its state files."""
        machine, now = self._machine, self._machine.now(self._t_ns)
        stored = decode_gpu_faults(encode_gpu_faults(self._stored_checkpoint))
        restored = restore_faults(stored, machine.boot_id, self._settings.gpu, now, self._settings.rules)
        self._state = initial_state(self._settings, restored, stored, machine.boot_id)
        self._checkpoint = self._state.checkpoint
        self._save_checkpoint()
        timing = LoopTiming(HEARTBEAT_S, NS // 10, None)
        self._schedule = PublicationSchedule(timing, lambda: JITTER)
        self._schedule.heartbeat_ns = now.mono_ns
        self._runs += 1
        self._observed = VerdictChangeLog(
            f"run{self._runs}", machine.boot_id, 3 * HEARTBEAT_S, rows=1_000_000
        )
        taints = decode_taints(encode_taints(self._taints.stored_taints))
        self._taints = restore_taints(taints, self._taint_driver, self._policy)
        content = LedgerFileContent(DRIVER, VERSION, self._ledger)
        self._set_ledger(decode_ledger(encode_ledger(content)).ledger)
        self._visible, self._report = None, None
        self._down_ns = None
        self._checker.restart()
        self._kubelet.start_agent()
        self._restart_detection_limits()

    def _evaluate(self, *, is_woken: bool, rereads: int = 1) -> None:
        """Evaluate the newest snapshot as agent.engine.loop does; publish the report if this is due."""
        machine, now = self._machine, self._machine.now(self._t_ns)
        is_full = self._schedule.is_full(now.mono_ns, is_woken=is_woken)
        state, report = step(self._state, machine.snapshot(self._t_ns), now, is_full=is_full)
        self.result.evaluations += 1
        while rereads and self._schedule.has_new_stall(report):
            rereads -= 1
            self._t_ns += REREAD_NS
            now, is_full = machine.now(self._t_ns), True
            state, report = step(self._state, machine.snapshot(self._t_ns), now)
            self.result.evaluations += 1
        self._accept(state, report, is_full=is_full)

    def _accept(self, state: EngineState, report: Report, *, is_full: bool) -> None:
        now_ns = report.at.mono_ns
        self._state = state
        self._schedule.handle_evaluation(report, now_ns, is_full=is_full)
        if report.starting:
            self._schedule.postpone(now_ns)
            return
        if state.checkpoint is not self._checkpoint:
            self._checkpoint = state.checkpoint
            self._save_checkpoint()
        visible = visible_state(report)
        if self._schedule.decide(report, now_ns) is not None:
            if visible != self._visible:
                self._settled_ns = max(self._settled_ns, self._t_ns + SETTLED_NS)
            self._visible = visible
            self._publish(report)
        self._check()

    def _save_checkpoint(self) -> None:
        if not self._slow_disks:
            self._stored_checkpoint = self._checkpoint

    def _publish(self, report: Report) -> None:
        self._report = report
        boot_s = report.at.mono_ns / NS
        self._decide_taints(report)
        self._kubelet.publish(report, self._t_ns)
        period = self._observed.period
        self._observed.handle_report(report, boot_s)
        if period is not None and period.id != (self._observed.period or period).id:
            self._checker.interrupt_states()
        self._checker.record_states(report, boot_s)
        self._checker.check_report(report, self._t_ns)
        if self._records:
            found = tuple(
                (subject_of(device), int(device.health), ",".join(cause.code for cause in device.causes))
                for device in report.devices
            )
            if found != self._verdicts:
                self._verdicts = found
                self.result.verdicts.append((self._t_ns / NS, found))

    @property
    def _taint_driver(self) -> str:
        """Driver whose taints are checked.

        It is the driver that declares devices or, if no driver declares devices, that of the host's devices.
        """
        return DRIVER if self._machine.declared else HOST_DRIVER

    def _decide_taints(self, report: Report) -> None:
        now = self._machine.now(self._t_ns)
        self._taints = decide_taints(self._taints, report, self._taint_driver, self._policy, now)
        self._checker.check_taints(self._taints.taints, report, self._taint_driver, self._t_ns)

    def _check(self) -> None:
        down_ns = self._stopped_ns if self._stopped and self._down_ns is None else self._down_ns
        self._checker.check_kubelet(self._kubelet, self._t_ns, down_ns)

    def _check_history(self) -> None:
        now = self._machine.now(self._t_ns)
        self._checker.check_history(self._stored_history(), now, self._machine.boot_id, self._t_ns)

    def _stored_history(self) -> StoredVerdicts:
        """Return the stored verdict history, with the periods and changes of the present run of the agent."""
        log, before = self._observed, self._history
        if not log.periods:
            return before
        newest = {change.device: change for change in before.changes}
        present = {ref: last for ref, last in newest.items() if last.verdict != GONE}
        changes = (*before.changes, *log.changes_after(present))
        return StoredVerdicts((*before.periods, *log.periods.values()), changes)

    # --- quiet time ------------------------------------------------------------------------------------

    def _skip_quiet_time(self, until_ns: int) -> None:
        """Skip the heartbeats of the agent before `until_ns` whose reports equal the present report."""
        heartbeat_ns = self._schedule.heartbeat_period_ns
        low_ns, high_ns = self._t_ns, until_ns - heartbeat_ns
        if self._visible is None or high_ns - low_ns < 3 * heartbeat_ns:
            return
        found = self._probe(high_ns)
        if found is None:
            self._blocked_ns = high_ns
            while high_ns - low_ns > heartbeat_ns:
                middle_ns = (low_ns + high_ns) // 2
                probed = self._probe(middle_ns)
                if probed is None:
                    high_ns = self._blocked_ns = middle_ns
                else:
                    low_ns, found = middle_ns, probed
        if found is None:
            return
        self.result.skipped += round((found[0] - self._t_ns) / heartbeat_ns)
        self._t_ns = found[0]
        now = self._machine.now(self._t_ns)
        period = self._observed.period
        if period is not None:
            boot_s, wall_s = now.mono_ns / NS - HEARTBEAT_S, now.wall_s - HEARTBEAT_S
            period = period._replace(lasted_s=boot_s - period.began_boot_s, ended_s=wall_s)
            self._observed.period = self._observed.periods[period.id] = period
        self._schedule.heartbeat_ns = now.mono_ns
        self._accept(found[1], found[2], is_full=True)

    def _probe(self, t_ns: int) -> tuple[int, EngineState, Report] | None:
        """Evaluate the heartbeat at `t_ns`, as if all heartbeats before it had repeated the last report.

        Returns the time, the engine's state and the report. None: the report differs from the last one, or a
        condition is in another phase.
        """
        now = self._machine.now(t_ns)
        before_ns = now.mono_ns - self._schedule.heartbeat_period_ns
        before = replace(self._machine.now(t_ns), mono_ns=before_ns)
        state = replace(self._state, evaluated=before, gpus=self._state.gpus._replace(evaluated_ns=before_ns))
        state, report = step(state, self._machine.snapshot(t_ns), now)
        self.result.evaluations += 1
        if visible_state(report) != self._visible or self._schedule.has_new_stall(report):
            return None
        if phases_of(state) != phases_of(self._state):
            return None
        return t_ns, state, report

    # --- events ----------------------------------------------------------------------------------------

    def _begin(self, event: ScriptEvent) -> None:
        """Begin an event of the script, and schedule its end."""
        if self._is_booting:
            return
        kind = FAULT_KINDS[event.kind]
        self.result.kinds[kind.name] = self.result.kinds.get(kind.name, 0) + 1
        same = [fault for fault in self._truth.faults if (fault.kind, fault.target) == (kind, event.target)]
        if kind.cure == "itself" and any(fault.end_ns is None for fault in same):
            return  # the end of the first would be the end of both
        handler = {"gpu": self._gpu_event, "numa": self._numa_event, "node": self._node_event}.get(
            kind.target
        )
        if handler is not None:
            handler(kind, event)
        elif kind.target == "source":
            self._source_hang(kind, event)
        else:
            self._prepare_fault(kind, event)

    def _end_after(self, event: ScriptEvent, action: Callable[[], None]) -> None:
        self._at(self._t_ns + max(event.lasts, 1) * NS, action)

    def _restart_detection_limits(self) -> None:
        """Start the time limits for the detection of faults again, because the agent was disturbed."""
        self._truth.watched_since_ns = self._t_ns

    def _gpu_event(self, kind: FaultKind, event: ScriptEvent) -> None:
        machine, gpu, t_ns = self._machine, event.target, self._t_ns
        is_h100 = machine.spec.model == "H100"
        if kind.name in ("gpu-link", "gpu-contained", "gpu-remap") and not is_h100:
            return None
        if machine.status[gpu] != NvmlReturnCode.OK:
            return None  # a lost GPU has no further faults
        devices = machine.devices_of_gpu(gpu)
        if kind.name == "gpu-instance":
            devices = tuple(name for name in devices if name == mig_device(gpu, 1, 0).name)
        if not devices:
            return None
        fault = self._truth.begin(kind, gpu, devices, t_ns)
        match kind.name:
            case "gpu-lost":
                machine.xid(gpu, 79, t_ns, detail="GPU has fallen off the bus.")
                machine.status[gpu] = NvmlReturnCode.LOST
                self._truth.end(t_ns, ("itself",), gpu)
                fault.end_ns = None
                return self._end_after(event, lambda: self._repair_by_reboot(fault))
            case "gpu-halted":
                machine.xid(gpu, 62, t_ns)
                return self._end_after(event, lambda: self._reload_driver(fault))
            case "gpu-link":
                machine.xid(gpu, 74, t_ns)
                machine.set(gpu, GpuField.LINKS_UP, 0x3FFF7)
            case "gpu-uncorrectable":
                machine.xid(gpu, 48, t_ns)
                machine.add(gpu, GpuField.ECC_UNCORRECTABLE, 1)
                machine.add(gpu, GpuField.ECC_UNCORRECTABLE_DRAM, 1)
                machine.set(gpu, GpuField.RECOVERY_ACTION, 1)
            case "gpu-contained":
                machine.xid(gpu, 94, t_ns)
                machine.set(gpu, GpuField.REMAP_PENDING, 1)
            case "gpu-sram":
                machine.xid(gpu, 95, t_ns)
                machine.set(gpu, GpuField.RECOVERY_ACTION, 1)
            case "gpu-gsp":
                machine.xid(gpu, 119, t_ns)
                machine.set(gpu, GpuField.RECOVERY_ACTION, 1)
            case "gpu-remap":
                machine.xid(gpu, 63, t_ns)
                machine.set(gpu, GpuField.REMAP_PENDING, 1)
            case "gpu-instance":
                machine.xid(gpu, 94, t_ns, 12, instance=1)
            case "gpu-hang":
                machine.hang(gpu, t_ns)
                self._at(t_ns + round(self._settings.gpu.deadline_s * NS), lambda: None)  # wakes the agent
                return self._end_after(event, lambda: self._end_hang(fault))
            case "gpu-failing":
                machine.status[gpu] = NvmlReturnCode.UNKNOWN
                return self._end_after(event, lambda: self._end_failing(fault))
            case "gpu-hot":
                machine.set(gpu, GpuField.TEMP, 90)
                return self._end_after(event, lambda: self._end_heat(fault))
            case "gpu-program":
                code = (13, 31, 43, 45)[event.at % 4]
                machine.xid(gpu, code, t_ns, detail=f"pid={event.at}, name=python, something failed")
            case _:
                machine.xid(gpu, 31, t_ns, 5000, f"pid={event.at}, name=python, MMU Fault")
                machine.add(gpu, GpuField.ECC_CORRECTABLE, 5000)
        if kind.cure == "reset":
            self._end_after(event, lambda: self._reset_gpu(fault))
        return None

    def _reset_gpu(self, fault: TrueFault) -> None:
        if fault.end_ns is not None or self._machine.status[fault.target] == NvmlReturnCode.LOST:
            return
        if self._machine.spec.model != "H100":  # nothing else shows the reset
            self._reload_driver(fault)
            return
        self._machine.reset(fault.target)
        self._truth.end(self._t_ns, RESET_CURES, fault.target)

    def _reload_driver(self, fault: TrueFault | None) -> None:
        if fault is not None and fault.end_ns is not None:
            return
        self._machine.reload_driver()
        for gpu, status in self._machine.status.items():
            if status != NvmlReturnCode.LOST:
                self._truth.end(self._t_ns, RELOAD_CURES, gpu)

    def _repair_by_reboot(self, fault: TrueFault) -> None:
        if fault.end_ns is None:
            self._reboot(240)

    def _end_hang(self, fault: TrueFault) -> None:
        if fault.end_ns is None:  # a crash of the NVML process ends a hang, and a later one may have begun
            self._machine.end_hang(fault.target, self._t_ns)
            fault.end_ns = self._t_ns

    def _end_failing(self, fault: TrueFault) -> None:
        if self._machine.status[fault.target] == NvmlReturnCode.UNKNOWN:
            self._machine.status[fault.target] = NvmlReturnCode.OK
        fault.end_ns = fault.end_ns or self._t_ns

    def _end_heat(self, fault: TrueFault) -> None:
        self._machine.set(fault.target, GpuField.TEMP, 33)
        fault.end_ns = fault.end_ns or self._t_ns

    def _numa_event(self, kind: FaultKind, event: ScriptEvent) -> None:
        machine, node = self._machine, event.target
        devices = {
            "pool-shrunk": (f"hugepages-2mi-node{node}",),
            "cpu-offline": machine.devices_of_cpus(node),
        }.get(kind.name, (f"memory-node{node}",))
        if kind.name == "pool-shrunk" and not machine.spec.pool_pages:
            return
        fault = self._truth.begin(kind, node, devices, self._t_ns)
        last_cpu = 1 << (node + 1) * machine.spec.cpus_per_node - 1
        match kind.name:
            case "pool-shrunk":
                machine.pages[node] = machine.spec.pool_pages // 2
            case "cpu-offline":
                machine.online &= ~last_cpu
            case "dimm-correctable":
                machine.dimm_errors[node][0] += 40
                return
            case _:
                machine.dimm_errors[node][1] += 1
                self._end_after(event, lambda: self._repair_by_reboot(fault))
                return
        self._end_after(event, lambda: self._end_numa_fault(fault, last_cpu))

    def _end_numa_fault(self, fault: TrueFault, last_cpu: int) -> None:
        if fault.end_ns is not None:
            return
        fault.end_ns = self._t_ns
        if fault.kind.name == "pool-shrunk":
            self._machine.pages[fault.target] = self._machine.spec.pool_pages
        else:
            self._machine.online |= last_cpu

    def _source_hang(self, kind: FaultKind, event: ScriptEvent) -> None:
        name = SOURCES[event.target]
        prefix = SOURCE_DEVICES.get(name, "none")
        devices = [f"{prefix}node{node}" for node in range(self._machine.spec.numa_nodes)]
        devices += [f"{prefix}2mi-node{node}" for node in range(self._machine.spec.numa_nodes)]
        if name == "cpus":
            devices += [
                device
                for node in range(self._machine.spec.numa_nodes)
                for device in self._machine.devices_of_cpus(node)
            ]
        fault = self._truth.begin(kind, event.target, devices, self._t_ns)
        self._hanging_sources.add(name)
        self._machine.stop_source(name, self._t_ns)
        self._end_after(event, lambda: self._end_source_hang(fault))

    def _end_source_hang(self, fault: TrueFault) -> None:
        if fault.end_ns is None:
            fault.end_ns = self._t_ns
            self._hanging_sources.discard(SOURCES[fault.target])
            if not self._stopped:
                self._machine.resume_source(SOURCES[fault.target], self._t_ns)
            self._restart_detection_limits()

    # --- agent, kubelet, clock -------------------------------------------------------------------------

    def _node_event(self, kind: FaultKind, event: ScriptEvent) -> None:
        match kind.name:
            case "driver-reload":
                self._reload_driver(None)
                self._restart_detection_limits()
            case "nvml-crash":
                devices = [
                    dev for gpu in range(self._machine.spec.gpus) for dev in self._machine.devices_of_gpu(gpu)
                ]
                if not devices:
                    return
                self._machine.crash_nvml(self._t_ns)
                for hang in self._truth.faults:
                    if hang.kind.name == "gpu-hang" and hang.end_ns is None:
                        hang.end_ns = self._t_ns
                fault = self._truth.begin(kind, 0, devices, self._t_ns)
                self._end_after(event, lambda: self._end_nvml_crash(fault))
            case "disk-slow":
                self._slow_disks += 1
                self._end_after(event, self._end_slow_disk)
            case "agent-restart":
                self._stop_agent()
                self._end_after(event, self._restart_agent)
            case "agent-stop":
                if self._down_ns is None:
                    self._stopped += 1
                    self._stopped_ns = self._t_ns if self._stopped == 1 else self._stopped_ns
                    self._machine.stop_agent(self._t_ns)
                    self._kubelet.pause_agent()
                    self._end_after(event, self._continue_agent)
            case "kubelet-restart" | "kubelet-crash":
                if self._kubelet.is_running:
                    self._kubelet.stop(is_crash=kind.name == "kubelet-crash")
                    self._end_after(event, self._start_kubelet)
            case "clock-step":
                self._machine.clock_offset_s += event.lasts * (-1 if event.target else 1)
            case _:
                self._reboot(max(event.lasts, 1))

    def _end_nvml_crash(self, fault: TrueFault) -> None:
        if fault.end_ns is None:
            fault.end_ns = self._t_ns
            if self._machine.nvml_process:
                self._machine.recover_nvml(self._t_ns)
            self._restart_detection_limits()

    def _end_slow_disk(self) -> None:
        self._slow_disks -= 1
        self._save_checkpoint()

    def _stop_agent(self) -> None:
        if self._down_ns is not None:
            return
        self._down_ns = self._t_ns
        self._stopped = 0
        self._check_history()
        self._observed.end_period(self._machine.now(self._t_ns).mono_ns / NS)
        log = self._observed
        if self._report is not None and log.period is not None:
            self._checker.record_states(self._report, log.period.began_boot_s + log.period.lasted_s)
        self._history = self._stored_history()
        self._observed = VerdictChangeLog("none", "", 0.0, rows=0)
        self._kubelet.stop_agent()

    def _restart_agent(self) -> None:
        if self._down_ns is not None:
            self._machine.start_agent(self._t_ns, self._hanging_sources)
            self._start_agent()

    def _continue_agent(self) -> None:
        if self._stopped and self._down_ns is None:
            self._stopped -= 1
            if not self._stopped:
                self._machine.continue_agent(self._t_ns, self._hanging_sources)
                self._kubelet.continue_agent(self._t_ns)
                self._restart_detection_limits()

    def _start_kubelet(self) -> None:
        if not self._kubelet.is_running:
            self._kubelet.start(self._t_ns)
            self._restart_detection_limits()

    def _reboot(self, lasts_s: int) -> None:
        """Reboot the machine, which ends all processes and repairs all hardware."""
        self._stop_agent()
        self._is_booting = True
        self._kubelet.stop(is_crash=False)
        self._truth.end(self._t_ns, ALL_CURES)
        self._hanging_sources.clear()
        self._broken.clear()
        self._slow_disks = 0
        self._stored_checkpoint = self._checkpoint
        scripted = len(self._script.events)
        self._actions = [job for job in self._actions if job[0] > self._t_ns and job[1] <= scripted]
        heapq.heapify(self._actions)
        self._at(self._t_ns + lasts_s * NS, self._boot)

    def _boot(self) -> None:
        self._is_booting = False
        self._machine.reboot(self._t_ns)
        self._machine.start_agent(self._t_ns)
        self._kubelet.is_running = True
        self._start_agent()

    # --- prepares --------------------------------------------------------------------------------------

    def _prepare_fault(self, kind: FaultKind, event: ScriptEvent) -> None:
        """Make prepares of claims with one device fail until the event ends, and begin such a prepare."""
        name = self._machine.declared_device(event.target)
        self._broken.add(event.target)
        fault = self._truth.begin(kind, event.target, [f"{DRIVER}/{NODE}/{name}"], self._t_ns)
        self._end_after(event, lambda: self._end_prepare_fault(fault))
        self._prepare(event.target, 0)

    def _end_prepare_fault(self, fault: TrueFault) -> None:
        fault.end_ns = self._t_ns
        self._broken.discard(fault.target)

    def _prepare(self, target: int, attempt: int) -> None:
        """Prepare a claim with one device as agent.prepare.step_runners does; repeat until it succeeds."""
        ref = DeviceRef(DRIVER, NODE, self._machine.declared_device(target))
        claim = Claim("team-a", f"c-{target}", f"uid-{target}", devices=(ClaimDevice("r", *ref),))
        again = self._t_ns + RETRY_S * NS
        if self._down_ns is not None or self._stopped or self._report is None:
            self._at(again, lambda: self._prepare(target, attempt))
            return
        health = self._health_of(ref)
        fingerprint = ledgers.health_fingerprint([health])
        now_s = self._now_wall_s
        if ledgers.cached_failure(self._ledger, claim, fingerprint, now_s, VERSION) is not None:
            self._at(again, lambda: self._prepare(target, attempt + 1))
            return
        if target not in self._broken:
            self._set_ledger(ledgers.with_success(self._ledger, claim, fingerprint, now_s, VERSION))
            return
        context = PrepareContext(claim, {ref: health} if health else {})
        verdict = classify(FailedDeviceError(ref, "the device does not answer"), context)
        ledger, verdict = ledgers.with_failure(self._ledger, claim, fingerprint, verdict, now_s, VERSION)
        self._set_ledger(ledger)
        self._evaluate(is_woken=True)
        self._checker.check_prepare(self._report, str(ref), self._t_ns)
        self._at(again, lambda: self._prepare(target, attempt + 1))

    def _health_of(self, ref: DeviceRef) -> DeviceHealth | None:
        assert self._report is not None
        found = next((device for device in self._report.devices if device.key == tuple(ref)), None)
        return found and health_without_faults(self._ledger.driver_faults.faults, found)

    def _set_ledger(self, ledger: ledgers.PrepareLedger) -> None:
        self._ledger = ledger
        self._machine.driver_faults = ledger.driver_faults.faults
