"""Engine loop: when it evaluates and publishes, with a simulated node, an eventfd and a mock clock."""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise

import pytest
import trio
from paper import PaperNode, device_of, pool_sample
from paper_gpus import GpuNode
from trio.testing import MockClock, wait_all_tasks_blocked

from agent.engine.loop import (
    LATE_REREADS,
    REREAD_PAUSE_S,
    URGENT_PAUSE_S,
    ClearRequestQueue,
    EngineLoop,
    LoopTiming,
    Unanswered,
    stalls_of,
)
from agent.engine.step import EngineState
from agent.model.cleared_faults import ClearResult, Operator
from agent.model.health import Health, Severity
from agent.model.reading import SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant

POOL = "hugepages-2mi-node0"


class PaperSource:
    """Source with its own descriptor that passes every second and wakes the loop on request."""

    def __init__(self) -> None:
        self.node = PaperNode()
        self.node.pool(pool_sample(10))
        self.node.now_ns = 0
        self.reads = 0
        self.blank = False
        self.hangs = False
        self.stopped_until_s = 0.0
        self.requests: Unanswered = ()
        self.withdrawing: list[Future[ClearResult]] = []
        """Requests that are withdrawn after they were read."""
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def read(self) -> Snapshot | None:
        self.reads += 1
        if self.blank:
            return None
        if self.hangs and not self.node.passes:
            return self.node.starting_snapshot()
        if trio.current_time() < self.stopped_until_s:
            return self.node.snapshot()
        while self.node.now_ns + NS <= trio.current_time() * NS or not self.node.passes:
            self.node.read()
        snapshot = replace(self.node.snapshot(), clear_requests=self.requests)
        while self.withdrawing:
            assert self.withdrawing.pop().cancel()
        return snapshot

    def set_requests(self, requests: Unanswered) -> None:
        """Replace the unanswered requests to clear faults and wake the loop."""
        self.requests = requests
        self.wake()

    def shrink(self, pages: int) -> None:
        """Set the number of pages of the pool and wake the loop."""
        self.node.pool(pool_sample(pages))
        self.wake()

    def close(self) -> None:
        os.close(self._fd)


class RecordingPublisher:
    """Recorder of reports with their time [s]; each publication takes ``publish_s`` of the clock."""

    def __init__(self, start_s: float, clock: MockClock | None, publish_s: float) -> None:
        self.start_s = start_s
        self._clock = clock
        self._publish_s = publish_s
        self.reports: list[tuple[float, Report]] = []
        self.alive: list[float] = []
        self.evaluated: list[Report] = []
        self.repeated: list[float] = []
        """Times of the reports that repeat the one before."""

    def repeat(self, report: Report) -> None:
        self.publish(report)
        self.repeated.append(self.times[-1])

    def publish(self, report: Report) -> None:
        self.reports.append((trio.current_time() - self.start_s, report))
        if self._clock:
            self._clock.jump(self._publish_s)

    def notify_watchdog(self) -> None:
        self.alive.append(trio.current_time() - self.start_s)

    @property
    def times(self) -> list[float]:
        return [round(t, 3) for t, _ in self.reports]

    def verdicts_since(self, second: float) -> list[Health]:
        """Return the successive different verdicts on the pool."""
        found = [device_of(report, POOL).health for t, report in self.reports if t > second]
        return [verdict for n, verdict in enumerate(found) if n == 0 or found[n - 1] is not verdict]

    @property
    def verdicts(self) -> list[Health]:
        return [device_of(report, POOL).health for _, report in self.reports]


@pytest.fixture
def source() -> Iterator[PaperSource]:
    made = PaperSource()
    yield made
    made.close()


class Running:
    """Engine loop in a nursery, for some seconds of a mock clock."""

    def __init__(
        self,
        source: PaperSource,
        *,
        heartbeat_s: float = 10,
        coalesce_s: float = 0.1,
        watchdog_s: float | None = None,
        jitter: float = 0,
        clock: MockClock | None = None,
        publish_s: float = 0,
    ) -> None:
        self.source = source
        self.urgency_checks = 0
        self.listener = RecordingPublisher(trio.current_time(), clock, publish_s)
        source.node.started_ns = source.node.now_ns = int(trio.current_time() * NS)
        self.queue = ClearRequestQueue(source.set_requests)
        self.core = EngineLoop(
            source=source,
            state=EngineState(EngineSettings("node-a")),
            timing=LoopTiming(heartbeat_s, int(coalesce_s * NS), watchdog_s),
            clock=lambda: Instant(int(trio.current_time() * NS), 1_700_000_000.0),
            publish=self.listener.publish,
            save_state=lambda _: None,
            notify_watchdog=self.listener.notify_watchdog,
            jitter=lambda: jitter,
            on_evaluated=self.listener.evaluated.append,
            repeat=self.listener.repeat,
            accept_clears=self.queue.accept,
            is_urgent=self._is_urgent,
        )

    def _is_urgent(self) -> bool:
        self.urgency_checks += 1
        return bool(self.source.requests)

    async def until(self, end_s: float, *story: tuple[float, object]) -> RecordingPublisher:
        """Run the loop; each function of the story is called at its second."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.core.run)
            await wait_all_tasks_blocked()
            for at_s, act in story:
                await trio.sleep_until(self.listener.start_s + at_s)
                act()  # type: ignore[operator]
            await trio.sleep_until(self.listener.start_s + end_s)
            nursery.cancel_scope.cancel()
        return self.listener


async def test_loop_publishes_after_the_first_evaluation(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    published = await Running(source).until(1)
    assert (published.times, published.verdicts) == ([0.0], [Health.HEALTHY])


async def test_request_withdrawn_during_the_evaluation_clears_nothing(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    running = Running(source)

    def clear(*, withdrawn: bool) -> None:
        future = running.queue.submit(POOL, "", Operator(0, 1))
        source.withdrawing = [future] if withdrawn else []

    published = await running.until(
        20,
        (1, lambda: source.shrink(8)),
        (10, lambda: clear(withdrawn=True)),
        (15, lambda: clear(withdrawn=False)),
    )
    found = [(round(t), device_of(report, POOL).health) for t, report in published.reports]
    assert [health for t, health in found if 5 < t < 15] == [Health.UNHEALTHY], "one heartbeat"
    assert found[-1] == (15, Health.HEALTHY)
    assert [result.number for _, report in published.reports for result in report.clear_results] == [2]


async def test_loop_publishes_nothing_before_the_first_pass(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    source.blank = True
    published = await Running(source).until(35)
    assert published.times == []
    assert source.reads == 4, "once, and at each heartbeat that there would have been"


async def test_loop_publishes_when_the_first_pass_ends(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def start_source() -> None:
        source.blank = False
        source.wake()

    source.blank = True
    published = await Running(source).until(5, (0.003, start_source))
    assert published.times == [0.003]


async def test_hanging_first_pass_is_published_late_without_watchdog(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def go_on() -> None:
        source.hangs = False

    source.hangs = True
    published = await Running(source, watchdog_s=4).until(30, (20.5, go_on))
    assert published.times[0] == pytest.approx(3 + REREAD_PAUSE_S)
    assert {state.state for state in published.reports[0][1].sources} == {SourceState.STALLED}
    assert min(published.alive) > 20.5
    assert published.verdicts_since(20.5) == [Health.HEALTHY]


async def test_slow_first_pass_is_published_when_it_ends(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def start_source() -> None:
        source.hangs = False
        source.wake()

    source.hangs = True
    published = await Running(source).until(5, (2.5, start_source))
    assert (published.times, published.verdicts) == ([2.5], [Health.HEALTHY])


async def test_flapping_source_failure_is_not_published(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def flip() -> None:
        states = source.node.states
        states["cgroups"] = SourceState.FAILING if "cgroups" not in states else SourceState.OK
        source.wake()

    published = await Running(source).until(9, *((1 + n / 10, flip) for n in range(50)))
    assert published.times == [0]


async def test_idle_loop_evaluates_at_heartbeats_only(autojump_clock: MockClock, source: PaperSource) -> None:
    published = await Running(source).until(60.5)
    assert published.times == [0, 10, 20, 30, 40, 50, 60]
    assert source.reads == len(published.times)


async def test_unpublished_evaluations_are_noted(autojump_clock: MockClock, source: PaperSource) -> None:
    wakes = [(second, source.wake) for second in (2.0, 4.0, 6.0)]
    published = await Running(source).until(8, *wakes)
    assert published.times == [0]
    assert [report.at.mono_ns // NS for report in published.evaluated] == [0, 2, 4, 6]


async def test_first_change_is_published_at_once(autojump_clock: MockClock, source: PaperSource) -> None:
    published = await Running(source).until(8, (3.25, lambda: source.shrink(9)))
    assert published.times[:2] == [0, 3.25]
    assert published.verdicts[1] is Health.UNHEALTHY


async def test_close_changes_are_published_together(autojump_clock: MockClock, source: PaperSource) -> None:
    story = [(3 + n / 100, lambda n=n: source.shrink(9 - n)) for n in range(5)]
    published = await Running(source).until(6, *story)
    assert published.times == [0, 3, 3.1]
    assert "5 pages" in device_of(published.reports[-1][1], POOL).message


async def test_flood_of_changes_is_published_ten_times_a_second(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    source.node.pool(pool_sample(1000))
    story = [(3 + n / 100, lambda n=n: source.shrink(900 - n)) for n in range(200)]
    published = await Running(source).until(5.05, *story)
    assert published.times[0] == 0
    assert len(published.times) == 22
    assert all(b - a > 0.0999 for a, b in pairwise(published.times[1:]))
    assert source.reads == 22


async def test_debounce_interval_is_configurable(autojump_clock: MockClock, source: PaperSource) -> None:
    story = [(3 + n / 100, lambda n=n: source.shrink(9 - n)) for n in range(5)]
    published = await Running(source, coalesce_s=0).until(4, *story)
    assert published.times == [0, 3, 3.01, 3.02, 3.03, 3.04]


async def test_wake_without_change_is_not_published(autojump_clock: MockClock, source: PaperSource) -> None:
    published = await Running(source).until(9, (3, source.wake), (4, source.wake))
    assert published.times == [0]
    assert source.reads == 3


async def test_change_postpones_the_heartbeat(autojump_clock: MockClock, source: PaperSource) -> None:
    published = await Running(source).until(25, (7, lambda: source.shrink(9)))
    assert published.times == [0, 7, 17]


async def test_change_postpones_no_full_evaluation(autojump_clock: MockClock, source: PaperSource) -> None:
    published = await Running(source).until(25, (7, lambda: source.shrink(9)))
    full_s = [report.at.mono_ns / NS - published.start_s for report in published.evaluated if report.is_full]
    assert full_s == [0, 10, 17]
    assert published.times == [0, 7, 17]


async def test_only_heartbeats_repeat_a_report(autojump_clock: MockClock, source: PaperSource) -> None:
    published = await Running(source).until(31, (15, lambda: source.shrink(4)))
    assert published.times == [0.0, 10.0, 15.0, 25.0]
    assert published.repeated == [10.0, 25.0]


@pytest.mark.parametrize(("jitter", "every_s"), [(0, 10), (0.5, 9.5), (1, 9)])
async def test_heartbeats_are_up_to_a_tenth_early_and_never_late(
    autojump_clock: MockClock, source: PaperSource, jitter: float, every_s: float
) -> None:
    published = await Running(source, jitter=jitter).until(30.5)
    assert published.times == [0, every_s, 2 * every_s, 3 * every_s]


async def test_debounced_changes_do_not_delay_a_heartbeat(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    story = [(0.5 + n / 2, lambda n=n: source.shrink(9 - n)) for n in range(9)]
    published = await Running(source, heartbeat_s=1, coalesce_s=8).until(9, *story)
    assert all(b - a <= 1.001 for a, b in pairwise(published.times))


async def test_request_ends_a_debounce(autojump_clock: MockClock, source: PaperSource) -> None:
    running = Running(source, coalesce_s=8)

    def clear() -> None:
        running.queue.submit(POOL, "", Operator(0, 1))

    published = await running.until(5, (1, lambda: source.shrink(8)), (2.1, clear))
    (answered_s,) = (t for t, report in published.reports if report.clear_results)
    assert 2.1 <= answered_s <= 2.1 + URGENT_PAUSE_S


async def test_debounce_without_a_wake_is_one_long_sleep(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    running = Running(source, coalesce_s=8)
    published = await running.until(9, (1, lambda: source.shrink(8)), (1.5, lambda: source.shrink(7)))
    assert published.times == [0, 8]
    assert running.urgency_checks <= 5


async def test_recovery_is_published_without_a_wake(autojump_clock: MockClock, source: PaperSource) -> None:
    story = [(2.2, lambda: source.shrink(9)), (4.2, lambda: source.shrink(10))]
    published = await Running(source).until(9, *story)
    assert published.verdicts == [Health.HEALTHY, Health.UNHEALTHY, Health.HEALTHY]
    assert 6 < published.times[-1] < 6.5, "two more passes after the first clean one"
    assert source.reads == 4


async def test_stall_is_published_at_a_heartbeat_and_its_end_soon(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def hang() -> None:
        source.node.stuck = {"hugepages"}

    def go_on() -> None:
        source.node.stuck = set()

    published = await Running(source).until(60, (11, hang), (44.5, go_on))
    verdicts = list(zip(published.times, published.verdicts, strict=True))
    assert next(t for t, verdict in verdicts if verdict is Health.UNKNOWN) == 20 + REREAD_PAUSE_S
    healthy_again = next(t for t, verdict in verdicts if verdict is Health.HEALTHY and t > 20)
    assert 44.5 < healthy_again <= 48, "three passes, a second apart"


class Stop:
    """Stop of agent and machine for 60 s, after which the sources finish their next pass with a delay."""

    def __init__(self, source: PaperSource, clock: MockClock, delay_s: float) -> None:
        self._source, self._clock, self._delay_s = source, clock, delay_s

    def __call__(self) -> None:
        self._clock.jump(60)
        self._source.stopped_until_s = trio.current_time() + self._delay_s


@pytest.mark.parametrize("delay_s", [0.1, LATE_REREADS * REREAD_PAUSE_S])
async def test_stop_of_the_agent_is_no_stall_of_its_sources(
    autojump_clock: MockClock, source: PaperSource, delay_s: float
) -> None:
    published = await Running(source).until(200, (12, Stop(source, autojump_clock, delay_s)))
    assert {*published.verdicts} == {Health.HEALTHY}
    assert [stalls_of(report) for _, report in published.reports if stalls_of(report)] == []
    (late,) = [t for t in published.times if 72 <= t < 75]
    assert late <= 72 + delay_s + REREAD_PAUSE_S


async def test_change_after_a_stop_of_the_agent_is_published_without_a_stall(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    """The wake of one source comes before the pass of the others, and the loop is not late."""

    def stop() -> None:
        autojump_clock.jump(5)
        source.stopped_until_s = trio.current_time() + 0.1
        source.shrink(9)

    published = await Running(source).until(30, (1, stop))
    assert published.times[:2] == [0, 6 + REREAD_PAUSE_S]
    assert published.verdicts_since(0) == [Health.UNHEALTHY]


async def test_source_that_hangs_after_a_stop_of_the_agent_is_stalled(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def stop() -> None:
        Stop(source, autojump_clock, 0)()
        source.node.stuck = {"hugepages"}

    published = await Running(source).until(200, (12, stop))
    verdicts = zip(published.times, published.verdicts, strict=True)
    stalled_s = next(t for t, found in verdicts if found is Health.UNKNOWN)
    assert stalled_s == 82 + REREAD_PAUSE_S, "one heartbeat after the stop, which does not count"


def test_gpu_that_does_not_answer_is_a_stall_by_its_severity() -> None:
    node = GpuNode(2)
    assert stalls_of(node.next()) == set()
    node.hang(1)
    node.rest(10)
    assert ("gpu-1", Severity.UNKNOWN) in stalls_of(node.evaluate())
    node.rest(60)
    assert ("gpu-1", Severity.UNHEALTHY) in stalls_of(node.evaluate())


async def test_watchdog_is_notified_at_twice_the_required_rate(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    published = await Running(source, watchdog_s=4).until(11)
    assert published.alive == [0, 2, 4, 6, 8, 10]
    assert published.times == [0, 10], "a watchdog notification publishes nothing"


async def test_without_watchdog_nothing_is_notified(autojump_clock: MockClock, source: PaperSource) -> None:
    published = await Running(source).until(100)
    assert published.alive == []


async def test_first_watchdog_notification_needs_no_heartbeat(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def start_source() -> None:
        source.blank = False
        source.wake()

    source.blank = True
    published = await Running(source, watchdog_s=4).until(5, (0.003, start_source))
    assert published.alive
    assert published.alive[0] <= 2


async def test_watchdog_is_not_notified_while_a_source_is_stalled(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def start_source() -> None:
        source.blank = False

    def hang() -> None:
        source.node.stuck = {"cgroups"}

    def go_on() -> None:
        source.node.stuck = set()

    source.blank = True
    running = Running(source, watchdog_s=4)
    published = await running.until(60, (19, start_source), (30.5, hang), (45.5, go_on))
    assert min(published.alive) >= 19
    assert not [t for t in published.alive if 34 < t <= 45.5]
    assert [t for t in published.alive if 30 < t < 34]
    assert [t for t in published.alive if t > 45.5]


async def test_under_a_flood_the_loop_sleeps_four_evaluations(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    story = [(0.3, lambda: source.shrink(9)), (0.4, lambda: source.shrink(8))]
    published = await Running(source, publish_s=0.2, clock=autojump_clock).until(2.9, *story)
    assert published.times[:2] == [0, 1.0]


async def test_exception_in_an_evaluation_ends_the_loop(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    running = Running(source)

    def remove_cpus() -> None:
        source.node.cpus = None  # type: ignore[assignment]
        source.wake()

    with pytest.raises(BaseExceptionGroup) as raised:
        await running.until(10, (1, remove_cpus))
    assert raised.group_contains(AttributeError)
