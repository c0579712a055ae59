"""Threads beside a loop: so many at most, in order, and nobody's place is held by who has left."""

import asyncio
import subprocess
import sys
import threading
from functools import partial

import pytest
from patience import PATIENCE_S
from wire.serving import eventually

from agent.system.threads.worker_pool import Full, WorkerPool


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of a lane of the test's own: threads of another one may still be about to end."""
    return str(request.node.name)


def threads(name: str) -> list[str]:
    """The lane's threads that live."""
    return [one.name for one in threading.enumerate() if one.name.startswith(f"{name}-")]


def test_what_a_function_returns_or_raises_comes_back(name: str) -> None:
    async def main() -> None:
        lane = WorkerPool(name, 2)
        assert (await lane.call(lambda: threading.current_thread().name)).startswith(f"{name}-")
        with pytest.raises(LookupError, match="not there"):
            await lane.call(raise_)
        lane.close()

    asyncio.run(main())
    eventually(lambda: not threads(name), "the threads end")


def raise_() -> None:
    raise LookupError("not there")


def test_threads_are_made_when_there_is_work_and_no_more_than_so_many(name: str) -> None:
    async def main() -> None:
        lane, release = WorkerPool(name, 3), threading.Event()
        assert threads(name) == []
        await lane.call(int)
        await lane.call(int)
        assert len(threads(name)) == 1, "the one that is idle is taken again"
        calls = [asyncio.create_task(lane.call(release.wait)) for _ in range(9)]
        await asyncio.sleep(0)
        assert len(threads(name)) == 3
        release.set()
        assert await asyncio.gather(*calls) == [True] * 9
        lane.close()

    asyncio.run(main())


def test_one_thread_does_things_in_the_order_of_the_asking(name: str) -> None:
    async def main() -> None:
        lane, done = WorkerPool(name, 1), list[int]()
        await asyncio.gather(*(lane.call(partial(done.append, number)) for number in range(50)))
        assert done == list(range(50))
        lane.close()

    asyncio.run(main())


def test_who_leaves_before_its_turn_frees_the_place_and_what_is_kept_is_done(name: str) -> None:
    async def main() -> None:
        lane, release, started = WorkerPool(name, 1, waiting_max=3), threading.Event(), threading.Event()
        done: list[str] = []

        def hang() -> None:
            started.set()
            assert release.wait(PATIENCE_S)
            done.append("first")

        first = asyncio.create_task(lane.call(hang))
        await asyncio.to_thread(started.wait)
        leaves, stays, keeps = (
            asyncio.create_task(lane.call(partial(done.append, word), kept=word == "kept"))
            for word in ("leaves", "stays", "kept")
        )
        await asyncio.sleep(0)
        with pytest.raises(Full, match="3 calls wait already, limit 3"):
            await lane.call(int)
        leaves.cancel()
        keeps.cancel()
        await asyncio.wait([leaves, keeps])
        last = asyncio.create_task(lane.call(lambda: done.append("last")))
        first.cancel()
        release.set()
        await asyncio.gather(stays, last)
        assert done == ["first", "stays", "kept", "last"]
        lane.close()

    asyncio.run(main())


def test_the_end_waits_for_what_was_asked_but_not_for_ever(name: str) -> None:
    async def main() -> None:
        lane, release, done = WorkerPool(name, 1), threading.Event(), list[str]()
        await lane.finish(30)
        assert threads(name) == [], "nothing is made for the end"
        soon = asyncio.create_task(lane.call(lambda: done.append("soon"), kept=True))
        await asyncio.sleep(0)
        soon.cancel()
        await lane.finish(30)
        assert done == ["soon"]
        hangs = asyncio.create_task(lane.call(release.wait))
        await asyncio.sleep(0)
        await lane.finish(0.01)
        assert not hangs.done()
        lane.close()
        release.set()
        assert await hangs

    asyncio.run(main())
    eventually(lambda: not threads(name), "and the threads end all the same")


def test_a_thread_that_hangs_keeps_no_process() -> None:
    program = """if True:
        import asyncio, threading
        from agent.system.threads.worker_pool import WorkerPool
        async def main():
            lane, started = WorkerPool("lane", 1), threading.Event()
            asyncio.create_task(lane.call(lambda: (started.set(), threading.Event().wait())))
            await asyncio.to_thread(lambda: None)
            while not started.is_set():
                await asyncio.sleep(0)
        asyncio.run(main())
        print("over")
        """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("over\n", "")
