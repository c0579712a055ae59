"""A monitor in a test, and a driver's own grpclib server that serves its health."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpclib.server
import pytest
from patience import PATIENCE_S
from wire.serving import eventually

from agent.embed.monitor import Monitor
from agent.embed.plugin import PluginServer
from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth, Health
from agent.serve.sockets import abort_transport
from agent.system.threads.loop_thread import AsyncioThread

DRIVER: Final = "demo.example.com"
NODE: Final = "node-a"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the limits of starts, stops and waits that a busy machine may exceed."""
    for method in (PluginServer.stop, PluginServer.aclose, PluginServer._stop):
        monkeypatch.setattr(method, "__defaults__", (PATIENCE_S,))
    for method in (Monitor.stop, Monitor.aclose):
        monkeypatch.setattr(method, "__defaults__", (PATIENCE_S,))
    monkeypatch.setattr("agent.embed.core_components.SOURCES_STOP_S", PATIENCE_S)
    for name in ("DELIVERY_S", "EVALUATION_WAIT_S"):
        monkeypatch.setattr(f"agent.driver.prepare_failure_tracker.{name}", PATIENCE_S)
    monkeypatch.setattr("agent.driver.ledger_writer.MAX_DISK_WAIT_S", PATIENCE_S)
    monkeypatch.setattr("agent.system.threads.worker_threads.SHUTDOWN_S", PATIENCE_S)
    # above the deadline of a call: a retry that must end early does not end by itself
    monkeypatch.setattr("agent.prepare.step_runners.RETRY_WINDOW_S", 2 * PATIENCE_S)


class BrokenLogHandler(logging.Handler):
    """Logging handler of a host that raises at every record of its level."""

    def emit(self, record: logging.LogRecord) -> None:
        raise BrokenPipeError("the log collector does not answer")


@contextmanager
def broken_log_handler(level: int = logging.WARNING) -> Iterator[None]:
    """Add a handler that raises to the library's logger during a ``with`` block."""
    handler, logger = BrokenLogHandler(level), logging.getLogger("agent")
    level_before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)


def ref(name: str) -> DeviceRef:
    """Return the identity of a device of the driver."""
    return DeviceRef(DRIVER, NODE, name)


def health_of(monitor: Monitor, name: str) -> DeviceHealth:
    """Return the monitor's health of a device, which must be known."""
    found = monitor.health_of(ref(name))
    assert found is not None, f"{name} is not in the report"
    return found


def until(monitor: Monitor, name: str, health: Health, code: str = "") -> DeviceHealth:
    """Wait until a device has this health, with this cause if one is given."""

    def is_so() -> bool:
        found = monitor.health_of(ref(name))
        return found is not None and found.health is health and codes(found)[:1] == ([code] if code else [])

    def any_code() -> bool:
        found = monitor.health_of(ref(name))
        return found is not None and found.health is health

    eventually(is_so if code or health is Health.HEALTHY else any_code, f"{name} is {health.name} {code}")
    return health_of(monitor, name)


def codes(device: DeviceHealth) -> list[str]:
    """Return the codes of a device's causes, worst first."""
    return [cause.code for cause in device.causes]


class DriverServer:
    """A driver's own server in a thread of its own: plain grpclib, with what the monitor gives it."""

    def __init__(self, path: Path, service: Any, codec: Any) -> None:
        self.path = path
        self._service = service
        self._codec = codec
        self._failures: list[BaseException] = []
        self._thread = AsyncioThread(self._run, on_failure=self._failures.append, name="driver")

    async def _run(self, ready: Callable[[], None]) -> None:
        server = grpclib.server.Server([self._service], codec=self._codec)
        await server.start(path=str(self.path))
        ready()
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            await server.wait_closed()
            await _cut_off()

    def __enter__(self) -> Self:
        self._thread.start(PATIENCE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = self._thread.stop(PATIENCE_S)
        if error is None:
            assert self._failures == []
            assert ended


async def _cut_off() -> None:
    """End the connections that clients still hold: grpclib leaves them to the end of the process."""
    transports: dict[int, asyncio.Transport] = asyncio.get_running_loop()._transports  # type: ignore[attr-defined]
    for transport in list(transports.values()):
        abort_transport(transport)
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # it takes effect in the loop's next turn
