"""Invariants of a simulated node, and the truth about its hardware that they are checked against.

INVARIANTS describes the invariants. A violation names the invariant, the time and the device.

The module also has the model of the kubelet's cache of device health, fed by the agent's real selection of
devices to send.

The cache behaves as in the kubelet of Kubernetes 1.36 (``healthinfo.go``): an entry is valid for
health_check_timeout_seconds (its lease) from its receipt, then reads as Unknown; the end of a stream deletes
the entries of its driver.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from agent.devices.taints import TaintPolicy
from agent.health.availability_statistics import ObservedTimeAxis, summarize, verdict_spans
from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth, Effect, Health, Severity, Taints
from agent.model.history import STATE_OF_SEVERITY, ClockReading, RecordedState, StoredVerdicts
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.serve.health.service import DEFAULT_LEASE_S, HealthFeed, devices_of_socket
from agent.simulate.fault_model import FaultKind
from agent.simulate.machine import Machine

EXTRA_LEASE_S: Final = 2
"""Time that every second stream adds to its leases, as in agent.serve.health.service [s]."""


def subject_of(device: DeviceHealth) -> str:
    """Return a device's name in the simulation.

    The name of a device that a driver declares also has the driver and the pool.
    """
    return f"{device.driver}/{device.pool}/{device.device}" if device.driver else device.device


class CacheEntry(NamedTuple):
    """Health of one device in the kubelet's cache."""

    health: Health
    lease_s: int
    received_ns: int
    """Time of the receipt, on the clock of the script [ns]."""

    def read(self, t_ns: int) -> Health:
        """Return the health that the kubelet shows to pods; Unknown if the entry has expired.

        An entry expires health_check_timeout_seconds (its lease) after its receipt.
        """
        is_expired = t_ns - self.received_ns > self.lease_s * NS
        return Health.UNKNOWN if is_expired else self.health


class KubeletModel:
    """Model of the kubelet's health cache, and of the agent's side of one health stream per driver."""

    def __init__(self, drivers: Sequence[str], mark_sent: Callable[[DeviceHealth, int, bool], None]) -> None:
        """Create the model of a running kubelet that has no health streams yet.

        Args:
            drivers: Drivers whose sockets the agent serves.
            mark_sent: Called with each sent device, the time, and whether a new stream sends it.
        """
        self.entries: dict[str, CacheEntry] = {}
        self.is_running = True
        self._is_agent_stopped = False
        self._published_ns = 0
        self._mark_sent = mark_sent
        self._extra_lease_s = 0
        self._sent: list[DeviceHealth] = []
        self._drivers = tuple(drivers)
        self._feeds: dict[str, HealthFeed] = {}
        self._numbers: dict[str, int] = {}
        """Number of the last publication that each stream has sent; 0: the stream is new."""

    def start_agent(self) -> None:
        """Open the health streams to an agent that has just started, and has not published yet."""
        self._is_agent_stopped = False
        self._feeds = {driver: HealthFeed(self._encode) for driver in self._drivers}
        self._numbers = dict.fromkeys(self._drivers, 0)

    def stop_agent(self) -> None:
        """End the health streams, because the agent has ended; the kubelet deletes its cache entries."""
        self._feeds.clear()
        self.entries.clear()

    def pause_agent(self) -> None:
        """Pause the health streams, because the agent's process is stopped; they stay open."""
        self._is_agent_stopped = True

    def continue_agent(self, t_ns: int) -> None:
        """Send on the health streams again, because the agent's process continues.

        A stream that was opened while the process was stopped gets its first list of devices.
        """
        self._is_agent_stopped = False
        for driver in self._feeds:
            self._send(driver, t_ns)

    def stop(self, *, is_crash: bool) -> None:
        """Stop the kubelet, which deletes the entries of its health cache unless it crashes."""
        self.is_running = False
        if not is_crash:
            self.entries.clear()

    def start(self, t_ns: int) -> None:
        """Start the kubelet again; the first message of each new health stream has all devices."""
        self.is_running = True
        self._extra_lease_s = EXTRA_LEASE_S - self._extra_lease_s
        self._numbers = dict.fromkeys(self._drivers, 0)
        for driver in self._feeds:
            self._send(driver, t_ns)

    def publish(self, report: Report, t_ns: int) -> None:
        """Publish a report of the agent on all health streams."""
        self._published_ns = t_ns
        for driver, feed in self._feeds.items():
            feed.publish(devices_of_socket(report, driver))
            self._send(driver, t_ns)

    def read(self, subject: str, t_ns: int) -> Health:
        """Return the health of a device that the kubelet shows to pods; Unknown if the cache has no entry."""
        entry = self.entries.get(subject)
        return Health.UNKNOWN if entry is None else entry.read(t_ns)

    def _encode(self, devices: Sequence[DeviceHealth], extra_lease_s: int) -> list[bytes]:
        self._sent = list(devices)
        return [b"list"]

    def _send(self, driver: str, t_ns: int) -> None:
        feed, since = self._feeds[driver], self._numbers[driver]
        if not self.is_running or self._is_agent_stopped or not feed.number:
            return
        age_s = (t_ns - self._published_ns) / NS
        if since == 0 and not feed.is_current(age_s):
            return
        self._sent = []
        feed.pending_messages(since, self._extra_lease_s, age_s if since else 0.0)
        for device in self._sent:
            self._mark_sent(device, t_ns, since == 0)
            lease_s = (device.timeout_s or DEFAULT_LEASE_S) + self._extra_lease_s
            self.entries[subject_of(device)] = CacheEntry(device.health, lease_s, t_ns)
        self._numbers[driver] = feed.number


# --- invariants --------------------------------------------------------------------------------------------

BROKEN: Final = "broken-not-healthy"
CAUSE: Final = "unhealthy-has-cause"
CLEARS: Final = "ended-fault-clears"
VERIFIED: Final = "heartbeat-is-verified"
TAINTS: Final = "taint-follows-cause"
HISTORY: Final = "history-adds-up"
PREPARES: Final = "failed-prepare-is-known"
INVARIANTS: Final[Mapping[str, str]] = {
    BROKEN: "The kubelet shows no broken device as Healthy for longer than the bound of its fault, counted "
    "while agent and kubelet run; without an agent, for longer than the longest lease. After the bound and "
    "the time of a start, reports show at least the severity of the fault.",
    CAUSE: "Every Unhealthy device has an Unhealthy cause whose code belongs to a fault that the device has, "
    "or had within the bound of its end.",
    CLEARS: "After all faults of a device have ended, reports show it as Healthy within the longest of their "
    "bounds.",
    VERIFIED: "A list repeats the verdict on a device only after another reading of its sources, and the "
    "kubelet shows no device as Healthy for longer than stall limit and lease after the last reading.",
    TAINTS: "Every Unhealthy device has a taint that keeps pods away, and a published taint stays at least "
    "for the quiet time.",
    HISTORY: "For every device, the times in all states and the time without observation add up to the whole "
    "time, and each state has the time for which reports had it.",
    PREPARES: "When a prepare fails because of its device, the next report shows the device Unhealthy.",
}
"""Description of each invariant, by its id."""
LEASE_MAX_S: Final = 30 + 1 + 4 + 2
"""Longest lease: the default, the salts of delays and of runs, and that of streams [s]."""
UNREAD_MAX_S: Final = 20 + LEASE_MAX_S
"""Longest time from the last reading of a device until the kubelet no longer shows it as Healthy [s]."""
KEPT_NS: Final = 86_400 * NS
START_S: Final = 30
"""Time after the start of an agent in which a device may be Unknown without a fault [s]."""
ROUNDING_S: Final = 1e-3


class InvariantViolation(Exception):
    """Error: a simulated node violates an invariant at one moment."""

    def __init__(self, invariant: str, t_ns: int, subject: str, text: str) -> None:
        super().__init__(f"{invariant} at {t_ns / NS:.3f} s: {subject}: {text}")
        self.invariant = invariant
        self.t_ns = t_ns


@dataclass
class TrueFault:
    """Fault that a simulated machine really has or had."""

    kind: FaultKind
    target: int
    subjects: frozenset[str]
    """Devices that the fault affects."""
    begin_ns: int
    end_ns: int | None = None
    """End of the fault [ns]; None: not ended."""


@dataclass
class Truth:
    """Faults that a simulated machine really has and had, and since when the agent can report them."""

    faults: list[TrueFault] = field(default_factory=list)
    watched_since_ns: int = 0
    """Time since which agent, kubelet and sources run without interruption [ns]."""

    def begin(self, kind: FaultKind, target: int, subjects: Iterable[str], t_ns: int) -> TrueFault:
        """Add a fault that begins at ``t_ns``; a fault of a kind without a duration ends at once."""
        fault = TrueFault(kind, target, frozenset(subjects), t_ns, None if kind.median_s else t_ns)
        self.faults.append(fault)
        return fault

    def end(self, t_ns: int, cures: Iterable[str], gpu: int | None = None) -> None:
        """End the faults that one of the cures (such as a GPU reset) repairs, on one GPU or on the node.

        ``gpu`` None: end such faults on the whole node.
        """
        for fault in self.faults:
            is_meant = gpu is None or (fault.kind.target == "gpu" and fault.target == gpu)
            if fault.end_ns is None and fault.kind.cure in cures and is_meant:
                fault.end_ns = t_ns

    def forget(self, t_ns: int) -> None:
        """Drop faults that ended long ago.

        Faults that ended later stay, because sources that hang may show them again.
        """
        self.faults = [
            fault
            for fault in self.faults
            if fault.end_ns is None or t_ns < fault.end_ns + KEPT_NS or not self.is_over(fault, t_ns)
        ]

    def is_over(self, fault: TrueFault, t_ns: int) -> bool:
        """Return whether a fault has ended so long ago that no verdict may show it any more."""
        return fault.end_ns is not None and t_ns > self.clear_limit_ns(fault)

    def clear_limit_ns(self, fault: TrueFault) -> int:
        """Return the time until which verdicts may still show an ended fault [ns]."""
        assert fault.end_ns is not None
        return max(fault.end_ns, self.watched_since_ns) + round(fault.kind.clear_s * NS)


class InvariantChecker:
    """Checker of the invariants of one simulated node. Raises InvariantViolation."""

    def __init__(self, truth: Truth, machine: Machine, policy: TaintPolicy) -> None:
        self._truth = truth
        self._machine = machine
        self._policy = policy
        self._sent: dict[str, DeviceHealth] = {}
        self._tainted: dict[tuple[DeviceRef, str, str], int] = {}
        """Time of publication of each taint [ns]."""
        self._observed_s: dict[str, dict[RecordedState, float]] = {}
        self._last_states: tuple[float, dict[str, RecordedState]] | None = None
        self.checks = 0

    # --- verdicts --------------------------------------------------------------------------------------

    def check_kubelet(self, kubelet: KubeletModel, t_ns: int, agent_down_ns: int | None) -> None:
        """Check the device health that the kubelet shows to pods.

        Args:
            agent_down_ns: Time since which the agent does not run [ns]; None: the agent runs.
        """
        self.checks += 1
        if not kubelet.is_running:
            return
        for subject, entry in kubelet.entries.items():
            if entry.read(t_ns) is not Health.HEALTHY:
                continue
            for fault in self._truth.faults:
                if not (subject in fault.subjects and fault.end_ns is None):
                    continue
                if fault.kind.expected < Severity.UNKNOWN:
                    continue
                if agent_down_ns is None:
                    since_ns = max(fault.begin_ns, self._truth.watched_since_ns)
                    limit_s = fault.kind.detect_s
                else:
                    since_ns, limit_s = agent_down_ns, float(LEASE_MAX_S)
                if t_ns - since_ns > limit_s * NS:
                    text = (
                        f"Healthy {(t_ns - since_ns) / NS:.1f} s after {fault.kind.name}, limit {limit_s:g} s"
                    )
                    raise InvariantViolation(BROKEN, t_ns, subject, text)
            self._check_age(subject, t_ns, agent_down_ns)

    def _check_age(self, subject: str, t_ns: int, agent_down_ns: int | None) -> None:
        if "/" in subject:
            return  # the host's device of the same hardware has the same sources
        read_ns = self._machine.last_read_ns(subject, t_ns)
        if agent_down_ns is not None:
            read_ns = min(read_ns, agent_down_ns)
        if t_ns - read_ns > UNREAD_MAX_S * NS:
            text = f"Healthy {(t_ns - read_ns) / NS:.1f} s after the last reading, limit {UNREAD_MAX_S} s"
            raise InvariantViolation(VERIFIED, t_ns, subject, text)

    def check_report(self, report: Report, t_ns: int) -> None:
        """Check the health verdicts of a published report."""
        truth = self._truth
        found = {subject_of(device): device for device in report.devices}
        current = [fault for fault in truth.faults if not truth.is_over(fault, t_ns)]
        hiding = [fault for fault in current if fault.kind.expected is Severity.UNKNOWN]
        # a source that hangs from the agent's start on keeps devices of other sources out of the report, too
        for subject in dict.fromkeys((*(() if hiding else self._machine.subjects), *found)):
            device = found.get(subject)
            is_hidden = any(subject in fault.subjects for fault in hiding)
            known = [fault for fault in (truth.faults if is_hidden else current) if subject in fault.subjects]
            severity = Severity.UNKNOWN if device is None else device.severity
            for fault in () if is_hidden else known:
                since_ns = max(fault.begin_ns, truth.watched_since_ns)
                is_due = fault.end_ns is None and t_ns - since_ns > (fault.kind.detect_s + START_S) * NS
                if is_due and severity < fault.kind.expected:
                    text = f"{severity.name}, and {fault.kind.expected.name} is expected of {fault.kind.name}"
                    raise InvariantViolation(BROKEN, t_ns, subject, text)
            if device is not None and device.health is Health.HEALTHY:
                continue
            if device is not None and device.health is Health.UNHEALTHY:
                self._check_cause(device, subject, known, t_ns)
            if not known and t_ns > truth.watched_since_ns + START_S * NS:
                codes = ", ".join(cause.code for cause in device.causes) if device else ""
                text = f"{device.health.name} by {codes}" if device else "absent from the report"
                raise InvariantViolation(CLEARS, t_ns, subject, f"{text} without a fault")
        truth.forget(t_ns)

    def _check_cause(self, device: DeviceHealth, subject: str, known: Iterable[TrueFault], t_ns: int) -> None:
        codes = [cause.code for cause in device.causes if cause.severity is Severity.UNHEALTHY]
        allowed = [pattern for fault in known for pattern in fault.kind.allowed]
        unexplained = [code for code in codes if not any(fnmatchcase(code, shape) for shape in allowed)]
        if not codes or len(unexplained) == len(codes):
            text = f"Unhealthy by {', '.join(codes) or 'no cause'}, which no fault of the device explains"
            raise InvariantViolation(CAUSE, t_ns, subject, text)

    def mark_sent(self, device: DeviceHealth, t_ns: int, is_new_stream: bool) -> None:
        """Check a device's health that a health stream sends.

        A verdict of Healthy, and a verdict that is sent again, need a recent reading of the device.
        """
        subject = subject_of(device)
        before = self._sent.get(subject)
        self._sent[subject] = device
        age_s = (self._machine.now(t_ns).mono_ns - device.verified.mono_ns) / NS
        if device.health is Health.HEALTHY and age_s > UNREAD_MAX_S:
            text = f"Healthy sent {age_s:.1f} s after the last reading, limit {UNREAD_MAX_S} s"
            raise InvariantViolation(VERIFIED, t_ns, subject, text)
        if before is None or is_new_stream or device.health is Health.UNKNOWN:
            return
        is_same = (before.health, before.message, before.timeout_s) == (
            device.health,
            device.message,
            device.timeout_s,
        )
        if is_same and device.verified.mono_ns <= before.verified.mono_ns:
            text = f"{device.health.name} sent again without another reading"
            raise InvariantViolation(VERIFIED, t_ns, subject, text)

    def restart(self) -> None:
        """Drop the verdicts that the health streams sent last, because the agent restarts."""
        self._sent.clear()
        self._last_states = None

    # --- taints ----------------------------------------------------------------------------------------

    def check_taints(self, taints: Taints, report: Report, driver: str, t_ns: int) -> None:
        """Check a driver's taints after a report.

        Each Unhealthy device must have a taint, and no taint may be removed too early.
        """
        found: dict[tuple[DeviceRef, str, str], int] = {}
        for ref, published in taints.devices.items():
            for taint in published:
                key = (ref, taint.key, taint.value)
                found[key] = self._tainted.get(key, t_ns)
        for key, since_ns in self._tainted.items():
            if key not in found and t_ns - since_ns < self._policy.quiet_s * NS:
                text = f"taint {key[1]} removed after {(t_ns - since_ns) / NS:.1f} s"
                raise InvariantViolation(TAINTS, t_ns, str(key[0]), text)
        self._tainted = found
        for device in report.devices:
            if device.driver != driver or device.health is not Health.UNHEALTHY:
                continue
            ref = DeviceRef(driver, device.pool, device.device)
            if all(taint.effect is Effect.NONE for taint in taints.devices.get(ref, ())):
                raise InvariantViolation(TAINTS, t_ns, str(ref), "Unhealthy without a taint")

    def check_prepare(self, report: Report, subject: str, t_ns: int) -> None:
        """Check that the report after a failed prepare of a claim shows the claim's device as Unhealthy."""
        found = [device.health for device in report.devices if subject_of(device) == subject]
        if found != [Health.UNHEALTHY]:
            text = f"{found[0].name if found else 'absent'} in the report after a failed prepare"
            raise InvariantViolation(PREPARES, t_ns, subject, text)

    # --- history ---------------------------------------------------------------------------------------

    def record_states(self, report: Report, boot_s: float) -> None:
        """Add the time since the previous report to the state that each device had in that report.

        ``boot_s`` is the time of the present report since the boot [s].
        """
        if self._last_states is not None:
            last_s, states = self._last_states
            for subject, state in states.items():
                times = self._observed_s.setdefault(subject, dict.fromkeys(RecordedState, 0.0))
                times[state] += boot_s - last_s
        now = dict.fromkeys(self._observed_s, RecordedState.ABSENT)
        now |= {subject_of(device): STATE_OF_SEVERITY[device.severity] for device in report.devices}
        self._last_states = (boot_s, now)

    def interrupt_states(self) -> None:
        """Do not count the time from the last report to the next one, because the agent does not run."""
        self._last_states = None

    def check_history(self, stored: StoredVerdicts, now: Instant, boot_id: str, t_ns: int) -> None:
        """Check that the stored history has, for each device, the time that reports showed each state."""
        clock = ClockReading(now.wall_s, now.mono_ns / NS, boot_id)
        timeline = ObservedTimeAxis(stored.periods, clock)
        unseen = set(self._observed_s)
        for device in summarize(verdict_spans(stored, timeline), timeline).devices:
            ref = device.device
            subject = str(ref) if ref.driver else ref.device
            unseen.discard(subject)
            total_s = sum(device.observed_s.values()) + device.not_observed_s
            if abs(total_s - device.total_s) > ROUNDING_S:
                text = f"states and gaps are {total_s:.3f} s of {device.total_s:.3f} s"
                raise InvariantViolation(HISTORY, t_ns, subject, text)
            for state, seconds in self._observed_s.get(subject, {}).items():
                if abs(seconds - device.observed_s[state]) > ROUNDING_S:
                    text = f"{state} for {device.observed_s[state]:.3f} s, {seconds:.3f} s in reports"
                    raise InvariantViolation(HISTORY, t_ns, subject, text)
        for subject in sorted(unseen):
            raise InvariantViolation(HISTORY, t_ns, subject, "absent from the history")
