"""State machine of two instances of a driver and the kubelet: which messages keep pods right.

The kubelet's cache is that of the fake kubelet, which follows the kubelet's code; the devices that a stream
sends are selected by the agent's feed. tests/models/HealthStreams.tla is the same protocol for TLC.
"""

from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kubelet.health import DeviceHealth as CachedHealth
from kubelet.health import HealthCache

from agent.model.health import DeviceHealth, Health, Severity
from agent.model.time import NS, Instant
from agent.serve.health.service import EXTRA_LEASE_S, HealthFeed

DRIVER, POOL, DEVICE = "gpu.example.com", "node-a", "gpu-0"
LEASE_S = 30
TICK_S = 10
RUN_LEASE_S = 4
NAMES = {Health.HEALTHY: "Healthy", Health.UNHEALTHY: "Unhealthy", Health.UNKNOWN: "Unknown"}


@dataclass(frozen=True)
class Messages:
    """Orders of messages that the instances keep."""

    only_newest_sends: bool = True
    repeats_after_end: bool = True
    sends_unknown: bool = True
    salts_lease: bool = True
    salts_unused: bool = False


@dataclass(frozen=True)
class FixedKubelet:
    """Fixes of the kubelet that are not merged: pull requests 140842 and 140883."""

    authority: bool = False
    expiry: bool = False


PLAIN = Messages(False, False, False, False)


class Instance:
    """One instance of the driver, with its feed and at most one health stream."""

    def __init__(self, number, messages):
        self.messages = messages
        self.run_lease_s = RUN_LEASE_S * number if messages.salts_lease else 0
        self.feed = HealthFeed(self._encode)
        self.extra_s = self.salt_s = 0
        self.is_hung = self.has_stream = self.has_sent = False
        self.sent_number = 0
        self.evaluated_s = 0
        self.reading = Health.HEALTHY
        self.verified_s = -1
        self.last = None
        """Health that was sent last on the present stream, and its time."""
        self._pending = []

    def _encode(self, devices, extra_lease_s):
        self._pending = [device._replace(timeout_s=device.timeout_s + extra_lease_s) for device in devices]
        return [b"list"]

    def evaluate(self, now_s, stalled):
        """Publish the verdict on the device to the feed, as each heartbeat does."""
        if self.messages.salts_lease and now_s - self.evaluated_s > LEASE_S:
            self.salt_s = 1 - self.salt_s
        self.evaluated_s = now_s
        if not stalled:
            self.verified_s = now_s
        health = Health.UNKNOWN if stalled and self.messages.sends_unknown else self.reading
        at = Instant(self.verified_s * NS, 0.0)
        lease_s = LEASE_S + self.salt_s + self.run_lease_s
        self.feed.publish(
            [DeviceHealth(POOL, DEVICE, "gpu", health, Severity.OK, "", at, at, lease_s, driver=DRIVER)]
        )

    def next_messages(self, *, repeats=False):
        """Return what the stream sends now."""
        self._pending = []
        self.feed.pending_messages(0 if repeats else self.sent_number, self.extra_s)
        self.sent_number = self.feed.number
        return self._pending

    def open_stream(self):
        self.has_stream, self.sent_number, self.last = True, 0, None

    def end_stream(self):
        if self.has_stream and self.messages.salts_lease and (self.has_sent or self.messages.salts_unused):
            self.extra_s = EXTRA_LEASE_S - self.extra_s
        self.has_stream = self.has_sent = False
        self.last = None


class HealthStreams(RuleBasedStateMachine):
    """Rules: what can happen to hardware, instances, kubelet and time. Invariants: what pods must show."""

    messages = Messages()
    kubelet_fixes = FixedKubelet()
    may_hang = True

    @initialize()
    def begin(self):
        self.now_s = 0
        self.stalled = False
        self.kubelet_runs = True
        self.truth = Health.HEALTHY
        self.pod = "Unknown"
        self.cache = HealthCache(None, lambda: self.now_s * NS)
        self.instances = [Instance(0, self.messages)]
        self.ended = []
        self.instances[0].open_stream()
        self.beat(self.instances[0])

    # --- helpers -------------------------------------------------------------------------------------------

    @property
    def newest(self):
        return self.instances[-1]

    @property
    def entry(self):
        return next(iter(self.cache.devices(DRIVER)), None)

    def read(self):
        return self.cache.get(DRIVER, POOL, DEVICE).health

    def beat(self, instance, *, repeats=False):
        """Let an instance read its sources, evaluate, and send what is pending."""
        if instance.is_hung:
            return
        instance.evaluate(self.now_s, self.stalled)
        if not instance.has_stream or (self.messages.only_newest_sends and instance is not self.newest):
            return
        for device in instance.next_messages(repeats=repeats):
            instance.last, instance.has_sent = (NAMES[device.health], self.now_s), True
            if self.kubelet_fixes.authority and instance is not self.newest:
                continue
            known = CachedHealth(POOL, DEVICE, NAMES[device.health], lease_ns=device.timeout_s * NS)
            for changed in self.cache.update(DRIVER, [known]):
                self.pod = changed.health

    # --- rules ---------------------------------------------------------------------------------------------

    @rule()
    def break_hardware(self):
        self.truth = Health.UNHEALTHY

    @rule(index=st.integers(0, 1))
    def read_hardware(self, index):
        instance = self.instances[index % len(self.instances)]
        if not instance.is_hung and not self.stalled:
            instance.reading = self.truth
            self.beat(instance)

    @rule()
    def stall_sources(self):
        self.stalled = True
        self.beat(self.newest)

    @rule()
    def resume_sources(self):
        self.stalled = False
        self.beat(self.newest)

    @precondition(lambda self: self.may_hang and not self.newest.is_hung)
    @rule()
    def hang(self):
        self.newest.is_hung = True

    @precondition(lambda self: self.newest.is_hung)
    @rule()
    def resume(self):
        self.newest.is_hung = False
        self.beat(self.newest)

    @precondition(lambda self: self.kubelet_runs and len(self.instances) == 1 and not self.ended)
    @rule()
    def start_second_instance(self):
        self.instances.append(Instance(1, self.messages))
        self.newest.reading, self.newest.evaluated_s = self.truth, self.now_s
        self.newest.open_stream()
        self.beat(self.newest)

    @precondition(lambda self: len(self.instances) == 2)
    @rule()
    def end_first_instance(self):
        self.ended.append(self.instances.pop(0))
        if self.ended[0].has_stream and not self.kubelet_fixes.authority:
            self.cache.clear(DRIVER)
        if self.messages.repeats_after_end:
            self.beat(self.newest, repeats=True)

    @precondition(lambda self: self.kubelet_runs)
    @rule()
    def sync_pod(self):
        self.pod = self.read()

    @precondition(lambda self: self.kubelet_runs)
    @rule()
    def crash_kubelet(self):
        self.kubelet_runs = False
        for instance in self.instances:
            instance.end_stream()

    @precondition(lambda self: not self.kubelet_runs)
    @rule(crashes_again=st.booleans())
    def start_kubelet(self, crashes_again):
        self.kubelet_runs = True
        self.pod = self.read()
        for instance in self.instances:
            instance.open_stream()
        if crashes_again:  # before the first list
            self.crash_kubelet()
            return
        for other_instance in self.instances:
            self.beat(other_instance, repeats=True)

    @rule(ticks=st.integers(1, 6))
    def pass_time(self, ticks):
        for _ in range(ticks):
            self.now_s += TICK_S
            entry = self.entry
            if self.kubelet_fixes.expiry and entry is not None and entry.stale(self.now_s * NS):
                self.pod = "Unknown"
            for instance in self.instances:
                self.beat(instance)


class Authority(HealthStreams):
    """Pods get the verdict that the newest instance sent last."""

    @invariant()
    def newest_decides(self):
        instance = self.newest
        if self.kubelet_runs and instance.has_stream and instance.last and not instance.is_hung:
            assert self.read() == instance.last[0] or self.now_s - instance.last[1] > LEASE_S, "140818"


class Expiry(HealthStreams):
    """No pod shows a verdict whose lease has ended."""

    @invariant()
    def pod_is_unknown_after_the_lease(self):
        if self.kubelet_runs and self.entry is not None and self.entry.stale(self.now_s * NS):
            assert self.pod == "Unknown", "140819"


class Refresh(HealthStreams):
    """A pod shows what was sent on the present stream, as long as it is valid."""

    @invariant()
    def pod_shows_the_valid_entry(self):
        instance, entry = self.newest, self.entry
        if not (
            self.kubelet_runs and instance.last and entry and instance.has_stream and not instance.is_hung
        ):
            return
        if entry.updated_ns == instance.last[1] * NS and not entry.stale(self.now_s * NS):
            assert self.pod == entry.health


def run(machine, messages, *, may_hang=True, fixes=FixedKubelet(), examples=150):
    """Run a state machine with the same random choices every time."""
    chosen = type(
        machine.__name__,
        (machine,),
        {"messages": messages, "may_hang": may_hang, "kubelet_fixes": fixes},
    )
    run_state_machine_as_test(
        chosen,
        settings=settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=examples,
            phases=(Phase.generate,),
            stateful_step_count=20,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        ),
    )


def run_until_violated(machine, messages, text=None, **options):
    """Run a state machine until its invariant is violated."""
    with pytest.raises(AssertionError, match=text):
        run(machine, messages, examples=3000, **options)


def test_older_instance_decides_with_plain_messages():
    run_until_violated(Authority, PLAIN, "140818")


def test_ended_lease_stays_in_the_pod_with_plain_messages():
    run_until_violated(Expiry, PLAIN, "140819", may_hang=False)


@pytest.mark.parametrize("machine", [Authority, Refresh])
def test_our_messages_keep_pods_right_through_hangs_and_crashes(machine):
    run(machine, Messages())


def test_our_messages_leave_no_ended_lease_in_a_pod_without_a_hang():
    run(Expiry, Messages(), may_hang=False)


@pytest.mark.parametrize(
    ("machine", "order"),
    [
        (Authority, "only_newest_sends"),
        (Authority, "repeats_after_end"),
        (Expiry, "sends_unknown"),
        (Refresh, "salts_lease"),
    ],
)
def test_messages_without_one_ordering_rule_violate_an_invariant(machine, order):
    run_until_violated(machine, replace(Messages(), **{order: False}), may_hang=machine is not Expiry)


def test_lease_change_by_a_stream_without_lists_leaves_the_pod_unknown():
    run_until_violated(Refresh, replace(Messages(), salts_unused=True))


def test_fixed_kubelet_needs_no_order_of_messages():
    fixes = FixedKubelet(authority=True, expiry=True)
    run(Authority, PLAIN, fixes=fixes)
    run(Expiry, PLAIN, fixes=fixes)
