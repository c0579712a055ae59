"""Newest wins, from any thread to one loop."""

import asyncio
import threading

import pytest

from agent.system.threads.latest_value import LatestValue


def test_empty_cell_has_version_0() -> None:
    assert LatestValue[str]().peek() == (0, None)


def test_every_publication_increments_the_version() -> None:
    latest: LatestValue[str] = LatestValue()
    assert [latest.publish(text) for text in "abc"] == [1, 2, 3]
    assert latest.peek() == (3, "c")


def test_slow_reader_skips_values_but_gets_the_last() -> None:
    async def main() -> list[tuple[int, int]]:
        latest: LatestValue[int] = LatestValue()
        total = 20_000
        writer = threading.Thread(target=lambda: [latest.publish(number) for number in range(1, total + 1)])
        writer.start()
        seen = [(0, 0)]
        while seen[-1][1] < total:
            seen.append(await latest.wait_newer(seen[-1][0]))
        writer.join()
        return seen

    seen = asyncio.run(main())
    assert all(version == value for version, value in seen)
    assert seen == sorted(set(seen))


def test_value_published_before_the_wait_is_returned_at_once() -> None:
    latest: LatestValue[str] = LatestValue()
    latest.publish("early")
    assert asyncio.run(latest.wait_newer(0)) == (1, "early")


def test_publication_wakes_every_waiter() -> None:
    async def main() -> list[tuple[int, str]]:
        latest: LatestValue[str] = LatestValue()
        waiters = [asyncio.create_task(latest.wait_newer(0)) for _ in range(64)]
        await asyncio.sleep(0)
        threading.Thread(target=latest.publish, args=("news",)).start()
        return await asyncio.gather(*waiters)

    assert asyncio.run(main()) == [(1, "news")] * 64


def test_reader_that_never_waits_yields_to_other_tasks() -> None:
    async def main() -> int:
        latest: LatestValue[int] = LatestValue()
        latest.publish(0)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(other())
        for _ in range(100):
            await latest.wait_newer(0)
        task.cancel()
        return turns

    assert asyncio.run(main()) >= 99


def test_cancelled_waiter_is_dropped_and_others_are_woken() -> None:
    async def main() -> tuple[int, str]:
        latest: LatestValue[str] = LatestValue()
        gone, stays = (asyncio.create_task(latest.wait_newer(0)) for _ in range(2))
        await asyncio.sleep(0.001)
        gone.cancel()
        await asyncio.wait([gone])
        latest.publish("news")
        return await stays

    assert asyncio.run(main()) == (1, "news")


def test_publication_after_the_loop_has_closed_has_no_effect() -> None:
    latest: LatestValue[str] = LatestValue()
    latest.publish("a")
    asyncio.run(latest.wait_newer(0))
    assert latest.publish("b") == 2
    assert latest.publish("c") == 3


def test_second_loop_is_rejected() -> None:
    latest: LatestValue[str] = LatestValue()
    latest.publish("a")
    asyncio.run(latest.wait_newer(0))
    with pytest.raises(RuntimeError, match=r"two event loops.*use one LatestValue for each loop"):
        asyncio.run(latest.wait_newer(0))


async def taken_after_waiting() -> list[bool]:
    latest: LatestValue[int] = LatestValue()
    seen = [latest.is_delivered()]
    latest.publish(1)
    seen.append(latest.is_delivered())
    await latest.wait_newer(0)
    seen.append(latest.is_delivered())
    latest.publish(2)
    seen.append(latest.is_delivered())
    return seen


def test_value_is_delivered_when_a_waiter_has_it() -> None:
    assert asyncio.run(taken_after_waiting()) == [True, False, True, False]


def test_wait_delivered_returns_at_once_without_waiters() -> None:
    latest: LatestValue[str] = LatestValue()
    latest.publish("news")
    assert latest.wait_delivered(0)


def test_wait_delivered_waits_for_a_reader() -> None:
    latest: LatestValue[str] = LatestValue()
    taken: list[bool] = []

    async def main() -> None:
        version, _ = await latest.wait_newer(0)
        latest.publish("second")
        assert not latest.wait_delivered(60), "the loop that would take it waits here"
        waiting = threading.Thread(target=lambda: taken.append(latest.wait_delivered(60)))
        waiting.start()
        await latest.wait_newer(version)
        await asyncio.to_thread(waiting.join)

    latest.publish("first")
    asyncio.run(main())
    assert taken == [True]


def test_wait_delivered_times_out_for_a_blocked_loop() -> None:
    latest: LatestValue[str] = LatestValue()

    async def main() -> bool:
        await latest.wait_newer(0)
        latest.publish("second")
        return await asyncio.to_thread(latest.wait_delivered, 0.01)

    latest.publish("first")
    assert asyncio.run(main()) is False
    assert latest.wait_delivered(60), "the loop has closed: there is no reader"
