"""Taints of devices: keys and values, quiet times, restarts, limits, policies."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cli.checks.catalog import checks_by_section
from agent.devices.taints import (
    MORE_CAUSES,
    RESERVED_NAMES,
    UNDECLARED_CODE,
    UNMONITORED,
    TaintId,
    TaintPolicy,
    TaintState,
    decide_taints,
    restore_taints,
    taint_domain,
    taint_id,
)
from agent.errors import ConfigError
from agent.health.declared import verdicts as declared
from agent.health.gpu.xid.xid_table import XIDS
from agent.health.state_machine import HEALTH_OF_SEVERITY
from agent.model.claim import DeviceRef
from agent.model.health import (
    SLICE_DEVICES_MAX,
    TAINTED_SLICE_DEVICES_MAX,
    TAINTS_MAX,
    Blame,
    Cause,
    DeviceHealth,
    Effect,
    Severity,
    Taint,
    Taints,
)
from agent.model.reading import GPU_LIBRARY, SourceSample, SourceState
from agent.model.report import Report
from agent.model.settings import GpuLimits
from agent.model.time import NS, Instant
from agent.prepare.failure_kinds import FAILURE_KINDS

DRIVER: Final = "gpu.example.com"
POOL: Final = "node-1"
GPU: Final = DeviceRef(DRIVER, POOL, "gpu-0")
BOOT_S: Final = 1_790_000_000
DEFAULT: Final = TaintPolicy()
PAGE: Final = Path(__file__).parent.parent / "docs" / "taints.md"
LABEL: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
"""Names and values of labels that Kubernetes accepts."""

Causes = Sequence[tuple[str, Severity]]


def at(seconds: float) -> Instant:
    return Instant(int(seconds * NS), BOOT_S + seconds)


def device_with(causes: Causes, *, name: str = GPU.device, driver: str = DRIVER) -> DeviceHealth:
    """Return a device with these causes, worst first."""
    found = [Cause(code, severity, Blame.HARDWARE, "", "", at(0)) for code, severity in causes]
    worst = max((severity for _, severity in causes), default=Severity.OK)
    return DeviceHealth(
        POOL,
        name,
        "gpu",
        HEALTH_OF_SEVERITY[worst],
        worst,
        "",
        at(0),
        at(0),
        30,
        causes=tuple(found),
        driver=driver,
    )


def report(*devices: DeviceHealth, starting: bool = False, declaring: tuple[str, ...] = (DRIVER,)) -> Report:
    return Report("node-1", at(0), devices, declaring=declaring, starting=starting)


def unhealthy_causes(*codes: str) -> Causes:
    return [(code, Severity.UNHEALTHY) for code in codes]


NO_CAUSES: Final[Causes] = []
XID: Final = unhealthy_causes("gpu.xid.79")
UNKNOWN: Final[Causes] = [("gpu.not_answering", Severity.UNKNOWN)]


class TaintTimeline:
    """Sequence of taint decisions about one device."""

    def __init__(self, policy: TaintPolicy = DEFAULT, state: TaintState | None = None) -> None:
        self.policy = policy
        self.state = state or TaintState()

    def decide(self, seconds: float, *causes: Causes) -> tuple[Taint, ...]:
        """Decide with a list of causes, or without the device if there is none; return its taints."""
        return self.apply(seconds, report(*(device_with(cause) for cause in causes)))

    def apply(self, seconds: float, current_report: Report) -> tuple[Taint, ...]:
        self.state = decide_taints(self.state, current_report, DRIVER, self.policy, at(seconds))
        return self.state.taints.devices.get(GPU, ())

    def restart(self, policy: TaintPolicy | None = None) -> "TaintTimeline":
        policy = policy or self.policy
        return TaintTimeline(policy, restore_taints(self.state.stored_taints, DRIVER, policy))


def taint(name: str, value: str = "", effect: Effect = Effect.NO_SCHEDULE, *, added: int = 0) -> Taint:
    return Taint(f"{DRIVER}/{name}", value, effect, BOOT_S + added)


# --- causes and their taints -------------------------------------------------------------------------------


class ExpectedTaint(NamedTuple):
    """Taint without its domain and time."""

    name: str
    value: str
    effect: Effect


NO_SCHEDULE, NO_EXECUTE, NONE = Effect.NO_SCHEDULE, Effect.NO_EXECUTE, Effect.NONE
EVICTING: Final = TaintPolicy(evict=frozenset({"gpu.lost", "gpu.xid.*"}))
SILENT: Final = TaintPolicy(inform=False)
TAINT_CASES: Final[list[tuple[TaintPolicy, str, Severity, ExpectedTaint | None]]] = [
    (DEFAULT, "gpu.xid.79", Severity.UNHEALTHY, ExpectedTaint("xid", "79", NO_SCHEDULE)),
    (DEFAULT, "gpu.fabric.sxid.20034", Severity.UNHEALTHY, ExpectedTaint("sxid", "20034", NO_SCHEDULE)),
    (DEFAULT, "gpu.lost", Severity.UNHEALTHY, ExpectedTaint("gpu-lost", "", NO_SCHEDULE)),
    (
        DEFAULT,
        "gpu.ecc.uncorrectable",
        Severity.UNHEALTHY,
        ExpectedTaint("gpu.ecc.uncorrectable", "", NO_SCHEDULE),
    ),
    (
        DEFAULT,
        "gpu.ecc.correctable_rate",
        Severity.DEGRADED,
        ExpectedTaint("gpu.ecc.correctable_rate", "", NONE),
    ),
    (DEFAULT, "gpu.xid.63", Severity.DEGRADED, ExpectedTaint("xid", "63", NONE)),
    (DEFAULT, "gpu.xid.31", Severity.INFO, None),
    (DEFAULT, "gpu.not_answering", Severity.UNKNOWN, None),
    (DEFAULT, "fpga.bank_locked", Severity.UNHEALTHY, ExpectedTaint("fpga.bank_locked", "", NO_SCHEDULE)),
    (EVICTING, "gpu.xid.79", Severity.UNHEALTHY, ExpectedTaint("xid", "79", NO_EXECUTE)),
    (EVICTING, "gpu.lost", Severity.UNHEALTHY, ExpectedTaint("gpu-lost", "", NO_EXECUTE)),
    (EVICTING, "gpu.xid.63", Severity.DEGRADED, ExpectedTaint("xid", "63", NONE)),
    (EVICTING, "gpu.xidious", Severity.UNHEALTHY, ExpectedTaint("gpu.xidious", "", NO_SCHEDULE)),
    (EVICTING, "gpu.lost.again", Severity.UNHEALTHY, ExpectedTaint("gpu.lost.again", "", NO_SCHEDULE)),
    (SILENT, "gpu.xid.63", Severity.DEGRADED, None),
    (SILENT, "gpu.xid.79", Severity.UNHEALTHY, ExpectedTaint("xid", "79", NO_SCHEDULE)),
]


@pytest.mark.parametrize(("policy", "code", "severity", "expected_taint"), TAINT_CASES)
def test_cause_gives_its_taint(
    policy: TaintPolicy, code: str, severity: Severity, expected_taint: ExpectedTaint | None
) -> None:
    expected = (
        (taint(expected_taint.name, expected_taint.value, expected_taint.effect),) if expected_taint else ()
    )
    assert TaintTimeline(policy).decide(0, [(code, severity)]) == expected


def test_two_xids_give_two_taints() -> None:
    assert TaintTimeline().decide(0, unhealthy_causes("gpu.xid.79", "gpu.xid.48")) == (
        taint("xid", "48"),
        taint("xid", "79"),
    )


def test_taint_of_two_causes_has_the_stronger_effect() -> None:
    causes = [
        ("gpu.xid.48", Severity.DEGRADED),
        *unhealthy_causes("gpu.xid.48"),
        ("gpu.xid.48", Severity.DEGRADED),
    ]
    assert TaintTimeline().decide(0, causes) == (taint("xid", "48"),)


def test_configured_domain_is_the_prefix_of_every_key() -> None:
    timeline = TaintTimeline(TaintPolicy(domain="health.example.com"))
    assert [found_taint.key for found_taint in timeline.decide(0, XID)] == ["health.example.com/xid"]


def test_devices_of_other_drivers_get_no_taints() -> None:
    others = device_with(XID, driver="other.example.com"), device_with(XID, driver="")
    timeline = TaintTimeline()
    timeline.apply(0, report(*others, device_with(NO_CAUSES)))
    assert timeline.state.taints == Taints({GPU: ()})


def test_driver_without_declaration_gets_taints_of_host_devices() -> None:
    current_report = report(
        device_with(XID, driver=""), device_with(XID, driver="other.example.com", name="x"), declaring=()
    )
    timeline = TaintTimeline()
    assert timeline.apply(0, current_report) == (taint("xid", "79"),)
    assert list(timeline.state.taints.devices) == [GPU]


def test_device_without_taints_is_listed() -> None:
    timeline = TaintTimeline()
    timeline.apply(0, report(device_with(NO_CAUSES), device_with(NO_CAUSES, name="gpu-1")))
    assert timeline.state.taints.devices == {GPU: (), GPU._replace(device="gpu-1"): ()}


def test_any_taint_in_a_pool_lowers_its_slice_limit() -> None:
    timeline = TaintTimeline()
    timeline.decide(0, NO_CAUSES)
    assert timeline.state.taints.slice_limit(POOL) == SLICE_DEVICES_MAX
    timeline.decide(1, [("gpu.ecc.off", Severity.DEGRADED)])
    assert timeline.state.taints.slice_limit(POOL) == TAINTED_SLICE_DEVICES_MAX
    assert timeline.state.taints.slice_limit("another") == SLICE_DEVICES_MAX


# --- quiet times -------------------------------------------------------------------------------------------


def test_taint_is_removed_after_the_quiet_time_without_its_cause() -> None:
    timeline = TaintTimeline()
    timeline.decide(0, XID)
    timeline.decide(10, NO_CAUSES)
    assert timeline.state.due_ns == 70 * NS
    assert timeline.decide(69.999, NO_CAUSES) == (taint("xid", "79"),)
    assert timeline.decide(70, NO_CAUSES) == ()
    assert timeline.state == TaintState(Taints({GPU: ()}))


def test_cause_back_within_the_quiet_time_keeps_the_taint() -> None:
    timeline = TaintTimeline()
    first = timeline.decide(0, XID)
    timeline.decide(10, NO_CAUSES)
    assert timeline.decide(69, XID) == first
    timeline.decide(80, NO_CAUSES)
    assert timeline.decide(139, NO_CAUSES) == first
    assert timeline.decide(140, NO_CAUSES) == ()
    assert timeline.decide(141, XID) == (taint("xid", "79", added=141),)


def test_effect_rises_at_once_and_falls_after_the_quiet_time() -> None:
    timeline = TaintTimeline()
    mild = [("gpu.nvlink.down", Severity.DEGRADED)]
    assert timeline.decide(0, mild) == (taint("gpu.nvlink.down", effect=NONE),)
    worse = timeline.decide(5, unhealthy_causes("gpu.nvlink.down"))
    assert worse == (taint("gpu.nvlink.down", added=5),)
    assert timeline.decide(10, mild) == worse
    assert timeline.decide(69, mild) == worse
    assert timeline.decide(70, mild) == (taint("gpu.nvlink.down", effect=NONE, added=70),)


def test_unknown_device_keeps_its_taints() -> None:
    timeline = TaintTimeline(TaintPolicy(report_unknown=False))
    first = timeline.decide(0, XID)
    assert timeline.decide(10, UNKNOWN) == first
    assert timeline.decide(100_000, UNKNOWN) == first
    assert timeline.decide(100_010, NO_CAUSES) == first
    assert timeline.decide(100_070, NO_CAUSES) == ()


def test_unknown_device_stops_evicting_after_the_quiet_time() -> None:
    timeline = TaintTimeline(TaintPolicy(evict=frozenset({"gpu.lost"}), report_unknown=False))
    first = timeline.decide(0, unhealthy_causes("gpu.lost"))
    assert first == (taint("gpu-lost", effect=NO_EXECUTE),)
    assert timeline.decide(10, UNKNOWN) == first
    assert timeline.decide(70, UNKNOWN) == (taint("gpu-lost", added=70),)


def test_latched_cause_of_a_stalled_source_keeps_evicting() -> None:
    timeline = TaintTimeline(EVICTING)
    first = timeline.decide(0, XID)
    unread = [*XID, ("source.stalled", Severity.UNKNOWN)]
    assert timeline.decide(1000, unread) == first


def test_wall_clock_step_does_not_change_the_quiet_time() -> None:
    timeline = TaintTimeline()
    timeline.decide(0, XID)
    for mono_s, wall_s in ((10, 0), (69, 2_000_000_000)):
        timeline.state = decide_taints(
            timeline.state, report(device_with(NO_CAUSES)), DRIVER, DEFAULT, Instant(mono_s * NS, wall_s)
        )
        assert timeline.state.taints.devices[GPU] == (taint("xid", "79"),)


@pytest.mark.parametrize("step_s", [400 * 86_400, -86_400])
def test_time_added_follows_the_wall_clock_when_it_is_set(step_s: int) -> None:
    timeline = TaintTimeline()
    timeline.decide(30, XID)
    for mono_s, causes in ((90, XID), (95, NO_CAUSES), (99, UNKNOWN), (3700, XID), (90_000, XID)):
        now = Instant(mono_s * NS, BOOT_S + mono_s + step_s)
        timeline.state = decide_taints(timeline.state, report(device_with(causes)), DRIVER, DEFAULT, now)
        assert timeline.state.taints.devices[GPU][0] == taint("xid", "79", added=30 + step_s), mono_s
    restored = timeline.restart()
    assert restored.decide(90_001, XID) == (taint("xid", "79", added=30 + step_s),)


def test_time_added_does_not_follow_a_small_step_of_the_clock() -> None:
    timeline = TaintTimeline()
    first = timeline.decide(30, XID)
    for step_s in (59, -59):
        now = Instant(90 * NS, BOOT_S + 90.0 + step_s)
        timeline.state = decide_taints(timeline.state, report(device_with(XID)), DRIVER, DEFAULT, now)
        assert timeline.state.taints.devices[GPU] == first


@given(st.lists(st.tuples(st.floats(0, 59.9), st.booleans(), st.booleans()), max_size=30))
def test_cause_flapping_within_the_quiet_time_changes_nothing(
    steps: list[tuple[float, bool, bool]],
) -> None:
    timeline = TaintTimeline()
    first, seconds = timeline.decide(0, XID), 0.0
    for pause_s, mild, unknown in steps:
        partly: Causes = [("gpu.xid.79", Severity.DEGRADED)] if mild else []
        timeline.decide(seconds, [*partly, *(UNKNOWN if unknown else [])])
        assert timeline.decide(seconds + pause_s, NO_CAUSES) == first
        seconds += 60
        assert timeline.decide(seconds - 0.05, XID) == first


# --- unknown, starting, removed-----------------------------------------------------------------------------


def test_device_unknown_for_a_minute_is_unmonitored() -> None:
    timeline = TaintTimeline()
    assert timeline.decide(0, UNKNOWN) == ()
    assert timeline.state.due_ns == 60 * NS
    assert timeline.decide(59.9, UNKNOWN) == ()
    assert timeline.decide(60, UNKNOWN) == (taint("unmonitored", effect=NONE, added=60),)
    assert timeline.state.due_ns is None
    timeline.decide(100, NO_CAUSES)
    assert timeline.decide(160, NO_CAUSES) == ()


def test_unmonitored_needs_a_minute_without_interruption() -> None:
    timeline = TaintTimeline()
    timeline.decide(0, UNKNOWN)
    timeline.decide(50, NO_CAUSES)
    timeline.decide(51, UNKNOWN)
    assert timeline.decide(110, UNKNOWN) == ()


@pytest.mark.parametrize("policy", [TaintPolicy(report_unknown=False), SILENT])
def test_unmonitored_taint_can_be_disabled(policy: TaintPolicy) -> None:
    timeline = TaintTimeline(policy)
    timeline.decide(0, UNKNOWN)
    assert (timeline.decide(1000, UNKNOWN), timeline.state.due_ns) == ((), None)


def test_report_of_a_starting_agent_changes_nothing() -> None:
    timeline = TaintTimeline()
    timeline.decide(0, XID)
    before = timeline.state
    timeline.apply(100, report(device_with(UNKNOWN), starting=True))
    assert timeline.state is before


@pytest.mark.parametrize("gone", [(), ([(UNDECLARED_CODE, Severity.UNKNOWN)],)])
def test_removed_device_loses_its_taints_after_a_minute(gone: Sequence[Causes]) -> None:
    timeline = TaintTimeline()
    timeline.decide(0, XID)
    timeline.decide(1, *gone)
    timeline.decide(60, *gone)
    assert GPU in timeline.state.taints.devices, "the device may come back within a minute"
    timeline.decide(61, *gone)
    assert timeline.state == TaintState()


def test_code_of_removed_devices_is_that_of_the_rule() -> None:
    assert declared.REMOVED_DEVICE.code == UNDECLARED_CODE


# --- restarts ----------------------------------------------------------------------------------------------


def test_restart_keeps_the_time_a_taint_was_added() -> None:
    timeline = TaintTimeline()
    first = timeline.decide(0, XID)
    restarted = timeline.restart()
    assert restarted.state.taints == Taints({GPU: first})
    assert restarted.decide(500, UNKNOWN) == first
    assert restarted.decide(510, XID) == first


def test_taint_without_cause_after_a_restart_stays_the_quiet_time() -> None:
    timeline = TaintTimeline()
    first = timeline.decide(0, XID)
    restarted = timeline.restart()
    assert restarted.decide(500, NO_CAUSES) == first
    assert restarted.decide(559, NO_CAUSES) == first
    assert restarted.decide(560, NO_CAUSES) == ()


def test_device_found_late_after_a_restart_keeps_its_taints() -> None:
    timeline = TaintTimeline()
    first = timeline.decide(0, XID)
    restarted = timeline.restart()
    restarted.decide(500)
    assert restarted.decide(503, XID) == first


def test_gpu_not_listed_by_nvml_after_a_restart_keeps_its_taints() -> None:
    before = TaintTimeline(TaintPolicy(evict=frozenset({"gpu.xid.79"})))
    host_gpu = report(device_with(XID, driver=""), declaring=())
    (evicting,) = before.apply(0, host_gpu)
    timeline = before.restart()
    nvml = SourceSample(GPU_LIBRARY, SourceState.STALLED, 0, 1, 0, "")
    unlisted = replace(report(declaring=()), sources=(nvml,))
    assert timeline.apply(500, unlisted) == (evicting,)
    assert timeline.apply(9000, unlisted) == (taint("xid", "79", added=9000),)
    listed = replace(unlisted, sources=(nvml._replace(state=SourceState.OK, passes=1),))
    assert timeline.apply(9001, listed) != ()
    assert timeline.apply(9061, listed) == ()


def test_restart_drops_taints_the_new_policy_does_not_allow() -> None:
    timeline = TaintTimeline()
    timeline.decide(0, [*XID, ("gpu.ecc.off", Severity.DEGRADED)])
    assert timeline.restart(SILENT).state.taints == Taints({GPU: (taint("xid", "79"),)})
    assert timeline.restart(TaintPolicy(domain="other.example.com")).state == TaintState()

    timeline = TaintTimeline()
    timeline.decide(0, UNKNOWN)
    timeline.decide(60, UNKNOWN)
    assert timeline.restart().state.taints.devices
    assert timeline.restart(TaintPolicy(report_unknown=False)).state == TaintState()


def test_stored_taints_of_another_driver_are_ignored() -> None:
    other = DeviceRef("other.example.com", POOL, "gpu-0")
    assert restore_taints(Taints({other: (taint("xid", "79"),)}), DRIVER, DEFAULT) == TaintState()


def test_unpublished_taint_keeps_its_time_over_a_restart() -> None:
    timeline = TaintTimeline()
    timeline.decide(0, unhealthy_causes(*CODES[:17]))
    restarted = timeline.restart()
    restarted.decide(10, unhealthy_causes(CODES[16]))
    assert taint(CODES[16]) in restarted.decide(70, unhealthy_causes(CODES[16]))


def test_time_added_is_rounded_down() -> None:
    assert TaintTimeline().decide(0.9, XID) == (taint("xid", "79", added=0),)


# --- limits ------------------------------------------------------------------------------------------------

CODES: Final = [f"fpga.part_{number:02}" for number in range(20)]


def test_sixteen_causes_give_sixteen_taints() -> None:
    taints = TaintTimeline().decide(0, unhealthy_causes(*CODES[:16]))
    assert [taint.key for taint in taints] == [f"{DRIVER}/{code}" for code in CODES[:16]]


def test_more_than_16_causes_give_the_worst_15_and_more_causes() -> None:
    timeline = TaintTimeline()
    causes = [*((code, Severity.DEGRADED) for code in CODES[:16]), *unhealthy_causes("gpu.xid.79")]
    expected = [taint("xid", "79"), *(taint(code, effect=NONE) for code in CODES[:14])]
    assert timeline.decide(0, causes) == (*expected, taint(MORE_CAUSES, effect=NONE))
    assert timeline.restart().decide(10, causes) == timeline.state.taints.devices[GPU]


def test_published_taint_stays_before_new_ones_of_equal_effect() -> None:
    timeline = TaintTimeline()
    first = timeline.decide(0, unhealthy_causes(*CODES[1:17]))
    after = timeline.decide(1, unhealthy_causes(*CODES[:17]))
    assert after == (*first[:15], taint(MORE_CAUSES, effect=NONE, added=1))


def test_count_flapping_around_16_changes_nothing() -> None:
    timeline = TaintTimeline()
    first = timeline.decide(0, unhealthy_causes(*CODES[:17]))
    for seconds in range(10, 1000, 50):
        assert timeline.decide(seconds, unhealthy_causes(*CODES[:16])) == first
        assert timeline.decide(seconds + 25, unhealthy_causes(*CODES[:17])) == first


def test_without_informing_taints_the_worst_16_are_published() -> None:
    taints = TaintTimeline(SILENT).decide(0, unhealthy_causes(*CODES))
    assert [taint.key for taint in taints] == [f"{DRIVER}/{code}" for code in CODES[:16]]


# --- valid labels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["a" * 63, "Fpga.Bank_7-x", "gpu.xid.1234567890"])
def test_code_that_is_a_valid_label_name_is_the_key(code: str) -> None:
    assert taint_id(code, DRIVER) == TaintId(f"{DRIVER}/{code}")


@pytest.mark.parametrize(
    ("code", "head"),
    [
        ("a" * 64, "a" * 54 + "-"),
        ("fpga bank", "fpga-bank-"),
        ("_x_", "x-"),
        ("", ""),
        (UNMONITORED, "unmonitored-"),
        (MORE_CAUSES, "more-causes-"),
        ("xid", "xid-"),
        ("gpu.xid.\u0663", "gpu.xid-"),
    ],
)
def test_invalid_or_reserved_code_gets_a_hash_in_its_key(code: str, head: str) -> None:
    digest = hashlib.sha256(code.encode()).hexdigest()[:8]
    assert taint_id(code, DRIVER) == TaintId(f"{DRIVER}/{head}{digest}")


@given(st.text())
def test_every_code_gives_a_valid_label(code: str) -> None:
    for text in (code, f"gpu.xid.{code}", f"x{code}x"):
        key, value = taint_id(text, DRIVER)
        domain, _, name = key.partition("/")
        assert domain == DRIVER
        assert LABEL.fullmatch(name)
        assert value == "" or LABEL.fullmatch(value)


def test_every_finding_code_has_its_own_taint() -> None:
    checks = [check for group in checks_by_section(GpuLimits()) for check in group.checks]
    codes = {check.code for check in checks} | {f"{check.code}.unreadable" for check in checks}
    codes |= {row.code.replace("*", "x") for row in FAILURE_KINDS} | {f"gpu.xid.{number}" for number in XIDS}
    taint_ids = {taint_id(code, DRIVER) for code in codes}
    assert len(taint_ids) == len(codes)
    for one_id in taint_ids:
        assert LABEL.fullmatch(one_id.key.removeprefix(f"{DRIVER}/"))
        assert one_id.value == "" or LABEL.fullmatch(one_id.value)


codes = st.one_of(st.sampled_from(CODES), st.text(max_size=70), st.integers(0, 999).map("gpu.xid.{}".format))
severities = st.sampled_from(Severity)
causes_lists = st.lists(st.tuples(codes, severities), max_size=25)
policies = st.builds(
    TaintPolicy,
    evict=st.frozensets(st.sampled_from(["gpu.xid.*", *CODES])),
    quiet_s=st.sampled_from([0, 1, 60]),
    report_unknown=st.booleans(),
    inform=st.booleans(),
)


@given(policies, st.lists(st.tuples(st.floats(0.01, 100), causes_lists), max_size=8))
def test_taints_of_a_device_are_at_most_16_and_distinct(
    policy: TaintPolicy, reports: list[tuple[float, Causes]]
) -> None:
    timeline, seconds = TaintTimeline(policy), 0.0
    for pause_s, causes in reports:
        seconds += pause_s
        taints = timeline.decide(seconds, causes)
        assert len(taints) <= TAINTS_MAX
        assert len({(taint.key, taint.value) for taint in taints}) == len(taints)
        assert policy.inform or all(taint.effect is not NONE for taint in taints)
        assert timeline.restart().state.taints.devices.get(GPU, ()) == taints
        due_ns = timeline.state.due_ns
        assert due_ns is None or due_ns > at(seconds).mono_ns
        assert timeline.decide(seconds, causes) == taints


# --- policies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("invalid", "text"),
    [
        ({"evict": "gpu.lost"}, "evict: 'gpu.lost' is not a frozenset of finding codes"),
        ({"evict": frozenset({"*"})}, "evict: '*' is neither a code, such as gpu.xid.79, nor a family"),
        ({"evict": frozenset({"gpu.xid*"})}, "evict: 'gpu.xid*' is neither"),
        ({"evict": frozenset({"gpu.xid.79 "})}, "evict: 'gpu.xid.79 ' is neither"),
        ({"evict": frozenset({79})}, "evict: 79 is neither"),
        ({"quiet_s": -1}, "quiet_s: -1 s is not between 0 and 86400 s"),
        ({"quiet_s": 86_401}, "quiet_s: 86401 s is not between"),
        ({"quiet_s": float("nan")}, "quiet_s: nan s is not between"),
        ({"quiet_s": "60"}, "quiet_s: '60' s is not between"),
        ({"domain": "Example.com"}, "domain: 'Example.com' is not a DNS subdomain, such as gpu.example.com"),
        ({"domain": "example.com/"}, "domain: 'example.com/' is not a DNS subdomain"),
        ({"domain": "a" * 254}, "is 254 characters, limit 253"),
    ],
)
def test_invalid_policy_is_refused_with_the_field(invalid: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TaintPolicy(**invalid)  # type: ignore[arg-type]  # from a caller without a type checker
    assert text in str(raised.value)


def test_driver_name_that_is_no_dns_subdomain_needs_a_domain() -> None:
    with pytest.raises(ConfigError, match="driver: 'My Driver' is not a DNS subdomain"):
        taint_domain("My Driver", DEFAULT)
    assert taint_domain("My Driver", TaintPolicy(domain="a" * 253)) == "a" * 253


def test_page_has_every_setting_with_its_default() -> None:
    defaults = {"evict": "none", "domain": "the driver's name"}
    for field in fields(TaintPolicy):
        default = re.escape(defaults.get(field.name, f"`{field.default}`"))
        assert re.search(
            rf"^\| `{field.name}` \| (`[a-z-]+` )?\| {default} \|", PAGE.read_text(), re.MULTILINE
        )


def test_page_has_every_reserved_key_and_effect() -> None:
    for name in (*RESERVED_NAMES, Effect.NONE, Effect.NO_SCHEDULE, Effect.NO_EXECUTE):
        assert f"`{name}`" in PAGE.read_text()


def test_keep_away_cause_of_a_driver_gives_a_taint() -> None:
    """With a mismatch of library and kernel module running programs continue, and no new one can start."""
    for keep_away, expected_taint in ((True, (taint("gpu.driver.mismatch"),)), (False, ())):
        device = device_with([("gpu.driver.mismatch", Severity.UNKNOWN)])
        cause = replace(device.causes[0], driver_reported=True, keep_away=keep_away)
        assert TaintTimeline().apply(0, report(device._replace(causes=(cause,)))) == expected_taint
