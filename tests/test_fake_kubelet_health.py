"""What the fake kubelet makes of health lists, by the cases of upstream's own tests.

Each is named by upstream's test and case: kubelet ``cm/dra/{healthinfo,manager}_test.go``. TestWithLock and
TestWithRLock are of Go's locks and have no counterpart. Cases that upstream lacks have none of its names.
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


class Hands:
    """A clock that stands still until it is put forward."""

    def __init__(self) -> None:
        self.at_ns = 1_700_000_000 * NS

    def __call__(self) -> int:
        return self.at_ns

    def advance(self, seconds: float) -> None:
        self.at_ns += int(seconds * NS)


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def cache(tmp_path: Path, hands: Hands) -> HealthCache:
    return HealthCache(tmp_path / "dra_health_state", hands)


def health(cache: HealthCache, device: str = "gpu-0", *, driver: str = DRIVER, pool: str = "pool") -> str:
    return cache.get(driver, pool, device).health


def entry(name: str = "gpu-0", **fields: Any) -> Any:
    """One of a health list on the wire."""
    return message_class("v1", "DeviceHealth")(
        device={"pool_name": "pool", "device_name": name}, **{"health": 1} | fields
    )


def said(changed: list[DeviceHealth]) -> list[tuple[str, str]]:
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
def test_a_cache_begins_empty_whatever_is_wrong_with_its_file(
    tmp_path: Path, hands: Hands, text: str | None
) -> None:
    file = tmp_path / "state"
    if text is not None:
        file.write_text(text)
    assert health(HealthCache(file, hands)) == "Unknown"


def test_a_device_is_believed_until_its_lease_is_over(cache: HealthCache, hands: Hands) -> None:
    """TestGetHealthInfo"""
    assert health(cache) == "Unknown"
    cache.update(DRIVER, [HEALTHY])
    assert health(cache) == "Healthy"
    hands.advance(31)
    assert health(cache) == "Unknown"


ROBUST: Final[Mapping[str, tuple[str, float, dict[str, str], str]]] = {
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
    ("held", "later_s", "asked", "expected"),
    [pytest.param(*case, id=f"TestGetHealthInfoRobust/{name}") for name, case in ROBUST.items()],
)
def test_what_is_believed_of_a_device(
    cache: HealthCache, hands: Hands, held: str, later_s: float, asked: dict[str, str], expected: str
) -> None:
    cache.update(DRIVER, [DeviceHealth("pool", "gpu-0", held, lease_ns=30 * NS)])
    hands.advance(later_s)
    assert health(cache, **asked) == expected


def test_devices_are_told_apart(cache: HealthCache) -> None:
    """TestGetHealthInfoRobust/{empty_cache,multiple_devices}"""
    assert health(cache) == "Unknown"
    cache.update(DRIVER, [HEALTHY, DeviceHealth("pool", "gpu-1", "Unhealthy")])
    assert (health(cache), health(cache, "gpu-1")) == ("Healthy", "Unhealthy")


def test_what_counts_as_a_change(cache: HealthCache, hands: Hands, tmp_path: Path) -> None:
    """TestUpdateHealthInfo, its six steps in one cache"""
    assert said(cache.update(DRIVER, [HEALTHY])) == [("gpu-0", "Healthy")]
    assert cache.update(DRIVER, [HEALTHY]) == []
    assert said(cache.update(DRIVER, [UNHEALTHY])) == [("gpu-0", "Unhealthy")]
    hands.advance(60)
    second = DeviceHealth("pool", "gpu-1", "Healthy", lease_ns=30 * NS)
    assert said(cache.update(DRIVER, [second])) == [("gpu-1", "Healthy"), ("gpu-0", "Unknown")]
    again = HealthCache(tmp_path / "dra_health_state", hands)
    assert (health(again, "gpu-1"), health(again)) == ("Healthy", "Unknown")
    cache.update(DRIVER, [DeviceHealth("pool", "gpu-2", "Unhealthy", lease_ns=30 * NS)])
    hands.advance(31)
    assert ("gpu-2", "Unknown") in said(cache.update(DRIVER, []))


def test_a_cleared_driver_is_forgotten_and_the_others_are_not(cache: HealthCache) -> None:
    """TestClearDriver"""
    cache.update(DRIVER, [HEALTHY])
    cache.update("b.example.com", [HEALTHY])
    cache.clear(DRIVER)
    assert (health(cache), health(cache, driver="b.example.com")) == ("Unknown", "Healthy")


def test_a_heartbeat_renews_the_lease_and_changes_nothing(cache: HealthCache, hands: Hands) -> None:
    cache.update(DRIVER, [HEALTHY])
    for _ in range(5):
        hands.advance(25)
        assert cache.update(DRIVER, [HEALTHY]) == []
        assert health(cache) == "Healthy"
    assert cache.saves == 1


def test_a_late_heartbeat_brings_the_device_back_and_tells_nobody(cache: HealthCache, hands: Hands) -> None:
    cache.update(DRIVER, [HEALTHY])
    hands.advance(45)
    assert health(cache) == "Unknown"
    assert cache.update(DRIVER, [HEALTHY]) == []
    assert health(cache) == "Healthy"


@pytest.mark.parametrize("field", ["health", "message", "lease_ns"])
def test_each_of_three_fields_makes_a_change(cache: HealthCache, field: str) -> None:
    cache.update(DRIVER, [HEALTHY])
    other = {"health": "Unhealthy", "message": "hot", "lease_ns": 31 * NS}[field]
    fields = {"health": "Healthy", "message": "", "lease_ns": 30 * NS} | {field: other}
    assert len(cache.update(DRIVER, [DeviceHealth("pool", "gpu-0", **fields)])) == 1  # type: ignore[arg-type]


def test_what_a_list_leaves_out_stays_until_its_own_lease_is_over(cache: HealthCache, hands: Hands) -> None:
    other = DeviceHealth("pool", "gpu-1", "Healthy", lease_ns=100 * NS, message="fine")
    cache.update(DRIVER, [HEALTHY, other])
    hands.advance(90)
    cache.update(DRIVER, [HEALTHY])
    assert (health(cache), health(cache, "gpu-1")) == ("Healthy", "Healthy")
    hands.advance(20)
    assert said(cache.update(DRIVER, [HEALTHY])) == [("gpu-1", "Unknown")]
    assert cache.get(DRIVER, "pool", "gpu-1").message == ""
    assert cache.update(DRIVER, [HEALTHY]) == []


def test_contradicting_entries_of_one_list_are_changes_every_time(cache: HealthCache) -> None:
    for _ in range(3):
        assert said(cache.update(DRIVER, [HEALTHY, UNHEALTHY]))[-1] == ("gpu-0", "Unhealthy")
        assert health(cache) == "Unhealthy"
    assert cache.saves == 3


def test_the_file_is_what_the_kubelet_writes(cache: HealthCache, tmp_path: Path) -> None:
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


def test_a_message_cut_within_a_character_is_another_one_after_a_restart(
    cache: HealthCache, hands: Hands, tmp_path: Path
) -> None:
    cut = cut_message(700 * "\u00e9")
    device = DeviceHealth("pool", "gpu-0", "Unhealthy", lease_ns=30 * NS, message=cut)
    cache.update(DRIVER, [device])
    assert cache.update(DRIVER, [device]) == []
    again = HealthCache(tmp_path / "dra_health_state", hands)
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
def test_a_message_is_cut_at_1024_bytes(length: int, expected: int) -> None:
    cut = cut_message("x" * length)
    assert len(cut) == expected
    assert cut == ("x" * length if length <= 1024 else "x" * 1021 + "...")


def test_the_beginning_of_a_cut_message_stays() -> None:
    """TestTruncateHealthMessage/meaningful"""
    assert cut_message("gpu.xid.79: " + 1100 * "y").startswith("gpu.xid.79: yyy")


def test_a_message_is_cut_between_any_two_bytes() -> None:
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
def test_a_number_that_nobody_knows_is_unknown(number: int, expected: str) -> None:
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
def test_a_lease_of_nothing_or_less_is_30_s(seconds: int, expected_s: int) -> None:
    assert read_device(entry(health_check_timeout_seconds=seconds), NOW).lease_ns == expected_s * NS


def test_a_lease_of_300_years_is_over_at_once(cache: HealthCache) -> None:
    cache.update(DRIVER, [read_device(entry(health_check_timeout_seconds=10_000_000_000), NOW)])
    assert health(cache) == "Unknown"


def test_the_time_that_the_plugin_names_does_not_matter(cache: HealthCache, hands: Hands) -> None:
    cache.update(DRIVER, [read_device(entry(last_updated_time=1), NOW)])
    assert cache.get(DRIVER, "pool", "gpu-0").updated_ns == hands()


def test_names_that_are_missing_are_accepted_and_match_nothing(cache: HealthCache) -> None:
    nameless = message_class("v1", "DeviceHealth")(health=2)
    cache.update(DRIVER, [read_device(nameless, NOW)])
    assert [device.key for device in cache.devices(DRIVER)] == ["/"]


@pytest.mark.parametrize(
    ("version", "lease_s", "message"), [("1.34", 30, ""), ("1.35", 7, ""), ("1.36", 7, "hot")]
)
def test_older_kubelets_do_not_know_the_younger_fields(version: str, lease_s: int, message: str) -> None:
    device = read_device(entry(health_check_timeout_seconds=7, message="hot"), VERSIONS[version])
    assert (device.lease_ns, device.message) == (lease_s * NS, message)


# --- to the pods ----------------------------------------------------------------------------------------


class Managed:
    """A manager of health, with claims whose devices were returned by the driver."""

    def __init__(self, directory: Path, hands: Hands) -> None:
        self.history = History()
        self.cache = HealthCache(directory / "health", hands)
        self.claims = ClaimInfos(directory / "claims")
        self.manager = HealthManager(self.cache, self.claims, NOW, self.history)

    def claim(self, name: str, *pods: str, device: str = "gpu-0", share_id: str = "") -> None:
        drivers = {DRIVER: [PreparedDevice("pool", device, ("gpu",), (), share_id)]}
        with self.claims.locked() as infos:
            infos["default", name] = ClaimInfo("default", name, f"uid-{name}", set(pods), drivers)

    def take(self, *entries: Any) -> None:
        self.manager.take(DRIVER, message_class("v1", "NodeWatchResourcesResponse")(devices=entries))

    @property
    def notified(self) -> list[set[str]]:
        return [set(entry.pods) for entry in self.history.of(PodsNotified)]


@pytest.fixture
def managed(tmp_path: Path, hands: Hands) -> Managed:
    return Managed(tmp_path, hands)


def test_a_change_of_an_allocated_device_is_told_to_its_pod(managed: Managed) -> None:
    """TestHandleWatchResourcesStream/HealthChangeForAllocatedDevice"""
    managed.claim("c", "pod")
    managed.take(entry(health=2))
    assert managed.notified == [{"pod"}]
    assert managed.manager.updates.get_nowait() == {"pod"}


def test_a_change_of_a_device_that_nobody_uses_is_told_to_nobody(managed: Managed) -> None:
    """TestHandleWatchResourcesStream/NonAllocatedDeviceChange"""
    managed.claim("c", "pod", device="gpu-1")
    managed.take(entry(health=2))
    assert managed.notified == []
    assert [one.health for one in managed.history.of(Changed)] == ["Unhealthy"]


def test_the_same_once_more_is_told_to_nobody(managed: Managed) -> None:
    """TestHandleWatchResourcesStream/NoActualStateChange"""
    managed.claim("c", "pod")
    for _ in range(3):
        managed.take(entry(health=2))
    assert managed.notified == [{"pod"}]


def test_the_share_of_a_device_does_not_matter(managed: Managed) -> None:
    """TestHandleWatchResourcesStream/HealthChangeForDeviceWithShareID"""
    managed.claim("c", "pod", share_id="one")
    managed.claim("d", "other", share_id="two")
    managed.take(entry(health=2))
    assert managed.notified == [{"pod", "other"}]


def test_all_pods_of_a_shared_claim_are_told_at_once(managed: Managed) -> None:
    """TestHandleWatchResourcesStream/HealthChangeForMultiplePodsWithSharedDevice"""
    managed.claim("c", "pod", "other")
    managed.take(entry(health=2))
    assert managed.notified == [{"pod", "other"}]


def test_the_end_of_a_stream_clears_and_tells_no_pod(managed: Managed) -> None:
    managed.claim("c", "pod")
    managed.take(entry(health=2))
    managed.manager.forget(DRIVER)
    assert health(managed.cache) == "Unknown"
    assert managed.history.of(Cleared) == [Cleared(DRIVER)]
    assert len(managed.notified) == 1


def test_the_hundred_and_first_notification_is_lost(managed: Managed) -> None:
    managed.claim("c", "pod")
    for number in range(NOTIFICATIONS + 1):
        managed.take(entry(message=f"{number}"))
    assert len(managed.notified) == NOTIFICATIONS
    assert managed.history.of(NotificationDropped) == [NotificationDropped(frozenset({"pod"}))]


def test_a_device_that_runs_out_is_told_with_the_next_list(managed: Managed, hands: Hands) -> None:
    managed.claim("c", "pod")
    managed.take(entry())
    hands.advance(31)
    assert len(managed.notified) == 1
    managed.take(entry("gpu-1"))
    assert managed.notified == [{"pod"}, {"pod"}]


# --- in a pod's status ----------------------------------------------------------------------------------


def claim_of(*devices: PreparedDevice) -> ClaimInfo:
    return ClaimInfo("default", "c", "uid-c", {"pod"}, {DRIVER: list(devices)})


@pytest.mark.parametrize("share_id", ["", "one"], ids=["direct", "ShareID"])
def test_a_container_shows_what_it_uses_by_the_pods_name_of_the_claim(
    cache: HealthCache, share_id: str
) -> None:
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
def test_a_subrequest_shows_what_its_request_got(cache: HealthCache, use: str, shown: bool) -> None:
    """TestUpdateAllocatedResourcesStatus_Subrequest"""
    info = claim_of(PreparedDevice("pool", "gpu-0", ("gpu",), ()))
    found = allocated_resources([use], {"mine": info}, cache, messages=True)
    assert list(found) == ([f"claim:{use}"] if shown else [])


def test_of_devices_with_one_first_cdi_id_only_the_first_is_shown(cache: HealthCache) -> None:
    cache.update(DRIVER, [HEALTHY, DeviceHealth("pool", "gpu-1", "Unhealthy")])
    shared = ("example.com/claim=c",)
    info = claim_of(
        PreparedDevice("pool", "gpu-0", ("gpu",), shared), PreparedDevice("pool", "gpu-1", (), shared)
    )
    found = allocated_resources(["mine"], {"mine": info}, cache, messages=True)
    assert found == {"claim:mine": (ResourceHealth(shared[0], "Healthy"),)}


@pytest.mark.parametrize(
    ("held", "messages", "ids", "expected"),
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
def test_what_is_shown_of_a_device(
    held: tuple[str, str], messages: bool, ids: tuple[str, ...], expected: tuple[str, str, str]
) -> None:
    """TestBuildResourceHealth, TestToResourceHealthStatus"""
    device, known = (
        PreparedDevice("pool", "gpu-0", (), ids),
        DeviceHealth("pool", "gpu-0", held[0], message=held[1]),
    )
    assert resource_health(DRIVER, device, known, messages) == expected


# --- what is noted of claims ----------------------------------------------------------------------------


def test_a_claim_survives_the_kubelet_and_its_prepared_flag_does_not(tmp_path: Path) -> None:
    claims = ClaimInfos(tmp_path / "claims")
    info = claim_of(PreparedDevice("pool", "gpu-0", ("gpu",), ("example.com/gpu=0",), "share"))
    info.prepared = True
    with claims.locked() as infos:
        infos["default", "c"] = info
        claims.save()
    with ClaimInfos(tmp_path / "claims").locked() as infos:
        kept = infos["default", "c"]
    assert (kept.pods, kept.drivers, kept.prepared) == (info.pods, info.drivers, False)


def test_a_new_claim_has_every_driver_of_its_allocation() -> None:
    devices = [
        ("a", DRIVER, "pool", "gpu-0"),
        ("b", "b.example.com", "pool", "nic-0"),
        ("c", DRIVER, "pool", "x"),
    ]
    claim = allocated_claim("c", "uid-c", *devices, pods=["pod"])
    assert new_claim_info(claim).drivers == {DRIVER: [], "b.example.com": []}
