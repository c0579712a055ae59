"""When the core looks and when it speaks: on a paper node, a real eventfd and a clock that jumps."""

import os
from collections.abc import Iterator
from itertools import pairwise

import pytest
import trio
from paper import PaperNode, device_of, pool_sample
from trio.testing import MockClock, wait_all_tasks_blocked

from agent.engine.loop import EngineLoop, Timing
from agent.engine.step import State
from agent.model.health import Health
from agent.model.report import Report
from agent.model.settings import Settings
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant

POOL = "hugepages-2mi-node0"


class PaperSource:
    """A source with a descriptor of its own. It beats by itself every second, and wakes when told to."""

    def __init__(self) -> None:
        self.node = PaperNode()
        self.node.pool(pool_sample(10))
        self.node.now_ns = 0
        self.reads = 0
        self.blank = False
        self.hangs = False
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
            return self.node.starting()
        while self.node.now_ns + NS <= trio.current_time() * NS or not self.node.passes:
            self.node.read()
        return self.node.snapshot()

    def shrink(self, pages: int) -> None:
        """The pool has so many pages, and whoever waits is woken."""
        self.node.pool(pool_sample(pages))
        self.wake()

    def close(self) -> None:
        os.close(self._fd)


class Listener:
    """Hears what the core says, and when [s since the begin]; it takes ``tell_s`` of the clock to tell it."""

    def __init__(self, start_s: float, clock: MockClock | None, tell_s: float) -> None:
        self.start_s = start_s
        self._clock = clock
        self._tell_s = tell_s
        self.heard: list[tuple[float, Report]] = []
        self.alive: list[float] = []

    def publish(self, report: Report) -> None:
        self.heard.append((trio.current_time() - self.start_s, report))
        if self._clock:
            self._clock.jump(self._tell_s)

    def be_alive(self) -> None:
        self.alive.append(trio.current_time() - self.start_s)

    @property
    def times(self) -> list[float]:
        return [round(t, 3) for t, _ in self.heard]

    def verdicts_after(self, second: float) -> list[Health]:
        """The verdicts on the pool, one after the other, each once."""
        found = [device_of(report, POOL).health for t, report in self.heard if t > second]
        return [verdict for n, verdict in enumerate(found) if n == 0 or found[n - 1] is not verdict]

    @property
    def verdicts(self) -> list[Health]:
        return [device_of(report, POOL).health for _, report in self.heard]


@pytest.fixture
def source() -> Iterator[PaperSource]:
    made = PaperSource()
    yield made
    made.close()


class Running:
    """A core in a nursery, for so many seconds of a clock that jumps."""

    def __init__(
        self,
        source: PaperSource,
        *,
        heartbeat_s: float = 10,
        coalesce_s: float = 0.1,
        watchdog_s: float | None = None,
        jitter: float = 0,
        clock: MockClock | None = None,
        tell_s: float = 0,
    ) -> None:
        self.source = source
        self.listener = Listener(trio.current_time(), clock, tell_s)
        source.node.started_ns = source.node.now_ns = int(trio.current_time() * NS)
        self.core = EngineLoop(
            source=source,
            state=State(Settings("node-a")),
            timing=Timing(heartbeat_s, int(coalesce_s * NS), watchdog_s),
            clock=lambda: Instant(int(trio.current_time() * NS), 1_700_000_000.0),
            publish=self.listener.publish,
            remember=lambda _: None,
            alive=self.listener.be_alive,
            jitter=lambda: jitter,
        )

    async def until(self, end_s: float, *story: tuple[float, object]) -> Listener:
        """Runs it; each of the story's functions is called at its second."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.core.run)
            await wait_all_tasks_blocked()
            for at_s, act in story:
                await trio.sleep_until(self.listener.start_s + at_s)
                act()  # type: ignore[operator]
            await trio.sleep_until(self.listener.start_s + end_s)
            nursery.cancel_scope.cancel()
        return self.listener


async def test_it_speaks_when_it_has_first_looked(autojump_clock: MockClock, source: PaperSource) -> None:
    heard = await Running(source).until(1)
    assert (heard.times, heard.verdicts) == ([0.0], [Health.HEALTHY])


async def test_before_the_first_pass_is_over_it_says_nothing(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    source.blank = True
    heard = await Running(source).until(35)
    assert heard.times == []
    assert source.reads == 4, "once, and at each heartbeat that there would have been"


async def test_the_first_pass_is_told_when_it_is_over(autojump_clock: MockClock, source: PaperSource) -> None:
    def begin() -> None:
        source.blank = False
        source.wake()

    source.blank = True
    heard = await Running(source).until(5, (0.003, begin))
    assert heard.times == [0.003]


async def test_a_first_pass_that_hangs_is_told_when_it_is_too_late_and_no_life_is_signed(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def go_on() -> None:
        source.hangs = False

    source.hangs = True
    heard = await Running(source, watchdog_s=4).until(30, (20.5, go_on))
    assert heard.times[0] == pytest.approx(3)
    assert {state.state for state in heard.heard[0][1].sources} == {SourceState.STALLED}
    assert min(heard.alive) > 20.5
    assert heard.verdicts_after(20.5) == [Health.HEALTHY]


async def test_a_first_pass_that_is_slow_is_told_when_it_is_over(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def begin() -> None:
        source.hangs = False
        source.wake()

    source.hangs = True
    heard = await Running(source).until(5, (2.5, begin))
    assert (heard.times, heard.verdicts) == ([2.5], [Health.HEALTHY])


async def test_a_source_that_fails_off_and_on_is_no_reason_to_speak(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def flip() -> None:
        states = source.node.states
        states["cgroups"] = SourceState.FAILING if "cgroups" not in states else SourceState.OK
        source.wake()

    heard = await Running(source).until(9, *((1 + n / 10, flip) for n in range(50)))
    assert heard.times == [0]


async def test_in_quiet_times_it_looks_at_heartbeats_only(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    heard = await Running(source).until(60.5)
    assert heard.times == [0, 10, 20, 30, 40, 50, 60]
    assert source.reads == len(heard.times)


async def test_the_first_change_is_told_at_once(autojump_clock: MockClock, source: PaperSource) -> None:
    heard = await Running(source).until(8, (3.25, lambda: source.shrink(9)))
    assert heard.times[:2] == [0, 3.25]
    assert heard.verdicts[1] is Health.UNHEALTHY


async def test_changes_that_follow_closely_are_told_together(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    story = [(3 + n / 100, lambda n=n: source.shrink(9 - n)) for n in range(5)]
    heard = await Running(source).until(6, *story)
    assert heard.times == [0, 3, 3.1]
    assert "5 pages" in device_of(heard.heard[-1][1], POOL).message


async def test_a_flood_of_changes_is_told_ten_times_a_second(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    source.node.pool(pool_sample(1000))
    story = [(3 + n / 100, lambda n=n: source.shrink(900 - n)) for n in range(200)]
    heard = await Running(source).until(5.05, *story)
    assert heard.times[0] == 0
    assert len(heard.times) == 22
    assert all(b - a > 0.0999 for a, b in pairwise(heard.times[1:]))
    assert source.reads == 22


async def test_how_close_is_close_is_configured(autojump_clock: MockClock, source: PaperSource) -> None:
    story = [(3 + n / 100, lambda n=n: source.shrink(9 - n)) for n in range(5)]
    heard = await Running(source, coalesce_s=0).until(4, *story)
    assert heard.times == [0, 3, 3.01, 3.02, 3.03, 3.04]


async def test_a_wake_that_changes_nothing_is_not_told(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    heard = await Running(source).until(9, (3, source.wake), (4, source.wake))
    assert heard.times == [0]
    assert source.reads == 3


async def test_a_change_puts_the_heartbeat_off(autojump_clock: MockClock, source: PaperSource) -> None:
    heard = await Running(source).until(25, (7, lambda: source.shrink(9)))
    assert heard.times == [0, 7, 17]


@pytest.mark.parametrize(("jitter", "every_s"), [(0, 10), (0.5, 9.5), (1, 9)])
async def test_heartbeats_come_up_to_a_tenth_early_and_never_late(
    autojump_clock: MockClock, source: PaperSource, jitter: float, every_s: float
) -> None:
    heard = await Running(source, jitter=jitter).until(30.5)
    assert heard.times == [0, every_s, 2 * every_s, 3 * every_s]


async def test_changes_do_not_make_a_heartbeat_late_however_long_they_are_gathered(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    story = [(0.5 + n / 2, lambda n=n: source.shrink(9 - n)) for n in range(9)]
    heard = await Running(source, heartbeat_s=1, coalesce_s=8).until(9, *story)
    assert all(b - a <= 1.001 for a, b in pairwise(heard.times))


async def test_a_recovery_is_seen_in_time_though_nobody_wakes_it(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    story = [(2.2, lambda: source.shrink(9)), (4.2, lambda: source.shrink(10))]
    heard = await Running(source).until(9, *story)
    assert heard.verdicts == [Health.HEALTHY, Health.UNHEALTHY, Health.HEALTHY]
    assert 6 < heard.times[-1] < 6.5, "two more passes after the first clean one"
    assert source.reads == 4


async def test_a_source_that_stands_still_is_told_at_the_next_heartbeat_and_its_return_soon(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def hang() -> None:
        source.node.stuck = {"hugepages"}

    def go_on() -> None:
        source.node.stuck = set()

    heard = await Running(source).until(60, (11, hang), (44.5, go_on))
    told = list(zip(heard.times, heard.verdicts, strict=True))
    assert next(t for t, verdict in told if verdict is Health.UNKNOWN) == 20
    healthy_again = next(t for t, verdict in told if verdict is Health.HEALTHY and t > 20)
    assert 44.5 < healthy_again <= 48, "three passes, a second apart, are looked at"


async def test_life_is_signed_twice_as_often_as_is_asked(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    heard = await Running(source, watchdog_s=4).until(11)
    assert heard.alive == [0, 2, 4, 6, 8, 10]
    assert heard.times == [0, 10], "and is no reason to speak"


async def test_nobody_asks_for_life_signs_nobody_gets_them(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    heard = await Running(source).until(100)
    assert heard.alive == []


async def test_the_first_life_sign_does_not_wait_for_a_heartbeat(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def begin() -> None:
        source.blank = False
        source.wake()

    source.blank = True
    heard = await Running(source, watchdog_s=4).until(5, (0.003, begin))
    assert heard.alive
    assert heard.alive[0] <= 2


async def test_no_life_is_signed_while_a_source_stands_still_or_before_there_is_one(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    def begin() -> None:
        source.blank = False

    def hang() -> None:
        source.node.stuck = {"cgroups"}

    def go_on() -> None:
        source.node.stuck = set()

    source.blank = True
    running = Running(source, watchdog_s=4)
    heard = await running.until(60, (19, begin), (30.5, hang), (45.5, go_on))
    assert min(heard.alive) >= 19
    assert not [t for t in heard.alive if 34 < t <= 45.5]
    assert [t for t in heard.alive if 30 < t < 34]
    assert [t for t in heard.alive if t > 45.5]


async def test_in_a_flood_it_rests_four_times_as_long_as_it_looks(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    story = [(0.3, lambda: source.shrink(9)), (0.4, lambda: source.shrink(8))]
    heard = await Running(source, tell_s=0.2, clock=autojump_clock).until(2.9, *story)
    assert heard.times[:2] == [0, 1.0]


async def test_what_goes_wrong_in_a_look_ends_the_core(
    autojump_clock: MockClock, source: PaperSource
) -> None:
    running = Running(source)

    def contradict() -> None:
        source.node.cpus = None  # type: ignore[assignment]
        source.wake()

    with pytest.raises(BaseExceptionGroup) as raised:
        await running.until(10, (1, contradict))
    assert raised.group_contains(AttributeError)
