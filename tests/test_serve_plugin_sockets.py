"""A driver's two sockets: where they are, in which order they come and go, and that they come back."""

import hashlib
import os
import shutil
import socket
import stat
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from wire.claims import DRIVER, Serving
from wire.google import names, watch_health
from wire.plugin import Kubelet, claim
from wire.serving import device, eventually, report

from agent.errors import Busy, ConfigError, PermissionDenied
from agent.model.sockets import PATH_LIMIT
from agent.serve.dra_plugin.paths import plugin_paths
from agent.serve.sockets import UnixListener

KUBELET_DIR = Path("/var/lib/kubelet")
UID = "0f3c2a9e-8d41-4f0b-9c55-1e2d3c4b5a69"


# --- names --------------------------------------------------------------------------------------------------


def test_the_sockets_have_the_names_that_all_drivers_use() -> None:
    paths = plugin_paths("gpu.example.com", kubelet_dir=KUBELET_DIR)
    assert str(paths.service) == "/var/lib/kubelet/plugins/gpu.example.com/dra.sock"
    assert str(paths.registration) == "/var/lib/kubelet/plugins_registry/gpu.example.com-reg.sock"


def test_the_pods_uid_keeps_two_instances_apart() -> None:
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
def test_what_is_too_long_is_hashed_as_all_drivers_do(driver: str, service: str, registration: str) -> None:
    def hashed(text: str, size: int) -> str:
        return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:size]).decode().rstrip("=")

    paths = plugin_paths(driver, kubelet_dir=KUBELET_DIR, pod_uid=UID)
    words = {"driver": driver, "uid": UID, "uid8": hashed(UID, 8), "both16": hashed(f"{driver}\0{UID}", 16)}
    assert paths.service.name == service.format(**words)
    assert paths.registration.name == registration.format(**words)


LABELS = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=63)


@given(LABELS, st.integers(1, 17), st.text("0123456789abcdef", max_size=36))
def test_a_socket_that_is_named_can_be_bound(driver: str, depth: int, pod_uid: str) -> None:
    """With a kubelet's directory that is a little longer than usual, too."""
    paths = plugin_paths(driver, kubelet_dir=Path("/" + "k" * depth), pod_uid=pod_uid)
    for path in (paths.service, paths.registration):
        assert len(os.fsencode(path)) <= PATH_LIMIT
        assert not path.name.startswith("."), "the kubelet passes over such"


def test_where_no_name_fits_the_arithmetic_is_told() -> None:
    with pytest.raises(ConfigError) as raised:
        plugin_paths("a.example", kubelet_dir=Path("/" + "k" * 90))
    assert str(raised.value).endswith("is 118 bytes, a socket's limit is 107; --plugin-dir uses 110 of them")


@pytest.mark.parametrize("name", ["", "GPU.example.com", "a..b", "../a", "a/b", "a\n", "a" * 64])
def test_what_is_no_drivers_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="driver name"):
        plugin_paths(name, kubelet_dir=KUBELET_DIR)


@pytest.mark.parametrize("uid", ["../x", "a/b", "a\n", ".", "-a", "u" * 64])
def test_what_is_no_uid_is_refused(uid: str) -> None:
    with pytest.raises(ConfigError, match="pod uid"):
        plugin_paths("a.example", kubelet_dir=KUBELET_DIR, pod_uid=uid)


@pytest.mark.parametrize("plugin_dir", ["/run/a", "/var/lib/kubelet/../a", "/var/lib/kubelet-2/a"])
def test_a_socket_outside_of_the_kubelets_directory_is_refused(plugin_dir: str) -> None:
    """The kubelet will refuse it, after it has cleaned the path."""
    with pytest.raises(ConfigError, match="is not below /var/lib/kubelet, where the kubelet wants"):
        plugin_paths("a.example", kubelet_dir=KUBELET_DIR, plugin_dir=Path(plugin_dir))


def test_a_path_is_clean_before_the_kubelet_hears_of_it() -> None:
    odd = Path("/var/lib/kubelet/x/../plugins//a")
    assert str(plugin_paths("a", kubelet_dir=KUBELET_DIR, plugin_dir=odd).service) == (
        "/var/lib/kubelet/plugins/a/dra.sock"
    )
    with pytest.raises(ConfigError, match="is relative; --registry-dir takes an absolute path"):
        plugin_paths("a", kubelet_dir=KUBELET_DIR, registry_dir=Path("registry"))


# --- coming and going ---------------------------------------------------------------------------------------


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # short: a socket's path is 107 bytes at most
        yield Path(directory)


@pytest.fixture
def serving(kubelet_dir: Path) -> Iterator[Serving]:
    with Serving(kubelet_dir) as serving:
        yield serving


def inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def test_the_directory_is_made_and_the_service_answers_when_the_registration_appears(
    serving: Serving,
) -> None:
    assert stat.S_IMODE(serving.paths.plugin_dir.stat().st_mode) == 0o750 & ~umask()
    with Kubelet(serving.paths.registration) as registry:
        endpoint = Path(registry.get_info().endpoint)
    with Kubelet(endpoint) as kubelet:
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""


def umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_without_a_registry_nothing_is_left_behind(kubelet_dir: Path) -> None:
    serving = Serving(kubelet_dir)
    serving.paths.registry_dir.rmdir()
    with pytest.raises(ConfigError) as raised:
        serving.thread.start()
    assert str(raised.value) == (
        f"{kubelet_dir}/plugins_registry: no such directory; is it the one that the kubelet watches? "
        "See --registry-dir and --kubelet-dir"
    )
    assert list(serving.paths.plugin_dir.iterdir()) == []


def test_a_registration_that_cannot_be_made_takes_the_service_back(kubelet_dir: Path) -> None:
    serving = Serving(kubelet_dir)
    serving.paths.registration.write_text("in the way")
    with pytest.raises(ConfigError, match="is in the way, and is no socket"):
        serving.thread.start()
    assert not serving.paths.service.exists()


def test_sockets_of_a_driver_that_died_are_replaced(kubelet_dir: Path) -> None:
    serving = Serving(kubelet_dir)
    serving.paths.plugin_dir.mkdir(parents=True)
    for path in (serving.paths.service, serving.paths.registration):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    with serving, Kubelet(serving.paths.registration) as kubelet:
        assert kubelet.get_info().name == DRIVER


def test_a_second_driver_without_a_uid_of_its_own_is_refused(serving: Serving, kubelet_dir: Path) -> None:
    second = Serving(kubelet_dir)
    with pytest.raises(Busy, match="another process serves this socket"):
        second.thread.start()
    with Kubelet(serving.paths.registration) as kubelet:
        assert kubelet.get_info().name == DRIVER


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody without permission")
def test_a_directory_that_may_not_be_made_is_a_matter_of_permission(kubelet_dir: Path) -> None:
    kubelet_dir.chmod(0o755)
    serving = Serving(kubelet_dir)
    os.seteuid(65_534)
    try:
        with pytest.raises(
            PermissionDenied, match="may not make this directory; choose another with --plugin-dir"
        ):
            serving.thread.start()
    finally:
        os.seteuid(0)


def test_at_the_end_the_registration_goes_first_and_nothing_stays(kubelet_dir: Path) -> None:
    with Serving(kubelet_dir) as serving, watch_health(serving.paths.service) as watcher:
        serving.latest.publish(report([device("a")]))
        watcher.next()
        assert serving.thread.stop(PATIENCE_S)
        with pytest.raises(grpc.RpcError) as raised:
            watcher.next()
        assert (raised.value.code(), raised.value.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "driver shutting down",
        )
    assert list(serving.paths.registry_dir.iterdir()) == []
    assert [path.name for path in serving.paths.plugin_dir.iterdir()] == []


# --- coming back --------------------------------------------------------------------------------------------


def test_a_registration_socket_that_is_removed_comes_back(serving: Serving) -> None:
    before = inode(serving.paths.registration)
    serving.paths.registration.unlink()
    eventually(lambda: inode(serving.paths.registration) not in {None, before}, "it is made again")
    with Kubelet(serving.paths.registration) as kubelet:
        assert kubelet.get_info().name == DRIVER


def test_a_service_socket_that_is_removed_comes_back_and_no_stream_is_cut(serving: Serving) -> None:
    with watch_health(serving.paths.service) as watcher:
        serving.latest.publish(report([device("a")]))
        assert names(watcher.next()) == ["a"]
        serving.paths.service.unlink()
        eventually(serving.paths.service.exists, "it is made again")
        with Kubelet(serving.paths.service) as kubelet:
            assert kubelet.prepare(claim("a"))["uid-a"].error == ""
        serving.latest.publish(report([device("a", verified=2)]))
        assert names(watcher.next()) == ["a"]


def test_a_kubelets_directory_that_is_wiped_and_made_anew_has_the_driver_again(
    serving: Serving, kubelet_dir: Path
) -> None:
    for directory in ("plugins", "plugins_registry"):
        shutil.rmtree(kubelet_dir / directory)
    eventually(serving.paths.service.exists, "the service needs nobody else's directory")
    assert not serving.paths.registration.exists()
    serving.paths.registry_dir.mkdir()
    eventually(serving.paths.registration.exists, "the kubelet's directory is there again")
    with (
        Kubelet(serving.paths.registration) as registry,
        Kubelet(Path(registry.get_info().endpoint)) as kubelet,
    ):
        assert kubelet.prepare(claim("a"))["uid-a"].error == ""


def test_a_socket_that_somebody_else_serves_now_is_left_alone(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    serving.paths.registration.unlink()
    theirs = UnixListener(serving.paths.registration)
    eventually(lambda: "another process serves this socket" in caplog.text, "it is told")
    assert theirs.is_there()
    theirs.close()
    eventually(serving.paths.registration.exists, "it is made when it can be")
