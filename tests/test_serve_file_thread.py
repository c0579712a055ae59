"""The thread for what a disk may hold up: in order, and nobody has to wait to the end."""

import asyncio
import threading
from pathlib import Path

import pytest
from wire.serving import eventually

from agent.system.threads.serial_worker import SerialWorker


def ends(thread: SerialWorker) -> None:
    thread.close()
    eventually(lambda: all(one.name != "dh-files" for one in threading.enumerate()), "it ends")


def test_what_a_function_returns_or_raises_comes_back() -> None:
    async def main() -> None:
        thread = SerialWorker()
        assert await thread.call(lambda: threading.current_thread().name) == "dh-files"
        with pytest.raises(FileNotFoundError):
            await thread.call(Path("/no/such/file").read_bytes)
        with pytest.raises(SystemExit):
            await thread.call(leave)
        assert await thread.call(lambda: 1) == 1, "and nothing ends it"
        ends(thread)

    asyncio.run(main())


def leave() -> None:
    raise SystemExit(3)


def test_what_nobody_waits_for_any_more_is_done_all_the_same_and_in_order() -> None:
    release, done = threading.Event(), list[str]()

    async def main() -> SerialWorker:
        thread = SerialWorker()
        look = asyncio.create_task(thread.call(release.wait))
        await asyncio.sleep(0)
        look.cancel()
        await thread.finish(lambda: done.append("remove"))
        await thread.finish(lambda: done.append("leave"))
        assert done == []
        return thread

    thread = asyncio.run(main())  # and the loop is closed
    release.set()
    ends(thread)
    assert done == ["remove", "leave"]


def test_a_disk_that_does_not_answer_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        thread = SerialWorker(slow_s=0.01)
        release = threading.Event()
        look = asyncio.create_task(thread.call(release.wait))
        await asyncio.to_thread(eventually, lambda: bool(caplog.records), "it is told of")
        release.set()
        assert await look
        ends(thread)

    asyncio.run(main())
    assert caplog.messages == [
        "the driver's sockets cannot be looked after: a disk has not answered for 0.01 s"
    ]
