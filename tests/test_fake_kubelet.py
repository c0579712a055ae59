"""The kubelet against a plugin on grpcio: registration, connection, health streams, prepare, restarts.

Tests run with the fake kubelet, and with the kubelet's own code where ``make test-kubelet`` has built it.

A test that covers cases of upstream's tests names them: kubelet ``cm/dra/plugin/*_test.go`` and
``cm/dra/manager_test.go``. Not covered are TestPrepareResources' pod groups and extended resources, and
TestGRPCConnUsableAfterIdle, because gRPC decides about the half hour until a connection is idle.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from agents import short_tmp
from kubelet import FakeKubelet, Pace, Pod, PreparedDevice, ResourceHealth, allocated_claim
from kubelet.calls import Calls
from kubelet.health import cut_message, message_in_status
from kubelet.history import (
    Cleared,
    Connected,
    Deregistered,
    Disconnected,
    EventWritten,
    HealthChanged,
    History,
    PodsNotified,
    Registered,
    RegistrationFailed,
    SlicesWiped,
    StreamEnded,
    StreamOpened,
    StreamRefused,
    UnprepareFailed,
)
from kubelet.pace import NS
from kubelet.plugins import Plugins
from kubelet.sample import HEALTHY, SERVICES, UNHEALTHY, SamplePlugin, one_device, sleep_for
from kubelet.versions import VERSIONS, plugin_service
from kubelet_real.implementations import implementations
from patience import PATIENCE_S

__all__ = ["short_tmp"]  # a fixture

DRIVER: Final = "a.example.com"
FAST: Final = Pace.fast()
NUMBERS: Final = count()
"""Numbers for names of devices; each is used once."""
PREPARE: Final = "NodePrepareResources"
UNPREPARE: Final = "NodeUnprepareResources"
EVENT: Final = "Failed to prepare dynamic resources: prepare dynamic resources: "


MakeKubelet = Callable[..., FakeKubelet]


@pytest.fixture(params=implementations("1.36", "1.37"))
def make_kubelet(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[MakeKubelet]:
    """Factory of a running kubelet. Its arguments are durations; the real kubelet has its own."""
    with ExitStack() as stack:
        version, new = request.param

        def make(**pace: Any) -> FakeKubelet:
            kubelet = new(version)(short_tmp, version=version, pace=replace(FAST, **pace))
            return stack.enter_context(kubelet)

        yield make


@pytest.fixture
def kubelet(make_kubelet: MakeKubelet) -> FakeKubelet:
    return make_kubelet()


def lease_of(kubelet: FakeKubelet) -> int:
    """Return the lease of devices that a test lets expire [s]: long where the clock can be advanced."""
    return 1000 if type(kubelet) is FakeKubelet else 5


def only_versions(*versions: str) -> pytest.MarkDecorator:
    """Run a test with these versions of the kubelet only."""
    return pytest.mark.parametrize("make_kubelet", implementations(*versions), indirect=True)


@pytest.fixture
def sample(kubelet: FakeKubelet) -> Iterator[SamplePlugin]:
    """A plugin that has not been started."""
    plugin = SamplePlugin(kubelet.root, DRIVER)
    yield plugin
    plugin.stop()


@pytest.fixture
def plugin(kubelet: FakeKubelet, sample: SamplePlugin) -> SamplePlugin:
    """A registered plugin with an open health stream."""
    sample.serve()
    sample.register()
    kubelet.wait_registered(DRIVER)
    kubelet.wait_for(lambda: sample.opened and sample.statuses, "a health stream and a registration status")
    return sample


def add_pod(kubelet: FakeKubelet, *claims: str, uid: str = "pod", driver: str = DRIVER) -> Pod:
    """Add claims with one device each and return a pod whose container uses them."""
    for name in claims:
        device = ("gpu", driver, "node-a", name)
        kubelet.add_claim(allocated_claim(name, f"uid-{name}", device, pods=["pod", "other", uid]))
    return Pod(uid, {f"my-{name}": name for name in claims}, {"main": tuple(f"my-{name}" for name in claims)})


def prepare_error(kubelet: FakeKubelet, pod: Pod) -> str:
    """Prepare the pod and return the error."""
    with pytest.raises(ValueError, match=r".") as caught:
        kubelet.prepare_pod(pod)
    return str(caught.value)


def registration_error(kubelet: FakeKubelet) -> str:
    """Wait for the first failed registration and return its error."""
    return kubelet.wait_for(lambda: kubelet.history.of(RegistrationFailed), "a failed registration")[0].error


# --- registration ---------------------------------------------------------------------------------------


def test_plugin_registers_in_four_steps(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    assert plugin.get_info_calls == [DRIVER]
    assert plugin.statuses == [(True, "")]
    assert kubelet.history.of(Registered) == [Registered(DRIVER, str(plugin.service), SERVICES)]
    assert kubelet.plugins[0].service == "v1.DRAPlugin"


def test_plugin_older_than_the_kubelet_is_found(short_tmp: Path, make_kubelet: MakeKubelet) -> None:
    with SamplePlugin(short_tmp, DRIVER):
        make_kubelet().wait_registered(DRIVER)


def test_socket_in_a_new_directory_is_found(kubelet: FakeKubelet, sample: SamplePlugin) -> None:
    sample.registration = sample.registration.parent / "deep" / "down" / "reg.sock"
    sample.serve()
    sample.register()
    kubelet.wait_registered(DRIVER)


def test_plugin_may_serve_all_on_one_socket(kubelet: FakeKubelet) -> None:
    with SamplePlugin(kubelet.root, DRIVER, one_socket=True) as sample:
        assert kubelet.wait_registered(DRIVER)[0].endpoint == str(sample.registration)


def test_hidden_names_and_regular_files_are_ignored(kubelet: FakeKubelet, sample: SamplePlugin) -> None:
    registry = sample.registration.parent
    (registry / "file-reg.sock").write_text("")
    hidden = SamplePlugin(kubelet.root, "hidden.example.com")
    hidden.registration = registry / ".hidden-reg.sock"
    with hidden, sample:
        kubelet.wait_registered(DRIVER)
        kubelet.wait_for(lambda: sample.statuses, "the registration status")
        assert hidden.get_info_calls == []
        assert kubelet.history.of(RegistrationFailed) == []


def test_removed_socket_deregisters_and_ends_the_connection(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    """Kubelet test: TestHandleWatchResourcesStream/ContextCanceled."""
    plugin.unregister()
    kubelet.wait_for(lambda: kubelet.history.of(Deregistered), "de-registration")
    kubelet.wait_for(lambda: kubelet.history.of(Cleared), "the cleared health")
    kubelet.wait_for(lambda: kubelet.history.of(StreamEnded), "the stream's end")
    kubelet.wait_for(lambda: plugin.connections() == 0, "the connection's end")
    assert kubelet.plugins == []
    assert [ended.code for ended in kubelet.history.of(StreamEnded)] == [grpc.StatusCode.CANCELLED]
    assert kubelet.history.of(StreamEnded)[0].logged


def test_recreated_socket_is_another_plugin(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    plugin.unregister()
    plugin.register()
    kubelet.wait_for(lambda: len(kubelet.history.of(Registered)) == 2, "another registration")
    kubelet.wait_registered(DRIVER)
    kinds = (Registered, Deregistered)
    assert [type(entry) for entry in kubelet.history if isinstance(entry, kinds)] == [
        Registered,
        Deregistered,
        Registered,
    ]


def test_renamed_socket_is_not_noticed(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    plugin.registration.rename(kubelet.root / "elsewhere")
    second = SamplePlugin(kubelet.root, "b.example.com")
    with second:
        kubelet.wait_registered("b.example.com")  # so the watcher has run
    assert kubelet.history.of(Deregistered)[:1] != [Deregistered(DRIVER, str(plugin.service))]
    assert kubelet.wait_registered(DRIVER)


def test_getinfo_has_a_deadline_and_is_retried(short_tmp: Path, make_kubelet: MakeKubelet) -> None:
    """e2e: registration after GetInfo failure"""
    kubelet = make_kubelet(get_info_s=0.2)
    sample = SamplePlugin(short_tmp, DRIVER)
    sample.get_info = sleep_for(kubelet.pace.get_info_s + 0.3)
    with sample:
        assert "using RPC GetInfo" in registration_error(kubelet)
        assert "code = DeadlineExceeded" in registration_error(kubelet)
        sample.get_info = sleep_for(0)
        kubelet.wait_registered(DRIVER)
        kubelet.wait_for(lambda: sample.statuses == [(True, "")], "the registration status")


def test_plugin_whose_notify_fails_is_deregistered_and_retried(
    kubelet: FakeKubelet, sample: SamplePlugin
) -> None:
    """e2e: registration after Notify failure"""

    def refuse() -> None:
        if len(sample.statuses) == 1:
            raise RuntimeError("not now")

    sample.notify = refuse
    with sample:
        assert "failed to send registration status" in registration_error(kubelet)
        kubelet.wait_for(lambda: len(sample.statuses) == 2, "another attempt")
        kubelet.wait_registered(DRIVER)
        kinds = [type(entry) for entry in kubelet.history if isinstance(entry, (Deregistered, Registered))]
        assert kinds[-2:] == [Deregistered, Registered]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param({"services": []}, "empty list of supported gRPC services", id="no-services-provided"),
        pytest.param(
            {"services": ["1.0.0"]}, 'none of services supported by the plugin (["1.0.0"])', id="version"
        ),
        pytest.param(
            {"services": ["v1.DRAResourceHealth"]}, "none of services supported", id="nothing_but_health"
        ),
        pytest.param({"kind": "CSIPlugin"}, "no handler registered for plugin type: CSIPlugin", id="kind"),
    ],
)
def test_unusable_plugin_is_notified_of_the_reason(
    kubelet: FakeKubelet, sample: SamplePlugin, change: dict[str, Any], text: str
) -> None:
    """Kubelet test: TestRegistrationHandler, its cases that fail."""
    for name, value in change.items():
        setattr(sample, name, value)
    with sample:
        error, status = registration_error(kubelet), sample.statuses[0]
        assert text in status.error
        assert not status.registered
        start = f"RegisterPlugin error -- failed to send error at socket {sample.registration}, err: "
        assert error == f"{start}{status.error}"


def test_second_registration_of_an_endpoint_is_refused(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    again = SamplePlugin(kubelet.root, DRIVER, instance="-2")
    again.endpoint = plugin.endpoint
    with again:
        assert f"endpoint {plugin.endpoint} already registered" in registration_error(kubelet)
        assert not again.statuses[0].registered
    assert kubelet.wait_registered(DRIVER)


def test_socket_without_a_server_is_retried_with_backoff(short_tmp: Path, make_kubelet: MakeKubelet) -> None:
    kubelet = make_kubelet(dial_s=0.05)
    with socket.socket(socket.AF_UNIX) as unserved:
        unserved.bind(str(short_tmp / "plugins_registry" / "reg.sock"))
    failed = kubelet.history
    kubelet.wait_for(lambda: len(failed.of(RegistrationFailed)) >= 4, "four failures")
    assert {"dial failed" in entry.error for entry in failed.of(RegistrationFailed)} == {True}
    times = failed.times(RegistrationFailed)
    for number in range(3):
        assert times[number + 1] - times[number] >= kubelet.pace.backoff_first_s * 2**number


# --- the plugin manager without gRPC --------------------------------------------------------------------


@pytest.fixture
def plugins(short_tmp: Path) -> Iterator[Plugins]:
    made = Plugins(short_tmp, Calls(), FAST, History(), lambda plugin: None, validates_input=False)
    yield made
    made.end()


def test_the_newest_endpoint_of_a_driver_is_used(plugins: Plugins) -> None:
    """Kubelet test: TestAddSameName."""
    plugins.register(DRIVER, "/old.sock", SERVICES)
    old = plugins.get(DRIVER)
    with pytest.raises(ValueError, match="already registered"):
        plugins.register(DRIVER, "/old.sock", SERVICES)
    plugins.register(DRIVER, "/new.sock", SERVICES)
    new = plugins.get(DRIVER)
    assert new is not old
    plugins.deregister(DRIVER, "/old.sock")
    assert plugins.get(DRIVER) is new


def test_deregistered_plugin_is_removed(plugins: Plugins) -> None:
    """Kubelet test: TestDelete."""
    plugins.register(DRIVER, "/dra.sock", SERVICES)
    plugins.deregister(DRIVER, "/dra.sock")
    plugins.deregister(DRIVER, "/dra.sock")
    with pytest.raises(ValueError, match=r"DRA driver a\.example\.com is not registered"):
        plugins.get(DRIVER)


@pytest.mark.parametrize(
    ("services", "expected"),
    [
        pytest.param(["v1beta1.DRAPlugin"], "v1beta1.DRAPlugin", id="current-service"),
        pytest.param(["v1alpha4.Node", "v1beta1.DRAPlugin"], "v1beta1.DRAPlugin", id="two-services"),
        pytest.param(["v1.DRAPlugin", "v1beta1.DRAPlugin"], "v1.DRAPlugin", id="newest_first"),
        pytest.param(["v1beta1.DRAPlugin", "v1.DRAPlugin"], "v1beta1.DRAPlugin", id="oldest_first"),
    ],
)
def test_plugin_service_follows_the_advertised_order(services: list[str], expected: str) -> None:
    """Kubelet test: TestRegistrationHandler."""
    assert plugin_service(services) == expected


@pytest.mark.parametrize(
    ("services", "expected"),
    [
        pytest.param(["v1beta1.DRAPlugin"], None, id="none"),
        pytest.param([], None, id="empty"),
        pytest.param(["v1alpha1.DRAResourceHealth"], "v1alpha1.DRAResourceHealth", id="only-v1alpha1"),
        pytest.param(["v1.DRAResourceHealth"], "v1.DRAResourceHealth", id="only-v1"),
        pytest.param(
            ["v1alpha1.DRAResourceHealth", "v1.DRAResourceHealth"], "v1.DRAResourceHealth", id="both-picks-v1"
        ),
    ],
)
def test_health_v1_is_preferred_in_any_order(services: list[str], expected: str | None) -> None:
    """Kubelet test: TestPickHealthService."""
    assert VERSIONS["1.37"].health_service(services) == expected
    assert VERSIONS["1.38"].health_service(services) == expected
    assert VERSIONS["1.36"].health_service(services) == "v1alpha1.DRAResourceHealth"


@pytest.mark.parametrize(
    ("driver", "endpoint", "text"),
    [
        pytest.param("", "/k/plugins/x.sock", "Required value", id="empty-driver"),
        pytest.param("../evil", "/k/plugins/x.sock", "invalid DRA driver name", id="driver-with-slash"),
        pytest.param("evil driver", "/k/plugins/x.sock", "invalid DRA driver name", id="driver-with-space"),
        pytest.param("a" * 64, "/k/plugins/x.sock", "Too long", id="driver-too-long"),
        pytest.param(DRIVER, "", "empty DRA plugin endpoint", id="empty-endpoint"),
        pytest.param(DRIVER, "plugin.sock", "must be an absolute path", id="relative-endpoint"),
        pytest.param(DRIVER, "/k/" + "a" * 105, "longer than", id="endpoint-too-long"),
        pytest.param(DRIVER, "/run/x.sock", "is not inside", id="endpoint-outside-rootDir"),
        pytest.param(DRIVER, "/k/../etc/x", "is not inside", id="endpoint-dotdot-escapes-rootDir"),
    ],
)
def test_later_kubelets_refuse_untrusted_input(driver: str, endpoint: str, text: str) -> None:
    """Kubelet test: TestRegisterPluginRejectsUntrustedInput."""
    plugins = Plugins(Path("/k"), Calls(), FAST, History(), lambda plugin: None, validates_input=True)
    for method in (plugins.validate, plugins.register):
        with pytest.raises(ValueError, match=text):
            method(driver, endpoint, SERVICES)


@pytest.mark.parametrize("page", ["drivers.md", "audit.md"])
def test_tables_of_releases_have_a_column_for_each_kubelet(page: str) -> None:
    lines = (Path(__file__).parents[1] / "docs" / page).read_text().splitlines()
    (start,) = (number for number, line in enumerate(lines) if re.match(r"\| \| .*1\.3\d \|$", line))
    columns = [cell.strip().removeprefix("up to ") for cell in lines[start].split("|")[2:-1]]
    assert columns == [release for release in VERSIONS if release >= columns[0]]
    for row in takewhile(lambda line: line.startswith("|"), lines[start:]):
        assert row.count("|") == len(columns) + 2, row


def test_kubelets_refuse_untrusted_input_from_138_on() -> None:
    assert [name for name, version in VERSIONS.items() if version.validates_input] == ["1.38"]


@pytest.mark.parametrize(
    "endpoint",
    ["/k/plugins/a/dra.sock", "/k/plugins_registry/a.sock", "/k/plugins/./a/../dra.sock", "/k/" + "a" * 104],
)
def test_later_kubelets_accept_sockets_in_their_directory(endpoint: str) -> None:
    """Kubelet test: TestRegisterPluginAcceptsEndpointInsideRootDir."""
    plugins = Plugins(Path("/k"), Calls(), FAST, History(), lambda plugin: None, validates_input=True)
    plugins.validate(DRIVER, endpoint, SERVICES)


# --- the connection -------------------------------------------------------------------------------------


def test_one_connection_carries_health_prepare_and_unprepare_calls(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    """Kubelet test: TestGRPCConnIsReused."""
    pod = add_pod(kubelet, "gpu-0")
    for _ in range(3):
        kubelet.prepare_pod(pod)
        kubelet.unprepare_pod(pod)
    plugin.send_health({"name": "gpu-0", "health": HEALTHY})
    kubelet.wait_health(DRIVER, "node-a", "gpu-0", "Healthy")
    assert plugin.connections() == 1
    assert kubelet.history.of(Connected) == [Connected(DRIVER, str(plugin.service))]


def test_slices_are_wiped_at_start_and_after_a_long_disconnect(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    """Kubelet test: TestConnectionHandling/wipe-on-disconnect."""
    kubelet.wait_for(lambda: SlicesWiped("") in kubelet.history.of(SlicesWiped), "the first wipe")
    seen = len(kubelet.history)  # a connection that is made late is a long disconnect, too
    plugin.registration.rename(kubelet.root / "kept")  # so that it stays registered
    plugin.stop()
    kubelet.wait_for(lambda: kubelet.history.of(SlicesWiped, since=seen), "slices wiped")
    entries = kubelet.history.timed_entries()[seen:]
    # A kubelet that connects again before the socket is closed loses that connection, too.
    lost_s = [at_s for at_s, entry in entries if isinstance(entry, Disconnected)][-1]
    ((wiped_s, wiped),) = (timed for timed in entries if isinstance(timed.entry, SlicesWiped))
    assert wiped == SlicesWiped(DRIVER)
    assert wiped_s - lost_s >= kubelet.pace.wipe_s - 1  # the loss is found a bit late in a real kubelet's log
    assert kubelet.history.of(Deregistered) == []


def test_slices_are_not_wiped_after_a_short_disconnect(short_tmp: Path, make_kubelet: MakeKubelet) -> None:
    """Kubelet test: TestConnectionHandling/no-wipe-on-reconnect."""
    kubelet = make_kubelet(wipe_s=600)
    with SamplePlugin(short_tmp, DRIVER) as found_sample:
        kubelet.wait_registered(DRIVER)
        kubelet.wait_for(lambda: found_sample.statuses, "the registration status")
        found_sample.registration.rename(short_tmp / "kept")
        found_sample.stop()
        kubelet.wait_for(lambda: kubelet.history.of(Disconnected), "the end of the connection")
        found_sample.serve()
        kubelet.wait_for(lambda: len(kubelet.history.of(Connected)) >= 2, "another connection")
        assert kubelet.history.of(SlicesWiped) == [SlicesWiped("")]
        pod = add_pod(kubelet, "gpu-0")
        kubelet.run_pod(pod)
        kubelet.wait_running(pod)


def test_message_over_4_mib_ends_the_stream(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    plugin.send_health({"name": "gpu-0", "health": HEALTHY})
    kubelet.wait_health(DRIVER, "node-a", "gpu-0", "Healthy")
    plugin.send_health({"name": "x" * (4 << 20), "health": HEALTHY})
    ended = kubelet.wait_for(lambda: kubelet.history.of(StreamEnded), "the stream's end")[0]
    assert (ended.code, ended.logged) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    assert kubelet.health(DRIVER, "node-a", "gpu-0").health == "Unknown"


# --- health streams -------------------------------------------------------------------------------------


def test_health_list_reaches_the_cache(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """Kubelet test: TestPlugin_WatchResources."""
    lease_s = lease_of(kubelet)
    plugin.send_health(
        {"name": "gpu-0", "health": UNHEALTHY, "message": "hot", "health_check_timeout_seconds": lease_s}
    )
    found = kubelet.wait_health(DRIVER, "node-a", "gpu-0", "Unhealthy")
    assert (found.message, found.lease_ns) == ("hot", lease_s * NS)
    kubelet.pass_time(lease_s + 0.5)
    assert kubelet.health(DRIVER, "node-a", "gpu-0").health == "Unknown"


@pytest.mark.parametrize(
    ("code", "logged"),
    [
        pytest.param(None, False, id="end_of_stream"),
        pytest.param(grpc.StatusCode.INTERNAL, True, id="StreamError"),
        pytest.param(grpc.StatusCode.UNAVAILABLE, True, id="unavailable"),
    ],
)
def test_ended_stream_clears_health_and_is_reopened(
    kubelet: FakeKubelet, plugin: SamplePlugin, code: grpc.StatusCode | None, logged: bool
) -> None:
    """Kubelet test: TestHandleWatchResourcesStream."""
    plugin.send_health({"name": "gpu-0", "health": HEALTHY})
    kubelet.wait_health(DRIVER, "node-a", "gpu-0", "Healthy")
    before_s = time.monotonic()  # the end may be found late in the kubelet's log
    plugin.end_streams(code, "enough")
    kubelet.wait_for(lambda: len(kubelet.history.of(StreamOpened)) == 2, "another stream")
    assert kubelet.history.of(StreamEnded)[0].logged is logged
    assert kubelet.history.of(Cleared) == [Cleared(DRIVER)]
    assert kubelet.health(DRIVER, "node-a", "gpu-0").health == "Unknown"
    assert kubelet.history.times(StreamOpened)[1] - before_s >= kubelet.pace.stream_retry_s
    assert plugin.connections() == 1


def test_unreachable_plugin_opens_no_stream_and_clears_nothing(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    plugin.registration.rename(kubelet.root / "kept")
    plugin.stop()
    kubelet.wait_for(lambda: len(kubelet.history.of(StreamRefused)) > 2, "refused streams")
    # a stream that ends before the socket is closed is opened again, and ends once more
    ended = kubelet.history.of(StreamEnded)
    assert len(kubelet.history.of(Cleared)) == len(ended) == len(kubelet.history.of(StreamOpened))


@only_versions("1.36")
def test_kubelet_1_36_retries_unimplemented_health_forever(
    kubelet: FakeKubelet, sample: SamplePlugin
) -> None:
    assert_retries_unimplemented(kubelet, sample)


@pytest.mark.parametrize("version", ["1.34", "1.35"])
def test_older_kubelets_retry_unimplemented_health_forever(short_tmp: Path, version: str) -> None:
    with FakeKubelet(short_tmp, version=version, pace=FAST, health=True) as kubelet:
        assert_retries_unimplemented(kubelet, SamplePlugin(short_tmp, DRIVER))


def assert_retries_unimplemented(kubelet: FakeKubelet, sample: SamplePlugin) -> None:
    sample.services = ["v1.DRAPlugin"]
    sample.health_status = grpc.StatusCode.UNIMPLEMENTED
    with sample:
        kubelet.wait_for(lambda: len(sample.opened) >= 3, "three streams")
    assert set(sample.opened) == {"v1alpha1"}
    assert kubelet.history.of(StreamEnded)[0].logged


def test_feature_gate_is_enabled_from_1_36(kubelet: FakeKubelet) -> None:
    assert_status_and_streams(kubelet, 1)


@pytest.mark.parametrize(("version", "count"), [("1.34", 0), ("1.35", 0), ("1.38", 1)])
def test_feature_gate_of_releases_without_real_kubelet_is_on_from_1_36(
    short_tmp: Path, version: str, count: int
) -> None:
    with FakeKubelet(short_tmp, version=version, pace=FAST) as kubelet:
        assert_status_and_streams(kubelet, count)


def assert_status_and_streams(kubelet: FakeKubelet, count: int) -> None:
    with SamplePlugin(kubelet.root, DRIVER) as found_sample:
        pod = add_pod(kubelet, "gpu-0")
        kubelet.wait_registered(DRIVER)
        kubelet.run_pod(pod)
        assert len(kubelet.wait_running(pod).resources) == count
        kubelet.wait_for(lambda: len(found_sample.opened) == count, "streams")


@only_versions("1.37")
def test_kubelet_1_37_calls_v1(kubelet: FakeKubelet) -> None:
    with SamplePlugin(kubelet.root, DRIVER) as found_sample:
        kubelet.wait_for(lambda: found_sample.opened, "a stream")
        found_sample.send_health({"name": "gpu-0", "health": HEALTHY})
        kubelet.wait_health(DRIVER, "node-a", "gpu-0", "Healthy")
        assert found_sample.opened == ["v1"]


@only_versions("1.37")
def test_kubelet_1_37_opens_only_advertised_streams(kubelet: FakeKubelet, sample: SamplePlugin) -> None:
    """Kubelet test: TestHealthStreamRequiresAdvertisedService."""
    sample.services = ["v1.DRAPlugin"]
    with sample:
        kubelet.wait_registered(DRIVER)
        kubelet.prepare_pod(add_pod(kubelet, "gpu-0"))
    assert sample.opened == []
    assert kubelet.history.of(StreamOpened) == []


@only_versions("1.37")
def test_kubelet_1_37_stops_at_unimplemented_until_reregistration(
    short_tmp: Path, make_kubelet: MakeKubelet
) -> None:
    """Kubelet test: TestUnimplementedHealthStreamIsNotRetried, TestHealthStreamUnimplemented."""
    kubelet = make_kubelet(stream_retry_s=0.01)
    sample = SamplePlugin(short_tmp, DRIVER)
    sample.health_status = grpc.StatusCode.UNIMPLEMENTED
    with sample:
        kubelet.wait_for(lambda: kubelet.history.of(StreamEnded), "the stream's end")
        second = SamplePlugin(short_tmp, "b.example.com")
        second.health_status = grpc.StatusCode.UNAVAILABLE
        with second:  # retried after the same time, with calls on the first connection meanwhile
            kubelet.wait_for(lambda: len(second.opened) >= 2, "another stream of the other plugin")
            kubelet.prepare_pod(add_pod(kubelet, "gpu-0"))
            kubelet.unprepare_pod(add_pod(kubelet, "gpu-0"))
        assert sample.opened == ["v1"]
        sample.health_status = None
        sample.unregister()
        sample.register()
        kubelet.wait_for(lambda: len(sample.opened) == 2, "another stream")


def test_kubelet_retries_unavailable_health(kubelet: FakeKubelet, sample: SamplePlugin) -> None:
    sample.health_status = grpc.StatusCode.UNAVAILABLE
    with sample:
        kubelet.wait_for(lambda: len(sample.opened) >= 2, "two streams")


def test_end_of_old_instance_clears_health_from_the_new_one(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    with SamplePlugin(kubelet.root, DRIVER, instance="-2") as second:
        kubelet.wait_registered(DRIVER, count=2)
        kubelet.wait_for(lambda: second.opened, "the second stream")
        second.send_health({"name": "gpu-0", "health": HEALTHY})
        kubelet.wait_health(DRIVER, "node-a", "gpu-0", "Healthy")
        plugin.unregister()
        kubelet.wait_for(lambda: kubelet.history.of(Cleared), "the cleared health")
        assert kubelet.health(DRIVER, "node-a", "gpu-0").health == "Unknown"


# --- health lists ---------------------------------------------------------------------------------------


LONG_LEASE: Final = {"health_check_timeout_seconds": 1000}
"""Lease of devices that must not expire while a busy machine stops the test."""


def send_and_wait(kubelet: FakeKubelet, plugin: SamplePlugin, *devices: dict[str, Any]) -> None:
    """Send a health list and wait until the kubelet has stored it, shown by a last device of its own.

    The devices have a long lease unless they name one.
    """
    last = f"last-{next(NUMBERS)}"
    plugin.send_health(*(LONG_LEASE | device for device in (*devices, {"name": last, "health": HEALTHY})))
    kubelet.wait_health(DRIVER, "node-a", last, "Healthy")


def change_counts(kubelet: FakeKubelet, lists: int) -> list[int]:
    """Return the number of changed devices of each list; waits for `lists` lists.

    The real kubelet stores a list before it logs the number.
    """
    kubelet.wait_for(lambda: len(kubelet.history.of(HealthChanged)) >= lists, f"{lists} lists")
    return [entry.count for entry in kubelet.history.of(HealthChanged)]


@pytest.mark.parametrize("seconds", [600, 0, -5, 86_400, 10_000_000_000])
def test_lease_is_30_s_for_0_or_less_and_overflows(
    kubelet: FakeKubelet, plugin: SamplePlugin, seconds: int
) -> None:
    """Kubelet test: TestBuildDeviceHealth."""
    expected = "Unknown" if seconds == 10_000_000_000 else "Healthy"

    def read_health() -> Any:
        """Send the list again each time: on a busy machine, a lease of 30 s may end before the read."""
        send_and_wait(
            kubelet, plugin, {"name": "gpu-0", "health": HEALTHY, "health_check_timeout_seconds": seconds}
        )
        found = kubelet.health(DRIVER, "node-a", "gpu-0")
        return found if found.health == expected else None

    found = kubelet.wait_for(read_health, expected)
    if expected == "Healthy":
        assert found.lease_ns == (seconds if seconds > 0 else 30) * NS


def test_undefined_health_number_is_unknown_with_its_message(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    """Kubelet test: TestToDeviceHealthStatus."""
    send_and_wait(kubelet, plugin, {"name": "gpu-0", "health": 99, "message": "new"})
    found = kubelet.health(DRIVER, "node-a", "gpu-0")
    assert (found.health, found.message) == ("Unknown", "new")


def test_entry_without_names_is_accepted(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    plugin.send_health({"name": "", "health": UNHEALTHY}, pool="")
    kubelet.wait_health(DRIVER, "", "", "Unhealthy")


@pytest.mark.parametrize("text", ["x" * 1024, "x" * 1025, "x" + 700 * "\u00e9", 700 * "\u00e9"])
def test_message_in_the_status_is_cut_at_1024_bytes(
    kubelet: FakeKubelet, plugin: SamplePlugin, text: str
) -> None:
    """TestTruncateHealthMessage; a cut character is shown as the replacement character."""
    send_and_wait(kubelet, plugin, {"name": "gpu-0", "health": UNHEALTHY, "message": text})
    assert kubelet.health(DRIVER, "node-a", "gpu-0").message.encode(errors="surrogateescape").decode(
        errors="replace"
    ) == message_in_status(cut_message(text))


def test_repeated_list_is_no_change_and_contradictions_are(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    """Kubelet test: TestHandleWatchResourcesStream/NoActualStateChange."""
    healthy, unhealthy = {"name": "gpu-0", "health": HEALTHY}, {"name": "gpu-0", "health": UNHEALTHY}
    for devices in ([healthy], [healthy], [healthy, unhealthy], [healthy, unhealthy]):
        send_and_wait(kubelet, plugin, *devices)
    assert change_counts(kubelet, 4) == [2, 1, 2, 3]  # with the last device of each list
    assert kubelet.health(DRIVER, "node-a", "gpu-0").health == "Unhealthy"


@pytest.mark.parametrize("field", ["health", "message", "health_check_timeout_seconds"])
def test_each_compared_field_makes_a_change(kubelet: FakeKubelet, plugin: SamplePlugin, field: str) -> None:
    fields = {"name": "gpu-0", "health": HEALTHY, "message": "", "health_check_timeout_seconds": 30}
    other = {"health": UNHEALTHY, "message": "hot", "health_check_timeout_seconds": 31}[field]
    for devices in (fields, fields | {"last_updated_time": 1}, fields | {field: other}):
        send_and_wait(kubelet, plugin, devices)
    assert change_counts(kubelet, 3) == [2, 1, 2]


def test_device_missing_in_lists_becomes_unknown_after_its_lease(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    """TestUpdateHealthInfo; 1.37 removes the device from the cache."""
    lease_s = 5  # shorter than that of the last device of a list
    kubelet.prepare_pod(add_pod(kubelet, "gpu-0"))
    send_and_wait(
        kubelet, plugin, {"name": "gpu-0", "health": HEALTHY, "health_check_timeout_seconds": lease_s}
    )
    kubelet.wait_for(lambda: kubelet.history.of(PodsNotified), "the notified pod")
    kubelet.pass_time(lease_s + 0.5)
    send_and_wait(kubelet, plugin)
    assert change_counts(kubelet, 2)[-1] == 2
    kubelet.wait_for(lambda: len(kubelet.history.of(PodsNotified)) == 2, "another notification")
    assert kubelet.health(DRIVER, "node-a", "gpu-0").health == "Unknown"
    stored = json.loads((kubelet.root / "dra_health_state").read_text())[DRIVER]["Devices"]
    assert ("node-a/gpu-0" in stored) is (kubelet.version.device_limit is None)


def test_devices_beyond_the_limit_of_a_driver_are_ignored(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    count = 16_400
    plugin.send_health(*({"name": f"gpu-{number}", "health": HEALTHY} for number in range(count)))
    kubelet.wait_for(lambda: kubelet.history.of(HealthChanged), "a list")
    limit = kubelet.version.device_limit
    assert kubelet.history.of(HealthChanged)[0].count == (limit or count)
    last = kubelet.health(DRIVER, "node-a", f"gpu-{count - 1}").health
    assert last == ("Unknown" if limit else "Healthy")


def test_change_notifies_all_pods_of_the_device_and_no_other(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    """Kubelet test: TestHandleWatchResourcesStream/{HealthChangeForAllocatedDevice,NonAllocatedDeviceChange,
    HealthChangeForMultiplePodsWithSharedDevice}
    """
    for uid in ("pod", "other"):
        kubelet.prepare_pod(add_pod(kubelet, "gpu-0", uid=uid))
    kubelet.prepare_pod(add_pod(kubelet, "gpu-1", uid="third"))
    send_and_wait(kubelet, plugin, {"name": "gpu-2", "health": UNHEALTHY})
    assert kubelet.history.of(PodsNotified) == []
    send_and_wait(kubelet, plugin, {"name": "gpu-0", "health": UNHEALTHY})
    kubelet.wait_for(lambda: kubelet.history.of(PodsNotified), "notified pods")
    assert kubelet.history.of(PodsNotified) == [PodsNotified(frozenset({"pod", "other"}))]


@pytest.mark.parametrize(
    ("use", "names"),
    [
        ("mine", {"example.com/a=0", f"{DRIVER}/node-a/nic-0"}),
        ("mine/gpu", {"example.com/a=0"}),
        ("mine/gpu/big", {"example.com/a=0"}),
        ("mine/nic", {f"{DRIVER}/node-a/nic-0"}),
        ("mine/none", set()),
    ],
)
def test_container_shows_the_devices_of_its_request(
    kubelet: FakeKubelet, plugin: SamplePlugin, use: str, names: set[str]
) -> None:
    """Kubelet test: TestUpdateAllocatedResourcesStatus{,_Subrequest}, TestBuildResourceHealth."""
    shared = {"pool_name": "node-a", "request_names": ["gpu"], "cdi_device_ids": ["example.com/a=0", "x/y=1"]}
    plugin.prepare = lambda claim: [
        {"device_name": "gpu-0", **shared},
        {"device_name": "gpu-1", **shared},
        {"device_name": "nic-0", "pool_name": "node-a", "request_names": ["nic"]},
    ]
    kubelet.add_claim(allocated_claim("c", "uid-c", ("gpu", DRIVER, "node-a", "gpu-0"), pods=["pod"]))
    plugin.send_health(
        *({"name": name, "health": HEALTHY, "message": name} for name in ("gpu-0", "gpu-1", "nic-0"))
    )
    kubelet.wait_health(DRIVER, "node-a", "nic-0", "Healthy")
    pod = Pod("pod", {"mine": "c"}, {"main": (use,), "plain": ()})
    kubelet.run_pod(pod)
    resources = kubelet.wait_running(pod).resources
    assert set(resources) == {"main"}
    found = resources["main"].get(f"claim:{use}", ())
    assert {entry.resource_id for entry in found} == names
    messages = {entry.resource_id: entry.message for entry in found}
    assert messages.get("example.com/a=0", "gpu-0") == "gpu-0"  # the first device with that id


# --- prepare --------------------------------------------------------------------------------------------


def test_all_claims_of_a_driver_are_prepared_in_one_call(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """Kubelet test: TestPrepareResources."""
    kubelet.prepare_pod(add_pod(kubelet, "gpu-0", "gpu-1"))
    expected_claims = (("default", "gpu-0", "uid-gpu-0"), ("default", "gpu-1", "uid-gpu-1"))
    assert [(call.service, call.method, call.claims) for call in plugin.calls] == [
        ("v1.DRAPlugin", PREPARE, expected_claims)
    ]
    info = kubelet.claim_info("gpu-0")
    assert info is not None
    assert info.prepared
    assert info.drivers == {DRIVER: [PreparedDevice("node-a", "gpu-0", ("gpu",), ("example.com/gpu=gpu-0",))]}


@pytest.mark.parametrize("service", ["v1beta1.DRAPlugin", "v1.DRAPlugin"])
def test_both_versions_of_the_plugin_service_work(
    kubelet: FakeKubelet, sample: SamplePlugin, service: str
) -> None:
    """Kubelet test: TestGRPCMethods/{v1beta1,v1}."""
    sample.services = [service]
    with sample:
        kubelet.wait_registered(DRIVER)
        pod = add_pod(kubelet, "gpu-0")
        kubelet.prepare_pod(pod)
        kubelet.unprepare_pod(pod)
    assert [(call.service, call.method) for call in sample.calls] == [
        (service, PREPARE),
        (service, UNPREPARE),
    ]


def test_share_id_is_recorded(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """Kubelet test: TestPrepareResources/share_id."""
    plugin.prepare = lambda claim: [{"pool_name": "p", "device_name": "d", "share_id": "one"}]
    kubelet.prepare_pod(add_pod(kubelet, "gpu-0"))
    info = kubelet.claim_info("gpu-0")
    assert info is not None
    assert info.drivers == {DRIVER: [PreparedDevice("p", "d", (), (), "one")]}


def unknown_uid(response: Any) -> None:
    response.claims["uid-unknown"].error = ""


def empty(response: Any) -> None:
    response.claims.clear()


@pytest.mark.parametrize(
    ("error_texts", "text"),
    [
        pytest.param(
            {"prepare": lambda claim: "no pages"}, f"{PREPARE} failed for ResourceClaim gpu-0: no pages"
        ),
        pytest.param({"amend": empty}, f"{PREPARE} skipped 1 ResourceClaims", id="empty_result"),
        pytest.param({"amend": unknown_uid}, None, id="unknown_uid_or_too_many"),
        pytest.param(
            {"prepare": lambda claim: int("")},
            f"{PREPARE}: rpc error: code = Unknown desc = Exception calling application: "
            "invalid literal for int() with base 10: ''",
            id="TestGRPCMethods/internal_error",
        ),
    ],
)
def test_invalid_answers_of_a_driver_fail_the_prepare(
    kubelet: FakeKubelet, plugin: SamplePlugin, error_texts: dict[str, Any], text: str | None
) -> None:
    """Kubelet test: TestPrepareResources."""
    for name, value in error_texts.items():
        setattr(plugin, name, value)
    error = prepare_error(kubelet, add_pod(kubelet, "gpu-0"))
    if text is None:  # either text: Go iterates over a map in random order
        unknown = f"{PREPARE} returned result for unknown claim UID uid-unknown"
        assert error in (unknown, f"{PREPARE} skipped -1 ResourceClaims")
    else:
        assert error == text


def test_advertised_service_that_is_not_served(kubelet: FakeKubelet, sample: SamplePlugin) -> None:
    """Kubelet test: TestGRPCMethods/mismatch."""
    sample.services = ["v1.DRAPlugin"]
    server = grpc.server(ThreadPoolExecutor(1))
    sample.service.parent.mkdir(parents=True)
    server.add_insecure_port(f"unix:{sample.service}")
    server.start()
    try:
        sample.register()
        kubelet.wait_registered(DRIVER)
        error = prepare_error(kubelet, add_pod(kubelet, "gpu-0"))
        assert error.startswith(f"{PREPARE}: rpc error: code = Unimplemented")
    finally:
        server.stop(0).wait()


def test_call_has_the_kubelets_deadline(short_tmp: Path, make_kubelet: MakeKubelet) -> None:
    """Kubelet test: TestGRPCWithTimeoutEnforced, TestPrepareResources/should_timeout."""
    kubelet = make_kubelet(call_s=0.2)
    with SamplePlugin(short_tmp, DRIVER) as found_sample:
        kubelet.wait_registered(DRIVER)
        ended = threading.Event()
        found_sample.prepare = lambda claim: ended.wait() and one_device(claim)  # type: ignore[return-value,assignment]
        start_s = time.monotonic()
        error = prepare_error(kubelet, add_pod(kubelet, "gpu-0"))
        took_s = time.monotonic() - start_s
        ended.set()
        # the driver's own server may answer first, at the same deadline
        expected = f"{PREPARE}: rpc error: code = DeadlineExceeded desc = "
        assert error in (f"{expected}context deadline exceeded", f"{expected}Deadline Exceeded")
        assert took_s >= kubelet.pace.call_s


def test_prepare_can_fail_before_the_driver_is_called(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """TestPrepareResources: claim missing, not allocated, not reserved, unknown driver"""
    missing = Pod("pod", {"c": "nowhere"})
    assert prepare_error(kubelet, missing).startswith("fetch ResourceClaim nowhere: ")
    kubelet.add_claim(allocated_claim("c", "uid-c", ("gpu", DRIVER, "p", "d"), pods=["another-pod"]))
    assert "is not allowed to use ResourceClaim c (uid-c)" in prepare_error(kubelet, Pod("pod", {"c": "c"}))
    bare = allocated_claim("d", "uid-d", pods=["pod"])
    del bare["status"]["allocation"]
    kubelet.add_claim(bare)
    assert prepare_error(kubelet, Pod("pod", {"c": "d"})) == "ResourceClaim d: not allocated"
    unregistered = add_pod(kubelet, "e", driver="unregistered.example.com")
    assert prepare_error(kubelet, unregistered) == "DRA driver unregistered.example.com is not registered"
    assert plugin.calls == []
    assert kubelet.claim_info("e") is None


def test_prepare_of_a_recreated_claim_with_the_same_name(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """Kubelet test: TestPrepareResources/UID_mismatch."""
    kubelet.prepare_pod(add_pod(kubelet, "gpu-0"))
    kubelet.add_claim(allocated_claim("gpu-0", "uid-new", ("gpu", DRIVER, "p", "d"), pods=["pod"]))
    assert prepare_error(kubelet, Pod("pod", {"c": "gpu-0"})) == (
        "old ResourceClaim with same name gpu-0 and different UID uid-gpu-0 still exists"
        " (previous pod force-deleted?!)"
    )


def test_prepared_claim_is_not_prepared_again(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """Kubelet test: TestPrepareResources/already_prepared, TestPrepareResourcesWithPreparedAndNewClaim."""
    kubelet.prepare_pod(add_pod(kubelet, "gpu-0"))
    kubelet.prepare_pod(add_pod(kubelet, "gpu-0", "gpu-1"))
    assert [[claim[1] for claim in call.claims] for call in plugin.calls] == [["gpu-0"], ["gpu-1"]]


def test_retry_appends_or_replaces_devices_by_version(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    plugin.amend = lambda response: response.claims["uid-gpu-1"].MergeFrom(
        type(response.claims["uid-gpu-1"])(error="later")
    )
    pod = add_pod(kubelet, "gpu-0", "gpu-1")
    while not (kubelet.claim_info("gpu-0") and kubelet.claim_info("gpu-0").drivers[DRIVER]):  # type: ignore[union-attr]
        prepare_error(kubelet, pod)  # until the claim that succeeds was first
    plugin.amend = lambda response: None
    kubelet.prepare_pod(pod)
    info = kubelet.claim_info("gpu-0")
    assert info is not None
    assert (len(info.drivers[DRIVER]) > 1) is not kubelet.version.replaces_devices
    assert len(set(info.drivers[DRIVER])) == 1


def test_one_of_two_failing_claims_is_shown_at_random(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    plugin.prepare = lambda claim: f"{claim.name} is bad"
    pod = add_pod(kubelet, "gpu-0", "gpu-1")
    expected = {f"{PREPARE} failed for ResourceClaim gpu-{number}: gpu-{number} is bad" for number in (0, 1)}
    seen: set[str] = set()
    for _ in range(
        400
    ):  # Go begins at one of eight places in a small map: one order in eight is the other one
        seen.add(prepare_error(kubelet, pod))
        if seen >= expected:
            break
    assert seen == expected


def test_second_driver_is_not_called_after_an_error(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    with SamplePlugin(kubelet.root, "b.example.com") as other:
        kubelet.wait_registered("b.example.com")
        both = allocated_claim(
            "c", "uid-c", ("x", DRIVER, "p", "d"), ("y", "b.example.com", "p", "e"), pods=["pod"]
        )
        kubelet.add_claim(both)
        plugin.prepare = other.prepare = lambda claim: "no"
        tries = 0
        while not (plugin.calls and other.calls):  # in random order, seldom the same one first for long
            prepare_error(kubelet, Pod("pod", {"c": "c"}))
            tries += 1
            assert len(plugin.calls) + len(other.calls) == tries < 200


def test_pods_are_prepared_in_parallel(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """Kubelet test: TestParallelPrepareUnprepare."""
    barrier = threading.Barrier(2, timeout=PATIENCE_S)

    def wait_for_both(claim: Any) -> Any:
        barrier.wait()
        return one_device(claim)

    plugin.prepare = wait_for_both
    pods = [add_pod(kubelet, f"gpu-{number}", uid=f"pod-{number}") for number in range(2)]
    for pod in pods:
        kubelet.run_pod(pod)
    for pod in pods:
        kubelet.wait_running(pod)


# --- unprepare ------------------------------------------------------------------------------------------


def test_claim_is_unprepared_with_its_last_pod(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """Kubelet test: TestUnprepareResources."""
    first, second = add_pod(kubelet, "gpu-0"), add_pod(kubelet, "gpu-0", uid="other")
    for pod in (first, second):
        kubelet.run_pod(pod)
        kubelet.wait_running(pod)
    kubelet.delete_pod(first)
    kubelet.wait_gone(first)
    assert [call.method for call in plugin.calls] == [PREPARE]
    kubelet.delete_pod(second)
    kubelet.wait_gone(second)
    assert [call.method for call in plugin.calls] == [PREPARE, UNPREPARE]
    assert kubelet.claim_info("gpu-0") is None


def test_failed_unprepare_keeps_the_pod_until_it_succeeds(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """e2e: unprepare fails then succeeds"""
    pod = add_pod(kubelet, "gpu-0")
    kubelet.run_pod(pod)
    kubelet.wait_running(pod)
    plugin.unprepare = lambda claim: "busy"
    kubelet.delete_pod(pod)
    failed = kubelet.wait_for(lambda: kubelet.history.of(UnprepareFailed), "a failed unprepare")[0]
    assert failed.error == f"{UNPREPARE} failed for ResourceClaim gpu-0: busy"
    assert pod.uid in kubelet.pods
    assert kubelet.events == []
    plugin.unprepare = lambda claim: ""
    kubelet.wait_gone(pod)


def test_unprepare_of_a_pod_that_was_refused_spares_the_claim_from_1_37(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    kubelet.prepare_pod(add_pod(kubelet, "gpu-0"))
    refused = Pod("refused", {"c": "gpu-0"})
    assert "is not allowed to use ResourceClaim" in prepare_error(kubelet, refused)
    kubelet.unprepare_pod(refused)
    expected = [PREPARE] if kubelet.version.checks_pod else [PREPARE, UNPREPARE]
    assert [call.method for call in plugin.calls] == expected


@only_versions("1.37")
def test_claim_that_is_being_unprepared_refuses_new_pods(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    pod, later = add_pod(kubelet, "gpu-0"), add_pod(kubelet, "gpu-0", uid="other")
    kubelet.run_pod(pod)
    kubelet.wait_running(pod)
    plugin.unprepare = lambda claim: "busy"
    kubelet.delete_pod(pod)
    kubelet.wait_for(lambda: kubelet.history.of(UnprepareFailed), "a failed unprepare")
    assert prepare_error(kubelet, later) == "ResourceClaim gpu-0 is being unprepared"


def test_claim_never_prepared_is_not_unprepared(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    kubelet.unprepare_pod(add_pod(kubelet, "gpu-0"))
    assert plugin.calls == []


# --- pods -----------------------------------------------------------------------------------------------


def test_failing_pod_gets_one_event_with_a_count(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """e2e: prepare fails then succeeds"""
    plugin.prepare = lambda claim: "no pages"
    pod = add_pod(kubelet, "gpu-0")
    before_s = time.monotonic()  # the first event may be found late
    kubelet.run_pod(pod)
    kubelet.wait_for(lambda: len(kubelet.history.of(EventWritten)) >= 2, "two attempts")
    event = kubelet.events_of(pod)[0]
    assert event.reason == "FailedPrepareDynamicResources"
    assert event.message == f"{EVENT}{PREPARE} failed for ResourceClaim gpu-0: no pages"
    assert kubelet.pod_status(pod).phase == "Pending"
    assert kubelet.history.times(EventWritten)[1] - before_s >= kubelet.pace.resync_s[0]
    plugin.prepare = one_device
    kubelet.wait_running(pod)
    assert len(kubelet.events) == 1


def test_every_pod_event_retries_the_prepare(short_tmp: Path, make_kubelet: MakeKubelet) -> None:
    kubelet = make_kubelet(resync_s=(600, 900))
    with SamplePlugin(short_tmp, DRIVER) as found_sample:
        kubelet.wait_registered(DRIVER)
        found_sample.prepare = lambda claim: "no"
        pod = add_pod(kubelet, "gpu-0")
        kubelet.run_pod(pod)
        kubelet.wait_for(lambda: kubelet.events, "an event")
        found_sample.prepare = one_device
        kubelet.sync_pod(pod)
        kubelet.wait_running(pod)


def test_pod_status_follows_the_health_of_its_devices(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """e2e: Resource Health, Healthy -> Unhealthy -> Healthy"""
    pod = add_pod(kubelet, "gpu-0")
    kubelet.run_pod(pod)
    kubelet.wait_running(pod)

    def shows(health: str, message: str) -> Callable[[], bool]:
        expected = {"claim:my-gpu-0": (ResourceHealth("example.com/gpu=gpu-0", health, message),)}
        return lambda: kubelet.pod_status(pod).resources == {"main": expected}

    for number, health, message in ((1, "Healthy", ""), (2, "Unhealthy", "hot"), (1, "Healthy", "")):
        plugin.send_health({"name": "gpu-0", "health": number, "message": message})
        kubelet.wait_for(shows(health, message), f"{health} in the status")


def test_expired_lease_is_shown_only_at_the_next_resync(short_tmp: Path, make_kubelet: MakeKubelet) -> None:
    kubelet = make_kubelet(resync_s=(600, 900))
    lease_s = lease_of(kubelet)
    with SamplePlugin(short_tmp, DRIVER) as found_sample:
        kubelet.wait_for(lambda: found_sample.opened, "a stream")
        found_sample.send_health(
            {"name": "gpu-0", "health": HEALTHY, "health_check_timeout_seconds": lease_s}
        )
        kubelet.wait_health(DRIVER, "node-a", "gpu-0", "Healthy")
        kubelet.wait_registered(DRIVER)
        pod = add_pod(kubelet, "gpu-0")
        kubelet.run_pod(pod)
        kubelet.wait_running(pod)

        def shown_health() -> str:
            return kubelet.pod_status(pod).resources["main"]["claim:my-gpu-0"][0].health

        kubelet.pass_time(lease_s + 0.5)
        assert (kubelet.health(DRIVER, "node-a", "gpu-0").health, shown_health()) == ("Unknown", "Healthy")
        found_sample.send_health(
            {"name": "gpu-0", "health": HEALTHY, "health_check_timeout_seconds": lease_s}
        )
        kubelet.wait_health(DRIVER, "node-a", "gpu-0", "Healthy")
        kubelet.pass_time(lease_s + 0.5)
        kubelet.sync_pod(pod)
        kubelet.wait_for(lambda: shown_health() == "Unknown", "Unknown in the status")


# --- stop and start of the kubelet ----------------------------------------------------------------------


def send_unhealthy(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    fields = {"message": "hot", "health_check_timeout_seconds": lease_of(kubelet)}
    plugin.send_health({"name": "gpu-0", "health": UNHEALTHY, **fields})
    kubelet.wait_health(DRIVER, "node-a", "gpu-0", "Unhealthy")


def test_stopped_kubelet_keeps_or_clears_the_cache(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """The end of the process races with the end of its streams, so either may be found."""
    send_unhealthy(kubelet, plugin)
    kept = json.loads((kubelet.root / "dra_health_state").read_text())
    kubelet.stop()
    assert json.loads((kubelet.root / "dra_health_state").read_text()) in ({}, kept)


def test_cache_after_a_crash_makes_the_same_list_no_change(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    send_unhealthy(kubelet, plugin)
    kubelet.stop(graceful=False)
    kubelet.pass_time(lease_of(kubelet) + 0.5)
    seen = len(kubelet.history)
    kubelet.start()
    assert kubelet.health(DRIVER, "node-a", "gpu-0").health == "Unknown"
    kubelet.wait_for(lambda: len(plugin.opened) == 2, "another stream")
    send_unhealthy(kubelet, plugin)
    assert kubelet.history.of(HealthChanged, since=seen) == []


def test_restarted_kubelet_registers_the_plugin_again(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """e2e: registration after kubelet restart"""
    kubelet.restart()
    kubelet.wait_registered(DRIVER)
    kubelet.wait_for(lambda: plugin.statuses == [(True, ""), (True, "")], "the second status")
    # a connection that is made late is a wipe of the driver's slices
    kubelet.wait_for(lambda: kubelet.history.of(SlicesWiped).count(SlicesWiped("")) == 2, "two wipes")
    assert kubelet.history.of(Deregistered) == []


def test_second_pod_of_a_claim_is_prepared_the_first_not_again(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    first, second = add_pod(kubelet, "gpu-0"), add_pod(kubelet, "gpu-0", uid="other")
    kubelet.run_pod(first)
    kubelet.wait_running(first)
    kubelet.restart(graceful=False)
    kubelet.wait_registered(DRIVER)
    kubelet.sync_pod(first)
    kubelet.run_pod(second)
    kubelet.wait_running(second)
    assert [call.method for call in plugin.calls] == [PREPARE, PREPARE]
    info = kubelet.claim_info("gpu-0")
    assert info is not None
    assert len(info.drivers[DRIVER]) == (1 if kubelet.version.replaces_devices else 2)
    assert kubelet.wait_running(second).resources["main"]["claim:my-gpu-0"] == (
        ResourceHealth("example.com/gpu=gpu-0", "Unknown"),
    )


def test_pod_created_while_kubelet_was_down_is_prepared(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """e2e: pod created while kubelet is down"""
    kubelet.stop()
    pod = add_pod(kubelet, "gpu-0")
    kubelet.run_pod(pod)
    kubelet.start()
    kubelet.wait_running(pod)


def test_pod_deleted_while_kubelet_was_down_is_unprepared(kubelet: FakeKubelet, plugin: SamplePlugin) -> None:
    """e2e: unprepare for deleted pods, no prepare for a deleted pod"""
    pod = add_pod(kubelet, "gpu-0")
    kubelet.run_pod(pod)
    kubelet.wait_running(pod)
    kubelet.stop()
    kubelet.delete_pod(pod)
    kubelet.start()
    kubelet.wait_for(lambda: plugin.calls[-1].method == UNPREPARE, "unprepare")
    kubelet.wait_for(lambda: kubelet.claim_info("gpu-0") is None, "the claim's state to be removed")
    assert [call.method for call in plugin.calls] == [PREPARE, UNPREPARE]


def test_pending_call_ends_with_the_kubelet_and_is_repeated(
    kubelet: FakeKubelet, plugin: SamplePlugin
) -> None:
    """e2e: retry after kubelet restart"""
    proceed = threading.Event()
    plugin.prepare = lambda claim: proceed.wait(PATIENCE_S) and one_device(claim)  # type: ignore[return-value,assignment]
    pod = add_pod(kubelet, "gpu-0")
    kubelet.run_pod(pod)
    kubelet.wait_for(lambda: plugin.calls, "a call")
    kubelet.stop(graceful=False)
    assert kubelet.events == []
    proceed.set()
    kubelet.start()
    kubelet.wait_running(pod)
