"""Thread that tracks which pods use devices while the agent runs.

The engine loop never waits for this thread. Without a kubelet that supports claims, the thread imports
nothing and only checks periodically for such a kubelet.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

from agent.config.config import CHECKPOINT, PODS_API, Config
from agent.model.pod_findings import PodsSample
from agent.model.reading import SourceSample, SourceState
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.system.files import may_exist
from agent.system.output import get_logger
from agent.system.threads.thread_start import DaemonThread, ThreadStartError
from agent.system.timing import PassTimer

if TYPE_CHECKING:
    from agent.model.consumers import ConsumerMap
    from agent.node.pods.kubelet_watch import KubeletDirWatcher, PodList
    from agent.node.pods.poller import PodPoller, PodUses
    from agent.system.threads.worker_threads import LatestJob

SOURCE: Final = "pods"
RETRY_S: Final = 10.0
"""Interval of checks for an absent kubelet or unwatched directory; pause after an internal error [s]."""
DEBOUNCE_S: Final = 0.1
"""Delay of a poll after a change of the kubelet's state [s]; changes within it cause one poll."""
MIN_PAUSE_S: Final = 1.0
"""Shortest pause between two polls of kubelet and drivers [s]."""
MAX_DUTY_CYCLE: Final = 4
"""Pause after a poll, in multiples of its CPU time: at most a fifth of a CPU is used."""
START_LIMIT_S: Final = 30.0
"""Time after the start of the agent from which a first poll that has not ended is reported [s]."""
STALL_PERIODS: Final = 2
SLOW_S: Final = 120.0
"""Time after which the source ``pods`` is stalled, in addition to STALL_PERIODS polling periods [s]."""

log = get_logger(__name__)

MapRecorder = Callable[["ConsumerMap", Report, Instant], None]
"""Function that receives each consumer map, the newest report and the time. May block."""


class PodTracker:
    """Tracker that holds the newest sample of pods that use devices. Thread-safe, except :meth:`start`."""

    def __init__(
        self, config: Config, *, clock: Callable[[], Instant], record: MapRecorder | None = None
    ) -> None:
        """Create the tracker.

        Args:
            config: Paths and intervals.
            clock: Returns the current time.
            record: Receives each new map of claims, devices and pods, in a thread; None: no history is
                recorded.
        """
        self.timer: Final = PassTimer(SOURCE)
        self._config = config
        self._clock = clock
        self._record = record
        self._wake: Callable[[], None] = lambda: None
        self._began_ns = clock().mono_ns
        self._sample: PodsSample | None = None
        self._map: ConsumerMap | None = None
        self._passes = 0
        self._failures = 0
        self._logged_error = ""
        self._report: Report | None = None
        self._healths: object = None
        self._core_snapshot: tuple[Snapshot, Instant] | None = None
        self._thread = DaemonThread(self._run, "dh-pods")
        self._ended = threading.Event()
        self._waker: _Waker | None = None

    # --- called by the core ----------------------------------------------------------------------------

    @property
    def sample(self) -> PodsSample | None:
        """Newest sample of pods that use devices; None: not known yet."""
        if self._sample is None and self._clock().mono_ns - self._began_ns > START_LIMIT_S * NS:
            return PodsSample(self._source(SourceState.STARTING, "", self._began_ns))
        return self._sample

    @property
    def newest_map(self) -> "ConsumerMap | None":
        """Newest map of claims, devices and pods; None: not known yet."""
        return self._map

    def handle_snapshot(self, snapshot: Snapshot) -> None:
        """Store the newest snapshot, for the cgroups and declared devices in it. Never blocks."""
        self._core_snapshot = (snapshot, self._clock())

    def handle_report(self, report: Report) -> None:
        """Store a published report. A changed health of a device triggers a poll. Never blocks."""
        if report.starting:
            return
        self._report = report
        healths = {device.key: (device.health, device.severity) for device in report.devices}
        if healths != self._healths:
            self._healths = healths
            if self._waker is not None:
                self._waker.notify()

    def reconfigure(self, config: Config) -> None:
        """Apply the intervals of a reloaded configuration. Never blocks."""
        self._config = config
        if self._waker is not None:
            self._waker.notify()

    def start(self, wake: Callable[[], None]) -> None:
        """Start the thread that polls pods; it calls `wake` when the sample has changed."""
        self._wake = wake
        self._thread.start()

    def request_stop(self) -> None:
        """Request the thread that polls pods to end. :meth:`stop` waits for it. Never blocks."""
        if not self._ended.is_set():
            self._ended.set()
            if self._waker is not None:
                self._waker.cancel()

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread that polls pods.

        Returns False if it hangs for longer than `timeout_s` seconds; it is abandoned.
        """
        self.request_stop()
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- poll thread only ------------------------------------------------------------------------------

    def _run(self) -> None:
        directory = self._config.kubelet_dir
        while not (may_exist(directory / CHECKPOINT) or may_exist(directory / PODS_API)):
            self._set_sample(SourceState.ABSENT, f"{directory}: no kubelet that knows claims")
            if self._ended.wait(RETRY_S):
                return
        while not self._ended.is_set():
            try:
                with suppress(asyncio.CancelledError), asyncio.Runner() as runner:
                    runner.run(self._poll_until_stopped())
            except OSError as error:  # no descriptor or memory for the event loop
                self._set_sample(SourceState.FAILING, f"event loop: {error.strerror}; will retry")
                self._ended.wait(RETRY_S)

    async def _poll_until_stopped(self) -> None:
        from agent.node.pods.kubelet_watch import KubeletDirWatcher, PodList
        from agent.node.pods.poller import GcControl, PodPoller
        from agent.system.threads.worker_threads import HungGuard, LatestJob

        self._waker = waker = _Waker()
        if self._ended.is_set():  # stop() ran before there was anything to cancel
            return
        guard = HungGuard()
        pod_list = PodList(self._config.kubelet_dir, self._clock, waker.notify)
        poller = PodPoller(self._config, self._clock, guard, pod_list)
        gc_control = GcControl()
        recording = LatestJob(self._record) if self._record else None
        with (
            closing(KubeletDirWatcher(self._config.kubelet_dir, guard, waker.notify)) as kubelet_dir,
            closing(pod_list),
        ):
            while not self._ended.is_set():
                began_s, healths, report = time.thread_time(), self._healths, self._report
                config = self._config
                poller.reconfigure(config)
                try:
                    await kubelet_dir.check_for_change()  # a later change triggers the next poll
                    with gc_control.paused_during(lambda: poller.size):
                        await self._poll_once(poller, report, recording)
                    await _pause(MIN_PAUSE_S, began_s)
                    await self._wait_for_change(
                        waker, kubelet_dir, pod_list, poller.next_due_in_s(), (healths, config)
                    )
                except Exception as error:  # a bug here must not stop the agent's verdicts
                    self._report_failure(error)
                    await _pause(min(RETRY_S, self._config.pods_period_ns / NS), began_s)

    async def _poll_once(
        self,
        poller: "PodPoller",
        report: Report | None,
        recording: "LatestJob[ConsumerMap, Report, Instant] | None",
    ) -> None:
        """Poll kubelet and drivers once, then audit the pods' cgroups if that is due.

        Args:
            report: Newest health report, for the log lines about affected pods; None: there is none yet.
            recording: Recorder that gets the new map of claims, devices and pods; None: no history is
                recorded.
        """
        with self.timer.measure():
            polled = await poller.poll(self._core_snapshot)
        self._set_sample(*polled)
        self._map = poller.newest_map
        if report is not None:
            report = await poller.with_embedding_drivers(report)
            poller.log_impact(report)
            if recording and poller.newest_map:
                recording.submit(poller.newest_map, report, self._clock())
        if found := await poller.audit_if_due(self._core_snapshot):
            self._set_sample(*found)

    async def _wait_for_change(
        self,
        waker: "_Waker",
        kubelet_dir: "KubeletDirWatcher",
        pod_list: "PodList",
        seconds: float,
        known: tuple[object, Config],
    ) -> None:
        """Wait until `seconds` have passed, the kubelet's state changes, or health or configuration differ
        from those in `known`."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and (self._healths, self._config) == known:
            await waker.wait(left_s if kubelet_dir.is_watched else min(left_s, RETRY_S))
            await asyncio.sleep(DEBOUNCE_S)
            waker.clear()
            if await kubelet_dir.check_for_change() or pod_list.has_changed():
                return

    def _report_failure(self, error: Exception) -> None:
        """Add an error to the sample of pods, whose values stay. The traceback of a bug is logged once."""
        last, is_bug = self._sample, not isinstance(error, ThreadStartError)
        text = f"internal error of drahealth: {error!r}" if is_bug else f"{error}; will retry"
        if is_bug and text != self._logged_error:
            log.exception("pod tracker: poll failed: internal error; the last known uses of devices stay")
        self._logged_error = text
        known = (last.uses, last.names, last.findings) if last else None
        self._set_sample(SourceState.FAILING, text, known)

    def _set_sample(self, state: SourceState, detail: str, known: "PodUses | None" = None) -> None:
        """Set the sample of pods, and wake the engine loop if the sample has changed.

        Args:
            known: Uses of devices, names of pods and audit findings; None: none are known.
        """
        before = self._sample
        self._passes += 1
        self._failures += state is SourceState.FAILING
        source = self._source(state, detail, self._clock().mono_ns)
        self._sample = PodsSample(source, *(known or ()))
        is_changed = before is None or _visible_part(before) != _visible_part(self._sample)
        if is_changed and not self._ended.is_set():  # the core is gone by then
            self._wake()

    def _source(self, state: SourceState, detail: str, beat_ns: int) -> SourceSample:
        return SourceSample(
            SOURCE,
            state,
            beat_ns,
            self._config.pods_period_ns,
            self._failures,
            detail,
            passes=self._passes,
            vital=False,
            limit_ns=STALL_PERIODS * self._config.pods_period_ns + int(SLOW_S * NS),
        )


class _Waker:
    """Event that wakes the tracker's loop. Thread-safe, except :meth:`wait` and :meth:`clear`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._changed = asyncio.Event()

    def notify(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._changed.set)

    def cancel(self) -> None:
        assert self._task is not None, "made in a task"
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def wait(self, seconds: float) -> None:
        """Wait for a call of :meth:`notify`, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def clear(self) -> None:
        """Reset the event, so that the next :meth:`wait` blocks."""
        self._changed.clear()


async def _pause(seconds: float, began_s: float) -> None:
    """Sleep for `seconds`, and longer if the thread used much CPU time since a poll began.

    Args:
        began_s: CPU time of the thread when the poll began [s].
    """
    await asyncio.sleep(max(seconds, MAX_DUTY_CYCLE * (time.thread_time() - began_s)))


def _visible_part(sample: PodsSample) -> object:
    """Return the part of a sample of pods whose change wakes the engine loop: all but counters and times."""
    source = sample.source
    return (source.state, source.detail, sample.uses, sample.names, sample.findings)
