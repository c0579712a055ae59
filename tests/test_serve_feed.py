"""What a subscriber is owed: everything that is news to it, and nothing that would renew an old verdict."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire.serving import at, device, sick

from agent.model.health import DeviceHealth, Health, Severity
from agent.serve.health.feed import Feed


class Encoder:
    """Stands in for the core's: one message per list, naming devices and leases; counts its work."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, devices: Sequence[DeviceHealth], extra_s: int) -> list[bytes]:
        self.calls += 1
        return [(",".join(one.device for one in devices) + "+" * extra_s).encode()]


def test_before_the_first_report_nobody_is_owed_anything() -> None:
    feed = Feed(Encoder())
    assert (feed.number, feed.pending_for(0)) == (0, ())


def test_a_new_subscriber_gets_the_full_list() -> None:
    feed = Feed(Encoder())
    feed.publish([device("a"), device("b")])
    feed.publish([device("a"), device("b", verified=2)])
    assert feed.pending_for(0) == (b"a,b",)


def test_a_device_that_was_not_verified_again_is_not_sent_again() -> None:
    feed = Feed(Encoder())
    number = feed.publish([device("a"), device("b")])
    feed.publish([device("a"), device("b", verified=2)])
    assert feed.pending_for(number) == (b"b",)


def test_if_nothing_was_verified_nothing_is_sent() -> None:
    encoder = Encoder()
    feed = Feed(encoder)
    number = feed.publish([device("a"), device("b")])
    feed.publish([device("a"), device("b")])
    assert feed.pending_for(number) == ()
    assert encoder.calls == 0


@pytest.mark.parametrize(
    "changed",
    [
        sick("a"),
        device("a", severity=Severity.DEGRADED, message="cpu.throttled: 12 events"),
        device("a", timeout_s=31),
    ],
    ids=["health", "message", "timeout"],
)
def test_a_changed_verdict_is_sent_though_nothing_was_verified(changed: DeviceHealth) -> None:
    feed = Feed(Encoder())
    number = feed.publish([device("a"), device("b")])
    feed.publish([changed, device("b")])
    assert feed.pending_for(number) == (b"a",)


def test_unknown_is_sent_every_time_for_it_needs_no_reading() -> None:
    feed = Feed(Encoder())
    unknown = device("a", health=Health.UNKNOWN, severity=Severity.UNKNOWN, message="cpu.unreadable: EIO")
    for _ in range(3):
        number = feed.publish([unknown, device("b")])
        assert feed.pending_for(number - 1)[0].split(b",")[0] == b"a"
    assert feed.pending_for(number - 1) == (b"a",)


def test_what_the_kubelet_does_not_see_is_no_news() -> None:
    feed = Feed(Encoder())
    number = feed.publish([device("a")])
    feed.publish([device("a", since=at(9), kind="other")])
    assert feed.pending_for(number) == ()


def test_a_device_that_comes_back_is_news() -> None:
    feed = Feed(Encoder())
    feed.publish([device("a"), device("b")])
    number = feed.publish([device("b")])
    feed.publish([device("a"), device("b")])
    assert feed.pending_for(number) == (b"a",)


def test_subscribers_that_are_equally_far_cost_one_encoding() -> None:
    encoder = Encoder()
    feed = Feed(encoder)
    number = feed.publish([device("a")])
    feed.publish([device("a", verified=2)])
    for _ in range(64):
        feed.pending_for(number)
        feed.pending_for(0)
    assert encoder.calls == 2


def test_longer_leases_are_another_list_of_the_same_devices() -> None:
    feed = Feed(Encoder())
    feed.publish([device("a")])
    assert [feed.pending_for(0, extra) for extra in (0, 1, 0)] == [(b"a",), (b"a+",), (b"a",)]


def test_a_list_never_outlives_its_publication() -> None:
    feed = Feed(Encoder())
    feed.publish([device("a")])
    assert feed.pending_for(0) == (b"a",)
    feed.publish([device("b")])
    assert feed.pending_for(0) == (b"b",)


def test_a_device_named_twice_is_our_mistake_and_is_named() -> None:
    feed = Feed(Encoder())
    feed.publish([device("a")])
    with pytest.raises(ValueError, match="'a' of pool 'node-a' twice"):
        feed.publish([device("a"), device("b"), sick("a")])
    assert (feed.number, feed.pending_for(0)) == (1, (b"a",))


def test_the_same_name_in_two_pools_is_two_devices() -> None:
    feed = Feed(Encoder())
    feed.publish([device("a"), device("a")._replace(pool="other")])
    assert feed.pending_for(0) == (b"a,a",)


NAMES = ("a", "b", "c")
VERDICTS = st.builds(
    lambda name, verified, health, message: device(name, verified=verified, health=health, message=message),
    st.sampled_from(NAMES),
    st.integers(0, 3),
    st.sampled_from(Health),
    st.sampled_from(["", "x"]),
)
REPORTS = st.lists(VERDICTS, max_size=3, unique_by=lambda one: one.device)


@given(st.lists(st.tuples(REPORTS, st.booleans()), max_size=12))
def test_however_many_publications_are_skipped_no_device_is_lost(
    days: list[tuple[list[DeviceHealth], bool]],
) -> None:
    """A subscriber that got any subset of the lists believes of every device what the last report says."""
    sent: list[DeviceHealth] = []

    def encode(devices: Sequence[DeviceHealth], extra_s: int) -> list[bytes]:
        sent[:] = devices
        return [b"list"]

    feed = Feed(encode)
    believed: dict[str, DeviceHealth] = {}
    got = 0
    for devices, reads in [*days, ([device("a")], True)]:
        number = feed.publish(devices)
        if not reads:
            continue
        if feed.pending_for(got):
            believed |= {one.device: one for one in sent}
        got = number
        assert [believed[one.device] for one in devices] == devices
