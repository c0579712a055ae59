"""Worker pool: bounded threads, order of calls, and cancelled callers."""

import asyncio
import subprocess
import sys
import threading
from functools import partial

import pytest
from patience import PATIENCE_S
from wire.serving import eventually

from agent.system.threads.worker_threads import PoolFull, WorkerPool


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return a pool name of this test alone: threads of another pool may still be ending."""
    return str(request.node.name)


def threads(name: str) -> list[str]:
    """Return the names of the pool's live threads."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(f"{name}-")]


def test_call_returns_the_result_or_raises_the_exception(name: str) -> None:
    async def main() -> None:
        pool = WorkerPool(name, 2)
        assert (await pool.call(lambda: threading.current_thread().name)).startswith(f"{name}-")
        with pytest.raises(LookupError, match="not there"):
            await pool.call(raise_)
        pool.close()

    asyncio.run(main())
    eventually(lambda: not threads(name), "the threads end")


def raise_() -> None:
    raise LookupError("not there")


def test_threads_start_on_demand_up_to_the_limit(name: str) -> None:
    async def main() -> None:
        pool, release = WorkerPool(name, 3), threading.Event()
        assert threads(name) == []
        await pool.call(int)
        await pool.call(int)
        assert len(threads(name)) == 1, "the idle thread is reused"
        calls = [asyncio.create_task(pool.call(release.wait)) for _ in range(9)]
        await asyncio.sleep(0)
        assert len(threads(name)) == 3
        release.set()
        assert await asyncio.gather(*calls) == [True] * 9
        pool.close()

    asyncio.run(main())


def test_single_thread_runs_calls_in_order(name: str) -> None:
    async def main() -> None:
        pool, done = WorkerPool(name, 1), list[int]()
        await asyncio.gather(*(pool.call(partial(done.append, number)) for number in range(50)))
        assert done == list(range(50))
        pool.close()

    asyncio.run(main())


def test_cancelled_call_leaves_the_queue_unless_run_even_if_abandoned(name: str) -> None:
    async def main() -> None:
        pool, release, started = WorkerPool(name, 1, waiting_max=3), threading.Event(), threading.Event()
        done: list[str] = []

        def hang() -> None:
            started.set()
            assert release.wait(PATIENCE_S)
            done.append("first")

        first = asyncio.create_task(pool.call(hang))
        await asyncio.to_thread(started.wait)
        leaves, stays, keeps = (
            asyncio.create_task(pool.call(partial(done.append, label), run_even_if_abandoned=label == "kept"))
            for label in ("leaves", "stays", "kept")
        )
        await asyncio.sleep(0)
        with pytest.raises(PoolFull, match="3 calls wait already, limit 3"):
            await pool.call(int)
        leaves.cancel()
        keeps.cancel()
        await asyncio.wait([leaves, keeps])
        last = asyncio.create_task(pool.call(lambda: done.append("last")))
        first.cancel()
        release.set()
        await asyncio.gather(stays, last)
        assert done == ["first", "stays", "kept", "last"]
        pool.close()

    asyncio.run(main())


def test_finish_waits_for_queued_calls_up_to_the_timeout(name: str) -> None:
    async def main() -> None:
        pool, release, done = WorkerPool(name, 1), threading.Event(), list[str]()
        await pool.finish(30)
        assert threads(name) == [], "finish starts no thread"
        soon = asyncio.create_task(pool.call(lambda: done.append("soon"), run_even_if_abandoned=True))
        await asyncio.sleep(0)
        soon.cancel()
        await pool.finish(30)
        assert done == ["soon"]
        hangs = asyncio.create_task(pool.call(release.wait))
        await asyncio.sleep(0)
        await pool.finish(0.01)
        assert not hangs.done()
        pool.close()
        release.set()
        assert await hangs

    asyncio.run(main())
    eventually(lambda: not threads(name), "and the threads end all the same")


def test_hung_thread_does_not_keep_the_process() -> None:
    program = """if True:
        import asyncio, threading
        from agent.system.threads.worker_threads import WorkerPool
        async def main():
            pool, started = WorkerPool("pool", 1), threading.Event()
            asyncio.create_task(pool.call(lambda: (started.set(), threading.Event().wait())))
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
