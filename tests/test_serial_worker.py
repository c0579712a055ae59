"""Serial worker: calls run in order, even if their callers have gone."""

import asyncio
import threading
from pathlib import Path

import pytest
from patience import PATIENCE_S
from wire.serving import eventually

from agent.system.threads import worker_threads
from agent.system.threads.worker_threads import SerialWorker


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return a name of this test's threads alone: those of other tests may hang on purpose."""
    return str(request.node.name)


def ends(worker: SerialWorker, name: str) -> None:
    worker.close()
    eventually(
        lambda: not any(thread.name.startswith(f"{name}-") for thread in threading.enumerate()), "it ends"
    )


def test_call_returns_the_result_or_raises_the_exception(name: str) -> None:
    async def main() -> None:
        worker = SerialWorker(name)
        assert (await worker.call(lambda: threading.current_thread().name)).startswith(f"{name}-")
        with pytest.raises(FileNotFoundError):
            await worker.call(Path("/no/such/file").read_bytes)
        with pytest.raises(SystemExit):
            await worker.call(leave)
        assert await worker.call(lambda: 1) == 1, "no exception ends the worker"
        ends(worker, name)

    asyncio.run(main())


def leave() -> None:
    raise SystemExit(3)


def test_abandoned_calls_run_in_order(name: str) -> None:
    release, done = threading.Event(), list[str]()

    async def main() -> SerialWorker:
        worker = SerialWorker(name)
        waiting = asyncio.create_task(worker.call(release.wait))
        await asyncio.sleep(0)
        waiting.cancel()
        await worker.finish(lambda: done.append("remove"))
        await worker.finish(lambda: done.append("leave"))
        assert done == []
        return worker

    worker = asyncio.run(main())  # and the loop is closed
    release.set()
    ends(worker, name)
    assert done == ["remove", "leave"]


def test_shutdown_of_a_cancelled_task_goes_on_after_a_hung_call(name: str) -> None:
    """The asyncio.timeout of Python 3.11.0 to 3.11.2 raises CancelledError in a cancelled task."""
    release, done = threading.Event(), list[str]()

    async def serve(worker: SerialWorker) -> None:
        try:
            await worker.call(release.wait)
        finally:
            await worker.finish(lambda: done.append("remove"))
            await worker.finish(lambda: done.append("leave"))
            done.append("goodbye")

    async def main() -> SerialWorker:
        worker = SerialWorker(name)
        serving = asyncio.create_task(serve(worker))
        await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()
        return worker

    worker = asyncio.run(main())
    assert done == ["goodbye"]
    release.set()
    ends(worker, name)
    assert done == ["goodbye", "remove", "leave"]


def test_error_of_the_last_call_is_raised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_threads, "SHUTDOWN_S", PATIENCE_S)

    async def main() -> None:
        worker = SerialWorker(name)
        with pytest.raises(FileNotFoundError):
            await worker.finish(Path("/no/such/file").read_bytes)
        ends(worker, name)

    asyncio.run(main())


def test_slow_disk_is_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def messages() -> list[str]:
        logger = "agent.system.threads.worker_threads"
        return [record.getMessage() for record in caplog.records if record.name == logger]

    async def main() -> None:
        worker = SerialWorker(name, slow_s=0.01)
        release = threading.Event()
        waiting = asyncio.create_task(worker.call(release.wait))
        await asyncio.to_thread(eventually, lambda: bool(messages()), "the slow disk is logged")
        release.set()
        assert await waiting
        ends(worker, name)

    asyncio.run(main())
    assert messages() == [
        "driver sockets: existence not checked: a file operation takes longer than 0.01 s; the disk may hang"
    ]
