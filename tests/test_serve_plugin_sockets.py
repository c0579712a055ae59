"""A driver's two sockets: their paths, the order of their creation and removal, and their restoration."""

import hashlib
import os
import socket
import stat
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_user import become_other_user
from patience import PATIENCE_S
from wire.claims import DRIVER, DriverInstance
from wire.google import names, watch_health
from wire.plugin import Kubelet, claim
from wire.serving import current_report, device, eventually, fail_once, is_served, remove_tree

from agent.errors import ConfigError, PermissionDeniedError, ResourceBusyError
from agent.model.socket_address import SOCKET_PATH_LIMIT
from agent.serve.dra_plugin import instance_server
from agent.serve.dra_plugin.instance_server import plugin_paths
from agent.serve.grpc.server import HardenedServer
from agent.serve.sockets import UnixListener

KUBELET_DIR = Path("/var/lib/kubelet")
UID = "0f3c2a9e-8d41-4f0b-9c55-1e2d3c4b5a69"


# --- names --------------------------------------------------------------------------------------------------


def test_plugin_paths_have_the_usual_names() -> None:
    paths = plugin_paths("gpu.example.com", kubelet_dir=KUBELET_DIR)
    assert str(paths.service) == "/var/lib/kubelet/plugins/gpu.example.com/dra.sock"
    assert str(paths.registration) == "/var/lib/kubelet/plugins_registry/gpu.example.com-reg.sock"


def test_plugin_paths_contain_pod_uid() -> None:
    paths = plugin_paths("a.example", kubelet_dir=KUBELET_DIR, pod_uid=UID)
    assert str(paths.service) == f"/var/lib/kubelet/plugins/a.example/dra-{UID}.sock"
    assert str(paths.registration) == f"/var/lib/kubelet/plugins_registry/a.example-{UID}-reg.sock"


@pytest.mark.parametrize(
    ("driver", "service", "registration"),
    [
        ("d" * 27, "dra-{uid}.sock", "{driver}-{uid}-reg.sock"),
        ("d" * 40, "dra-{uid8}.sock", "{driver}-{uid8}-reg.sock"),
        ("d" * 63, "{uid8}.sock", "dra-{both16}-reg.sock"),
    ],
)
def test_too_long_names_are_hashed_in_the_usual_way(driver: str, service: str, registration: str) -> None:
    def hash_name(text: str, size: int) -> str:
        return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:size]).decode().rstrip("=")

    paths = plugin_paths(driver, kubelet_dir=KUBELET_DIR, pod_uid=UID)
    values = {
        "driver": driver,
        "uid": UID,
        "uid8": hash_name(UID, 8),
        "both16": hash_name(f"{driver}\0{UID}", 16),
    }
    assert paths.service.name == service.format(**values)
    assert paths.registration.name == registration.format(**values)


LABELS = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=63)


@given(LABELS, st.integers(1, 17), st.text("0123456789abcdef", max_size=36))
def test_plugin_paths_fit_into_the_socket_limit(driver: str, depth: int, pod_uid: str) -> None:
    """This holds for a kubelet directory that is a little longer than usual, too."""
    paths = plugin_paths(driver, kubelet_dir=Path("/" + "k" * depth), pod_uid=pod_uid)
    for path in (paths.service, paths.registration):
        assert len(os.fsencode(path)) <= SOCKET_PATH_LIMIT
        assert not path.name.startswith("."), "the kubelet ignores such files"


def test_too_long_directory_error_has_size_and_limit() -> None:
    with pytest.raises(ConfigError) as raised:
        plugin_paths("a.example", kubelet_dir=Path("/" + "k" * 90))
    assert str(raised.value).endswith(
        "118 bytes, limit 107; choose a shorter directory with argument plugin_dir"
    )


@pytest.mark.parametrize("name", ["", "GPU.example.com", "a..b", "../a", "a/b", "a\n", "a" * 64])
def test_invalid_driver_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="driver name"):
        plugin_paths(name, kubelet_dir=KUBELET_DIR)


@pytest.mark.parametrize("uid", ["../x", "a/b", "a\n", ".", "-a", "u" * 64])
def test_invalid_pod_uid_is_refused(uid: str) -> None:
    with pytest.raises(ConfigError, match="pod uid"):
        plugin_paths("a.example", kubelet_dir=KUBELET_DIR, pod_uid=uid)


@pytest.mark.parametrize("plugin_dir", ["/run/a", "/var/lib/kubelet/../a", "/var/lib/kubelet-2/a"])
def test_socket_outside_of_kubelet_directory_is_refused(plugin_dir: str) -> None:
    """The kubelet refuses it after it has cleaned the path."""
    with pytest.raises(ConfigError, match="is not below /var/lib/kubelet, where the kubelet expects"):
        plugin_paths("a.example", kubelet_dir=KUBELET_DIR, plugin_dir=Path(plugin_dir))


def test_plugin_paths_are_cleaned_and_absolute() -> None:
    unclean = Path("/var/lib/kubelet/x/../plugins//a")
    assert str(plugin_paths("a", kubelet_dir=KUBELET_DIR, plugin_dir=unclean).service) == (
        "/var/lib/kubelet/plugins/a/dra.sock"
    )
    with pytest.raises(ConfigError, match="is relative; give argument registry_dir an absolute path"):
        plugin_paths("a", kubelet_dir=KUBELET_DIR, registry_dir=Path("registry"))


# --- start and end ------------------------------------------------------------------------------------------


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # short: a socket's path is 107 bytes at most
        yield Path(directory)


@pytest.fixture
def driver_instance(kubelet_dir: Path) -> Iterator[DriverInstance]:
    with DriverInstance(kubelet_dir) as driver_instance:
        yield driver_instance


def test_servers_of_an_instance_share_one_limit_of_unsent_messages(
    kubelet_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    class RecordedServer(HardenedServer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            limits.append(self.unsent)

    monkeypatch.setattr(instance_server, "HardenedServer", RecordedServer)
    with DriverInstance(kubelet_dir):
        service, registration = limits
    assert service is registration


def inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def test_service_answers_when_registration_socket_appears(
    driver_instance: DriverInstance,
) -> None:
    assert stat.S_IMODE(driver_instance.paths.plugin_dir.stat().st_mode) == 0o750 & ~umask()
    with Kubelet(driver_instance.paths.registration) as registry:
        endpoint = Path(registry.get_info().endpoint)
    with Kubelet(endpoint) as kubelet:
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_missing_registry_fails_without_leftovers(kubelet_dir: Path) -> None:
    driver_instance = DriverInstance(kubelet_dir)
    driver_instance.paths.registry_dir.rmdir()
    with pytest.raises(ConfigError) as raised:
        driver_instance.thread.start(PATIENCE_S)
    assert str(raised.value) == (
        f"registration directory {kubelet_dir}/plugins_registry: does not exist; in a pod, mount it from "
        "the host at the same path; elsewhere, set argument registry_dir or kubelet_dir"
    )
    eventually(lambda: list(driver_instance.paths.plugin_dir.iterdir()) == [], "the lock file is removed")


def test_failed_registration_socket_removes_service_socket(kubelet_dir: Path) -> None:
    driver_instance = DriverInstance(kubelet_dir)
    driver_instance.paths.registration.write_text("other file")
    with pytest.raises(
        ConfigError, match="is not a socket, but a socket must be created there; remove the file"
    ):
        driver_instance.thread.start(PATIENCE_S)
    eventually(lambda: not driver_instance.paths.service.exists(), "the service socket is removed")


def test_stale_sockets_of_former_driver_are_replaced(kubelet_dir: Path) -> None:
    driver_instance = DriverInstance(kubelet_dir)
    driver_instance.paths.plugin_dir.mkdir(parents=True)
    for path in (driver_instance.paths.service, driver_instance.paths.registration):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
    with driver_instance, Kubelet(driver_instance.paths.registration) as kubelet:
        assert kubelet.get_info().name == DRIVER


def test_second_instance_without_own_uid_is_refused(
    driver_instance: DriverInstance, kubelet_dir: Path
) -> None:
    second = DriverInstance(kubelet_dir)
    with pytest.raises(ResourceBusyError, match="another process serves it; stop that process"):
        second.thread.start(PATIENCE_S)
    with Kubelet(driver_instance.paths.registration) as kubelet:
        assert kubelet.get_info().name == DRIVER


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without permission")
def test_unwritable_directory_raises_permission_denied(kubelet_dir: Path) -> None:
    kubelet_dir.chmod(0o755)
    driver_instance = DriverInstance(kubelet_dir)
    become_other_user()
    try:
        with pytest.raises(
            PermissionDeniedError, match="no permission; choose another with argument plugin_dir"
        ):
            driver_instance.thread.start(PATIENCE_S)
    finally:
        os.seteuid(0)


def test_shutdown_ends_streams_and_removes_all_files(kubelet_dir: Path) -> None:
    with (
        DriverInstance(kubelet_dir) as driver_instance,
        watch_health(driver_instance.paths.service) as watcher,
    ):
        driver_instance.latest.publish(current_report([device("a")]))
        watcher.next()
        assert driver_instance.thread.stop(PATIENCE_S)
        with pytest.raises(grpc.RpcError) as raised:
            watcher.next()
        assert (raised.value.code(), raised.value.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "driver shutting down",
        )
    directories = (driver_instance.paths.registry_dir, driver_instance.paths.plugin_dir)
    eventually(  # the shutdown waits less than a second for the disk
        lambda: not any(list(directory.iterdir()) for directory in directories), "all files are removed"
    )


# --- restoring ----------------------------------------------------------------------------------------------


def test_removed_registration_socket_is_created_again(driver_instance: DriverInstance) -> None:
    before = inode(driver_instance.paths.registration)
    driver_instance.paths.registration.unlink()
    eventually(
        lambda: inode(driver_instance.paths.registration) not in {None, before}, "the socket is created again"
    )
    eventually(lambda: is_served(driver_instance.paths.registration), "it is served")
    with Kubelet(driver_instance.paths.registration) as kubelet:
        assert kubelet.get_info().name == DRIVER


def test_removed_service_socket_returns_and_streams_continue(driver_instance: DriverInstance) -> None:
    with watch_health(driver_instance.paths.service) as watcher:
        driver_instance.latest.publish(current_report([device("a")]))
        assert names(watcher.next()) == ["a"]
        driver_instance.paths.service.unlink()
        eventually(lambda: is_served(driver_instance.paths.service), "the socket is created again")
        with Kubelet(driver_instance.paths.service) as kubelet:
            assert kubelet.prepare(claim("a"))["uid-a"].error == ""
        driver_instance.latest.publish(current_report([device("a", verified=2)]))
        assert names(watcher.next()) == ["a"]


def test_created_socket_that_cannot_be_served_is_created_once_more(
    driver_instance: DriverInstance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised = fail_once(monkeypatch, HardenedServer, "listen")
    driver_instance.paths.service.unlink()
    eventually(lambda: f"socket {driver_instance.paths.service}: was removed" in caplog.text, "served again")
    assert raised
    with Kubelet(driver_instance.paths.service) as kubelet:
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""


def test_driver_returns_after_kubelet_directory_is_recreated(
    driver_instance: DriverInstance, kubelet_dir: Path
) -> None:
    for directory in ("plugins", "plugins_registry"):
        remove_tree(kubelet_dir / directory)
    eventually(lambda: is_served(driver_instance.paths.service), "the service socket is created again")
    assert not driver_instance.paths.registration.exists()
    driver_instance.paths.registry_dir.mkdir()
    eventually(driver_instance.paths.registration.exists, "the registration socket is created again")
    with (
        Kubelet(driver_instance.paths.registration) as registry,
        Kubelet(Path(registry.get_info().endpoint)) as kubelet,
    ):
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""


def test_socket_of_another_server_is_kept(
    driver_instance: DriverInstance, caplog: pytest.LogCaptureFixture
) -> None:
    path = driver_instance.paths.registration
    other = UnixListener(path.with_name("other.sock"))
    other.path.rename(path)  # in one step: the driver would soon replace a missing socket
    try:
        eventually(
            lambda: ": removed by another process and not created again" in caplog.text,
            "the error is logged",
        )
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            other.sock.accept()[0].close()
    finally:
        other.sock.close()
    eventually(driver_instance.paths.registration.exists, "the socket is created when possible")
