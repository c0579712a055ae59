"""Pending devices of a subscriber: all that changed or were read again, and none whose old verdict would be
renewed.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from wire.serving import DRIVER, at, device, unhealthy

from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.serve.health.service import HealthFeed, HealthPublisher, HealthSubscriber, HealthSubscribers
from agent.system.threads.latest_value import LatestValue


def ns_before_now(age_s: float) -> int:
    """Return the monotonic time of so many seconds before now [ns]."""
    return time.monotonic_ns() - int(age_s * NS)


class Encoder:
    """Encoder that makes one message per list with devices and leases, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, devices: Sequence[DeviceHealth], extra_s: int) -> list[bytes]:
        self.calls += 1
        return [(",".join(entry.device for entry in devices) + "+" * extra_s).encode()]


def test_feed_before_first_report_has_nothing_pending() -> None:
    feed = HealthFeed(Encoder())
    assert (feed.number, feed.pending_messages(0)) == (0, ())


def test_new_subscriber_gets_full_list() -> None:
    feed = HealthFeed(Encoder())
    feed.publish([device("a"), device("b")])
    feed.publish([device("a"), device("b", verified=2)])
    assert feed.pending_messages(0) == (b"a,b",)


def test_device_without_new_reading_is_not_pending() -> None:
    feed = HealthFeed(Encoder())
    number = feed.publish([device("a"), device("b")])
    feed.publish([device("a"), device("b", verified=2)])
    assert feed.pending_messages(number) == (b"b",)


def test_report_without_new_readings_is_not_pending() -> None:
    encoder = Encoder()
    feed = HealthFeed(encoder)
    number = feed.publish([device("a"), device("b")])
    feed.publish([device("a"), device("b")])
    assert feed.pending_messages(number) == ()
    assert encoder.calls == 0


@pytest.mark.parametrize(
    "changed",
    [
        unhealthy("a"),
        device("a", severity=Severity.DEGRADED, message="cpu.throttled: 12 events"),
        device("a", timeout_s=31),
    ],
    ids=["health", "message", "timeout"],
)
def test_changed_verdict_without_reading_is_pending(changed: DeviceHealth) -> None:
    feed = HealthFeed(Encoder())
    number = feed.publish([device("a"), device("b")])
    feed.publish([changed, device("b")])
    assert feed.pending_messages(number) == (b"a",)


def test_unknown_device_is_pending_in_every_report() -> None:
    feed = HealthFeed(Encoder())
    unknown = device("a", health=Health.UNKNOWN, severity=Severity.UNKNOWN, message="cpu.unreadable: EIO")
    for _ in range(3):
        number = feed.publish([unknown, device("b")])
        assert feed.pending_messages(number - 1)[0].split(b",")[0] == b"a"
    assert feed.pending_messages(number - 1) == (b"a",)


def test_change_invisible_to_kubelet_is_not_pending() -> None:
    feed = HealthFeed(Encoder())
    number = feed.publish([device("a")])
    feed.publish([device("a", since=at(9), kind="other")])
    assert feed.pending_messages(number) == ()


def test_returning_device_is_pending() -> None:
    feed = HealthFeed(Encoder())
    feed.publish([device("a"), device("b")])
    number = feed.publish([device("b")])
    feed.publish([device("a"), device("b")])
    assert feed.pending_messages(number) == (b"a",)


def test_subscribers_at_same_number_share_one_encoding() -> None:
    encoder = Encoder()
    feed = HealthFeed(encoder)
    number = feed.publish([device("a")])
    feed.publish([device("a", verified=2)])
    for _ in range(64):
        feed.pending_messages(number)
        feed.pending_messages(0)
    assert encoder.calls == 2


def test_longer_leases_are_encoded_separately() -> None:
    feed = HealthFeed(Encoder())
    feed.publish([device("a")])
    assert [feed.pending_messages(0, extra) for extra in (0, 1, 0)] == [(b"a",), (b"a+",), (b"a",)]


def test_encoded_list_is_dropped_at_next_publication() -> None:
    feed = HealthFeed(Encoder())
    feed.publish([device("a")])
    assert feed.pending_messages(0) == (b"a",)
    feed.publish([device("b")])
    assert feed.pending_messages(0) == (b"b",)


def test_publish_duplicate_device_raises_and_keeps_feed() -> None:
    feed = HealthFeed(Encoder())
    feed.publish([device("a")])
    with pytest.raises(ValueError, match="'a' of pool 'node-a' twice"):
        feed.publish([device("a"), device("b"), unhealthy("a")])
    assert (feed.number, feed.pending_messages(0)) == (1, (b"a",))


def test_same_name_in_two_pools_is_two_devices() -> None:
    feed = HealthFeed(Encoder())
    feed.publish([device("a"), device("a")._replace(pool="other")])
    assert feed.pending_messages(0) == (b"a,a",)


NAMES = ("a", "b", "c")
VERDICTS = st.builds(
    lambda name, verified, health, message: device(name, verified=verified, health=health, message=message),
    st.sampled_from(NAMES),
    st.integers(0, 3),
    st.sampled_from(Health),
    st.sampled_from(["", "x"]),
)
REPORTS = st.lists(VERDICTS, max_size=3, unique_by=lambda entry: entry.device)


@given(st.lists(st.tuples(REPORTS, st.booleans()), max_size=12))
def test_skipped_publications_lose_no_device(
    reports: list[tuple[list[DeviceHealth], bool]],
) -> None:
    """A subscriber with any subset of the lists knows every device of the last report."""
    sent: list[DeviceHealth] = []

    def encode(devices: Sequence[DeviceHealth], extra_s: int) -> list[bytes]:
        sent[:] = devices
        return [b"list"]

    feed = HealthFeed(encode)
    known: dict[str, DeviceHealth] = {}
    number_read = 0
    for devices, reads in [*reports, ([device("a")], True)]:
        number = feed.publish(devices)
        if not reads:
            continue
        if feed.pending_messages(number_read):
            known |= {entry.device: entry for entry in sent}
        number_read = number
        assert [known[entry.device] for entry in devices] == devices


def test_new_stream_gets_no_list_after_the_end_of_a_lease() -> None:
    async def messages_after(age_s: float) -> tuple[bytes, ...] | None:
        subscribers = HealthSubscribers(Encoder())
        publish(subscribers, [device("a", timeout_s=60), device("b", timeout_s=0)], ns_before_now(age_s))
        return subscribers._pending_lists(HealthSubscriber(None)).messages  # type: ignore[arg-type]

    assert asyncio.run(messages_after(0.0))  # the machine may take a while
    assert not asyncio.run(messages_after(30.0))


class SentLists:
    """Lists that streams were sent, by the stream's name, in place of gRPC streams whose clients read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lists: dict[str, list[bytes]] = {}
        monkeypatch.setattr("agent.serve.health.service.send_message_nowait", self._send_nowait)
        monkeypatch.setattr("agent.serve.health.service.send_shared_message", self._send)
        monkeypatch.setattr("agent.serve.health.service.idle_stream", lambda *_: None)

    def _send_nowait(self, stream: str, message: bytes) -> bool:
        self.lists.setdefault(stream, []).append(message)
        return True

    async def _send(self, stream: str, message: bytes, held: Sequence[bytes]) -> None:
        self._send_nowait(stream, message)


@pytest.fixture
def sent_lists(monkeypatch: pytest.MonkeyPatch) -> SentLists:
    return SentLists(monkeypatch)


def publish(subscribers: HealthSubscribers, devices: Sequence[DeviceHealth], evaluated_ns: int) -> None:
    """Publish devices and send them on all streams."""
    subscribers.publish(devices, evaluated_ns)
    subscribers.send_to_waiting()


@contextlib.asynccontextmanager
async def open_stream(subscribers: HealthSubscribers, name: str) -> AsyncIterator[None]:
    """Serve a stream until it has been sent what is pending, and to the end of the block."""
    task = asyncio.create_task(subscribers.serve(HealthSubscriber(name)))  # type: ignore[arg-type]
    for _ in range(5):  # the task sends, lets the loop run once, and waits
        await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()


@pytest.mark.parametrize("is_new", [True, False], ids=["opened", "sent-again"])
def test_withheld_full_list_is_sent_with_the_next_report(sent_lists: SentLists, is_new: bool) -> None:
    """The next report has no new reading of ``slow``, as while its check runs every 20 min."""

    async def run() -> None:
        subscribers = HealthSubscribers(Encoder())
        old = [device("fast", timeout_s=30), device("slow", timeout_s=3600)]
        publish(subscribers, old, ns_before_now(40 if is_new else 0))
        async with open_stream(subscribers, "stream"):
            if not is_new:
                assert sent_lists.lists.pop("stream") == [b"fast,slow"]
                publish(subscribers, old, ns_before_now(40))  # nothing was read again
                subscribers.resend_all()
            assert sent_lists.lists == {}
            publish(subscribers, [device("fast", verified=2), old[1]], ns_before_now(0))
            publish(subscribers, [device("fast", verified=3), old[1]], ns_before_now(0))
            assert sent_lists.lists == {"stream": [b"fast,slow", b"fast"]}

    asyncio.run(run())


def test_old_healthy_verdict_does_not_begin_its_lease_again(sent_lists: SentLists) -> None:
    """The process was stopped between the evaluation and the sending."""

    async def run() -> None:
        subscribers = HealthSubscribers(Encoder())
        names = ["fast", "slow", "broken"]
        publish(subscribers, [device(name, timeout_s=30) for name in names], ns_before_now(0))
        async with open_stream(subscribers, "stream"):
            assert sent_lists.lists.pop("stream") == [b"fast,slow,broken"]
            broken = unhealthy("broken")._replace(timeout_s=30)
            old = [device("fast", verified=2, timeout_s=30), device("slow", verified=2, timeout_s=60), broken]
            publish(subscribers, old, ns_before_now(16))
            assert sent_lists.lists.pop("stream") == [b"slow,broken"]
            publish(subscribers, [device("fast", verified=3, timeout_s=30), *old[1:]], ns_before_now(0))
            assert sent_lists.lists == {"stream": [b"fast"]}

    asyncio.run(run())


def test_stream_of_a_publisher_that_starts_late_gets_no_ended_leases(sent_lists: SentLists) -> None:
    """The publisher begins with the last report of a core that has hung since."""

    async def run() -> None:
        latest: LatestValue[Report] = LatestValue()
        latest.publish(Report("node-a", Instant(ns_before_now(40), 0.0), (device("a", timeout_s=30),)))
        publisher = HealthPublisher(latest, Encoder(), [DRIVER])
        task = asyncio.create_task(publisher.run())
        await latest.wait_newer(0)
        subscribers = publisher.subscribers_of(DRIVER)
        async with open_stream(subscribers, "stream"):
            assert subscribers._feed.number == 1
            assert sent_lists.lists == {}
        task.cancel()

    asyncio.run(run())


UNKNOWN = device("a", health=Health.UNKNOWN, severity=Severity.UNKNOWN, message="agent.failed", timeout_s=1)


def test_new_stream_gets_old_report_only_if_all_devices_are_unknown() -> None:
    feed = HealthFeed(Encoder())
    feed.publish([UNKNOWN])
    assert feed.is_current(1e6)
    feed.publish([UNKNOWN, device("b", timeout_s=30)])
    assert [feed.is_current(age_s) for age_s in (29.9, 30.0)] == [True, False]


def test_unknown_devices_of_a_last_report_are_sent_again(sent_lists: SentLists) -> None:
    """No report follows that of a failed core, and the kubelet forgets the reason when the lease ends."""

    async def run() -> None:
        latest: LatestValue[Report] = LatestValue()
        latest.publish(Report("node-a", Instant(ns_before_now(3600), 0.0), (UNKNOWN,)))
        publisher = HealthPublisher(latest, Encoder(), [DRIVER])
        task = asyncio.create_task(publisher.run())
        await latest.wait_newer(0)
        async with open_stream(publisher.subscribers_of(DRIVER), "stream"), asyncio.timeout(PATIENCE_S):
            while len(sent_lists.lists.get("stream", [])) < 3:  # noqa: ASYNC110  # a plain function adds lists
                await asyncio.sleep(0.01)
        assert set(sent_lists.lists["stream"]) == {b"a"}
        task.cancel()

    asyncio.run(run())


def test_report_is_repeatable_until_half_of_the_smallest_lease() -> None:
    feed = HealthFeed(Encoder())
    assert not feed.is_repeatable(0.0), "no device"
    feed.publish([device("a", timeout_s=60), device("b", timeout_s=0)])
    assert [feed.is_repeatable(age_s) for age_s in (0.0, 14.9, 15.0, 29.0)] == [True, True, False, False]
    feed.publish([device("a", timeout_s=60)])
    assert [feed.is_repeatable(age_s) for age_s in (29.9, 30.0)] == [True, False]
