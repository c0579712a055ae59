"""Findings of pod audits and of cgroups: notes, affected devices, severity and duration."""

import copy
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper import (
    ABSENT,
    MIB,
    PaperNode,
    codes,
    cpus_sample,
    group_sample,
    hugetlb_sample,
    pool_sample,
    without_times,
)
from paper_gpus import GpuNode

from agent.cgroup_audit.audit import ADVICE
from agent.cgroup_audit.audit_verdicts import DRIFT_VERDICTS
from agent.engine.step import EngineState, step
from agent.health.host.pod import MAX_GROUPS, POD_AUDIT_ROWS, PODS_UNREADABLE_ROW, UNLISTED_FINDINGS_ROW
from agent.health.rules import STALLED
from agent.health.verdict import MAX_MESSAGE_BYTES
from agent.model.claim import DeviceRef
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredFile,
    DeclaredHugepageDevice,
    DeclaredMemoryDevice,
    DeclaredOtherDevice,
    DeclaredPart,
    DriverDevice,
)
from agent.model.health import DeviceHealth, Health, NonDeviceCause, Severity
from agent.model.machine_samples import MachineSample, NumaMemorySample, PressureSample
from agent.model.pod_findings import PodFinding, PodsSample, Resource
from agent.model.reading import SourceSample, SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import HugetlbSample, Snapshot
from agent.model.time import NS

DRIVER: Final = "a.example.com"
PLAIN: Final = "plain.example.com"
"""Driver that the agent serves and that declares no devices."""
POD: Final = "pod-a"
LIMIT_NS: Final = 180 * NS
DEVICES: Final[dict[str, DeclaredPart]] = {
    "cpus": DeclaredCpuDevice(0b10, 0, exclusive=True, isolated=False),
    "memory": DeclaredMemoryDevice(0, 0),
    "pages-2m": DeclaredHugepageDevice(2048, 10, 0),
    "pages-1g": DeclaredHugepageDevice(1 << 20, 1, 0),
    "magic": DeclaredOtherDevice(),
}
MACHINE: Final = MachineSample(
    (), (NumaMemorySample(0, 1 << 24, 0, 128, 0),), (), PressureSample(0, 0, 0), 1, 1, 0, 0, ABSENT, ()
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
    """Node with a kubelet; one driver declares its devices."""

    def __init__(self) -> None:
        super().__init__(EngineSettings("node-a", drivers=(DRIVER, PLAIN)))
        self.pool(pool_sample(10))
        self.pool(pool_sample(1, size_kib=1 << 20))
        devices = [DriverDevice(DRIVER, "node-a", name, what, 0) for name, what in DEVICES.items()]
        self.files = (DeclaredFile(DRIVER, tuple(devices)),)
        self.uses: dict[str, tuple[DeviceRef, ...]] = {}
        self.names: dict[str, str] = {}
        self.findings: tuple[PodFinding, ...] = ()
        self.kubelet = SourceState.OK
        self.beats = True
        self._beat_ns = 0

    def use_devices(self, *names: str, pod: str = POD, driver: str = DRIVER) -> None:
        """Set the devices that a pod uses."""
        self.uses[pod] = tuple(ref(name, driver) for name in names)

    def report_of_audit(self, *findings: PodFinding) -> Report:
        """Set the findings of the newest audit; return the report."""
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


def device_of(report: Report, name: str, driver: str = DRIVER) -> DeviceHealth:
    return next(device for device in report.devices if (device.driver, device.device) == (driver, name))


def notes_of(report: Report) -> list[tuple[str, str]]:
    return [(note.subject, note.cause.code) for note in report.notes]


def bad_severities(report: Report) -> dict[str, Severity]:
    """Return the severities of devices that are not OK."""
    return {
        device.device: device.severity
        for device in report.devices
        if device.severity and device.device != "magic"
    }


# --- the catalog -----------------------------------------------------------------------------------------


def test_audit_findings_and_rows_match() -> None:
    verdicts = {f"cgroup.{verdict}".replace("-", "_") for verdict in DRIFT_VERDICTS}
    assert verdicts | ADVICE.keys() == POD_AUDIT_ROWS.keys()
    assert {code: POD_AUDIT_ROWS[code].advice for code in ADVICE} == ADVICE


def test_less_than_expected_is_degraded_and_the_rest_info() -> None:
    degraded = {code for code, row in POD_AUDIT_ROWS.items() if row.severity is Severity.DEGRADED}
    assert degraded == {
        "cgroup.lower",
        "cgroup.limited",
        "cgroup.parent_tighter",
        "cpus.exclusive_throttled",
    }
    assert {row.severity for row in POD_AUDIT_ROWS.values()} == {Severity.DEGRADED, Severity.INFO}


@pytest.mark.parametrize("code", sorted({*(f"cgroup.{verdict}" for verdict in DRIFT_VERDICTS), *ADVICE}))
def test_every_audit_finding_is_reported_as_in_its_row(code: str) -> None:
    report = Node().report_of_audit(PodFinding(POD, "main", code, "numbers"))
    (note,) = report.notes
    row = POD_AUDIT_ROWS[note.cause.code]
    assert note.cause.code == code.replace("-", "_")
    assert (note.cause.severity, note.cause.blame, note.cause.advice) == (row.severity, row.blame, row.advice)


# --- notes ------------------------------------------------------------------------------------------------


def test_note_names_the_pod_and_all_its_devices() -> None:
    node = Node()
    node.names[POD] = "ml/train-0"
    node.use_devices("cpus", "magic")
    node.uses[POD] += (ref("nic-0", "other.example.com"), ref("cpus"))
    (note,) = node.report_of_audit(QUOTA).notes
    assert note.subject == "pod pod-a (ml/train-0) container main"
    assert note.devices == (
        f"{DRIVER}/node-a/cpus",
        f"{DRIVER}/node-a/magic",
        "other.example.com/node-a/nic-0",
    )


def test_note_on_a_pod_without_name_has_its_uid() -> None:
    (note,) = Node().report_of_audit(BEST_EFFORT).notes
    assert (note.subject, note.devices, note.cause.evidence) == ("pod pod-a", (), "BestEffort")


def test_cgroup_files_of_one_container_share_a_note() -> None:
    report = Node().report_of_audit(
        QUOTA, MEMORY, QUOTA._replace(container="side"), QUOTA._replace(pod_uid="pod-b")
    )
    assert notes_of(report) == [
        ("pod pod-a container main", "cgroup.lower"),
        ("pod pod-a container side", "cgroup.lower"),
        ("pod pod-b container main", "cgroup.lower"),
    ]
    assert report.notes[0].cause.evidence == f"{QUOTA.evidence}; {MEMORY.evidence}"


def test_note_lists_few_cgroup_files_and_counts_the_rest() -> None:
    many = [PAGES._replace(evidence=f"{n}: {'x' * 5000}") for n in range(6)]
    (note,) = Node().report_of_audit(*many).notes
    assert note.cause.evidence.endswith("; and 3 more")
    assert [part[:3] for part in note.cause.evidence.split("; ")[:3]] == ["0: ", "1: ", "2: "]
    assert len(note.cause.evidence) < 2 * MAX_MESSAGE_BYTES


def test_degraded_notes_come_before_info() -> None:
    node = Node()
    report = node.report_of_audit(BEST_EFFORT, QUOTA._replace(pod_uid="pod-z"))
    assert [note.cause.severity for note in report.notes] == [Severity.DEGRADED, Severity.INFO]


def test_advice_of_the_finding_overrides_that_of_the_row() -> None:
    (note,) = Node().report_of_audit(QUOTA._replace(advice="raise it")).notes
    assert note.cause.advice == "raise it"


# --- devices ----------------------------------------------------------------------------------------------


def test_less_cpu_than_expected_degrades_the_pods_cpus() -> None:
    node = Node()
    node.names[POD] = "ml/train-0"
    node.use_devices("cpus", "memory", "magic")
    device = device_of(node.report_of_audit(QUOTA), "cpus")
    assert (device.health, device.severity) == (Health.HEALTHY, Severity.DEGRADED)
    assert device.message == (
        "cgroup.lower: pod ml/train-0 container main: cpu quota: 400000 us, expected 900000 us. "
        f"Advice: {POD_AUDIT_ROWS['cgroup.lower'].advice}"
    )
    assert bad_severities(node.next()) == {"cpus": Severity.DEGRADED}


def test_device_has_findings_of_its_own_resource_and_page_size() -> None:
    node = Node()
    node.use_devices("cpus", "pages-2m", "pages-1g")
    report = node.report_of_audit(QUOTA, PAGES)
    assert bad_severities(report) == {"cpus": Severity.DEGRADED, "pages-2m": Severity.DEGRADED}
    assert device_of(report, "pages-2m").causes[0].evidence == f"pod pod-a container main: {PAGES.evidence}"


def test_finding_without_a_matching_device_is_info_on_all() -> None:
    node = Node()
    node.use_devices("magic", "pages-1g")
    report = node.report_of_audit(QUOTA, PAGES)
    assert bad_severities(report) == {"pages-1g": Severity.INFO}
    assert codes(device_of(report, "magic")) == ["declared.unchecked", "cgroup.lower"]
    device = device_of(report, "pages-1g")
    assert (device.health, device.message) == (Health.HEALTHY, "")
    assert device.causes[0].evidence == f"pod pod-a container main: {PAGES.evidence}; {QUOTA.evidence}"


def test_finding_about_the_whole_pod_is_info_on_all_devices() -> None:
    node = Node()
    node.use_devices("cpus", "memory")
    assert bad_severities(node.report_of_audit(BEST_EFFORT)) == {
        "cpus": Severity.INFO,
        "memory": Severity.INFO,
    }


def test_foreign_devices_and_pods_without_devices_affect_none() -> None:
    node = Node()
    node.use_devices("cpus", pod="pod-b")
    node.use_devices("nic-0")
    assert bad_severities(node.report_of_audit(QUOTA)) == {}


def test_driver_without_declarations_uses_the_hosts_devices() -> None:
    node = Node()
    node.use_devices("cpu-node0", driver=PLAIN)
    report = node.report_of_audit(QUOTA)
    assert device_of(report, "cpu-node0", driver="").severity is Severity.DEGRADED
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
def test_name_of_a_host_device_in_another_pool_is_foreign(used: DeviceRef) -> None:
    node = Node()
    node.uses[POD] = (used,)
    report = node.report_of_audit(QUOTA)
    assert bad_severities(report) == {}
    assert report.notes[0].devices == (str(used),)


def test_gpu_verdict_gains_only_the_pods_cause() -> None:
    node = GpuNode()
    before = node.next()
    settings = replace(node.state.settings, drivers=(PLAIN,))
    source = SourceSample("pods", SourceState.OK, node.now_ns, 60 * NS, 0, "", passes=1, vital=False)
    pods = PodsSample(source, {POD: (ref("gpu-1", PLAIN),)}, {}, (QUOTA,))
    snapshot = replace(node.snapshot(), pods=pods)
    report = step(replace(node.state, settings=settings), snapshot, node.now)[1]
    plain, with_finding = (device_of(node_, "gpu-1", driver="") for node_ in (before, report))
    assert (codes(with_finding), with_finding.message, with_finding.severity) == (
        ["cgroup.lower"],
        "",
        Severity.INFO,
    )
    assert with_finding._replace(causes=(), severity=Severity.OK, since=plain.since) == plain
    assert device_of(report, "gpu-0", driver="").causes == ()


def test_cause_of_many_pods_names_the_newest() -> None:
    node = Node()
    pods = [f"pod-{n}" for n in range(5)]
    for pod in pods:
        node.use_devices("cpus", pod=pod)
    for count in range(1, len(pods)):
        node.report_of_audit(*(QUOTA._replace(pod_uid=pod) for pod in pods[:count]))
    (cause,) = device_of(node.report_of_audit(*(QUOTA._replace(pod_uid=pod) for pod in pods)), "cpus").causes
    assert [pod for pod in pods if pod in cause.evidence] == pods[-3:]


def test_same_finding_of_several_pods_is_one_cause_of_a_device() -> None:
    node = Node()
    pods = [f"pod-{n}" for n in range(5)]
    for pod in pods:
        node.use_devices("cpus", pod=pod)
    node.report_of_audit(QUOTA._replace(pod_uid=pods[0]))
    first = node.now
    (cause,) = device_of(node.report_of_audit(*(QUOTA._replace(pod_uid=pod) for pod in pods)), "cpus").causes
    assert cause.evidence.count(QUOTA.evidence) == 3
    assert cause.evidence.endswith("; and 2 more")
    assert cause.since == first


def test_degraded_finding_of_one_pod_hides_info_of_another() -> None:
    node = Node()
    node.use_devices("cpus")
    node.use_devices("cpus", pod="pod-b")
    (cause,) = device_of(node.report_of_audit(MEMORY, QUOTA._replace(pod_uid="pod-b")), "cpus").causes
    assert cause.severity is Severity.DEGRADED
    assert cause.evidence == f"pod pod-b container main: {QUOTA.evidence}"


def test_pod_findings_follow_an_unhealthy_devices_own_causes() -> None:
    node = Node()
    node.use_devices("cpus")
    node.report_of_audit(QUOTA)
    node.set_online("0")
    device = device_of(node.next(), "cpus")
    assert (device.health, codes(device)) == (Health.UNHEALTHY, ["cpu.offline", "cgroup.lower"])
    node.stuck.add("cpus")
    device = device_of(node.next(10), "cpus")
    assert (device.health, codes(device)) == (Health.UNKNOWN, [STALLED, "cpu.offline", "cgroup.lower"])
    assert device.severity is Severity.UNKNOWN


# --- events of cgroups ------------------------------------------------------------------------------------


def report_after_events(node: Node, *, base: tuple[HugetlbSample, ...] = (), **members: Any) -> Report:
    """Count events of the pod's container, which has the hugepage counters `base`; return the report."""
    still = group_sample(7, *base, pod=POD)._replace(mem_limit=32 * MIB)
    node.groups = [still]
    node.next()
    node.groups = [still._replace(**members)]
    return node.next()


def test_oom_kill_is_info_on_the_pods_memory_only() -> None:
    node = Node()
    node.names[POD] = "ml/train-0"
    node.use_devices("memory", "magic", "pages-2m")
    report = report_after_events(node, mem_oom_kill=1)
    assert bad_severities(report) == {"memory": Severity.INFO}
    assert codes(device_of(report, "magic")) == ["declared.unchecked"]
    (cause,) = device_of(report, "memory").causes
    assert cause.evidence.startswith("pod ml/train-0 container container-a: processes were killed")
    (note,) = report.notes
    assert note.subject == "pod pod-a (ml/train-0) container container-a"
    assert len(note.devices) == 3


def test_hugepage_limit_hit_is_info_on_pages_of_its_size_only() -> None:
    node = Node()
    node.use_devices("pages-2m", "pages-1g")
    sizes = hugetlb_sample(0), hugetlb_sample(0, size_kib=1 << 20)
    report = report_after_events(node, hugetlb=(sizes[0]._replace(events_max=1), sizes[1]), base=sizes)
    assert bad_severities(report) == {"pages-2m": Severity.INFO}


def test_exclusive_throttling_affects_the_devices_of_the_cpuset() -> None:
    node = Node()
    node.use_devices("memory", "cpus")
    report = report_after_events(node, cpus=0b10)
    for n in range(1, 5):
        node.groups = [node.groups[0]._replace(cpu_periods=10 * n, cpu_throttled=n)]
        report = node.next(5)
    assert bad_severities(report) == {"cpus": Severity.DEGRADED}
    notes: dict[str, NonDeviceCause] = {note.cause.code: note for note in report.notes}
    assert notes["cgroup.cpu.throttled_exclusive"].devices == (
        f"{DRIVER}/node-a/cpus",
        f"{DRIVER}/node-a/memory",
    )


# --- sequences of reports ---------------------------------------------------------------------------------


def test_audit_finding_since_is_the_first_of_consecutive_audits() -> None:
    node = Node()
    node.use_devices("cpus")
    node.report_of_audit(QUOTA)
    first = node.now
    (note,) = node.report_of_audit(
        QUOTA._replace(evidence="cpu quota: 300000 us, expected 900000 us"), MEMORY
    ).notes
    assert note.cause.since == first
    report = node.report_of_audit()
    assert (report.notes, bad_severities(report)) == ((), {})
    (note,) = node.report_of_audit(QUOTA).notes
    assert note.cause.since == node.now


def test_failing_source_is_trusted_until_its_limit() -> None:
    node = Node()
    node.use_devices("cpus")
    first = node.report_of_audit(QUOTA).at
    node.kubelet = SourceState.FAILING
    node.next()
    assert notes_of(node.evaluate()) == [("pod pod-a container main", "cgroup.lower")]
    assert node.state.due_ns is not None
    failed_ns = node.now_ns
    node.wait(LIMIT_NS / NS - 2)
    assert notes_of(node.next()) == [("pod pod-a container main", "cgroup.lower")]
    due_ns = node.state.due_ns
    assert due_ns == failed_ns + LIMIT_NS
    report = node.next(2)
    lost = [(note.subject, note.cause.code, note.cause.evidence) for note in report.notes]
    assert lost == [("node", PODS_UNREADABLE_ROW.code, "pods: checkpoint: Permission denied")]
    assert bad_severities(report) == {}
    assert node.next(50).notes == report.notes
    node.kubelet = SourceState.OK
    (note,) = node.next().notes
    assert (note.cause.code, note.cause.since) == ("cgroup.lower", first)
    assert bad_severities(node.next()) == {"cpus": Severity.DEGRADED}


def test_end_of_trust_schedules_an_evaluation() -> None:
    node = Node()
    node.report_of_audit(QUOTA)
    node.kubelet = SourceState.FAILING
    node.next()
    while codes_of(report := node.evaluate()) == ["cgroup.lower"]:
        assert node.state.due_ns is not None
        assert node.state.due_ns > node.now_ns
        node.wait((node.state.due_ns - node.now_ns) / NS)
    assert PODS_UNREADABLE_ROW.code in codes_of(report)
    assert node.now_ns - node.started_ns < LIMIT_NS + 10 * NS


def codes_of(report: Report) -> list[str]:
    return [note.cause.code for note in report.notes]


def test_stalled_source_drops_its_findings() -> None:
    node = Node()
    node.use_devices("cpus")
    node.report_of_audit(QUOTA)
    node.beats = False
    assert codes_of(node.next(180)) == ["cgroup.lower"]
    report = node.next()
    assert codes_of(report) == [PODS_UNREADABLE_ROW.code]
    assert report.notes[0].cause.evidence == "pods: no pass for more than 180 s"
    assert bad_severities(report) == {}
    assert report.notes[0].devices == ()


def test_untrusted_sample_names_no_devices_of_pods() -> None:
    node = Node()
    node.use_devices("memory")
    node.kubelet = SourceState.FAILING
    node.next()
    node.wait(181)
    report = report_after_events(node, mem_oom_kill=1)
    assert [note.devices for note in report.notes] == [()]
    assert bad_severities(report) == {}


def test_source_never_read_has_no_note() -> None:
    node = Node()
    node.kubelet = SourceState.FAILING
    node.next()
    node.wait(500)
    assert node.next().notes == ()


@pytest.mark.parametrize("state", [SourceState.ABSENT, SourceState.STARTING])
def test_absent_kubelet_has_no_note(state: SourceState) -> None:
    node = Node()
    node.next()
    node.kubelet = state
    node.next()
    node.wait(500)
    assert node.next().notes == ()


# --- floods, and random events ----------------------------------------------------------------------------


def test_flood_of_findings_has_bounded_notes_and_all_devices() -> None:
    node = Node()
    kinds = ["cpus", "memory", "pages-2m"]
    given_by = {"cpus": QUOTA, "memory": MEMORY, "pages-2m": PAGES}
    findings = []
    for n in range(5000):
        name = kinds[n % 3]
        node.use_devices(name, pod=f"pod-{n}")
        findings.append(given_by[name]._replace(pod_uid=f"pod-{n}", evidence=f"{n} " + "x" * 2000))
    report = node.report_of_audit(*findings)
    assert bad_severities(report) == dict.fromkeys(kinds, Severity.DEGRADED)
    for name in kinds:
        device = device_of(report, name)
        assert len(device.message.encode()) <= MAX_MESSAGE_BYTES
        assert len(device.causes) == 1
        assert len(device.causes[0].evidence) < 2 * MAX_MESSAGE_BYTES
    assert len(report.notes) == MAX_GROUPS + 1
    (rest,) = [note for note in report.notes if note.cause.code == UNLISTED_FINDINGS_ROW.code]
    assert (rest.subject, rest.cause.evidence) == (
        "node",
        f"{5000 - MAX_GROUPS} findings beyond the listed ones",
    )


found = st.builds(
    PodFinding,
    st.sampled_from(["pod-a", "pod-b", "pod-c"]),
    st.sampled_from(["", "main", "side"]),
    st.sampled_from([*POD_AUDIT_ROWS]),
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
def test_pod_findings_keep_devices_healthy_and_replay(days: list[Any]) -> None:
    node, calm = Node(), Node()
    for findings, uses, state, wait_s, online in days:
        for node_ in (node, calm):
            node_.cpus = cpus_sample(online)
            node_.wait(wait_s)
        node.findings, node.uses, node.kubelet = tuple(findings), dict(uses), state
        before = node.state
        frozen = copy.deepcopy(before)
        report, same = node.next(), calm.next()
        assert step(frozen, node.snapshot(), node.now) == (node.state, report)
        assert before == frozen, "a state is a value"
        again = node.evaluate()
        assert (without_times(again.devices), again.notes) == (without_times(report.devices), report.notes)
        for with_finding, alone in zip(report.devices, same.devices, strict=True):
            assert with_finding.health is alone.health
            assert with_finding.severity is max(alone.severity, min(with_finding.severity, Severity.DEGRADED))
            assert [cause for cause in with_finding.causes if cause in alone.causes] == [*alone.causes]
            assert len(set(codes(with_finding))) == len(codes(with_finding))
            if with_finding.severity <= Severity.INFO:
                assert with_finding.message == ""


@given(st.lists(found, max_size=8), found, users, st.randoms())
def test_more_findings_never_improve_a_verdict_in_any_order(
    findings: list[PodFinding], more: PodFinding, uses: Any, random: Any
) -> None:
    shuffled = [*findings]
    random.shuffle(shuffled)
    reports = []
    for these in (findings, shuffled, [*findings, more]):
        node = Node()
        node.uses = dict(uses)
        reports.append(node.report_of_audit(*these))
    few, other, many = reports
    assert [device.message for device in few.devices] == [device.message for device in other.devices]
    for less, worst in zip(few.devices, many.devices, strict=True):
        assert less.severity <= worst.severity
    assert {*notes_of(few)} <= {*notes_of(many)}


def test_report_without_pods_is_unchanged() -> None:
    node = Node()
    node.next()
    snapshot = node.snapshot()
    without = replace(snapshot, pods=None, sources=snapshot.sources[:-1])
    state = EngineState(node.state.settings)
    report = step(state, without, node.now)[1]
    assert report.devices == step(state, snapshot, node.now)[1].devices
    assert report.notes == ()
