"""Health lists in a kubelet, by the cases of upstream's own tests.

Tests run with the fake kubelet, and with the kubelet's own code where ``make test-kubelet`` has built it.

Tests name upstream's test and case: kubelet ``cm/dra/{healthinfo,manager}_test.go``. TestWithLock and
TestWithRLock test Go's locks and are not covered. Cases that upstream lacks have no such name.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import pytest
from kubelet import Pod, PreparedDevice, ResourceHealth, allocated_claim
from kubelet.claims import ClaimInfo, ClaimInfos, new_claim_info
from kubelet.health import DeviceHealth, HealthCache, message_in_status, read_device
from kubelet.history import History, NotificationDropped, PodsNotified
from kubelet.pace import NS
from kubelet.status import allocated_resources, resource_health
from kubelet.streams import NOTIFICATIONS, HealthManager
from kubelet.versions import VERSIONS
from kubelet_real.implementations import MARKS, binary_of
from kubelet_real.manager import ManagerProgram, RealManager
from wire.google import message_class

DRIVER: Final = "a.example.com"
LEASE_S: Final = 1000
"""Lease of a device, longer than any test takes."""


class ManualClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000 * NS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS)


class Manager(Protocol):
    """A DRA manager without plugins; see :class:`kubelet_real.manager.RealManager`."""

    saves: int

    def restart(self, *claims: ClaimInfo) -> None: ...
    def pass_time(self, seconds: float) -> None: ...
    def update(self, driver: str, entries: Sequence[Any]) -> list[tuple[str, str]]: ...
    def get(self, driver: str, pool: str, device: str) -> DeviceHealth: ...
    def clear(self, driver: str) -> None: ...
    def receive(self, driver: str, entries: Sequence[Any]) -> None: ...
    def end_stream(self, driver: str) -> None: ...
    def notified_pods(self) -> list[frozenset[str]]: ...
    def dropped_notifications(self) -> list[frozenset[str]]: ...
    def status(self, pod: Pod) -> dict[str, tuple[ResourceHealth, ...]]: ...
    def claim(self, name: str) -> ClaimInfo: ...


class FakeManager:
    """The parts of the fake kubelet that process health."""

    def __init__(self, version: str, directory: Path) -> None:
        self._version = VERSIONS[version]
        self._directory = directory
        self._clock = ManualClock()
        self._saved = 0
        self.restart()

    def restart(self, *claims: ClaimInfo) -> None:
        if claims:
            kept = ClaimInfos(self._directory / "claims")
            with kept.lock_infos() as infos:
                infos.update({(claim.namespace, claim.name): claim for claim in claims})
                kept.save()
        self._history = History()
        file, limit = self._directory / "dra_health_state", self._version.device_limit
        self._cache = HealthCache(file, self._clock, limit)
        self._claims = ClaimInfos(self._directory / "claims")
        self._manager = HealthManager(self._cache, self._claims, self._version, self._history)

    @property
    def saves(self) -> int:
        return self._cache.saves

    def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def update(self, driver: str, entries: Sequence[Any]) -> list[tuple[str, str]]:
        changed = self._cache.update(driver, [read_device(entry, self._version) for entry in entries])
        return [(device.device, device.health) for device in changed]

    def get(self, driver: str, pool: str, device: str) -> DeviceHealth:
        return self._cache.get(driver, pool, device)

    def clear(self, driver: str) -> None:
        self._cache.clear(driver)

    def receive(self, driver: str, entries: Sequence[Any]) -> None:
        self._manager.update(driver, message_class("v1", "NodeWatchResourcesResponse")(devices=entries))

    def end_stream(self, driver: str) -> None:
        self._manager.clear(driver)

    def notified_pods(self) -> list[frozenset[str]]:
        return [entry.pods for entry in self._history.of(PodsNotified)]

    def dropped_notifications(self) -> list[frozenset[str]]:
        return [entry.pods for entry in self._history.of(NotificationDropped)]

    def status(self, pod: Pod) -> dict[str, tuple[ResourceHealth, ...]]:
        (uses,) = pod.containers.values()
        with self._claims.lock_infos() as infos:
            claims = {local: infos["default", name] for local, name in pod.claims.items()}
            return allocated_resources(uses, claims, self._cache, messages=self._version.reads_message)

    def claim(self, name: str) -> ClaimInfo:
        with self._claims.lock_infos() as infos:
            return infos["default", name]


def encode_list(entries: Sequence[Any]) -> bytes:
    """Return a list of health as its driver sends it."""
    return bytes(message_class("v1", "NodeWatchResourcesResponse")(devices=entries).SerializeToString())


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ManagerProgram]]:
    """Function that returns the real kubelet's program of a version, which runs until the last test."""
    running: dict[str, ManagerProgram] = {}

    def program(version: str) -> ManagerProgram:
        if version not in running:
            running[version] = ManagerProgram(binary_of(version), tmp_path_factory.mktemp("kubelet"))
        return running[version]

    yield program
    for process in running.values():
        process.end(graceful=True)


@pytest.fixture(
    params=[
        *(pytest.param((version, False), id=f"fake-{version}") for version in ("1.36", "1.37")),
        *(pytest.param((version, True), id=f"real-{version}", marks=MARKS) for version in ("1.36", "1.37")),
    ]
)
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, programs: Callable[[str], ManagerProgram]
) -> Manager:
    version, is_real = request.param
    if is_real:
        return RealManager(programs(version), tmp_path, encode_list)
    return FakeManager(version, tmp_path)


def health(manager: Manager, device: str = "gpu-0", *, driver: str = DRIVER, pool: str = "pool") -> str:
    return manager.get(driver, pool, device).health


def entry(name: str = "gpu-0", **fields: Any) -> Any:
    """Return an entry of a health list."""
    return message_class("v1", "DeviceHealth")(
        device={"pool_name": "pool", "device_name": name},
        **{"health": 1, "health_check_timeout_seconds": LEASE_S} | fields,
    )


def healthy(name: str = "gpu-0") -> Any:
    return entry(name)


def unhealthy(name: str = "gpu-0") -> Any:
    return entry(name, health=2)


# --- the cache: healthinfo_test.go ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(None, id="TestNewHealthInfoCache/successfully_created_cache"),
        pytest.param("", id="TestNewHealthInfoCache/empty_state_file"),
        pytest.param("{", id="torn"),
        pytest.param('{"a.example.com": 1}', id="of_another_shape"),
        pytest.param("[]", id="no_object"),
    ],
)
def test_cache_with_a_corrupt_file_starts_empty(manager: Manager, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "dra_health_state").write_text(text)
    manager.restart()
    assert health(manager) == "Unknown"
    if text != '{"a.example.com": 1}':  # the real kubelet keeps a driver without a map and ends at its list
        manager.update(DRIVER, [healthy()])
        assert health(manager) == "Healthy"


def test_health_is_valid_until_the_lease_expires(manager: Manager) -> None:
    """Kubelet test: TestGetHealthInfo."""
    assert health(manager) == "Unknown"
    manager.update(DRIVER, [healthy()])
    assert health(manager) == "Healthy"
    manager.pass_time(LEASE_S + 1)
    assert health(manager) == "Unknown"


LOOKUPS: Final[Mapping[str, tuple[int, float, dict[str, str], str]]] = {
    "device_exists_and_is_healthy": (1, 0, {}, "Healthy"),
    "device_exists_and_is_unhealthy": (2, 0, {}, "Unhealthy"),
    "device_exists_but_timed_out": (1, LEASE_S + 1, {}, "Unknown"),
    "device_exists,_just_within_timeout": (1, LEASE_S * 0.9, {}, "Healthy"),
    "device_does_not_exist,_just_outside_of_timeout": (1, LEASE_S + 1, {"device": "gpu-1"}, "Unknown"),
    "device_does_not_exist": (1, 0, {"device": "gpu-1"}, "Unknown"),
    "driver_does_not_exist": (1, 0, {"driver": "b.example.com"}, "Unknown"),
    "pool_does_not_exist": (1, 0, {"pool": "pool2"}, "Unknown"),
}


@pytest.mark.parametrize(
    ("stored", "elapsed_s", "query", "expected"),
    [pytest.param(*case, id=f"TestGetHealthInfoRobust/{name}") for name, case in LOOKUPS.items()],
)
def test_get_returns_the_valid_health_of_a_device(
    manager: Manager, stored: int, elapsed_s: float, query: dict[str, str], expected: str
) -> None:
    manager.update(DRIVER, [entry(health=stored)])
    manager.pass_time(elapsed_s)
    assert health(manager, **query) == expected


def test_devices_are_distinguished_by_driver_pool_and_name(manager: Manager) -> None:
    """Kubelet test: TestGetHealthInfoRobust/{empty_cache,multiple_devices}."""
    assert health(manager) == "Unknown"
    manager.update(DRIVER, [healthy(), unhealthy("gpu-1")])
    assert (health(manager), health(manager, "gpu-1")) == ("Healthy", "Unhealthy")


def test_update_returns_the_changed_devices(manager: Manager) -> None:
    """Kubelet test: TestUpdateHealthInfo, its six steps in one cache."""
    assert manager.update(DRIVER, [healthy()]) == [("gpu-0", "Healthy")]
    assert manager.update(DRIVER, [healthy()]) == []
    assert manager.update(DRIVER, [unhealthy()]) == [("gpu-0", "Unhealthy")]
    manager.pass_time(2 * LEASE_S)
    assert manager.update(DRIVER, [healthy("gpu-1")]) == [("gpu-1", "Healthy"), ("gpu-0", "Unknown")]
    manager.restart()
    assert (health(manager, "gpu-1"), health(manager)) == ("Healthy", "Unknown")
    manager.update(DRIVER, [unhealthy("gpu-2")])
    manager.pass_time(LEASE_S + 1)
    assert ("gpu-2", "Unknown") in manager.update(DRIVER, [])


def test_clear_forgets_only_one_driver(manager: Manager) -> None:
    """Kubelet test: TestClearDriver."""
    manager.update(DRIVER, [healthy()])
    manager.update("b.example.com", [healthy()])
    manager.clear(DRIVER)
    assert (health(manager), health(manager, driver="b.example.com")) == ("Unknown", "Healthy")


def test_heartbeat_renews_the_lease_without_a_change(manager: Manager) -> None:
    manager.update(DRIVER, [healthy()])
    for _ in range(5):
        manager.pass_time(LEASE_S * 0.8)
        assert manager.update(DRIVER, [healthy()]) == []
        assert health(manager) == "Healthy"
    assert manager.saves == 1


def test_late_heartbeat_restores_the_device_without_a_change(manager: Manager) -> None:
    manager.update(DRIVER, [healthy()])
    manager.pass_time(LEASE_S * 1.5)
    assert health(manager) == "Unknown"
    assert manager.update(DRIVER, [healthy()]) == []
    assert health(manager) == "Healthy"


@pytest.mark.parametrize(
    "fields", [{"health": 2}, {"message": "hot"}, {"health_check_timeout_seconds": LEASE_S + 1}], ids=str
)
def test_health_message_and_lease_each_make_a_change(manager: Manager, fields: dict[str, Any]) -> None:
    manager.update(DRIVER, [healthy()])
    assert len(manager.update(DRIVER, [entry(**fields)])) == 1


def test_device_missing_in_a_list_stays_until_its_lease_expires(manager: Manager) -> None:
    other = entry("gpu-1", health_check_timeout_seconds=10 * LEASE_S, message="fine")
    manager.update(DRIVER, [healthy(), other])
    manager.pass_time(9 * LEASE_S)
    manager.update(DRIVER, [healthy()])
    assert (health(manager), health(manager, "gpu-1")) == ("Healthy", "Healthy")
    manager.pass_time(2 * LEASE_S)
    assert manager.update(DRIVER, [healthy()]) == [("gpu-1", "Unknown")]
    assert manager.get(DRIVER, "pool", "gpu-1").message == ""
    assert manager.update(DRIVER, [healthy()]) == []


def test_contradicting_entries_in_one_list_are_always_changes(manager: Manager) -> None:
    for _ in range(3):
        assert manager.update(DRIVER, [healthy(), unhealthy()])[-1] == ("gpu-0", "Unhealthy")
        assert health(manager) == "Unhealthy"
    assert manager.saves == 3


def test_cache_file_has_the_kubelets_format(manager: Manager, tmp_path: Path) -> None:
    manager.update(DRIVER, [entry(health_check_timeout_seconds=30)])
    found = json.loads((tmp_path / "dra_health_state").read_text())
    assert isinstance(found[DRIVER]["Devices"]["pool/gpu-0"].pop("LastUpdated"), str)
    assert found == {
        DRIVER: {
            "Devices": {
                "pool/gpu-0": {
                    "PoolName": "pool",
                    "DeviceName": "gpu-0",
                    "Health": "Healthy",
                    "HealthCheckTimeout": 30_000_000_000,
                    "Message": "",
                }
            }
        }
    }


def test_message_cut_within_a_character_differs_after_a_restart(manager: Manager) -> None:
    device = entry(message=700 * "\u00e9")
    manager.update(DRIVER, [device])
    assert manager.update(DRIVER, [device]) == []
    manager.restart()
    assert len(manager.update(DRIVER, [device])) == 1


# --- from the wire: manager_test.go ---------------------------------------------------------------------


def stored_message(manager: Manager, text: str) -> str:
    """Return a device's message as the kubelet keeps it; bytes of a cut character are replaced."""
    manager.update(DRIVER, [entry(message=text)])
    return message_in_status(manager.get(DRIVER, "pool", "gpu-0").message)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        pytest.param(0, 0, id="TestTruncateHealthMessage/empty"),
        pytest.param(10, 10, id="TestTruncateHealthMessage/short"),
        pytest.param(1024, 1024, id="TestTruncateHealthMessage/exactly_max"),
        pytest.param(1025, 1024, id="TestTruncateHealthMessage/one_over"),
        pytest.param(5000, 1024, id="TestTruncateHealthMessage/very_long"),
    ],
)
def test_message_is_cut_at_1024_bytes(manager: Manager, length: int, expected: int) -> None:
    cut = stored_message(manager, "x" * length)
    assert len(cut) == expected
    assert cut == ("x" * length if length <= 1024 else "x" * 1021 + "...")


def test_cut_message_keeps_its_beginning(manager: Manager) -> None:
    """Kubelet test: TestTruncateHealthMessage/meaningful."""
    assert stored_message(manager, "gpu.xid.79: " + 1100 * "y").startswith("gpu.xid.79: yyy")


def test_message_is_cut_between_any_two_bytes(manager: Manager) -> None:
    assert stored_message(manager, "x" + 700 * "\u00e9") == "x" + 510 * "\u00e9" + "..."
    assert stored_message(manager, 700 * "\u00e9") == 510 * "\u00e9" + "\ufffd..."


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        pytest.param(0, "Unknown", id="TestToDeviceHealthStatus/unknown"),
        pytest.param(1, "Healthy", id="TestToDeviceHealthStatus/healthy"),
        pytest.param(2, "Unhealthy", id="TestToDeviceHealthStatus/unhealthy"),
        pytest.param(99, "Unknown", id="TestToDeviceHealthStatus/unexpected"),
    ],
)
def test_undefined_health_number_is_unknown(manager: Manager, number: int, expected: str) -> None:
    assert manager.update(DRIVER, [entry(health=number)]) == [("gpu-0", expected)]


@pytest.mark.parametrize(
    ("seconds", "expected_s"),
    [
        pytest.param(120, 120, id="TestBuildDeviceHealth/positive"),
        pytest.param(0, 30, id="TestBuildDeviceHealth/zero"),
        pytest.param(-5, 30, id="TestBuildDeviceHealth/negative"),
        pytest.param(86_400, 86_400, id="a_day"),
    ],
)
def test_lease_of_zero_or_less_is_30_s(
    manager: Manager, tmp_path: Path, seconds: int, expected_s: int
) -> None:
    manager.update(DRIVER, [entry(health_check_timeout_seconds=seconds)])
    stored = json.loads((tmp_path / "dra_health_state").read_text())
    assert stored[DRIVER]["Devices"]["pool/gpu-0"]["HealthCheckTimeout"] == expected_s * NS


def test_lease_of_300_years_overflows_and_is_expired(manager: Manager) -> None:
    manager.update(DRIVER, [entry(health_check_timeout_seconds=10_000_000_000)])
    assert health(manager) == "Unknown"


def test_time_from_the_plugin_is_ignored(manager: Manager) -> None:
    manager.update(DRIVER, [entry(last_updated_time=1)])
    assert health(manager) == "Healthy"


def test_missing_names_are_accepted_and_match_no_device(manager: Manager) -> None:
    nameless = message_class("v1", "DeviceHealth")(health=2, health_check_timeout_seconds=LEASE_S)
    assert manager.update(DRIVER, [nameless]) == [("", "Unhealthy")]
    assert (health(manager, "", pool=""), health(manager)) == ("Unhealthy", "Unknown")


@pytest.mark.parametrize(
    ("version", "lease_s", "message"), [("1.34", 30, ""), ("1.35", 7, ""), ("1.36", 7, "hot")]
)
def test_older_kubelets_ignore_newer_fields(version: str, lease_s: int, message: str) -> None:
    device = read_device(entry(health_check_timeout_seconds=7, message="hot"), VERSIONS[version])
    assert (device.lease_ns, device.message) == (lease_s * NS, message)


# --- notification of pods -------------------------------------------------------------------------------


def claim(name: str, *pods: str, device: str = "gpu-0", share_id: str = "") -> ClaimInfo:
    """Return a claim for which the driver returned a device."""
    return ClaimInfo(
        "default",
        name,
        f"uid-{name}",
        set(pods),
        {DRIVER: [PreparedDevice("pool", device, ("gpu",), (), share_id)]},
    )


def test_change_of_an_allocated_device_notifies_its_pod(manager: Manager) -> None:
    """Kubelet test: TestHandleWatchResourcesStream/HealthChangeForAllocatedDevice."""
    manager.restart(claim("c", "pod"))
    manager.receive(DRIVER, [unhealthy()])
    assert manager.notified_pods() == [{"pod"}]


def test_change_of_an_unused_device_notifies_no_pod(manager: Manager) -> None:
    """Kubelet test: TestHandleWatchResourcesStream/NonAllocatedDeviceChange."""
    manager.restart(claim("c", "pod", device="gpu-1"))
    manager.receive(DRIVER, [unhealthy()])
    assert manager.notified_pods() == []
    assert health(manager) == "Unhealthy"


def test_repeated_list_notifies_no_pod(manager: Manager) -> None:
    """Kubelet test: TestHandleWatchResourcesStream/NoActualStateChange."""
    manager.restart(claim("c", "pod"))
    for _ in range(3):
        manager.receive(DRIVER, [unhealthy()])
    assert manager.notified_pods() == [{"pod"}]


def test_share_of_a_device_is_ignored(manager: Manager) -> None:
    """Kubelet test: TestHandleWatchResourcesStream/HealthChangeForDeviceWithShareID."""
    manager.restart(claim("c", "pod", share_id="one"), claim("d", "other", share_id="two"))
    manager.receive(DRIVER, [unhealthy()])
    assert manager.notified_pods() == [{"pod", "other"}]


def test_change_notifies_all_pods_of_a_shared_claim_together(manager: Manager) -> None:
    """Kubelet test: TestHandleWatchResourcesStream/HealthChangeForMultiplePodsWithSharedDevice."""
    manager.restart(claim("c", "pod", "other"))
    manager.receive(DRIVER, [unhealthy()])
    assert manager.notified_pods() == [{"pod", "other"}]


def test_end_of_a_stream_clears_and_notifies_no_pod(manager: Manager) -> None:
    manager.restart(claim("c", "pod"))
    manager.receive(DRIVER, [unhealthy()])
    assert health(manager) == "Unhealthy"
    manager.end_stream(DRIVER)
    assert health(manager) == "Unknown"
    assert manager.notified_pods() == [{"pod"}]


def test_101st_queued_notification_is_lost(manager: Manager) -> None:
    manager.restart(claim("c", "pod"))
    for number in range(NOTIFICATIONS + 1):
        manager.receive(DRIVER, [entry(message=f"{number}")])
    assert len(manager.notified_pods()) == NOTIFICATIONS
    assert manager.dropped_notifications() == [{"pod"}]


def test_expired_device_is_a_change_of_the_next_list(manager: Manager) -> None:
    manager.restart(claim("c", "pod"))
    manager.receive(DRIVER, [healthy()])
    manager.pass_time(LEASE_S + 1)
    manager.receive(DRIVER, [healthy("gpu-1")])
    assert manager.notified_pods() == [{"pod"}, {"pod"}]


# --- status of pods -------------------------------------------------------------------------------------


def claim_of(*devices: PreparedDevice) -> ClaimInfo:
    return ClaimInfo("default", "c", "uid-c", {"pod"}, {DRIVER: list(devices)})


def pod_using(use: str) -> Pod:
    """Return a pod whose container uses the claim, under the name ``mine``."""
    return Pod("pod", {"mine": "c"}, {"main": (use,)})


@pytest.mark.parametrize("share_id", ["", "one"], ids=["direct", "ShareID"])
def test_container_status_names_the_claim_as_in_the_pod(manager: Manager, share_id: str) -> None:
    """Kubelet test: TestUpdateAllocatedResourcesStatus/{direct,renamed,ShareID}; templates are left out."""
    manager.restart(claim_of(PreparedDevice("pool", "gpu-0", ("gpu",), ("example.com/gpu=0",), share_id)))
    manager.update(DRIVER, [unhealthy()])
    expected = {"claim:mine": (ResourceHealth("example.com/gpu=0", "Unhealthy"),)}
    assert manager.status(pod_using("mine")) == expected


@pytest.mark.parametrize(
    ("use", "shown"),
    [
        pytest.param("mine/gpu/big", True, id="base_match"),
        pytest.param("mine/nic/big", False, id="other_base"),
        pytest.param("mine/gpu", True, id="base_request"),
        pytest.param("mine", True, id="empty_request"),
    ],
)
def test_subrequest_shows_the_devices_of_its_request(manager: Manager, use: str, shown: bool) -> None:
    """Kubelet test: TestUpdateAllocatedResourcesStatus_Subrequest."""
    manager.restart(claim_of(PreparedDevice("pool", "gpu-0", ("gpu",), ())))
    assert list(manager.status(pod_using(use))) == ([f"claim:{use}"] if shown else [])


def test_only_the_first_device_with_a_cdi_id_is_shown(manager: Manager) -> None:
    shared = ("example.com/claim=c",)
    devices = PreparedDevice("pool", "gpu-0", ("gpu",), shared), PreparedDevice("pool", "gpu-1", (), shared)
    manager.restart(claim_of(*devices))
    manager.update(DRIVER, [healthy(), unhealthy("gpu-1")])
    assert manager.status(pod_using("mine")) == {"claim:mine": (ResourceHealth(shared[0], "Healthy"),)}


@pytest.mark.parametrize(
    ("stored", "ids", "expected"),
    [
        pytest.param((1, "ok"), ("x/y=0",), ("x/y=0", "Healthy", "ok"), id="message_on"),
        pytest.param((1, ""), ("x/y=0",), ("x/y=0", "Healthy", ""), id="message_empty"),
        pytest.param((2, "hot"), ("x/y=0", "z"), ("x/y=0", "Unhealthy", "hot"), id="unhealthy"),
        pytest.param((0, ""), ("x/y=0",), ("x/y=0", "Unknown", ""), id="unknown"),
        pytest.param((1, ""), (), (f"{DRIVER}/pool/gpu-0", "Healthy", ""), id="resource_id_fallback"),
    ],
)
def test_pod_status_shows_the_health_of_a_device(
    manager: Manager, stored: tuple[int, str], ids: tuple[str, ...], expected: tuple[str, str, str]
) -> None:
    """Kubelet test: TestBuildResourceHealth, TestToResourceHealthStatus."""
    manager.restart(claim_of(PreparedDevice("pool", "gpu-0", (), ids)))
    manager.update(DRIVER, [entry(health=stored[0], message=stored[1])])
    assert manager.status(pod_using("mine")) == {"claim:mine": (expected,)}


def test_status_without_the_messages_gate_shows_health_alone() -> None:
    """TestBuildResourceHealth/message_off; before 1.36 there is no such gate"""
    device = PreparedDevice("pool", "gpu-0", (), ("x/y=0",))
    known = DeviceHealth("pool", "gpu-0", "Healthy", message="ok")
    assert resource_health(DRIVER, device, known, messages=False) == ("x/y=0", "Healthy", "")


# --- the stored state of claims -------------------------------------------------------------------------


def test_restart_keeps_a_claim_without_its_prepared_flag(manager: Manager) -> None:
    info = claim_of(PreparedDevice("pool", "gpu-0", ("gpu",), ("example.com/gpu=0",), "share"))
    info.prepared = True
    manager.restart(info)
    kept = manager.claim("c")
    assert (kept.uid, kept.pods, kept.drivers, kept.prepared) == ("uid-c", info.pods, info.drivers, False)


def test_new_claim_has_every_driver_of_its_allocation() -> None:
    devices = [
        ("a", DRIVER, "pool", "gpu-0"),
        ("b", "b.example.com", "pool", "nic-0"),
        ("c", DRIVER, "pool", "x"),
    ]
    claim = allocated_claim("c", "uid-c", *devices, pods=["pod"])
    assert new_claim_info(claim).drivers == {DRIVER: [], "b.example.com": []}
