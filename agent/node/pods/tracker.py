"""Follows who uses which device while the agent runs, audits their cgroups, and says whom a change hurts.

In threads beside the core, which waits for none of them; a source that hangs costs what it would have said.
Where no kubelet knows of claims nothing is loaded, and nothing is done but to look for one. What is asked of
whom is in agent.node.pods; what follows from it for devices, the rules say.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.config.config import CHECKPOINT, PODS_API, Config
from agent.model.pods import PodsSample
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant

if TYPE_CHECKING:
    from agent.model.consumers import ConsumerMap
    from agent.node.pods.kubelet_dir import KubeletDirWatcher
    from agent.node.pods.pod_list import PodList
    from agent.node.pods.poller import Known, PodPoller
    from agent.system.threads.latest_job import LatestJob

SOURCE: Final = "pods"
FIND_S: Final = 10.0
"""How often a kubelet is looked for where there is none, and a directory that cannot be watched; and how long
nobody is asked after a mistake of ours [s]."""
DEBOUNCE_S: Final = 0.1
"""What changes together is asked about together [s]."""
REST_S: Final = 1.0
"""The kubelet is asked no more often than this, whatever changes [s]..."""
MAX_DUTY_CYCLE: Final = 4
"""...and after a round that cost much it rests so many times as long: a fifth of a core at most."""
START_S: Final = 30.0
"""Until then nobody is missed who has not looked yet [s]."""
STALL_PERIODS: Final = 2
SLOW_S: Final = 120.0
"""So many periods and this time may pass between two rounds: one waits for an audit that hangs [s]."""

log = logging.getLogger(__name__)

Record = Callable[["ConsumerMap", Report, Instant], None]
"""Takes who uses what, how the devices are, and when that was. May block; called by one thread at a time."""


class PodTracker:
    """The newest of what is known of the pods that use devices. All but :meth:`start` from any thread."""

    def __init__(self, config: Config, *, clock: Callable[[], Instant], record: Record | None = None) -> None:
        """
        Args:
            config: Where to look, and how often.
            clock: Now, on both clocks.
            record: Given each new map with the newest report.
        """
        self._config = config
        self._clock = clock
        self._record = record
        self._wake: Callable[[], None] = lambda: None
        self._began_ns = clock().mono_ns
        self._sample: PodsSample | None = None
        self._passes = 0
        self._failures = 0
        self._blundered = ""
        self._report: Report | None = None
        self._healths: object = None
        self._seen: tuple[Snapshot, Instant] | None = None
        self._thread = threading.Thread(target=self._run, name="dh-pods", daemon=True)
        self._ended = threading.Event()
        self._following: _Following | None = None

    # --- what the core does with it --------------------------------------------------------------------

    @property
    def sample(self) -> PodsSample | None:
        """What is known; None: nothing yet, and nobody need wait for it."""
        if self._sample is None and self._clock().mono_ns - self._began_ns > START_S * NS:
            return PodsSample(self._source(SourceState.STARTING, "", self._began_ns))
        return self._sample

    def note(self, snapshot: Snapshot) -> None:
        """What was read last: the cgroups that there are, and what drivers declare."""
        self._seen = (snapshot, self._clock())

    def take(self, report: Report) -> None:
        """A published report; returns at once. If a device's health is another, everybody is asked anew."""
        if report.starting:
            return
        self._report = report
        healths = {device.key: (device.health, device.severity) for device in report.devices}
        if healths != self._healths:
            self._healths = healths
            if self._following is not None:
                self._following.nudge()

    def start(self, wake: Callable[[], None]) -> None:
        """Begins to follow, and calls ``wake`` when something else is known."""
        self._wake = wake
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends. False: something hangs, and is left behind."""
        self._ended.set()
        if self._following is not None:
            self._following.cancel()
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- in the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        _call_this_thread("dh-pods")
        while not _is_there(self._config.kubelet_dir):
            self._set(SourceState.ABSENT, f"{self._config.kubelet_dir}: no kubelet that knows claims")
            if self._ended.wait(FIND_S):
                return
        with suppress(asyncio.CancelledError):
            asyncio.run(self._follow())

    async def _follow(self) -> None:
        from agent.node.pods.gc_control import GcControl
        from agent.node.pods.kubelet_dir import KubeletDirWatcher
        from agent.node.pods.pod_list import PodList
        from agent.node.pods.poller import PodPoller
        from agent.system.threads.latest_job import LatestJob
        from agent.system.threads.with_timeout import HungGuard

        self._following = following = _Following()
        if self._ended.is_set():  # stop() looked before there was anything to cancel
            return
        patience = HungGuard()
        listing = PodList(self._config.kubelet_dir, self._clock, following.nudge)
        rounds = PodPoller(self._config, self._clock, patience, listing)
        heap = GcControl()
        recording = LatestJob(self._record) if self._record else None
        with (
            closing(KubeletDirWatcher(self._config.kubelet_dir, patience, following.nudge)) as folder,
            closing(listing),
        ):
            while not self._ended.is_set():
                began_s, healths, report = time.thread_time(), self._healths, self._report
                try:
                    await folder.has_changed()  # what changes from here on is heard of in the next round
                    with heap.spared(lambda: rounds.size):
                        await self._round(rounds, report, recording)
                    await _rest(REST_S, began_s)
                    await self._wait(following, folder, listing, rounds.wait_s(), healths)
                except Exception as error:  # a mistake here costs what is said of pods; verdicts go on
                    self._blunder(f"a mistake in drahealth: {error!r}")
                    await _rest(min(FIND_S, self._config.pods_period_ns / NS), began_s)

    async def _round(
        self,
        rounds: "PodPoller",
        report: Report | None,
        recording: "LatestJob[ConsumerMap, Report, Instant] | None",
    ) -> None:
        """Everybody is asked once; with a report, whom it hurts is told, and who uses what handed on."""
        self._set(*await rounds.hear(self._seen))
        if report is not None:
            rounds.tell(report)
            if recording and rounds.newest:
                recording.give(rounds.newest, report, self._clock())
        if found := await rounds.audit(self._seen):
            self._set(*found)

    async def _wait(
        self,
        following: "_Following",
        folder: "KubeletDirWatcher",
        listing: "PodList",
        seconds: float,
        healths: object,
    ) -> None:
        """Until that time is over, the kubelet says something else, or devices are not as they were."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and self._healths == healths:
            await following.wait(left_s if folder.is_watched else min(left_s, FIND_S))
            await asyncio.sleep(DEBOUNCE_S)
            following.clear()
            if await folder.has_changed() or listing.has_changed():
                return

    def _blunder(self, text: str) -> None:
        """What was known stays. The traceback is for whoever mends it, once."""
        kept = self._sample
        if text != self._blundered:
            log.exception("who uses the devices cannot be followed")
        self._blundered = text
        known = (kept.uses, kept.names, kept.findings) if kept else None
        self._set(SourceState.FAILING, text, known)

    def _set(self, state: SourceState, detail: str, known: "Known | None" = None) -> None:
        """Takes what is known now; the core is woken if it is anything else."""
        before = self._sample
        self._passes += 1
        self._failures += state is SourceState.FAILING
        source = self._source(state, detail, self._clock().mono_ns)
        self._sample = PodsSample(source, *(known or ()))
        is_news = before is None or _substance(before) != _substance(self._sample)
        if is_news and not self._ended.is_set():  # the core is gone by then
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


class _Following:
    """What wakes the loop of the thread that follows. :meth:`wait` and :meth:`clear` are the loop's own."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._news = asyncio.Event()

    def nudge(self) -> None:
        """There may be something new."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._news.set)

    def cancel(self) -> None:
        """It is over."""
        assert self._task is not None, "made in a task"
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def wait(self, seconds: float) -> None:
        """For news, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def clear(self) -> None:
        """Take note of the news."""
        self._news.clear()


async def _rest(seconds: float, began_s: float) -> None:
    """For so long at least, and longer if the thread has worked much since it had worked for ``began_s``."""
    await asyncio.sleep(max(seconds, MAX_DUTY_CYCLE * (time.thread_time() - began_s)))


def _substance(sample: PodsSample) -> object:
    """All of it but what counts on."""
    source = sample.source
    return (source.state, source.detail, sample.uses, sample.names, sample.findings)


def _is_there(kubelet_dir: Path) -> bool:
    """Whether there is a kubelet that knows claims, or it cannot be told."""
    return any(_may_exist(kubelet_dir / name) for name in (CHECKPOINT, PODS_API))


def _may_exist(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _call_this_thread(name: str) -> None:
    """Python's own name for it is none that ``top`` would show."""
    with suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name)
