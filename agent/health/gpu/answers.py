"""Whether a GPU answers, and what its driver asks for: the rules that come first.

NVML can hang for ever, and a lost GPU answers every call with one code. So these rules do not need an
answer; they judge that there is none, since when, and how slow answers have become. The library itself, and
GPUs that it no longer counts, are in agent.health.gpu.driver.
"""

from collections.abc import Iterator
from typing import Final

from agent.health.catalog import Rule
from agent.health.gpu.common import library_error, nvml_name, probation_ns, read
from agent.health.gpu.view import GpuView
from agent.health.gpu.xid.recovery import RecoveryAction
from agent.health.rules import OK, RuleNotApplicable, RuleNotEvaluated, RuleResult, lacking
from agent.health.words import duration
from agent.model.gpu import GpuField, Status
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Missing
from agent.model.settings import GpuLimits
from agent.model.time import NS
from agent.model.wake import GpuWake

NOT_ANSWERING: Final = "gpu.not_answering"
STEPS_S: Final = (5, 10, 30, 60, 120, 300, 600, 1800, 3600, 21_600, 86_400)
"""Silence is told in these steps [s]: a text that grew every second would be news every second."""
SLOW_FACTOR: Final = 10
SLOW_NS: Final = 50_000_000  # a quiet machine's jitter is far below, and no client of NVML notices less
SIBLINGS: Final = 2  # with one there is no telling which of the two is odd

TOLD_ELSEWHERE: Final = frozenset({Status.OK, Status.LOST, Status.RESET_REQUIRED, Status.GPU_NOT_FOUND})
"""Answers that have rules of their own, or need none."""


def recovery_action(view: GpuView) -> RuleResult:
    """The driver says what must be done to the GPU before it is good again.

    Source: NVML field 230, driver 565 and later [0: nothing; else see agent.health.gpu.xid.recovery].
    """
    action = read(view, GpuField.RECOVERY_ACTION)
    if isinstance(action, Missing):
        return lacking(GpuField.RECOVERY_ACTION, action, "drivers before 565 and older GPUs do not tell")
    if action == RecoveryAction.NONE:
        return OK
    wanted = RecoveryAction(action)
    evidence = f"the driver asks for: {wanted.text}"
    return Finding("gpu.recovery_action", Severity.UNHEALTHY, evidence, wanted.advice)


def _open_call(view: GpuView) -> tuple[int, str] | None:
    """The oldest call of NVML that this GPU waits for: since when [ns], and which."""
    gpu, gpus = view.gpu, view.gpus
    calls = []
    if gpu and gpu.call:
        calls.append((gpu.call_ns, gpu.call))
    if gpus.call and (gpu is None or not gpu.passes or gpu.status):  # it waits for the library's thread
        calls.append((gpus.call_ns, gpus.call))
    return min(calls, default=None)


def _steps_ns(limits: GpuLimits) -> Iterator[int]:
    yield int(limits.deadline_s * NS)
    yield from (step * NS for step in STEPS_S if step > limits.deadline_s)


def not_answering(view: GpuView) -> RuleResult:
    """A call of NVML has not come back: at once Unknown, after a second limit Unhealthy.

    Source: how long the GPU's own thread has waited for NVML, or the library's thread that it waits for [ns].
    """
    call = _open_call(view)
    if call is None:
        return OK
    since_ns, name = call
    silent_ns = view.now_ns - since_ns
    step_ns = max((step for step in _steps_ns(view.limits) if step <= silent_ns), default=None)
    if step_ns is None:
        return OK
    dead = silent_ns >= view.limits.dead_s * NS
    evidence = f"{name} not answered for more than {duration(step_ns / NS)}"
    return Finding(NOT_ANSWERING, Severity.UNHEALTHY if dead else Severity.UNKNOWN, evidence)


def next_step_ns(view: GpuView) -> int | None:
    """When the answer of :func:`not_answering` will change by time alone [CLOCK_MONOTONIC, ns], if ever."""
    call = _open_call(view)
    if call is None:
        return None
    since_ns, _ = call
    changes = (since_ns + step for step in (*_steps_ns(view.limits), int(view.limits.dead_s * NS)))
    return min((change for change in changes if change > view.now_ns), default=None)


def _answered(view: GpuView, status: int, code: str) -> RuleResult:
    """Whether a GPU answers with that code. What says nothing of the GPU, says not that it has recovered."""
    found = view.gpu.status if view.gpu else Status.OK
    if found == status:
        return Finding(code, Severity.UNHEALTHY, f"NVML answers {nvml_name(status)}")
    return OK if found in TOLD_ELSEWHERE else RuleNotEvaluated(f"NVML answers {nvml_name(found)}")


def lost(view: GpuView) -> RuleResult:
    """The GPU has fallen off the bus, or stopped responding to the driver: every call says so.

    Source: NVML's return code 15 from any call on the GPU.
    """
    return _answered(view, Status.LOST, "gpu.lost")


def reset_required(view: GpuView) -> RuleResult:
    """The driver refuses the GPU until it is reset.

    Source: NVML's return code 16 from any call on the GPU.
    """
    return _answered(view, Status.RESET_REQUIRED, "gpu.reset_required")


def failing(view: GpuView) -> RuleResult:
    """Readings fail for a reason that is neither the GPU's loss nor the library's own trouble.

    Source: NVML's return code of the last pass as a whole.
    """
    status = view.gpu.status if view.gpu else Status.OK
    if status in TOLD_ELSEWHERE:
        return OK
    if library_error(view.gpus):  # one cause, told once: gpu.driver.init
        return OK
    return Finding("gpu.failing", Severity.UNKNOWN, f"NVML answers {nvml_name(status)}")


def probe_slow(view: GpuView) -> RuleResult:
    """The GPU answers much more slowly than its siblings: often the first sign of one about to hang.

    Source: the time of nvmlDeviceGetFieldValues, median of 15 passes [ns], against the siblings' median.
    """
    if view.gpu is None or not view.gpu.probe_p50_ns:
        return RuleNotEvaluated("needs a reading")
    if len(view.siblings_p50_ns) < SIBLINGS:
        if view.gpus.count <= SIBLINGS:
            return RuleNotApplicable(f"fewer than {SIBLINGS} other GPUs to compare with")
        return RuleNotEvaluated(f"needs {SIBLINGS} other GPUs that answer")
    from statistics import median  # most nodes have too few GPUs to need it, and its fractions

    own_ns = view.gpu.probe_p50_ns
    if own_ns < SLOW_NS or own_ns < SLOW_FACTOR * median(view.siblings_p50_ns):
        return OK
    evidence = f"readings take at least {SLOW_NS // 1_000_000} ms, and {SLOW_FACTOR} times what others' take"
    return Finding("gpu.probe.slow", Severity.DEGRADED, evidence)


def rows(limits: GpuLimits) -> tuple[Rule, ...]:
    """The rows of these rules. The driver's own demand is the first of all."""
    watch_ns = probation_ns(limits)
    return (
        Rule(
            code="gpu.recovery_action",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.RECOVERY_ACTION),),
            threshold="any action but none",
            why="the driver knows best what it cannot mend while work goes on",
            advice="do what the evidence names; it differs from case to case",
            judge=recovery_action,
            probation_ns=watch_ns,
            try_it="gpu 0 set recovery_action=1",
            leads=True,
        ),
        Rule(
            code=NOT_ANSWERING,
            severity=Severity.UNKNOWN,
            blame=Blame.DRIVER,
            source="gpu",
            threshold=f"a call older than {duration(limits.deadline_s)}; "
            f"unhealthy after {duration(limits.dead_s)} (gpu.deadline, gpu.dead)",
            why="nobody can tell how the GPU is, and what hangs for us hangs for its workload too",
            advice="look for NVRM lines in the kernel log; what stays in the driver ends with a reboot only",
            judge=not_answering,
            probation_ns=watch_ns,
            blind=True,
            try_it="gpu 0 hang nvmlDeviceGetFieldValues 30s",
        ),
        Rule(
            code="gpu.lost",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="gpu",
            threshold="NVML's return code 15, once",
            why="the GPU is not reachable; its workload is dead or will hang",
            advice="drain and reboot the node; if it is lost again, reseat or replace the GPU",
            judge=lost,
            probation_ns=watch_ns,
            blind=True,
            try_it="gpu 0 lost",
        ),
        Rule(
            code="gpu.reset_required",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="gpu",
            threshold="NVML's return code 16, once",
            why="no new work starts on the GPU before it is reset",
            advice="drain the GPU and reset it (nvidia-smi --gpu-reset)",
            judge=reset_required,
            probation_ns=watch_ns,
            blind=True,
            try_it="gpu 0 fail all 16",
        ),
        Rule(
            code="gpu.failing",
            severity=Severity.UNKNOWN,
            blame=Blame.DRIVER,
            source="gpu",
            threshold="any other return code for a pass as a whole",
            why="nothing is known of the GPU while its readings fail",
            advice="look for NVRM lines in the kernel log, and whether nvidia-smi answers",
            judge=failing,
            blind=True,
            try_it="gpu 0 fail nvmlDeviceGetFieldValues 999",
        ),
        Rule(
            code="gpu.probe.slow",
            severity=Severity.DEGRADED,
            blame=Blame.DRIVER,
            source="gpu",
            threshold=f"{SLOW_FACTOR} times the median of the other GPUs, and {SLOW_NS // 1_000_000} ms",
            why="a GPU that answers ever more slowly often stops answering next",
            advice="look for NVRM lines in the kernel log; plan a reset when its work has ended",
            judge=probe_slow,
            raise_after=3,
            try_it="gpu 0 slow 60ms",
        ),
    )
