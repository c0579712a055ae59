"""Threads of event loops: they lose no exception, and survive a lack of descriptors."""

import asyncio
import contextlib
import errno
import logging
import os
import queue
import resource
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trio
from own_process import run_in_own_process
from patience import PATIENCE_S
from wire.serving import eventually

from agent.system.threads import loop_thread
from agent.system.threads.loop_thread import AsyncioThread, TrioThread
from agent.system.threads.thread_start import ThreadStartError


async def run_forever(ready: Callable[[], None]) -> None:
    ready()
    await asyncio.Event().wait()


def fail_test(error: BaseException) -> None:
    raise AssertionError("nothing should fail here") from error


def test_loop_runs_in_a_named_thread_until_stopped() -> None:
    before = set(threading.enumerate())

    def names() -> list[str]:
        return [worker.name for worker in set(threading.enumerate()) - before]

    thread = AsyncioThread(run_forever, on_failure=fail_test)
    thread.start(PATIENCE_S)
    assert "dh-io" in names()
    assert thread.stop(PATIENCE_S)
    assert "dh-io" not in names()


def test_loop_is_of_asyncio_while_the_process_uses_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that installs uvloop must not change the loop: uvloop has transports of other classes."""

    class ForeignLoop(asyncio.SelectorEventLoop):
        pass

    loops: queue.Queue[type[asyncio.AbstractEventLoop]] = queue.Queue()

    async def main(ready: Callable[[], None]) -> None:
        loops.put(type(asyncio.get_running_loop()))
        await run_forever(ready)

    monkeypatch.setattr(asyncio.events, "new_event_loop", ForeignLoop)
    thread = AsyncioThread(main, on_failure=fail_test)
    thread.start(PATIENCE_S)
    assert loops.get(timeout=PATIENCE_S) is asyncio.SelectorEventLoop
    assert thread.stop(PATIENCE_S)


def test_failure_before_ready_is_raised_by_start() -> None:
    async def main(ready: Callable[[], None]) -> None:
        raise OSError("no such luck")

    thread = AsyncioThread(main, on_failure=fail_test)
    with pytest.raises(OSError, match="no such luck"):
        thread.start(PATIENCE_S)
    assert thread.stop(PATIENCE_S)


def test_loop_thread_failure_after_ready_calls_on_failure_in_it() -> None:
    failures: queue.Queue[tuple[str, BaseException]] = queue.Queue()

    async def main(ready: Callable[[], None]) -> None:
        ready()
        await asyncio.sleep(0)
        raise ValueError("later")

    thread = AsyncioThread(
        main, on_failure=lambda error: failures.put((threading.current_thread().name, error))
    )
    thread.start(PATIENCE_S)
    name, error = failures.get(timeout=PATIENCE_S)
    assert (name, str(error)) == ("dh-io", "later")
    assert thread.stop(PATIENCE_S)


def test_return_without_stop_is_a_failure() -> None:
    failures: queue.Queue[BaseException] = queue.Queue()

    async def main(ready: Callable[[], None]) -> None:
        ready()

    thread = AsyncioThread(main, on_failure=failures.put)
    thread.start(PATIENCE_S)
    assert "ended before stop() was called" in str(failures.get(timeout=PATIENCE_S))
    assert thread.stop(PATIENCE_S)


def test_failure_during_shutdown_is_raised_by_stop() -> None:
    async def main(ready: Callable[[], None]) -> None:
        try:
            await run_forever(ready)
        finally:
            raise OSError("cannot even stop")

    thread = AsyncioThread(main, on_failure=fail_test)
    thread.start(PATIENCE_S)
    with pytest.raises(OSError, match="cannot even stop"):
        thread.stop(PATIENCE_S)


def test_hung_thread_is_abandoned() -> None:
    release = threading.Event()

    async def main(ready: Callable[[], None]) -> None:
        ready()
        release.wait()

    thread = AsyncioThread(main, on_failure=fail_test)
    thread.start(PATIENCE_S)
    assert not thread.stop(timeout_s=0.05)
    release.set()
    assert thread.stop(PATIENCE_S)


def test_start_times_out_if_never_ready() -> None:
    async def main(ready: Callable[[], None]) -> None:
        await asyncio.Event().wait()

    thread = AsyncioThread(main, on_failure=fail_test)
    with pytest.raises(TimeoutError):
        thread.start(timeout_s=0.05)
    assert thread.stop(PATIENCE_S)


def test_stop_before_start_is_final() -> None:
    thread = AsyncioThread(run_forever, on_failure=fail_test)
    assert thread.stop(PATIENCE_S)
    with pytest.raises(RuntimeError, match="stopped before its event loop was ready"):
        thread.start(PATIENCE_S)
    assert not thread.is_alive


def test_start_raises_if_stopped_meanwhile() -> None:
    begun = threading.Event()

    async def main(ready: Callable[[], None]) -> None:
        begun.set()
        await asyncio.Event().wait()

    thread = AsyncioThread(main, on_failure=fail_test)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(thread.start, PATIENCE_S)
        assert begun.wait(PATIENCE_S)
        assert thread.stop(PATIENCE_S)
        with pytest.raises(RuntimeError, match="stopped before its event loop was ready"):
            starting.result(PATIENCE_S)


def test_out_of_descriptors_is_logged_once_and_recovers(tmp_path: Path) -> None:
    run_in_own_process(use_up_descriptors, tmp_path / "a.sock")


def use_up_descriptors(path: str) -> None:
    """Connect to a server that lacks a descriptor, in a process without threads that free one.

    asyncio retries every second, and logs a hundred tracebacks each time.
    """
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)

    async def main(ready: Callable[[], None]) -> None:
        def close_at_once(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with await asyncio.start_unix_server(close_at_once, path):
            ready()
            await asyncio.Event().wait()

    thread = AsyncioThread(main, on_failure=fail_test)
    thread.start(PATIENCE_S)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, before[1]))
        held = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(client.fileno()))
            client.connect(path)
            eventually(lambda: any(path in message for message in messages), "the lack is logged")
        finally:
            for fd in held:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert client.recv(1) == b""
    assert [message for message in messages if path in message] == [
        f"socket {path}: cannot accept connections: Too many open files; 1 attempts failed; will retry"
    ]
    assert thread.stop(PATIENCE_S)


def test_connection_that_the_kernel_does_not_watch_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "a.sock")
    accepted: list[object] = []  # Python 3.13 closes a connection whose streams are garbage

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main(ready: Callable[[], None]) -> None:
        async with await asyncio.start_unix_server(lambda *streams: accepted.append(streams), path):
            asyncio.get_running_loop()._selector.register = refuse  # type: ignore[attr-defined]
            ready()
            await asyncio.Event().wait()

    thread = AsyncioThread(main, on_failure=fail_test)
    thread.start(PATIENCE_S)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PATIENCE_S)
            client.connect(path)
            assert client.recv(1) == b""
    assert [record.getMessage() for record in caplog.records if record.name != "asyncio"] == [
        f"socket {path}: cannot accept connections: No space left on device; 1 attempts failed; will retry"
    ]
    assert "Traceback" not in caplog.text
    assert thread.stop(PATIENCE_S)


def test_uncaught_exception_of_the_loop_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main(ready: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(0)
        await run_forever(ready)

    thread = AsyncioThread(main, on_failure=fail_test)
    thread.start(PATIENCE_S)
    assert thread.stop(PATIENCE_S)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_stop_of_an_unstarted_thread_does_nothing() -> None:
    assert AsyncioThread(run_forever, on_failure=fail_test).stop()


def test_trio_thread_without_a_free_descriptor_creates_its_loop_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_thread, "START_RETRY_S", 0.01)
    create, failures, ran = socket.socketpair, iter((errno.EMFILE, errno.ENOBUFS)), threading.Event()

    def fail_twice(*arguments: Any) -> tuple[socket.socket, socket.socket]:
        if number := next(failures, 0):
            raise OSError(number, os.strerror(number))
        return create(*arguments)

    async def run_task() -> None:
        ran.set()
        await trio.sleep_forever()

    monkeypatch.setattr(socket, "socketpair", fail_twice)
    thread = TrioThread(lambda: [run_task], fail_test, "dh-core")
    thread.start()
    assert ran.wait(PATIENCE_S)
    assert thread.stop(PATIENCE_S)
    assert [record.getMessage() for record in caplog.records] == [
        "thread dh-core: cannot begin: [Errno 24] Too many open files; 1 attempts failed; will retry"
    ]


def test_trio_thread_whose_tasks_lack_a_thread_opens_them_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_thread, "START_RETRY_S", 0.01)
    failures, ran = iter([ThreadStartError("can't start new thread: dh-nvml")]), threading.Event()

    async def run_task() -> None:
        ran.set()
        await trio.sleep_forever()

    def open_tasks() -> list[Callable[[], Awaitable[None]]]:
        for failure in failures:
            raise failure
        return [run_task]

    thread = TrioThread(open_tasks, fail_test, "dh-core")
    thread.start()
    assert ran.wait(PATIENCE_S)
    assert thread.stop(PATIENCE_S)
    assert [record.getMessage() for record in caplog.records] == [
        "thread dh-core: cannot begin: can't start new thread: dh-nvml; 1 attempts failed; will retry"
    ]
