"""How the fake kubelet processes health lists, by the cases of upstream's own tests.

Tests name upstream's test and case: kubelet ``cm/dra/{healthinfo,manager}_test.go``. TestWithLock and
TestWithRLock test Go's locks and are not covered. Cases that upstream lacks have no such name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from kubelet import PreparedDevice, ResourceHealth, allocated_claim
from kubelet.claims import ClaimInfo, ClaimInfos, new_claim_info
from kubelet.health import DeviceHealth, HealthCache, cut_message, read_device
from kubelet.history import Changed, Cleared, History, NotificationDropped, PodsNotified
from kubelet.pace import NS
from kubelet.status import allocated_resources, resource_health
from kubelet.streams import NOTIFICATIONS, HealthManager
from kubelet.versions import VERSIONS
from wire.google import message_class

DRIVER: Final = "a.example.com"
NOW: Final = VERSIONS["1.37"]
HEALTHY: Final = DeviceHealth("pool", "gpu-0", "Healthy", lease_ns=30 * NS)
UNHEALTHY: Final = DeviceHealth("pool", "gpu-0", "Unhealthy", lease_ns=30 * NS)


class ManualClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000 * NS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def cache(tmp_path: Path, clock: ManualClock) -> HealthCache:
    return HealthCache(tmp_path / "dra_health_state", clock)


def health(cache: HealthCache, device: str = "gpu-0", *, driver: str = DRIVER, pool: str = "pool") -> str:
    return cache.get(driver, pool, device).health


def entry(name: str = "gpu-0", **fields: Any) -> Any:
    """Returns an entry of a health list."""
    return message_class("v1", "DeviceHealth")(
        device={"pool_name": "pool", "device_name": name}, **{"health": 1} | fields
    )


def health_of(changed: list[DeviceHealth]) -> list[tuple[str, str]]:
    return [(device.device, device.health) for device in changed]


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
def test_cache_with_a_corrupt_file_starts_empty(tmp_path: Path, clock: ManualClock, text: str | None) -> None:
    file = tmp_path / "state"
    if text is not None:
        file.write_text(text)
    assert health(HealthCache(file, clock)) == "Unknown"


def test_health_is_valid_until_the_lease_expires(cache: HealthCache, clock: ManualClock) -> None:
    """TestGetHealthInfo"""
    assert health(cache) == "Unknown"
    cache.update(DRIVER, [HEALTHY])
    assert health(cache) == "Healthy"
    clock.advance(31)
    assert health(cache) == "Unknown"


LOOKUPS: Final[Mapping[str, tuple[str, float, dict[str, str], str]]] = {
    "device_exists_and_is_healthy": ("Healthy", 0, {}, "Healthy"),
    "device_exists_and_is_unhealthy": ("Unhealthy", 0, {}, "Unhealthy"),
    "device_exists_but_timed_out": ("Healthy", 31, {}, "Unknown"),
    "device_exists,_just_within_timeout": ("Healthy", 30, {}, "Healthy"),
    "device_does_not_exist,_just_outside_of_timeout": ("Healthy", 31, {"device": "gpu-1"}, "Unknown"),
    "device_does_not_exist": ("Healthy", 0, {"device": "gpu-1"}, "Unknown"),
    "driver_does_not_exist": ("Healthy", 0, {"driver": "b.example.com"}, "Unknown"),
    "pool_does_not_exist": ("Healthy", 0, {"pool": "pool2"}, "Unknown"),
}


@pytest.mark.parametrize(
    ("stored", "elapsed_s", "query", "expected"),
    [pytest.param(*case, id=f"TestGetHealthInfoRobust/{name}") for name, case in LOOKUPS.items()],
)
def test_get_returns_the_valid_health_of_a_device(
    cache: HealthCache,
    clock: ManualClock,
    stored: str,
    elapsed_s: float,
    query: dict[str, str],
    expected: str,
) -> None:
    cache.update(DRIVER, [DeviceHealth("pool", "gpu-0", stored, lease_ns=30 * NS)])
    clock.advance(elapsed_s)
    assert health(cache, **query) == expected


def test_devices_are_distinguished_by_driver_pool_and_name(cache: HealthCache) -> None:
    """TestGetHealthInfoRobust/{empty_cache,multiple_devices}"""
    assert health(cache) == "Unknown"
    cache.update(DRIVER, [HEALTHY, DeviceHealth("pool", "gpu-1", "Unhealthy")])
    assert (health(cache), health(cache, "gpu-1")) == ("Healthy", "Unhealthy")


def test_update_returns_the_changed_devices(cache: HealthCache, clock: ManualClock, tmp_path: Path) -> None:
    """TestUpdateHealthInfo, its six steps in one cache"""
    assert health_of(cache.update(DRIVER, [HEALTHY])) == [("gpu-0", "Healthy")]
    assert cache.update(DRIVER, [HEALTHY]) == []
    assert health_of(cache.update(DRIVER, [UNHEALTHY])) == [("gpu-0", "Unhealthy")]
    clock.advance(60)
    second = DeviceHealth("pool", "gpu-1", "Healthy", lease_ns=30 * NS)
    assert health_of(cache.update(DRIVER, [second])) == [("gpu-1", "Healthy"), ("gpu-0", "Unknown")]
    again = HealthCache(tmp_path / "dra_health_state", clock)
    assert (health(again, "gpu-1"), health(again)) == ("Healthy", "Unknown")
    cache.update(DRIVER, [DeviceHealth("pool", "gpu-2", "Unhealthy", lease_ns=30 * NS)])
    clock.advance(31)
    assert ("gpu-2", "Unknown") in health_of(cache.update(DRIVER, []))


def test_clear_forgets_only_one_driver(cache: HealthCache) -> None:
    """TestClearDriver"""
    cache.update(DRIVER, [HEALTHY])
    cache.update("b.example.com", [HEALTHY])
    cache.clear(DRIVER)
    assert (health(cache), health(cache, driver="b.example.com")) == ("Unknown", "Healthy")


def test_heartbeat_renews_the_lease_without_a_change(cache: HealthCache, clock: ManualClock) -> None:
    cache.update(DRIVER, [HEALTHY])
    for _ in range(5):
        clock.advance(25)
        assert cache.update(DRIVER, [HEALTHY]) == []
        assert health(cache) == "Healthy"
    assert cache.saves == 1


def test_late_heartbeat_restores_the_device_without_a_change(cache: HealthCache, clock: ManualClock) -> None:
    cache.update(DRIVER, [HEALTHY])
    clock.advance(45)
    assert health(cache) == "Unknown"
    assert cache.update(DRIVER, [HEALTHY]) == []
    assert health(cache) == "Healthy"


@pytest.mark.parametrize("field", ["health", "message", "lease_ns"])
def test_health_message_and_lease_each_make_a_change(cache: HealthCache, field: str) -> None:
    cache.update(DRIVER, [HEALTHY])
    other = {"health": "Unhealthy", "message": "hot", "lease_ns": 31 * NS}[field]
    fields = {"health": "Healthy", "message": "", "lease_ns": 30 * NS} | {field: other}
    assert len(cache.update(DRIVER, [DeviceHealth("pool", "gpu-0", **fields)])) == 1  # type: ignore[arg-type]


def test_device_missing_in_a_list_stays_until_its_lease_expires(
    cache: HealthCache, clock: ManualClock
) -> None:
    other = DeviceHealth("pool", "gpu-1", "Healthy", lease_ns=100 * NS, message="fine")
    cache.update(DRIVER, [HEALTHY, other])
    clock.advance(90)
    cache.update(DRIVER, [HEALTHY])
    assert (health(cache), health(cache, "gpu-1")) == ("Healthy", "Healthy")
    clock.advance(20)
    assert health_of(cache.update(DRIVER, [HEALTHY])) == [("gpu-1", "Unknown")]
    assert cache.get(DRIVER, "pool", "gpu-1").message == ""
    assert cache.update(DRIVER, [HEALTHY]) == []


def test_contradicting_entries_in_one_list_are_always_changes(cache: HealthCache) -> None:
    for _ in range(3):
        assert health_of(cache.update(DRIVER, [HEALTHY, UNHEALTHY]))[-1] == ("gpu-0", "Unhealthy")
        assert health(cache) == "Unhealthy"
    assert cache.saves == 3


def test_cache_file_has_the_kubelets_format(cache: HealthCache, tmp_path: Path) -> None:
    cache.update(DRIVER, [HEALTHY])
    assert json.loads((tmp_path / "dra_health_state").read_text()) == {
        DRIVER: {
            "Devices": {
                "pool/gpu-0": {
                    "PoolName": "pool",
                    "DeviceName": "gpu-0",
                    "Health": "Healthy",
                    "LastUpdated": "2023-11-14T22:13:20.000000000Z",
                    "HealthCheckTimeout": 30_000_000_000,
                    "Message": "",
                }
            }
        }
    }


def test_message_cut_within_a_character_differs_after_a_restart(
    cache: HealthCache, clock: ManualClock, tmp_path: Path
) -> None:
    cut = cut_message(700 * "\u00e9")
    device = DeviceHealth("pool", "gpu-0", "Unhealthy", lease_ns=30 * NS, message=cut)
    cache.update(DRIVER, [device])
    assert cache.update(DRIVER, [device]) == []
    again = HealthCache(tmp_path / "dra_health_state", clock)
    assert len(again.update(DRIVER, [device])) == 1


# --- from the wire: manager_test.go ---------------------------------------------------------------------


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
def test_message_is_cut_at_1024_bytes(length: int, expected: int) -> None:
    cut = cut_message("x" * length)
    assert len(cut) == expected
    assert cut == ("x" * length if length <= 1024 else "x" * 1021 + "...")


def test_cut_message_keeps_its_beginning() -> None:
    """TestTruncateHealthMessage/meaningful"""
    assert cut_message("gpu.xid.79: " + 1100 * "y").startswith("gpu.xid.79: yyy")


def test_message_is_cut_between_any_two_bytes() -> None:
    cut = cut_message("x" + 700 * "\u00e9")
    assert cut.encode(errors="surrogateescape") == b"x" + 510 * b"\xc3\xa9" + b"..."
    assert cut_message(700 * "\u00e9").encode(errors="surrogateescape") == 510 * b"\xc3\xa9" + b"\xc3..."


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        pytest.param(0, "Unknown", id="TestToDeviceHealthStatus/unknown"),
        pytest.param(1, "Healthy", id="TestToDeviceHealthStatus/healthy"),
        pytest.param(2, "Unhealthy", id="TestToDeviceHealthStatus/unhealthy"),
        pytest.param(99, "Unknown", id="TestToDeviceHealthStatus/unexpected"),
    ],
)
def test_undefined_health_number_is_unknown(number: int, expected: str) -> None:
    assert read_device(entry(health=number), NOW).health == expected


@pytest.mark.parametrize(
    ("seconds", "expected_s"),
    [
        pytest.param(10, 10, id="TestBuildDeviceHealth/positive"),
        pytest.param(0, 30, id="TestBuildDeviceHealth/zero"),
        pytest.param(-5, 30, id="TestBuildDeviceHealth/negative"),
        pytest.param(86_400, 86_400, id="a_day"),
    ],
)
def test_lease_of_zero_or_less_is_30_s(seconds: int, expected_s: int) -> None:
    assert read_device(entry(health_check_timeout_seconds=seconds), NOW).lease_ns == expected_s * NS


def test_lease_of_300_years_overflows_and_is_expired(cache: HealthCache) -> None:
    cache.update(DRIVER, [read_device(entry(health_check_timeout_seconds=10_000_000_000), NOW)])
    assert health(cache) == "Unknown"


def test_time_from_the_plugin_is_ignored(cache: HealthCache, clock: ManualClock) -> None:
    cache.update(DRIVER, [read_device(entry(last_updated_time=1), NOW)])
    assert cache.get(DRIVER, "pool", "gpu-0").updated_ns == clock()


def test_missing_names_are_accepted_and_match_no_device(cache: HealthCache) -> None:
    nameless = message_class("v1", "DeviceHealth")(health=2)
    cache.update(DRIVER, [read_device(nameless, NOW)])
    assert [device.key for device in cache.devices(DRIVER)] == ["/"]


@pytest.mark.parametrize(
    ("version", "lease_s", "message"), [("1.34", 30, ""), ("1.35", 7, ""), ("1.36", 7, "hot")]
)
def test_older_kubelets_ignore_newer_fields(version: str, lease_s: int, message: str) -> None:
    device = read_device(entry(health_check_timeout_seconds=7, message="hot"), VERSIONS[version])
    assert (device.lease_ns, device.message) == (lease_s * NS, message)


# --- notification of pods -------------------------------------------------------------------------------


class HealthManagerSetup:
    """A health manager with claims whose devices the driver returned."""

    def __init__(self, directory: Path, clock: ManualClock) -> None:
        self.history = History()
        self.cache = HealthCache(directory / "health", clock)
        self.claims = ClaimInfos(directory / "claims")
        self.manager = HealthManager(self.cache, self.claims, NOW, self.history)

    def claim(self, name: str, *pods: str, device: str = "gpu-0", share_id: str = "") -> None:
        drivers = {DRIVER: [PreparedDevice("pool", device, ("gpu",), (), share_id)]}
        with self.claims.locked() as infos:
            infos["default", name] = ClaimInfo("default", name, f"uid-{name}", set(pods), drivers)

    def update(self, *entries: Any) -> None:
        self.manager.update(DRIVER, message_class("v1", "NodeWatchResourcesResponse")(devices=entries))

    @property
    def notified(self) -> list[set[str]]:
        return [set(entry.pods) for entry in self.history.of(PodsNotified)]


@pytest.fixture
def setup(tmp_path: Path, clock: ManualClock) -> HealthManagerSetup:
    return HealthManagerSetup(tmp_path, clock)


def test_change_of_an_allocated_device_notifies_its_pod(setup: HealthManagerSetup) -> None:
    """TestHandleWatchResourcesStream/HealthChangeForAllocatedDevice"""
    setup.claim("c", "pod")
    setup.update(entry(health=2))
    assert setup.notified == [{"pod"}]
    assert setup.manager.updates.get_nowait() == {"pod"}


def test_change_of_an_unused_device_notifies_no_pod(setup: HealthManagerSetup) -> None:
    """TestHandleWatchResourcesStream/NonAllocatedDeviceChange"""
    setup.claim("c", "pod", device="gpu-1")
    setup.update(entry(health=2))
    assert setup.notified == []
    assert [one.health for one in setup.history.of(Changed)] == ["Unhealthy"]


def test_repeated_list_notifies_no_pod(setup: HealthManagerSetup) -> None:
    """TestHandleWatchResourcesStream/NoActualStateChange"""
    setup.claim("c", "pod")
    for _ in range(3):
        setup.update(entry(health=2))
    assert setup.notified == [{"pod"}]


def test_share_of_a_device_is_ignored(setup: HealthManagerSetup) -> None:
    """TestHandleWatchResourcesStream/HealthChangeForDeviceWithShareID"""
    setup.claim("c", "pod", share_id="one")
    setup.claim("d", "other", share_id="two")
    setup.update(entry(health=2))
    assert setup.notified == [{"pod", "other"}]


def test_change_notifies_all_pods_of_a_shared_claim_together(setup: HealthManagerSetup) -> None:
    """TestHandleWatchResourcesStream/HealthChangeForMultiplePodsWithSharedDevice"""
    setup.claim("c", "pod", "other")
    setup.update(entry(health=2))
    assert setup.notified == [{"pod", "other"}]


def test_end_of_a_stream_clears_and_notifies_no_pod(setup: HealthManagerSetup) -> None:
    setup.claim("c", "pod")
    setup.update(entry(health=2))
    setup.manager.clear(DRIVER)
    assert health(setup.cache) == "Unknown"
    assert setup.history.of(Cleared) == [Cleared(DRIVER)]
    assert len(setup.notified) == 1


def test_101st_queued_notification_is_lost(setup: HealthManagerSetup) -> None:
    setup.claim("c", "pod")
    for number in range(NOTIFICATIONS + 1):
        setup.update(entry(message=f"{number}"))
    assert len(setup.notified) == NOTIFICATIONS
    assert setup.history.of(NotificationDropped) == [NotificationDropped(frozenset({"pod"}))]


def test_expired_device_is_a_change_of_the_next_list(setup: HealthManagerSetup, clock: ManualClock) -> None:
    setup.claim("c", "pod")
    setup.update(entry())
    clock.advance(31)
    assert len(setup.notified) == 1
    setup.update(entry("gpu-1"))
    assert setup.notified == [{"pod"}, {"pod"}]


# --- in a pod's status ----------------------------------------------------------------------------------


def claim_of(*devices: PreparedDevice) -> ClaimInfo:
    return ClaimInfo("default", "c", "uid-c", {"pod"}, {DRIVER: list(devices)})


@pytest.mark.parametrize("share_id", ["", "one"], ids=["direct", "ShareID"])
def test_container_status_names_the_claim_as_in_the_pod(cache: HealthCache, share_id: str) -> None:
    """TestUpdateAllocatedResourcesStatus/{direct,renamed,ShareID}; templates are left out"""
    cache.update(DRIVER, [UNHEALTHY])
    info = claim_of(PreparedDevice("pool", "gpu-0", ("gpu",), ("example.com/gpu=0",), share_id))
    found = allocated_resources(["mine"], {"mine": info}, cache, messages=True)
    assert found == {"claim:mine": (ResourceHealth("example.com/gpu=0", "Unhealthy"),)}


@pytest.mark.parametrize(
    ("use", "shown"),
    [
        pytest.param("mine/gpu/big", True, id="base_match"),
        pytest.param("mine/nic/big", False, id="other_base"),
        pytest.param("mine/gpu", True, id="base_request"),
        pytest.param("mine", True, id="empty_request"),
    ],
)
def test_subrequest_shows_the_devices_of_its_request(cache: HealthCache, use: str, shown: bool) -> None:
    """TestUpdateAllocatedResourcesStatus_Subrequest"""
    info = claim_of(PreparedDevice("pool", "gpu-0", ("gpu",), ()))
    found = allocated_resources([use], {"mine": info}, cache, messages=True)
    assert list(found) == ([f"claim:{use}"] if shown else [])


def test_only_the_first_device_with_a_cdi_id_is_shown(cache: HealthCache) -> None:
    cache.update(DRIVER, [HEALTHY, DeviceHealth("pool", "gpu-1", "Unhealthy")])
    shared = ("example.com/claim=c",)
    info = claim_of(
        PreparedDevice("pool", "gpu-0", ("gpu",), shared), PreparedDevice("pool", "gpu-1", (), shared)
    )
    found = allocated_resources(["mine"], {"mine": info}, cache, messages=True)
    assert found == {"claim:mine": (ResourceHealth(shared[0], "Healthy"),)}


@pytest.mark.parametrize(
    ("stored", "messages", "ids", "expected"),
    [
        pytest.param(("Healthy", "ok"), True, ("x/y=0",), ("x/y=0", "Healthy", "ok"), id="message_on"),
        pytest.param(("Healthy", "ok"), False, ("x/y=0",), ("x/y=0", "Healthy", ""), id="message_off"),
        pytest.param(("Healthy", ""), True, ("x/y=0",), ("x/y=0", "Healthy", ""), id="message_empty"),
        pytest.param(
            ("Unhealthy", "hot"), True, ("x/y=0", "z"), ("x/y=0", "Unhealthy", "hot"), id="unhealthy"
        ),
        pytest.param(("Unknown", ""), True, ("x/y=0",), ("x/y=0", "Unknown", ""), id="unknown"),
        pytest.param(
            ("Healthy", ""), True, (), (f"{DRIVER}/pool/gpu-0", "Healthy", ""), id="resource_id_fallback"
        ),
    ],
)
def test_pod_status_shows_the_health_of_a_device(
    stored: tuple[str, str], messages: bool, ids: tuple[str, ...], expected: tuple[str, str, str]
) -> None:
    """TestBuildResourceHealth, TestToResourceHealthStatus"""
    device, known = (
        PreparedDevice("pool", "gpu-0", (), ids),
        DeviceHealth("pool", "gpu-0", stored[0], message=stored[1]),
    )
    assert resource_health(DRIVER, device, known, messages) == expected


# --- the stored state of claims -------------------------------------------------------------------------


def test_restart_keeps_a_claim_without_its_prepared_flag(tmp_path: Path) -> None:
    claims = ClaimInfos(tmp_path / "claims")
    info = claim_of(PreparedDevice("pool", "gpu-0", ("gpu",), ("example.com/gpu=0",), "share"))
    info.prepared = True
    with claims.locked() as infos:
        infos["default", "c"] = info
        claims.save()
    with ClaimInfos(tmp_path / "claims").locked() as infos:
        kept = infos["default", "c"]
    assert (kept.pods, kept.drivers, kept.prepared) == (info.pods, info.drivers, False)


def test_new_claim_has_every_driver_of_its_allocation() -> None:
    devices = [
        ("a", DRIVER, "pool", "gpu-0"),
        ("b", "b.example.com", "pool", "nic-0"),
        ("c", DRIVER, "pool", "x"),
    ]
    claim = allocated_claim("c", "uid-c", *devices, pods=["pod"])
    assert new_claim_info(claim).drivers == {DRIVER: [], "b.example.com": []}
