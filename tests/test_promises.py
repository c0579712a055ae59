"""What an audit found in pods, and what their cgroups ran into: who is told, how bad, and for how long."""

import copy
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from paper import ABSENT, MIB, PaperNode, codes, cpus_sample, group_sample, pool_sample, without_times
from paper_gpus import GpuNode

from agent.allocatable.risks import ADVICE
from agent.allocatable.verdicts import CONCERNS
from agent.engine.step import State, step
from agent.health.catalog import STALLED
from agent.health.host.pod.rule_rows import MOST, PROMISES, UNLISTED, UNREAD
from agent.health.message import LIMIT
from agent.model.claim import DeviceRef
from agent.model.declared import (
    Declared,
    DeclaredCpus,
    DeclaredFile,
    DeclaredHugepages,
    DeclaredMemory,
    DeclaredOther,
    What,
)
from agent.model.health import DeviceHealth, Health, Note, Severity
from agent.model.machine import MachineSample, NumaSample, PressureSample
from agent.model.pods import PodFinding, PodsSample, Resource
from agent.model.report import Report
from agent.model.settings import Settings
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS

DRIVER: Final = "a.example.com"
PLAIN: Final = "plain.example.com"
"""Is served by the agent, and declares nothing."""
POD: Final = "pod-a"
LIMIT_NS: Final = 180 * NS
DEVICES: Final[dict[str, What]] = {
    "cpus": DeclaredCpus(0b10, 0, exclusive=True, isolated=False),
    "memory": DeclaredMemory(0, 0),
    "pages-2m": DeclaredHugepages(2048, 10, 0),
    "pages-1g": DeclaredHugepages(1 << 20, 1, 0),
    "magic": DeclaredOther(),
}
MACHINE: Final = MachineSample(
    (), (NumaSample(0, 1 << 24, 0, 128, 0),), (), PressureSample(0, 0, 0), 1, 1, 0, 0, ABSENT, ()
)
QUOTA: Final = PodFinding(
    POD, "main", "cgroup.lower", "cpu quota: 400000 us, expected 900000 us", "", Resource.CPU
)
MEMORY: Final = PodFinding(
    POD, "main", "cgroup.lower", "memory limit: 1Gi, expected 2Gi", "", Resource.MEMORY
)
PAGES: Final = PodFinding(
    POD, "main", "cgroup.lower", "2MB hugepages limit: 4Mi, expected 8Mi", "", Resource.HUGEPAGES, 2048
)
BEST_EFFORT: Final = PodFinding(POD, "", "claim.best_effort", "BestEffort", ADVICE["claim.best_effort"])


def ref(name: str, driver: str = DRIVER, pool: str = "node-a") -> DeviceRef:
    return DeviceRef(driver, pool, name)


class Node(PaperNode):
    """A node with a kubelet. One driver declares its devices."""

    def __init__(self) -> None:
        super().__init__(Settings("node-a", drivers=(DRIVER, PLAIN)))
        self.pool(pool_sample(10))
        self.pool(pool_sample(1, size_kib=1 << 20))
        devices = [Declared(DRIVER, "node-a", name, what, 0) for name, what in DEVICES.items()]
        self.files = (DeclaredFile(DRIVER, tuple(devices)),)
        self.uses: dict[str, tuple[DeviceRef, ...]] = {}
        self.names: dict[str, str] = {}
        self.findings: tuple[PodFinding, ...] = ()
        self.kubelet = SourceState.OK
        self.beats = True
        self._beat_ns = 0

    def use(self, *names: str, pod: str = POD, driver: str = DRIVER) -> None:
        """A pod uses these and no others."""
        self.uses[pod] = tuple(ref(name, driver) for name in names)

    def find(self, *findings: PodFinding) -> Report:
        """This is what the newest audit found."""
        self.findings = findings
        return self.next()

    def snapshot(self) -> Snapshot:
        if self.beats:
            self._beat_ns = self.now_ns
        why = "checkpoint: Permission denied" if self.kubelet is SourceState.FAILING else ""
        source = SourceSample(
            "pods", self.kubelet, self._beat_ns, 60 * NS, 0, why, passes=self.passes, vital=False
        )
        memory = SourceSample("memory", SourceState.OK, self.now_ns, NS, 0, "", passes=self.passes)
        read = super().snapshot()
        return replace(
            read,
            declared=self.files,
            pods=PodsSample(source, dict(self.uses), dict(self.names), self.findings),
            machine=MACHINE,
            sources=(*read.sources, memory, source),
        )


def of(report: Report, name: str, driver: str = DRIVER) -> DeviceHealth:
    return next(one for one in report.devices if (one.driver, one.device) == (driver, name))


def told(report: Report) -> list[tuple[str, str]]:
    return [(note.subject, note.cause.code) for note in report.notes]


def worse(report: Report) -> dict[str, Severity]:
    """Devices that are not simply well."""
    return {one.device: one.severity for one in report.devices if one.severity and one.device != "magic"}


# --- the catalogue -----------------------------------------------------------------------------------------


def test_everything_that_an_audit_can_find_has_a_row_and_nothing_else_has() -> None:
    verdicts = {f"cgroup.{verdict}".replace("-", "_") for verdict in CONCERNS}
    assert verdicts | ADVICE.keys() == PROMISES.keys()
    assert {code: PROMISES[code].advice for code in ADVICE} == ADVICE


def test_less_than_was_promised_is_degraded_and_all_else_a_word() -> None:
    degraded = {code for code, row in PROMISES.items() if row.severity is Severity.DEGRADED}
    assert degraded == {
        "cgroup.lower",
        "cgroup.limited",
        "cgroup.parent_tighter",
        "cpus.exclusive_throttled",
    }
    assert {row.severity for row in PROMISES.values()} == {Severity.DEGRADED, Severity.INFO}


@pytest.mark.parametrize("code", sorted({*(f"cgroup.{verdict}" for verdict in CONCERNS), *ADVICE}))
def test_every_finding_is_told_as_its_row_says(code: str) -> None:
    report = Node().find(PodFinding(POD, "main", code, "numbers"))
    (note,) = report.notes
    row = PROMISES[note.cause.code]
    assert note.cause.code == code.replace("-", "_")
    assert (note.cause.severity, note.cause.blame, note.cause.advice) == (row.severity, row.blame, row.advice)


# --- notes -------------------------------------------------------------------------------------------------


def test_a_note_names_the_pod_by_uid_and_name_and_all_devices_that_it_uses() -> None:
    node = Node()
    node.names[POD] = "ml/train-0"
    node.use("cpus", "magic")
    node.uses[POD] += (ref("nic-0", "other.example.com"), ref("cpus"))
    (note,) = node.find(QUOTA).notes
    assert note.subject == "pod pod-a (ml/train-0) container main"
    assert note.devices == (
        f"{DRIVER}/node-a/cpus",
        f"{DRIVER}/node-a/magic",
        "other.example.com/node-a/nic-0",
    )


def test_what_is_the_pods_names_no_container_and_without_a_name_there_is_the_uid() -> None:
    (note,) = Node().find(BEST_EFFORT).notes
    assert (note.subject, note.devices, note.cause.evidence) == ("pod pod-a", (), "BestEffort")


def test_several_knobs_of_a_container_are_one_note_and_several_containers_are_not() -> None:
    report = Node().find(QUOTA, MEMORY, QUOTA._replace(container="side"), QUOTA._replace(pod_uid="pod-b"))
    assert told(report) == [
        ("pod pod-a container main", "cgroup.lower"),
        ("pod pod-a container side", "cgroup.lower"),
        ("pod pod-b container main", "cgroup.lower"),
    ]
    assert report.notes[0].cause.evidence == f"{QUOTA.evidence}; {MEMORY.evidence}"


def test_of_many_knobs_the_first_are_named_and_the_rest_counted_however_long_they_are() -> None:
    many = [PAGES._replace(evidence=f"{n}: {'x' * 5000}") for n in range(6)]
    (note,) = Node().find(*many).notes
    assert note.cause.evidence.endswith("; and 3 more")
    assert [part[:3] for part in note.cause.evidence.split("; ")[:3]] == ["0: ", "1: ", "2: "]
    assert len(note.cause.evidence) < 2 * LIMIT


def test_degraded_comes_before_a_word() -> None:
    node = Node()
    report = node.find(BEST_EFFORT, QUOTA._replace(pod_uid="pod-z"))
    assert [note.cause.severity for note in report.notes] == [Severity.DEGRADED, Severity.INFO]


def test_advice_of_the_finding_comes_before_that_of_the_row() -> None:
    (note,) = Node().find(QUOTA._replace(advice="raise it")).notes
    assert note.cause.advice == "raise it"


# --- devices -----------------------------------------------------------------------------------------------


def test_less_cpu_than_promised_degrades_the_cpus_of_the_pod_and_says_so_to_the_kubelet() -> None:
    node = Node()
    node.names[POD] = "ml/train-0"
    node.use("cpus", "memory", "magic")
    device = of(node.find(QUOTA), "cpus")
    assert (device.health, device.severity) == (Health.HEALTHY, Severity.DEGRADED)
    assert device.message == (
        "cgroup.lower: pod ml/train-0 container main: cpu quota: 400000 us, expected 900000 us. "
        f"Advice: {PROMISES['cgroup.lower'].advice}"
    )
    assert worse(node.next()) == {"cpus": Severity.DEGRADED}


def test_each_device_is_told_of_its_own_resource_and_of_pages_of_its_own_size() -> None:
    node = Node()
    node.use("cpus", "pages-2m", "pages-1g")
    report = node.find(QUOTA, PAGES)
    assert worse(report) == {"cpus": Severity.DEGRADED, "pages-2m": Severity.DEGRADED}
    assert of(report, "pages-2m").causes[0].evidence == f"pod pod-a container main: {PAGES.evidence}"


def test_where_no_device_gives_it_all_are_told_and_none_is_degraded() -> None:
    node = Node()
    node.use("magic", "pages-1g")
    report = node.find(QUOTA, PAGES)
    assert worse(report) == {"pages-1g": Severity.INFO}
    assert codes(of(report, "magic")) == ["declared.unchecked", "cgroup.lower"]
    device = of(report, "pages-1g")
    assert (device.health, device.message) == (Health.HEALTHY, "")
    assert device.causes[0].evidence == f"pod pod-a container main: {PAGES.evidence}; {QUOTA.evidence}"


def test_what_is_about_the_pod_as_a_whole_is_a_word_on_all_its_devices() -> None:
    node = Node()
    node.use("cpus", "memory")
    assert worse(node.find(BEST_EFFORT)) == {"cpus": Severity.INFO, "memory": Severity.INFO}


def test_devices_of_others_and_pods_that_use_none_concern_no_device() -> None:
    node = Node()
    node.use("cpus", pod="pod-b")
    node.use("nic-0")
    assert worse(node.find(QUOTA)) == {}


def test_a_driver_that_declares_nothing_means_the_hosts_own_devices() -> None:
    node = Node()
    node.use("cpu-node0", driver=PLAIN)
    report = node.find(QUOTA)
    assert of(report, "cpu-node0", driver="").severity is Severity.DEGRADED
    assert report.notes[0].devices == ("cpu-node0",)


@pytest.mark.parametrize(
    "used",
    [
        ref("cpu-node0", "stranger.example.com"),
        ref("cpu-node0", PLAIN, pool="rack-7"),
        ref("cpu-node0", DRIVER),
        ref("cpu-node9", PLAIN),
    ],
)
def test_a_name_like_one_of_the_hosts_is_not_the_hosts(used: DeviceRef) -> None:
    node = Node()
    node.uses[POD] = (used,)
    report = node.find(QUOTA)
    assert worse(report) == {}
    assert report.notes[0].devices == (str(used),)


def test_a_gpu_is_told_and_stays_as_it_is_but_for_that() -> None:
    node = GpuNode()
    before = node.next()
    settings = replace(node.state.settings, drivers=(PLAIN,))
    source = SourceSample("pods", SourceState.OK, node.now_ns, 60 * NS, 0, "", passes=1, vital=False)
    pods = PodsSample(source, {POD: (ref("gpu-1", PLAIN),)}, {}, (QUOTA,))
    snapshot = replace(node.snapshot(), pods=pods)
    report = step(replace(node.state, settings=settings), snapshot, node.now)[1]
    plain, told_of = (of(one, "gpu-1", driver="") for one in (before, report))
    assert (codes(told_of), told_of.message, told_of.severity) == (["cgroup.lower"], "", Severity.INFO)
    assert told_of._replace(causes=(), severity=Severity.OK, since=plain.since) == plain
    assert of(report, "gpu-0", driver="").causes == ()


def test_several_pods_with_the_same_trouble_are_one_cause_of_the_device_that_they_share() -> None:
    node = Node()
    pods = [f"pod-{n}" for n in range(5)]
    for pod in pods:
        node.use("cpus", pod=pod)
    node.find(QUOTA._replace(pod_uid=pods[0]))
    first = node.now
    (cause,) = of(node.find(*(QUOTA._replace(pod_uid=pod) for pod in pods)), "cpus").causes
    assert cause.evidence.count(QUOTA.evidence) == 3
    assert cause.evidence.endswith("; and 2 more")
    assert cause.since == first


def test_a_word_of_one_pod_gives_way_to_what_is_more_of_another() -> None:
    node = Node()
    node.use("cpus")
    node.use("cpus", pod="pod-b")
    (cause,) = of(node.find(MEMORY, QUOTA._replace(pod_uid="pod-b")), "cpus").causes
    assert cause.severity is Severity.DEGRADED
    assert cause.evidence == f"pod pod-b container main: {QUOTA.evidence}"


def test_a_device_that_is_unhealthy_or_unknown_stays_so_and_its_own_cause_leads() -> None:
    node = Node()
    node.use("cpus")
    node.find(QUOTA)
    node.online("0")
    device = of(node.next(), "cpus")
    assert (device.health, codes(device)) == (Health.UNHEALTHY, ["cpu.offline", "cgroup.lower"])
    node.stuck.add("cpus")
    device = of(node.next(10), "cpus")
    assert (device.health, codes(device)) == (Health.UNKNOWN, [STALLED, "cpu.offline", "cgroup.lower"])
    assert device.severity is Severity.UNKNOWN


# --- what cgroups ran into ---------------------------------------------------------------------------------


def hurt(node: Node, **members: Any) -> Report:
    """A container of the pod counts this, which it had not."""
    still = group_sample(7, pod=POD)._replace(mem_limit=32 * MIB)
    node.groups = [still]
    node.next()
    node.groups = [still._replace(**members)]
    return node.next()


def test_a_kill_is_a_word_on_the_memory_of_the_pod_and_nothing_on_its_other_devices() -> None:
    node = Node()
    node.names[POD] = "ml/train-0"
    node.use("memory", "magic", "pages-2m")
    report = hurt(node, mem_oom_kill=1)
    assert worse(report) == {"memory": Severity.INFO}
    assert codes(of(report, "magic")) == ["declared.unchecked"]
    (cause,) = of(report, "memory").causes
    assert cause.evidence.startswith("pod ml/train-0 container container-a: processes were killed")
    (note,) = report.notes
    assert note.subject == "pod pod-a (ml/train-0) container container-a"
    assert len(note.devices) == 3


def test_exclusive_cpus_are_told_by_the_cpuset_and_a_note_has_the_claims_devices_too() -> None:
    node = Node()
    node.use("memory")
    report = hurt(node, cpus=0b10)
    for n in range(1, 5):
        node.groups = [node.groups[0]._replace(cpu_periods=10 * n, cpu_throttled=n)]
        report = node.next(5)
    assert worse(report) == {"cpus": Severity.DEGRADED}
    notes: dict[str, Note] = {note.cause.code: note for note in report.notes}
    assert notes["cgroup.cpu.throttled_exclusive"].devices == (
        f"{DRIVER}/node-a/cpus",
        f"{DRIVER}/node-a/memory",
    )


# --- through time ------------------------------------------------------------------------------------------


def test_a_finding_is_as_old_as_the_first_audit_that_has_it_without_a_break() -> None:
    node = Node()
    node.use("cpus")
    node.find(QUOTA)
    first = node.now
    (note,) = node.find(QUOTA._replace(evidence="cpu quota: 300000 us, expected 900000 us"), MEMORY).notes
    assert note.cause.since == first
    report = node.find()
    assert (report.notes, worse(report)) == ((), {})
    (note,) = node.find(QUOTA).notes
    assert note.cause.since == node.now


def test_what_a_source_said_that_fails_is_believed_to_its_limit_and_then_one_note_says_so() -> None:
    node = Node()
    node.use("cpus")
    first = node.find(QUOTA).at
    node.kubelet = SourceState.FAILING
    node.next()
    assert told(node.look()) == [("pod pod-a container main", "cgroup.lower")]
    assert node.state.due_ns is not None
    failed_ns = node.now_ns
    node.wait(LIMIT_NS / NS - 2)
    assert told(node.next()) == [("pod pod-a container main", "cgroup.lower")]
    due_ns = node.state.due_ns
    assert due_ns == failed_ns + LIMIT_NS
    report = node.next(2)
    lost = [(note.subject, note.cause.code, note.cause.evidence) for note in report.notes]
    assert lost == [("node", UNREAD.code, "pods: checkpoint: Permission denied")]
    assert worse(report) == {}
    assert node.next(50).notes == report.notes
    node.kubelet = SourceState.OK
    (note,) = node.next().notes
    assert (note.cause.code, note.cause.since) == ("cgroup.lower", first)
    assert worse(node.next()) == {"cpus": Severity.DEGRADED}


def test_the_core_looks_again_when_the_limit_is_over_though_nothing_wakes_it() -> None:
    node = Node()
    node.find(QUOTA)
    node.kubelet = SourceState.FAILING
    node.next()
    while codes_of(report := node.look()) == ["cgroup.lower"]:
        assert node.state.due_ns is not None
        assert node.state.due_ns > node.now_ns
        node.wait((node.state.due_ns - node.now_ns) / NS)
    assert UNREAD.code in codes_of(report)
    assert node.now_ns - node.started_ns < LIMIT_NS + 10 * NS


def codes_of(report: Report) -> list[str]:
    return [note.cause.code for note in report.notes]


def test_what_a_source_said_that_stands_still_is_told_no_more() -> None:
    node = Node()
    node.use("cpus")
    node.find(QUOTA)
    node.beats = False
    assert codes_of(node.next(180)) == ["cgroup.lower"]
    report = node.next()
    assert codes_of(report) == [UNREAD.code]
    assert report.notes[0].cause.evidence == "pods: no pass for more than 180 s"
    assert worse(report) == {}
    assert report.notes[0].devices == ()


def test_who_uses_what_is_not_claimed_either_when_nobody_has_looked_for_too_long() -> None:
    node = Node()
    node.use("memory")
    node.kubelet = SourceState.FAILING
    node.next()
    node.wait(181)
    report = hurt(node, mem_oom_kill=1)
    assert [note.devices for note in report.notes] == [()]
    assert worse(report) == {}


def test_what_could_never_be_read_is_no_loss() -> None:
    node = Node()
    node.kubelet = SourceState.FAILING
    node.next()
    node.wait(500)
    assert node.next().notes == ()


@pytest.mark.parametrize("state", [SourceState.ABSENT, SourceState.STARTING])
def test_a_kubelet_that_is_not_there_is_no_loss(state: SourceState) -> None:
    node = Node()
    node.next()
    node.kubelet = state
    node.next()
    node.wait(500)
    assert node.next().notes == ()


# --- floods, and whatever happens --------------------------------------------------------------------------


def test_a_flood_of_findings_has_bounded_messages_and_notes_and_forgets_no_device() -> None:
    node = Node()
    kinds = ["cpus", "memory", "pages-2m"]
    given_by = {"cpus": QUOTA, "memory": MEMORY, "pages-2m": PAGES}
    findings = []
    for n in range(5000):
        name = kinds[n % 3]
        node.use(name, pod=f"pod-{n}")
        findings.append(given_by[name]._replace(pod_uid=f"pod-{n}", evidence=f"{n} " + "x" * 2000))
    report = node.find(*findings)
    assert worse(report) == dict.fromkeys(kinds, Severity.DEGRADED)
    for name in kinds:
        device = of(report, name)
        assert len(device.message.encode()) <= LIMIT
        assert len(device.causes) == 1
        assert len(device.causes[0].evidence) < 2 * LIMIT
    assert len(report.notes) == MOST + 1
    (rest,) = [note for note in report.notes if note.cause.code == UNLISTED.code]
    assert (rest.subject, rest.cause.evidence) == ("node", f"{5000 - MOST} more than are told of one by one")


found = st.builds(
    PodFinding,
    st.sampled_from(["pod-a", "pod-b", "pod-c"]),
    st.sampled_from(["", "main", "side"]),
    st.sampled_from([*PROMISES]),
    st.sampled_from(["cpu quota", "memory limit", "pages"]),
    st.sampled_from(["", "raise it"]),
    st.one_of(st.none(), st.sampled_from(Resource)),
    st.sampled_from([0, 2048, 1 << 20]),
)
users = st.dictionaries(
    st.sampled_from(["pod-a", "pod-b"]),
    st.lists(
        st.builds(
            DeviceRef,
            st.sampled_from([DRIVER, PLAIN]),
            st.just("node-a"),
            st.sampled_from([*DEVICES, "cpu-node0", "nic-0"]),
        ),
        max_size=4,
    ).map(tuple),
)
worlds = st.tuples(
    st.lists(found, max_size=8),
    users,
    st.sampled_from([*SourceState]),
    st.sampled_from([1, 100, 200]),
    st.integers(0, 3),
)


@given(st.lists(worlds, min_size=1, max_size=5))
@hypothesis_settings(deadline=None, max_examples=80)
def test_pods_never_make_a_device_less_than_healthy_and_a_day_can_be_replayed(days: list[Any]) -> None:
    node, calm = Node(), Node()
    for findings, uses, state, wait_s, online in days:
        for one in (node, calm):
            one.cpus = cpus_sample(online)
            one.wait(wait_s)
        node.findings, node.uses, node.kubelet = tuple(findings), dict(uses), state
        before = node.state
        frozen = copy.deepcopy(before)
        report, same = node.next(), calm.next()
        assert step(frozen, node.snapshot(), node.now) == (node.state, report)
        assert before == frozen, "a state is a value"
        again = node.look()
        assert (without_times(again.devices), again.notes) == (without_times(report.devices), report.notes)
        for told_of, alone in zip(report.devices, same.devices, strict=True):
            assert told_of.health is alone.health
            assert told_of.severity is max(alone.severity, min(told_of.severity, Severity.DEGRADED))
            assert [one for one in told_of.causes if one in alone.causes] == [*alone.causes]
            assert len(set(codes(told_of))) == len(codes(told_of))
            if told_of.severity <= Severity.INFO:
                assert told_of.message == ""


@given(st.lists(found, max_size=8), found, users, st.randoms())
@hypothesis_settings(deadline=None, max_examples=80)
def test_one_finding_more_makes_nothing_better_and_their_order_makes_no_difference(
    findings: list[PodFinding], more: PodFinding, uses: Any, random: Any
) -> None:
    shuffled = [*findings]
    random.shuffle(shuffled)
    reports = []
    for these in (findings, shuffled, [*findings, more]):
        node = Node()
        node.uses = dict(uses)
        reports.append(node.find(*these))
    few, other, many = reports
    assert [one.message for one in few.devices] == [one.message for one in other.devices]
    for less, worst in zip(few.devices, many.devices, strict=True):
        assert less.severity <= worst.severity
    assert {*told(few)} <= {*told(many)}


def test_a_core_that_nobody_tells_of_pods_says_what_it_said_before() -> None:
    node = Node()
    node.next()
    snapshot = node.snapshot()
    without = replace(snapshot, pods=None, sources=snapshot.sources[:-1])
    state = State(node.state.settings)
    report = step(state, without, node.now)[1]
    assert report.devices == step(state, snapshot, node.now)[1].devices
    assert report.notes == ()
