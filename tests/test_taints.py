"""Which taints follow from what is said of devices: spelling, quiet times, restarts, limits."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cli.checks.rows import groups
from agent.devices.taint_keys import MORE, RESERVED, UNMONITORED, Spot, spot_of
from agent.devices.taints import GONE, TaintPast, TaintPolicy, decide, domain_of, restore
from agent.errors import ConfigError
from agent.health.declared import devices as declared
from agent.health.gpu.xid.table import XIDS
from agent.health.state_machine import HEALTH
from agent.model.claim import DeviceRef
from agent.model.health import Blame, Cause, DeviceHealth, Severity
from agent.model.report import Report
from agent.model.settings import GpuLimits
from agent.model.taint import (
    SLICE_DEVICES_MAX,
    TAINTED_SLICE_DEVICES_MAX,
    TAINTS_MAX,
    Effect,
    Taint,
    Taints,
)
from agent.model.time import NS, Instant
from agent.prepare.taxonomy import TAXONOMY

DRIVER: Final = "gpu.example.com"
POOL: Final = "node-1"
GPU: Final = DeviceRef(DRIVER, POOL, "gpu-0")
BOOT_S: Final = 1_790_000_000
DEFAULT: Final = TaintPolicy()
PAGE: Final = Path(__file__).parent.parent / "docs" / "taints.md"
LABEL: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
"""As Kubernetes checks names and values of labels."""

Causes = Sequence[tuple[str, Severity]]


def at(seconds: float) -> Instant:
    return Instant(int(seconds * NS), BOOT_S + seconds)


def sick(causes: Causes, *, name: str = GPU.device, driver: str = DRIVER) -> DeviceHealth:
    """A device with these causes, worst first."""
    found = [Cause(code, severity, Blame.HARDWARE, "", "", at(0)) for code, severity in causes]
    worst = max((severity for _, severity in causes), default=Severity.OK)
    return DeviceHealth(
        POOL, name, "gpu", HEALTH[worst], worst, "", at(0), at(0), 30, causes=tuple(found), driver=driver
    )


def report(*devices: DeviceHealth, starting: bool = False, declaring: tuple[str, ...] = (DRIVER,)) -> Report:
    return Report("node-1", at(0), devices, declaring=declaring, starting=starting)


def bad(*codes: str) -> Causes:
    return [(code, Severity.UNHEALTHY) for code in codes]


WELL: Final[Causes] = []
XID: Final = bad("gpu.xid.79")
UNKNOWN: Final[Causes] = [("gpu.not_answering", Severity.UNKNOWN)]


class Life:
    """Decisions one after the other, about one device."""

    def __init__(self, policy: TaintPolicy = DEFAULT, past: TaintPast | None = None) -> None:
        self.policy = policy
        self.past = past or TaintPast()

    def see(self, seconds: float, *causes: Causes) -> tuple[Taint, ...]:
        """What is published of the device; it is gone when no causes are given, not even none."""
        return self.take(seconds, report(*(sick(one) for one in causes)))

    def take(self, seconds: float, said: Report) -> tuple[Taint, ...]:
        self.past = decide(self.past, said, DRIVER, self.policy, at(seconds))
        return self.past.taints.devices.get(GPU, ())

    def restarted(self, policy: TaintPolicy | None = None) -> "Life":
        policy = policy or self.policy
        return Life(policy, restore(self.past.kept, DRIVER, policy))


def taint(name: str, value: str = "", effect: Effect = Effect.NO_SCHEDULE, *, added: int = 0) -> Taint:
    return Taint(f"{DRIVER}/{name}", value, effect, BOOT_S + added)


# --- which taint a cause makes -----------------------------------------------------------------------------


class Made(NamedTuple):
    """A taint without its domain and time."""

    name: str
    value: str
    effect: Effect


NO_SCHEDULE, NO_EXECUTE, NONE = Effect.NO_SCHEDULE, Effect.NO_EXECUTE, Effect.NONE
EVICTING: Final = TaintPolicy(evict=frozenset({"gpu.lost", "gpu.xid.*"}))
SILENT: Final = TaintPolicy(inform=False)
MADE: Final[list[tuple[TaintPolicy, str, Severity, Made | None]]] = [
    (DEFAULT, "gpu.xid.79", Severity.UNHEALTHY, Made("xid", "79", NO_SCHEDULE)),
    (DEFAULT, "gpu.fabric.sxid.20034", Severity.UNHEALTHY, Made("sxid", "20034", NO_SCHEDULE)),
    (DEFAULT, "gpu.lost", Severity.UNHEALTHY, Made("gpu-lost", "", NO_SCHEDULE)),
    (DEFAULT, "gpu.ecc.uncorrectable", Severity.UNHEALTHY, Made("gpu.ecc.uncorrectable", "", NO_SCHEDULE)),
    (DEFAULT, "gpu.ecc.correctable_rate", Severity.DEGRADED, Made("gpu.ecc.correctable_rate", "", NONE)),
    (DEFAULT, "gpu.xid.63", Severity.DEGRADED, Made("xid", "63", NONE)),
    (DEFAULT, "gpu.xid.31", Severity.INFO, None),
    (DEFAULT, "gpu.not_answering", Severity.UNKNOWN, None),
    (DEFAULT, "fpga.bank_locked", Severity.UNHEALTHY, Made("fpga.bank_locked", "", NO_SCHEDULE)),
    (EVICTING, "gpu.xid.79", Severity.UNHEALTHY, Made("xid", "79", NO_EXECUTE)),
    (EVICTING, "gpu.lost", Severity.UNHEALTHY, Made("gpu-lost", "", NO_EXECUTE)),
    (EVICTING, "gpu.xid.63", Severity.DEGRADED, Made("xid", "63", NONE)),
    (EVICTING, "gpu.xidious", Severity.UNHEALTHY, Made("gpu.xidious", "", NO_SCHEDULE)),
    (EVICTING, "gpu.lost.again", Severity.UNHEALTHY, Made("gpu.lost.again", "", NO_SCHEDULE)),
    (SILENT, "gpu.xid.63", Severity.DEGRADED, None),
    (SILENT, "gpu.xid.79", Severity.UNHEALTHY, Made("xid", "79", NO_SCHEDULE)),
]


@pytest.mark.parametrize(("policy", "code", "severity", "made"), MADE)
def test_each_cause_makes_its_taint(
    policy: TaintPolicy, code: str, severity: Severity, made: Made | None
) -> None:
    expected = (taint(made.name, made.value, made.effect),) if made else ()
    assert Life(policy).see(0, [(code, severity)]) == expected


def test_two_xids_are_two_taints() -> None:
    assert Life().see(0, bad("gpu.xid.79", "gpu.xid.48")) == (taint("xid", "48"), taint("xid", "79"))


def test_a_lesser_cause_of_the_same_name_does_not_weaken_a_taint() -> None:
    causes = [("gpu.xid.48", Severity.DEGRADED), *bad("gpu.xid.48"), ("gpu.xid.48", Severity.DEGRADED)]
    assert Life().see(0, causes) == (taint("xid", "48"),)


def test_a_domain_of_ones_own_begins_every_key() -> None:
    life = Life(TaintPolicy(domain="health.example.com"))
    assert [one.key for one in life.see(0, XID)] == ["health.example.com/xid"]


def test_only_the_drivers_own_devices_are_tainted() -> None:
    others = sick(XID, driver="other.example.com"), sick(XID, driver="")
    life = Life()
    life.take(0, report(*others, sick(WELL)))
    assert life.past.taints == Taints({GPU: ()})


def test_a_driver_that_declares_nothing_has_the_hosts_own_devices() -> None:
    said = report(sick(XID, driver=""), sick(XID, driver="other.example.com", name="x"), declaring=())
    life = Life()
    assert life.take(0, said) == (taint("xid", "79"),)
    assert list(life.past.taints.devices) == [GPU]


def test_every_device_is_named_though_it_has_no_taint() -> None:
    life = Life()
    life.take(0, report(sick(WELL), sick(WELL, name="gpu-1")))
    assert life.past.taints.devices == {GPU: (), GPU._replace(device="gpu-1"): ()}


def test_any_taint_halves_the_slices_of_its_pool() -> None:
    life = Life()
    life.see(0, WELL)
    assert life.past.taints.slice_limit(POOL) == SLICE_DEVICES_MAX
    life.see(1, [("gpu.ecc.off", Severity.DEGRADED)])
    assert life.past.taints.slice_limit(POOL) == TAINTED_SLICE_DEVICES_MAX
    assert life.past.taints.slice_limit("another") == SLICE_DEVICES_MAX


# --- quiet times -------------------------------------------------------------------------------------------


def test_a_taint_goes_when_its_cause_was_gone_for_the_quiet_time() -> None:
    life = Life()
    life.see(0, XID)
    life.see(10, WELL)
    assert life.past.due_ns == 70 * NS
    assert life.see(69.999, WELL) == (taint("xid", "79"),)
    assert life.see(70, WELL) == ()
    assert life.past == TaintPast(Taints({GPU: ()}))


def test_a_cause_that_comes_back_in_time_never_left() -> None:
    life = Life()
    first = life.see(0, XID)
    life.see(10, WELL)
    assert life.see(69, XID) == first
    life.see(80, WELL)
    assert life.see(139, WELL) == first
    assert life.see(140, WELL) == ()
    assert life.see(141, XID) == (taint("xid", "79", added=141),)


def test_a_taint_grows_worse_at_once_and_better_after_the_quiet_time() -> None:
    life = Life()
    mild = [("gpu.nvlink.down", Severity.DEGRADED)]
    assert life.see(0, mild) == (taint("gpu.nvlink.down", effect=NONE),)
    worse = life.see(5, bad("gpu.nvlink.down"))
    assert worse == (taint("gpu.nvlink.down", added=5),)
    assert life.see(10, mild) == worse
    assert life.see(69, mild) == worse
    assert life.see(70, mild) == (taint("gpu.nvlink.down", effect=NONE, added=70),)


def test_while_nobody_can_look_no_taint_goes() -> None:
    life = Life(TaintPolicy(tell_unknown=False))
    first = life.see(0, XID)
    assert life.see(10, UNKNOWN) == first
    assert life.see(100_000, UNKNOWN) == first
    assert life.see(100_010, WELL) == first
    assert life.see(100_070, WELL) == ()


def test_while_nobody_can_look_evictions_stop_after_the_quiet_time() -> None:
    life = Life(TaintPolicy(evict=frozenset({"gpu.lost"}), tell_unknown=False))
    first = life.see(0, bad("gpu.lost"))
    assert first == (taint("gpu-lost", effect=NO_EXECUTE),)
    assert life.see(10, UNKNOWN) == first
    assert life.see(70, UNKNOWN) == (taint("gpu-lost", added=70),)


def test_a_cause_that_is_still_held_while_nobody_can_look_goes_on_evicting() -> None:
    life = Life(EVICTING)
    first = life.see(0, XID)
    unread = [*XID, ("source.stalled", Severity.UNKNOWN)]
    assert life.see(1000, unread) == first


def test_a_wall_clock_that_steps_moves_no_quiet_time() -> None:
    life = Life()
    life.see(0, XID)
    for mono_s, wall_s in ((10, 0), (69, 2_000_000_000)):
        life.past = decide(life.past, report(sick(WELL)), DRIVER, DEFAULT, Instant(mono_s * NS, wall_s))
        assert life.past.taints.devices[GPU] == (taint("xid", "79"),)


@given(st.lists(st.tuples(st.floats(0, 59.9), st.booleans(), st.booleans()), max_size=30))
def test_what_flaps_within_the_quiet_time_is_published_once(
    steps: list[tuple[float, bool, bool]],
) -> None:
    life = Life()
    first, seconds = life.see(0, XID), 0.0
    for pause_s, mild, unknown in steps:
        partly: Causes = [("gpu.xid.79", Severity.DEGRADED)] if mild else []
        life.see(seconds, [*partly, *(UNKNOWN if unknown else [])])
        assert life.see(seconds + pause_s, WELL) == first
        seconds += 60
        assert life.see(seconds - 0.05, XID) == first


# --- Unknown, starting, gone -------------------------------------------------------------------------------


def test_a_device_is_unmonitored_after_a_minute_of_unknown() -> None:
    life = Life()
    assert life.see(0, UNKNOWN) == ()
    assert life.past.due_ns == 60 * NS
    assert life.see(59.9, UNKNOWN) == ()
    assert life.see(60, UNKNOWN) == (taint("unmonitored", effect=NONE, added=60),)
    assert life.past.due_ns is None
    life.see(100, WELL)
    assert life.see(160, WELL) == ()


def test_a_minute_of_unknown_is_one_without_a_break() -> None:
    life = Life()
    life.see(0, UNKNOWN)
    life.see(50, WELL)
    life.see(51, UNKNOWN)
    assert life.see(110, UNKNOWN) == ()


@pytest.mark.parametrize("policy", [TaintPolicy(tell_unknown=False), SILENT])
def test_nobody_who_does_not_want_it_is_told_of_unmonitored_devices(policy: TaintPolicy) -> None:
    life = Life(policy)
    life.see(0, UNKNOWN)
    assert (life.see(1000, UNKNOWN), life.past.due_ns) == ((), None)


def test_a_report_that_is_starting_changes_nothing() -> None:
    life = Life()
    life.see(0, XID)
    before = life.past
    life.take(100, report(sick(UNKNOWN), starting=True))
    assert life.past is before


@pytest.mark.parametrize("gone", [(), ([(GONE, Severity.UNKNOWN)],)])
def test_a_device_that_is_gone_loses_its_taints(gone: Sequence[Causes]) -> None:
    life = Life()
    life.see(0, XID)
    life.see(1, *gone)
    life.see(60, *gone)
    assert GPU in life.past.taints.devices, "it may be back in a moment"
    life.see(61, *gone)
    assert life.past == TaintPast()


def test_the_code_of_gone_devices_is_that_of_the_rule() -> None:
    assert declared.GONE.code == GONE


# --- restarts ----------------------------------------------------------------------------------------------


def test_a_restart_keeps_when_a_taint_was_added() -> None:
    life = Life()
    first = life.see(0, XID)
    again = life.restarted()
    assert again.past.taints == Taints({GPU: first})
    assert again.see(500, UNKNOWN) == first
    assert again.see(510, XID) == first


def test_after_a_restart_a_cause_has_the_quiet_time_to_be_found_again() -> None:
    life = Life()
    first = life.see(0, XID)
    again = life.restarted()
    assert again.see(500, WELL) == first
    assert again.see(559, WELL) == first
    assert again.see(560, WELL) == ()


def test_a_device_that_is_seen_late_after_a_restart_keeps_its_taints() -> None:
    life = Life()
    first = life.see(0, XID)
    again = life.restarted()
    again.see(500)
    assert again.see(503, XID) == first


def test_what_the_policy_no_longer_allows_does_not_outlive_a_restart() -> None:
    life = Life()
    life.see(0, [*XID, ("gpu.ecc.off", Severity.DEGRADED)])
    assert life.restarted(SILENT).past.taints == Taints({GPU: (taint("xid", "79"),)})
    assert life.restarted(TaintPolicy(domain="other.example.com")).past == TaintPast()

    life = Life()
    life.see(0, UNKNOWN)
    life.see(60, UNKNOWN)
    assert life.restarted().past.taints.devices
    assert life.restarted(TaintPolicy(tell_unknown=False)).past == TaintPast()


def test_what_was_kept_of_another_drivers_device_is_left_out() -> None:
    other = DeviceRef("other.example.com", POOL, "gpu-0")
    assert restore(Taints({other: (taint("xid", "79"),)}), DRIVER, DEFAULT) == TaintPast()


def test_one_that_found_no_room_keeps_when_it_was_added_over_a_restart() -> None:
    life = Life()
    life.see(0, bad(*CODES[:17]))
    again = life.restarted()
    again.see(10, bad(CODES[16]))
    assert taint(CODES[16]) in again.see(70, bad(CODES[16]))


def test_a_taint_is_never_added_in_the_future() -> None:
    assert Life().see(0.9, XID) == (taint("xid", "79", added=0),)


# --- limits ------------------------------------------------------------------------------------------------

CODES: Final = [f"fpga.part_{number:02}" for number in range(20)]


def test_sixteen_causes_are_sixteen_taints() -> None:
    taints = Life().see(0, bad(*CODES[:16]))
    assert [one.key for one in taints] == [f"{DRIVER}/{code}" for code in CODES[:16]]


def test_of_more_the_worst_fifteen_are_told_and_that_there_are_more() -> None:
    life = Life()
    causes = [*((code, Severity.DEGRADED) for code in CODES[:16]), *bad("gpu.xid.79")]
    expected = [taint("xid", "79"), *(taint(code, effect=NONE) for code in CODES[:14])]
    assert life.see(0, causes) == (*expected, taint(MORE, effect=NONE))
    assert life.restarted().see(10, causes) == life.past.taints.devices[GPU]


def test_one_that_found_room_keeps_it_among_its_equals() -> None:
    life = Life()
    first = life.see(0, bad(*CODES[1:17]))
    after = life.see(1, bad(*CODES[:17]))
    assert after == (*first[:15], taint(MORE, effect=NONE, added=1))


def test_a_count_that_flaps_about_sixteen_is_published_once() -> None:
    life = Life()
    first = life.see(0, bad(*CODES[:17]))
    for seconds in range(10, 1000, 50):
        assert life.see(seconds, bad(*CODES[:16])) == first
        assert life.see(seconds + 25, bad(*CODES[:17])) == first


def test_where_none_may_be_told_of_the_worst_sixteen_are_published() -> None:
    taints = Life(SILENT).see(0, bad(*CODES))
    assert [one.key for one in taints] == [f"{DRIVER}/{code}" for code in CODES[:16]]


# --- what labels may hold ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["a" * 63, "Fpga.Bank_7-x", "gpu.xid.1234567890"])
def test_a_code_that_is_a_labels_name_is_the_name(code: str) -> None:
    assert spot_of(code, DRIVER) == Spot(f"{DRIVER}/{code}")


@pytest.mark.parametrize(
    ("code", "head"),
    [
        ("a" * 64, "a" * 54 + "-"),
        ("fpga bank", "fpga-bank-"),
        ("_x_", "x-"),
        ("", ""),
        (UNMONITORED, "unmonitored-"),
        (MORE, "more-causes-"),
        ("xid", "xid-"),
        ("gpu.xid.\u0663", "gpu.xid-"),
    ],
)
def test_a_code_that_is_none_or_means_something_else_ends_in_its_hash(code: str, head: str) -> None:
    digest = hashlib.sha256(code.encode()).hexdigest()[:8]
    assert spot_of(code, DRIVER) == Spot(f"{DRIVER}/{head}{digest}")


@given(st.text())
def test_every_code_makes_a_valid_label(code: str) -> None:
    for text in (code, f"gpu.xid.{code}", f"x{code}x"):
        key, value = spot_of(text, DRIVER)
        domain, _, name = key.partition("/")
        assert domain == DRIVER
        assert LABEL.fullmatch(name)
        assert value == "" or LABEL.fullmatch(value)


def test_every_code_that_we_have_is_a_taint_of_its_own() -> None:
    checks = [check for group in groups(GpuLimits()) for check in group.checks]
    codes = {check.code for check in checks} | {f"{check.code}.unreadable" for check in checks}
    codes |= {row.code.replace("*", "x") for row in TAXONOMY} | {f"gpu.xid.{number}" for number in XIDS}
    spots = {spot_of(code, DRIVER) for code in codes}
    assert len(spots) == len(codes)
    for spot in spots:
        assert LABEL.fullmatch(spot.key.removeprefix(f"{DRIVER}/"))
        assert spot.value == "" or LABEL.fullmatch(spot.value)


codes = st.one_of(st.sampled_from(CODES), st.text(max_size=70), st.integers(0, 999).map("gpu.xid.{}".format))
severities = st.sampled_from(Severity)
causes_lists = st.lists(st.tuples(codes, severities), max_size=25)
policies = st.builds(
    TaintPolicy,
    evict=st.frozensets(st.sampled_from(["gpu.xid.*", *CODES])),
    quiet_s=st.sampled_from([0, 1, 60]),
    tell_unknown=st.booleans(),
    inform=st.booleans(),
)


@given(policies, st.lists(st.tuples(st.floats(0.01, 100), causes_lists), max_size=8))
def test_there_are_never_more_than_sixteen_nor_two_of_a_name(
    policy: TaintPolicy, looks: list[tuple[float, Causes]]
) -> None:
    life, seconds = Life(policy), 0.0
    for pause_s, causes in looks:
        seconds += pause_s
        taints = life.see(seconds, causes)
        assert len(taints) <= TAINTS_MAX
        assert len({(one.key, one.value) for one in taints}) == len(taints)
        assert policy.inform or all(one.effect is not NONE for one in taints)
        assert life.restarted().past.taints.devices.get(GPU, ()) == taints
        due_ns = life.past.due_ns
        assert due_ns is None or due_ns > at(seconds).mono_ns
        assert life.see(seconds, causes) == taints


# --- policies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"evict": "gpu.lost"}, "evict: 'gpu.lost' is no frozenset of codes"),
        ({"evict": frozenset({"*"})}, "evict: '*' is neither a code, such as gpu.xid.79, nor a family"),
        ({"evict": frozenset({"gpu.xid*"})}, "evict: 'gpu.xid*' is neither"),
        ({"evict": frozenset({"gpu.xid.79 "})}, "evict: 'gpu.xid.79 ' is neither"),
        ({"evict": frozenset({79})}, "evict: 79 is neither"),
        ({"quiet_s": -1}, "quiet_s: -1 s is not within 0 and 86400 s"),
        ({"quiet_s": 86_401}, "quiet_s: 86401 s is not within"),
        ({"quiet_s": float("nan")}, "quiet_s: nan s is not within"),
        ({"quiet_s": "60"}, "quiet_s: '60' s is not within"),
        ({"domain": "Example.com"}, "domain: 'Example.com' is no DNS subdomain, such as gpu.example.com"),
        ({"domain": "example.com/"}, "domain: 'example.com/' is no DNS subdomain"),
        ({"domain": "a" * 254}, "is 254 characters, limit 253"),
    ],
)
def test_a_wrong_policy_is_refused_by_name(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TaintPolicy(**wrong)  # type: ignore[arg-type]  # what a caller without a type checker gives
    assert text in str(raised.value)


def test_a_driver_whose_name_begins_no_label_needs_a_domain() -> None:
    with pytest.raises(ConfigError, match="driver: 'My Driver' is no DNS subdomain"):
        domain_of("My Driver", DEFAULT)
    assert domain_of("My Driver", TaintPolicy(domain="a" * 253)) == "a" * 253


def test_the_page_tells_of_every_setting_and_its_default() -> None:
    said = {"evict": "none", "domain": "the driver's name"}
    for one in fields(TaintPolicy):
        assert f"| `{one.name}` | {said.get(one.name, f'`{one.default}`')} |" in PAGE.read_text()


def test_the_page_tells_of_every_key_that_is_no_code() -> None:
    for name in (*RESERVED, Effect.NONE, Effect.NO_SCHEDULE, Effect.NO_EXECUTE):
        assert f"`{name}`" in PAGE.read_text()


def test_a_device_that_its_driver_cannot_hand_out_is_kept_free_where_the_driver_asks_for_that() -> None:
    """No hugepages of that size: nothing is wrong with the device, and no claim of it can be prepared."""
    for keep_away, made in ((True, (taint("mem.hugepages.size_unsupported"),)), (False, ())):
        device = sick([("mem.hugepages.size_unsupported", Severity.UNKNOWN)])
        cause = replace(device.causes[0], told=True, keep_away=keep_away)
        assert Life().take(0, report(device._replace(causes=(cause,)))) == made
