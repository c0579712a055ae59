"""Registration of a driver: the kubelet's calls and their answers."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from patience import PATIENCE_S
from wire.plugin import REGISTRATION, Kubelet

from agent.serve.dra_plugin.instance_server import SUPPORTED, RegistrationService
from agent.serve.grpc.server import HardenedServer
from agent.serve.sockets import UnixListener
from agent.system.threads.loop_thread import AsyncioThread

DRIVER = "gpu.example.com"
ENDPOINT = "/var/lib/kubelet/plugins/gpu.example.com/dra.sock"


class Registrar:
    """Server of a registration socket that records the results."""

    def __init__(self, path: Path) -> None:
        self.statuses: list[tuple[bool, str]] = []
        self.raises: Exception | None = None
        self._listener = UnixListener(path)
        self._thread = AsyncioThread(self._run, on_failure=lambda error: None)
        self._thread.start(PATIENCE_S)

    def stop(self) -> None:
        assert self._thread.stop(PATIENCE_S)

    def _record(self, registered: bool, error: str) -> None:
        self.statuses.append((registered, error))
        if self.raises is not None:
            raise self.raises

    async def _run(self, ready: Callable[[], None]) -> None:
        server = HardenedServer([RegistrationService(DRIVER, ENDPOINT, self._record)])
        await server.listen(self._listener.sock)
        ready()
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop("end of the test")
            self._listener.close()


@pytest.fixture
def registrar(tmp_path: Path) -> Iterator[Registrar]:
    registrar = Registrar(tmp_path / "reg.sock")
    yield registrar
    registrar.stop()


@pytest.fixture
def kubelet(registrar: Registrar, tmp_path: Path) -> Iterator[Kubelet]:
    with Kubelet(tmp_path / "reg.sock") as kubelet:
        yield kubelet


def test_get_info_lists_newest_services_first(kubelet: Kubelet) -> None:
    info = kubelet.get_info()
    assert (info.type, info.name, info.endpoint) == ("DRAPlugin", DRIVER, ENDPOINT)
    assert list(info.supported_versions) == [
        "v1.DRAPlugin",
        "v1beta1.DRAPlugin",
        "v1.DRAResourceHealth",
        "v1alpha1.DRAResourceHealth",
    ]
    assert tuple(info.supported_versions) == SUPPORTED


def test_get_info_returns_the_same_answer_every_time(kubelet: Kubelet) -> None:
    assert {kubelet.get_info().SerializeToString() for _ in range(10)} == {
        kubelet.get_info().SerializeToString()
    }


def test_failed_registration_reports_error_of_the_kubelet(
    registrar: Registrar, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agent.serve.dra_plugin.instance_server")
    kubelet.notify(False, "name is taken")
    kubelet.notify(True)
    assert registrar.statuses == [(False, "name is taken"), (True, "")]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"driver {DRIVER}: registration failed: name is taken; the kubelet will retry"),
        ("INFO", f"driver {DRIVER}: registered with the kubelet"),
    ]
    assert kubelet.get_info().name == DRIVER, "the kubelet retries by itself"


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_exception_in_callback_does_not_fail_registration(
    registrar: Registrar, kubelet: Kubelet, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    registrar.raises = kind("the driver's own")
    kubelet.notify(True)
    assert registrar.statuses == [(True, "")]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [kind]
    assert kubelet.get_info().name == DRIVER


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x12\x05ab", "RegistrationStatus.error: ends 3 bytes after the end of the message"),
        (b"\x12\x02\xc3\x28", "RegistrationStatus.error: not UTF-8 at byte 0 of 2"),
        (b"\x10\x05", "RegistrationStatus.error: wire type is 0, must be 2"),
        (b"\x0a\x01x", "RegistrationStatus.plugin_registered: wire type is 2, must be 0"),
    ],
)
def test_invalid_status_is_refused_with_place(
    registrar: Registrar, kubelet: Kubelet, data: bytes, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        kubelet.call_raw(f"{REGISTRATION}/NotifyRegistrationStatus", data)
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.INTERNAL, text)
    assert registrar.statuses == []


def test_unknown_fields_of_a_newer_kubelet_are_ignored(registrar: Registrar, kubelet: Kubelet) -> None:
    kubelet.call_raw(f"{REGISTRATION}/NotifyRegistrationStatus", b"\x7a\x01x\x08\x01\x78\x05")
    assert registrar.statuses == [(True, "")]
