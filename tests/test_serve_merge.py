"""Partial lists and leases, as the kubelet understands them."""

from wire.serving import at

from agent.model.health import DeviceHealth, Health
from agent.serve.grpc.gen.health_v1 import v1
from agent.serve.health.merge import Merge


def listed(
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


def devices(merge: Merge, second: int) -> dict[str, DeviceHealth]:
    merge.expire(at(second))
    return {one.device: one for one in merge.report(at(second)).devices}


def test_before_the_first_list_nothing_is_known_and_nothing_expires() -> None:
    merge = Merge()
    assert (devices(merge, 1), merge.expires_in_s(at(1))) == ({}, None)


def test_the_lease_counts_from_receipt_whatever_the_peer_says_of_the_time() -> None:
    merge = Merge()
    merge.take(listed("a"), at(100))
    assert devices(merge, 109)["a"].health is Health.HEALTHY
    assert devices(merge, 110)["a"].health is Health.UNKNOWN
    assert devices(merge, 110)["a"].verified.wall_s == 1_600_000_000


def test_a_heartbeat_renews_the_lease_and_changes_nothing_else() -> None:
    merge = Merge()
    merge.take(listed("a"), at(100))
    merge.take(listed("a"), at(109))
    assert devices(merge, 118)["a"].health is Health.HEALTHY
    assert devices(merge, 118)["a"].since == at(100)


def test_a_device_that_is_left_out_keeps_its_own_lease() -> None:
    merge = Merge()
    merge.take(listed("a", timeout_s=10), at(100))
    merge.take(listed("b", timeout_s=30), at(105))
    assert [one.health for one in devices(merge, 112).values()] == [Health.UNKNOWN, Health.HEALTHY]


def test_an_expired_device_stays_unknown_until_it_is_named_again() -> None:
    merge = Merge()
    merge.take(listed("a"), at(100))
    assert devices(merge, 500)["a"].health is Health.UNKNOWN
    assert merge.expires_in_s(at(500)) is None
    merge.take(listed("a"), at(501))
    assert (devices(merge, 502)["a"].health, devices(merge, 502)["a"].since) == (Health.HEALTHY, at(501))


def test_the_next_lease_to_run_out_is_known() -> None:
    merge = Merge()
    merge.take(listed("a", timeout_s=30), at(100))
    merge.take(listed("b", timeout_s=10), at(102))
    assert merge.expires_in_s(at(104)) == 8
    assert merge.expires_in_s(at(999)) == 0


def test_of_contradicting_entries_the_last_counts() -> None:
    merge = Merge()
    merge.take(v1.NodeWatchResourcesResponse(listed("a").devices + listed("a", health=2).devices), at(100))
    assert devices(merge, 101)["a"].health is Health.UNHEALTHY
