"""Merging of partial health lists and leases, as in the kubelet."""

from wire.serving import at

from agent.model.health import DeviceHealth, Health
from agent.serve.agent_api.client import StreamHealth
from agent.serve.grpc.gen.health_v1 import v1


def health_list(
    *names: str, health: int = 1, message: str = "", timeout_s: int = 10
) -> v1.NodeWatchResourcesResponse:
    return v1.NodeWatchResourcesResponse(
        [
            v1.DeviceHealth(
                device=v1.DeviceIdentifier("pool", name),
                health=v1.HealthStatus(health),
                last_updated_time=1_600_000_000,
                health_check_timeout_seconds=timeout_s,
                message=message,
            )
            for name in names
        ]
    )


def devices(merged: StreamHealth, now_s: int) -> dict[str, DeviceHealth]:
    merged.expire(at(now_s))
    return {device.device: device for device in merged.report(at(now_s)).devices}


def test_merged_health_before_first_list_is_empty() -> None:
    merged = StreamHealth()
    assert (devices(merged, 1), merged.expires_in_s(at(1))) == ({}, None)


def test_lease_counts_from_receipt_not_from_peer_time() -> None:
    merged = StreamHealth()
    merged.update(health_list("a"), at(100))
    assert devices(merged, 109)["a"].health is Health.HEALTHY
    assert devices(merged, 110)["a"].health is Health.UNKNOWN
    assert devices(merged, 110)["a"].verified.wall_s == 1_600_000_000


def test_heartbeat_renews_lease_and_keeps_since() -> None:
    merged = StreamHealth()
    merged.update(health_list("a"), at(100))
    merged.update(health_list("a"), at(109))
    assert devices(merged, 118)["a"].health is Health.HEALTHY
    assert devices(merged, 118)["a"].since == at(100)


def test_omitted_device_keeps_its_lease() -> None:
    merged = StreamHealth()
    merged.update(health_list("a", timeout_s=10), at(100))
    merged.update(health_list("b", timeout_s=30), at(105))
    assert [device.health for device in devices(merged, 112).values()] == [Health.UNKNOWN, Health.HEALTHY]


def test_expired_device_is_unknown_until_next_report() -> None:
    merged = StreamHealth()
    merged.update(health_list("a"), at(100))
    assert devices(merged, 500)["a"].health is Health.UNKNOWN
    assert merged.expires_in_s(at(500)) is None
    merged.update(health_list("a"), at(501))
    assert (devices(merged, 502)["a"].health, devices(merged, 502)["a"].since) == (Health.HEALTHY, at(501))


def test_expires_in_returns_time_of_next_lease_end() -> None:
    merged = StreamHealth()
    merged.update(health_list("a", timeout_s=30), at(100))
    merged.update(health_list("b", timeout_s=10), at(102))
    assert merged.expires_in_s(at(104)) == 8
    assert merged.expires_in_s(at(999)) == 0


def test_duplicate_entries_last_one_counts() -> None:
    merged = StreamHealth()
    merged.update(
        v1.NodeWatchResourcesResponse(health_list("a").devices + health_list("a", health=2).devices), at(100)
    )
    assert devices(merged, 101)["a"].health is Health.UNHEALTHY
