"""Test cases of Kubernetes, by their names; the first accepted value is the result of its code.

Source: kubelet v1.37.1, pkg/kubelet/cm and kuberuntime; k8s.io/component-helpers v0.37.2, resource.
Shares are checked in cgroup v1, where they are not converted.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pytest
from cgroup_audit_pods import (
    GI,
    MI,
    SIZES,
    V1,
    Object,
    claim,
    container,
    exact_value,
    knob,
    pod,
    pod_object,
    resources,
    sidecar,
)

from agent.cgroup_audit.cgroup_paths import CgroupLevel
from agent.cgroup_audit.cgroup_settings import SettingKind
from agent.cgroup_audit.expected_cgroups import ExpectedCgroup, expected_pod_cgroups, expected_qos_cgroups
from agent.cgroup_audit.expected_values import ResourceSum, pod_limits, pod_requests
from agent.cgroup_audit.kubelet_config import CgroupDriver, NodeFacts
from agent.cgroup_audit.pod_model import Pod, QosClass, parse_quantity
from agent.cgroup_audit.pod_parser import parse_pod
from agent.model.pod_findings import NO_LIMIT

UNCOUNTED: Final = NodeFacts(1, CgroupDriver.CGROUPFS, hugepages_kib=SIZES, counts_claims=False)
TUNED: Final = NodeFacts(1, CgroupDriver.CGROUPFS, period_us=5000)
UNENFORCED: Final = NodeFacts(1, CgroupDriver.CGROUPFS, enforces_quota=False)
SMALL, LARGE = "cpu=100m memory=100Mi", "cpu=200m memory=200Mi"


class Config(NamedTuple):
    """Written values of one cgroup; None: no limit."""

    shares: int
    quota: int | None
    memory: int | None


def config(pod: Pod, facts: NodeFacts = V1, name: str = "") -> Config:
    groups = expected_pod_cgroups(pod, facts)
    quota, memory = (exact_value(groups, kind, name) for kind in (SettingKind.QUOTA, SettingKind.MEMORY))
    return Config(
        exact_value(groups, SettingKind.WEIGHT, name),
        None if quota == NO_LIMIT else quota,
        None if memory == NO_LIMIT else memory,
    )


def c1(requests: str = "", limits: str = "") -> Object:
    return container("c1", requests, limits)


SPEC: Final = c1("cpu=1 memory=200Mi", "cpu=3 memory=500Mi")

# --- cm: TestResourceConfigForPod --------------------------------------------------------------------------

POD_CASES: Final[Mapping[str, tuple[Pod, NodeFacts, Config]]] = {
    "besteffort": (pod(c1()), V1, Config(2, None, None)),
    "burstable-no-limits": (pod(c1(SMALL)), V1, Config(102, None, None)),
    "burstable-with-limits": (pod(c1(SMALL, LARGE)), V1, Config(102, 20000, 200 * MI)),
    "burstable-with-limits-no-cpu-enforcement": (
        pod(c1(SMALL, LARGE)), UNENFORCED, Config(102, None, 200 * MI),
    ),
    "burstable-partial-limits": (
        pod(c1(SMALL, LARGE), container("c2", SMALL)), V1, Config(204, None, None),
    ),
    "burstable-with-limits-with-tuned-quota": (pod(c1(SMALL, LARGE)), TUNED, Config(102, 1000, 200 * MI)),
    "guaranteed": (pod(c1(SMALL, SMALL)), V1, Config(102, 10000, 100 * MI)),
    "guaranteed-no-cpu-enforcement": (pod(c1(SMALL, SMALL)), UNENFORCED, Config(102, None, 100 * MI)),
    "guaranteed-with-tuned-quota": (pod(c1(SMALL, SMALL)), TUNED, Config(102, 1000, 100 * MI)),
    "burstable-partial-limits-with-init-containers": (
        pod(
            c1("cpu=100m memory=100m", SMALL),
            container("c2", "cpu=100m memory=100m"),
            init=[container("i1", "cpu=100m memory=100m", SMALL), container("i2", "cpu=100m memory=100m")],
        ),
        V1,
        Config(204, None, None),
    ),
    "besteffort-with-pod-level-resources-enabled": (pod(c1(), level={}), V1, Config(2, None, None)),
    "burstable-with-pod-level-requests": (pod(c1(), level=resources(SMALL)), V1, Config(102, None, None)),
    "burstable-with-pod-and-container-level-requests": (
        pod(c1("cpu=10m memory=50Mi"), level=resources(SMALL)), V1, Config(102, None, None),
    ),
    "burstable-with-pod-level-resources": (
        pod(c1(), level=resources(SMALL, LARGE)), V1, Config(102, 20000, 200 * MI),
    ),
    "burstable-with-pod-and-container-level-resources": (
        pod(c1("cpu=10m memory=50Mi", "cpu=50m memory=100Mi"), level=resources(SMALL, LARGE)),
        V1,
        Config(102, 20000, 200 * MI),
    ),
    "burstable-with-partial-pod-level-resources-limits": (
        pod(c1(LARGE, LARGE), level=resources("cpu=200m memory=300Mi")), V1, Config(204, 20000, 200 * MI),
    ),
    "guaranteed-with-pod-level-resources": (
        pod(c1(), level=resources(SMALL, SMALL)), V1, Config(102, 10000, 100 * MI),
    ),
    "guaranteed-with-pod-and-container-level-resources": (
        pod(c1("cpu=10m memory=50Mi", "cpu=50m memory=100Mi"), level=resources(SMALL, SMALL)),
        V1,
        Config(102, 10000, 100 * MI),
    ),
    "guaranteed-pod-level-resources-with-init-containers": (
        pod(
            c1("cpu=10m memory=50Mi", "cpu=50m memory=50Mi"),
            init=[container("i1", "cpu=10m memory=50Mi", "cpu=50m memory=50Mi")],
            level=resources(SMALL, SMALL),
        ),
        V1,
        Config(102, 10000, 100 * MI),
    ),
    "burstable-with-dra-direct-claims": (
        pod(SPEC, claims=[claim("x", "c1", "cpu=2")]), V1, Config(3072, 500000, 500 * MI),
    ),
    "burstable-with-dra-overhead-claims": (
        pod(SPEC, claims=[claim("x", "c1", "", "memory=300Mi", "memory=100Mi")]),
        V1,
        Config(1024, 300000, 900 * MI),
    ),
    "burstable-with-dra-combined-mapping-and-overhead-claims": (
        pod(
            SPEC,
            claims=[
                claim("x", "c1", "cpu=2 memory=100Mi", "cpu=1 memory=300Mi", "cpu=1500m memory=100Mi"),
            ],
        ),
        V1,
        Config(5632, 750000, 1000 * MI),
    ),
    "burstable-with-dra-feature-gate-disabled": (
        pod(SPEC, claims=[claim("x", "c1", "cpu=2")]), UNCOUNTED, Config(1024, 300000, 500 * MI),
    ),
    "burstable-with-dra-and-pod-level-resources": (
        pod(
            c1(),
            level=resources("cpu=4 memory=600Mi", "cpu=8 memory=900Mi"),
            claims=[claim("x", "c1", "cpu=2 memory=300Mi")],
        ),
        V1,
        Config(4096, 800000, 900 * MI),
    ),
    "burstable-with-multiple-dra-claims": (
        pod(
            c1("cpu=100m memory=200Mi", "cpu=300m memory=500Mi"),
            claims=[claim("x", "c1", "cpu=100m"), claim("y", "c1", "cpu=200m")],
        ),
        V1,
        Config(409, 60000, 500 * MI),
    ),
    "burstable-with-multiple-containers-referencing-overhead-claim": (
        pod(
            c1("cpu=100m memory=200Mi", "cpu=300m memory=500Mi"),
            container("c2", "cpu=200m memory=300Mi", "cpu=400m memory=600Mi"),
            claims=[claim("x", "c1 c2", "", "memory=200Mi", "memory=100Mi")],
        ),
        V1,
        Config(307, 70000, 1500 * MI),
    ),
    "burstable-with-direct-claim-shared-by-two-containers": (
        pod(
            SPEC,
            container("c2", "cpu=2 memory=300Mi", "cpu=4 memory=600Mi"),
            claims=[claim("x", "c1 c2", "cpu=2 memory=400Mi")],
        ),
        V1,
        Config(5120, 900000, 1500 * MI),
    ),
    "besteffort-with-dra-direct-claims": (
        pod(c1(), claims=[claim("x", "c1", "cpu=2 memory=400Mi")]), V1, Config(2, None, None),
    ),
    "guaranteed-with-dra-direct-claims": (
        pod(
            c1("cpu=1 memory=300Mi", "cpu=1 memory=300Mi"), claims=[claim("x", "c1", "cpu=2 memory=400Mi")],
        ),
        V1,
        Config(3072, 300000, 700 * MI),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POD_CASES)
def test_pod_cgroup_matches_resource_config_for_pod(name: str) -> None:
    pod, facts, expected = POD_CASES[name]
    assert config(pod, facts) == expected


def test_claim_of_hugepages_sets_the_page_limits_of_the_pod() -> None:
    groups = expected_pod_cgroups(pod(SPEC, claims=[claim("x", "c1", "hugepages-1Gi=2Gi")]), V1)
    for kind in (SettingKind.PAGES, SettingKind.RESERVED):
        assert [exact_value(groups, kind, size_kib=size) for size in SIZES] == [0, 2 * GI]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ("2Mi=128", {2: 0, 4: 0}),
        ("hugepages-2Mi=128", {2: 128, 4: 0}),
        ("hugepages-2Mi=128 hugepages-2097152=256 hugepages-4Mi=512 4Mi=1024", {2: 384, 4: 512}),
    ],
)
def test_page_limits_sum_all_spellings_of_a_size(requests: str, expected: Mapping[int, int]) -> None:
    """Go test TestHugePageLimits: one size may be written in several ways; the amounts are summed."""
    facts = NodeFacts(hugepages_kib=(2 << 10, 4 << 10))
    groups = expected_pod_cgroups(pod(c1(requests)), facts)
    assert {mib: exact_value(groups, SettingKind.PAGES, size_kib=mib << 10) for mib in (2, 4)} == expected


# --- cm: TestQOSCPUConfigUpdate ----------------------------------------------------------------------------

GUARANTEED: Final = pod(c1("cpu=1 memory=128Mi", "cpu=1 memory=128Mi"))
BURSTABLE: Final = pod(c1("cpu=1 memory=128Mi", "cpu=2 memory=256Mi"))
BEST_EFFORT: Final = pod(c1())


@pytest.mark.parametrize(
    ("pods", "burstable"),
    [
        ([GUARANTEED], 2),
        ([BURSTABLE], 1024),
        ([BEST_EFFORT], 2),
        ([GUARANTEED, BURSTABLE], 1024),
        ([BEST_EFFORT, BURSTABLE], 1024),
        ([BURSTABLE, BURSTABLE], 2048),
        ([pod(SPEC, claims=[claim("x", "c1", "cpu=2")])], 3072),
    ],
)
def test_qos_class_shares_match_qos_cpu_config_update(pods: list[Pod], burstable: int) -> None:
    shares = {
        group.cgroup.qos: group.settings[0].accepted[0].value for group in expected_qos_cgroups(pods, V1)
    }
    assert shares == {QosClass.BURSTABLE: burstable, QosClass.BEST_EFFORT: 2}


# --- kuberuntime: TestApplySandboxResources ----------------------------------------------------------------
# The sandbox gets the values of the pod's cgroup without the overhead.

FIRST: Final = c1("cpu=2 memory=128Mi", "cpu=4 memory=256Mi")


@pytest.mark.parametrize(
    ("pod", "facts", "expected"),
    [
        pytest.param(
            pod(FIRST, overhead="cpu=1 memory=128Mi"), V1, Config(3072, 500000, 384 * MI), id="overhead"
        ),
        pytest.param(
            pod(c1("memory=128Mi", "memory=256Mi")), V1, Config(2, None, 256 * MI), id="no-overhead"
        ),
        pytest.param(
            pod(FIRST, claims=[claim("x", "c1", "cpu=200m memory=128Mi")]),
            V1,
            Config(2252, 420000, 402653184),
            id="dra-direct",
        ),
        pytest.param(
            pod(c1("cpu=2 memory=128Mi"), claims=[claim("x", "c1", "cpu=200m memory=128Mi")]),
            V1,
            Config(2252, None, None),
            id="dra-no-limits",
        ),
        pytest.param(
            pod(FIRST, claims=[claim("x", "c1", "cpu=200m memory=128Mi")]),
            UNCOUNTED,
            Config(2048, 400000, 268435456),
            id="dra-disabled",
        ),
        pytest.param(
            pod(
                c1("cpu=1 memory=128Mi", "cpu=2 memory=256Mi"),
                level=resources("cpu=4 memory=512Mi", "cpu=8 memory=1Gi"),
                claims=[claim("x", "c1", "cpu=200m memory=128Mi")],
            ),
            V1,
            Config(4096, 800000, GI),
            id="pod-level",
        ),
        pytest.param(
            pod(
                FIRST,
                claims=[
                    claim("x", "c1", "cpu=200m memory=128Mi", "cpu=100m memory=100Mi", "cpu=50m memory=50Mi")
                ],
            ),
            V1,
            Config(2406, 435000, 534 * MI),
            id="dra-combined",
        ),
    ],
)
def test_pod_cgroup_matches_sandbox_resources(pod: Pod, facts: NodeFacts, expected: Config) -> None:
    assert config(pod, facts) == expected


# --- kuberuntime: TestGenerateLinuxContainerConfigResources, TestCalculateLinuxResources -------------------


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (pod(c1("cpu=1 memory=128Mi", "cpu=3 memory=256Mi")), Config(1024, 300000, 256 * MI)),
        (pod(c1("cpu=2 memory=128Mi")), Config(2048, None, None)),
        (
            pod(c1("cpu=1 memory=128Mi"), level=resources("", "cpu=3 memory=256Mi")),
            Config(1024, 300000, 256 * MI),
        ),
        (pod(c1("cpu=1", "cpu=1")), Config(1024, 100000, None)),
        (pod(c1("cpu=500m", "cpu=500m"), level=resources("cpu=2", "cpu=2")), Config(512, 50000, None)),
        (pod(c1("cpu=1", "cpu=2"), level=resources("cpu=2", "cpu=2")), Config(1024, 200000, None)),
        (pod(c1(), level=resources("cpu=2", "cpu=2")), Config(2048, 200000, None)),
        (pod(c1("", "cpu=2")), Config(2048, 200000, None)),
        (pod(c1("cpu=0", "cpu=2")), Config(2, 200000, None)),
    ],
)
def test_container_cgroup_matches_container_config_resources(pod: Pod, expected: Config) -> None:
    assert config(pod, V1, "c1") == expected


# --- kuberuntime: TestGenerateLinuxContainerResourcesWithDRA -----------------------------------------------

MIXED: Final = claim("x", "c1", "cpu=1 memory=300Mi hugepages-2Mi=2Mi")
LIMITS: Final = "cpu=2 memory=500Mi hugepages-2Mi=2Mi"
LEVEL: Final = resources("", "cpu=4 memory=1Gi hugepages-2Mi=4Mi")
CONTAINER_CASES: Final[Mapping[str, tuple[Pod, NodeFacts, Config, int]]] = {
    "feature gate DRANodeAllocatableResources disabled": (
        pod(c1("", LIMITS), claims=[MIXED]), UNCOUNTED, Config(2048, 200000, 500 * MI), 2 * MI,
    ),
    "explicit container spec limits + DRA allocations": (
        pod(c1("cpu=1 memory=300Mi", LIMITS), claims=[MIXED]), V1, Config(1024, 300000, 800 * MI), 4 * MI,
    ),
    "container limits omitted + pod level resource limits set + DRA allocations": (
        pod(c1(), level=LEVEL, claims=[MIXED]), V1, Config(4096, 400000, GI), 4 * MI,
    ),
    "container limits omitted + pod level limits omitted + DRA allocations": (
        pod(c1(), claims=[MIXED]), V1, Config(2, None, None), 2 * MI,
    ),
    "container limits specified + no DRA allocations": (
        pod(c1("", LIMITS)), V1, Config(2048, 200000, 500 * MI), 2 * MI,
    ),
    "container limits omitted + pod level resource limits set + no DRA allocations": (
        pod(c1(), level=LEVEL), V1, Config(4096, 400000, GI), 4 * MI,
    ),
    "container limits omitted + pod level limits omitted + no DRA allocations": (
        pod(c1()), V1, Config(2, None, None), 0,
    ),
    "multiple claims for the same resource": (
        pod(c1("", "cpu=2"), claims=[claim("x", "c1", "cpu=1"), claim("y", "c1", "cpu=2")]),
        V1, Config(2048, 500000, None), 0,
    ),
    "per-pod and per-container DRA overhead": (
        pod(c1("", "cpu=1"), claims=[claim("x", "c1", "", "cpu=1", "cpu=2")]),
        V1, Config(1024, 400000, None), 0,
    ),
    "combined mapping and overhead DRA allocations": (
        pod(
            c1("", "cpu=2 memory=500Mi"),
            claims=[claim("x", "c1", "cpu=1 memory=300Mi", "cpu=1 memory=100Mi", "cpu=2 memory=200Mi")],
        ),
        V1, Config(2048, 600000, 1100 * MI), 0,
    ),
    "hugepages omitted at container level + pod level limits set + DRA allocations": (
        pod(c1(), level=resources("", "hugepages-2Mi=4Mi"), claims=[claim("x", "c1", "hugepages-2Mi=2Mi")]),
        V1, Config(2, None, None), 4 * MI,
    ),
    "hugepages omitted at pod and container level + pod level cpu/memory limits set + DRA allocations": (
        pod(c1(), level=resources("", "cpu=4 memory=1Gi"), claims=[claim("x", "c1", "hugepages-2Mi=2Mi")]),
        V1, Config(4096, 400000, GI), 2 * MI,
    ),
    "hugepages at pod level + container level + DRA allocations": (
        pod(
            c1("", "hugepages-2Mi=2Mi"),
            level=resources("", "hugepages-2Mi=4Mi"),
            claims=[claim("x", "c1", "hugepages-2Mi=1Mi")],
        ),
        V1, Config(2, None, None), 3 * MI,
    ),
    "hugepages omitted at pod and container level + DRA allocations": (
        pod(c1(), claims=[claim("x", "c1", "hugepages-2Mi=2Mi")]), V1, Config(2, None, None), 2 * MI,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINER_CASES)
def test_container_cgroup_with_claims_matches_the_kubelets(name: str) -> None:
    pod, facts, expected, pages = CONTAINER_CASES[name]
    assert config(pod, facts, "c1") == expected
    assert exact_value(expected_pod_cgroups(pod, facts), SettingKind.PAGES, "c1", SIZES[0]) == pages


# --- kuberuntime: TestGetHugepageLimitsFromResources -------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "limits", "expected"),
    [
        pytest.param("", "hugepages-2Mi=2Mi", (2 * MI, 0), id="Success2MB"),
        pytest.param("", "hugepages-1Gi=2Gi", (0, 2 * GI), id="Success1GB"),
        pytest.param("", "hugepages-2MB=2Mi hugepages-1GB=2Gi", (0, 0), id="Skip2MBand1GB"),
        pytest.param("", "hugepages-2Mi=2Mi hugepages-1Gi=2Gi", (2 * MI, 2 * GI), id="Success2MBand1GB"),
        pytest.param("hugepages-2Mi=2Mi hugepages-1Gi=2Gi", "", (2 * MI, 2 * GI), id="PodLevel2MBand1GB"),
        pytest.param(
            "hugepages-2Mi=4Mi", "hugepages-2Mi=2Mi", (2 * MI, 0), id="PodLevel2MBContainerLevel2MB"
        ),
        pytest.param(
            "hugepages-1Gi=4Gi", "hugepages-1Gi=2Gi", (0, 2 * GI), id="PodLevel1GBContainerLevel1GB"
        ),
    ],
)
def test_container_page_limits_match_the_kubelets(level: str, limits: str, expected: tuple[int, int]) -> None:
    groups = expected_pod_cgroups(pod(c1("", limits), level=resources("", level)), V1)
    for kind in (SettingKind.PAGES, SettingKind.RESERVED):
        assert tuple(exact_value(groups, kind, "c1", size) for size in SIZES) == expected


# --- component-helpers: TestPodRequestsAndLimitsWithDRA, TestPodResource(Limits|Requests)WithSharedDRAClaims

BOTH: Final = "cpu=100m memory=1Gi"
PAGES: Final = "hugepages-1Gi"
TWO: Final = [container("c1", "memory=1Gi", "memory=1Gi"), container("c2", "memory=1Gi", "memory=1Gi")]
SUM_CASES: Final[Mapping[str, tuple[Object, str, str | None]]] = {
    "No claims": (pod_object(c1(BOTH, BOTH)), BOTH, BOTH),
    "Single claim on one container": (
        pod_object(
            c1(f"{BOTH} {PAGES}=2", f"{BOTH} {PAGES}=2"), claims=[claim("x", "c1", f"cpu=50m {PAGES}=1")],
        ),
        f"cpu=150m memory=1Gi {PAGES}=3",
        f"cpu=150m memory=1Gi {PAGES}=3",
    ),
    "Multiple claims on one container": (
        pod_object(c1(BOTH), claims=[claim("x", "c1", "cpu=50m"), claim("y", "c1", "cpu=25m memory=512Mi")]),
        "cpu=175m memory=1.5Gi",
        None,
    ),
    "Same claim referenced in multiple containers": (
        pod_object(
            c1("cpu=100m", "cpu=100m"),
            container("c2", "cpu=200m", "cpu=200m"),
            claims=[claim("x", "c1 c2", "cpu=50m")],
        ),
        "cpu=350m",
        "cpu=350m",
    ),
    "Different claims on multiple containers": (
        pod_object(
            c1(f"cpu=100m {PAGES}=1"),
            container("c2", f"cpu=200m memory=1Gi {PAGES}=2"),
            claims=[
                claim("x", "c1", f"cpu=50m {PAGES}=1"), claim("y", "c2", f"cpu=25m memory=512Mi {PAGES}=2"),
            ],
        ),
        f"cpu=375m memory=1.5Gi {PAGES}=6",
        None,
    ),
    "Claim on init container": (
        pod_object(c1("cpu=50m"), init=[container("i1", "cpu=100m")], claims=[claim("x", "i1", "cpu=25m")]),
        "cpu=125m",
        None,
    ),
    "Pod Level Resources overrides the claim request/limit": (
        pod_object(
            c1("cpu=1 memory=1Gi", "cpu=1 memory=1Gi"),
            level=resources("cpu=2", "cpu=2"),
            claims=[claim("x", "c1", "cpu=3")],
        ),
        "cpu=2 memory=1Gi",
        "cpu=2 memory=1Gi",
    ),
    "Pod with DRA claim specifying Overhead mapping": (
        pod_object(
            c1(BOTH, "memory=1Gi"),
            container("c2", BOTH, "memory=1Gi"),
            claims=[claim("x", "c1 c2", "", "memory=1Gi", "memory=500Mi")],
        ),
        "cpu=200m memory=4072Mi",
        "memory=4072Mi",
    ),
    "Pod with DRA claim specifying both Mapping and Overhead mapping": (
        pod_object(*TWO, claims=[claim("x", "c1 c2", "memory=2Gi", "memory=1Gi", "memory=500Mi")]),
        "memory=6120Mi",
        "memory=6120Mi",
    ),
    "Pod with DRA claim specifying Overhead mapping, PerPod only": (
        pod_object(TWO[0], claims=[claim("x", "c1", "", "memory=1Gi")]), "memory=2Gi", "memory=2Gi",
    ),
    "Pod with DRA claim specifying Overhead mapping, PerContainer only": (
        pod_object(TWO[0], claims=[claim("x", "c1", "", "", "memory=500Mi")]),
        "memory=1524Mi",
        "memory=1524Mi",
    ),
    "Pod with unreferenced DRA claim specifying Mapping": (
        pod_object(TWO[0], claims=[claim("x", "", "memory=2Gi")]), "memory=3Gi", "memory=3Gi",
    ),
    "Pod with unreferenced DRA claim specifying Overhead mapping": (
        pod_object(TWO[0], claims=[claim("x", "", "", "memory=1Gi", "memory=500Mi")]),
        "memory=2Gi",
        "memory=2Gi",
    ),
    "Pod with unreferenced DRA claim specifying Overhead mapping, PerContainer only": (
        pod_object(TWO[0], claims=[claim("x", "", "", "", "memory=500Mi")]), "memory=1Gi", "memory=1Gi",
    ),
    "SharedDRAClaims": (
        pod_object(
            c1("memory=2Gi", "memory=2Gi"),
            container("c2", "memory=2Gi", "memory=2Gi"),
            claims=[claim("shared-claim", "c1 c2", "", "", "memory=3Gi")],
        ),
        "memory=10Gi",
        "memory=10Gi",
    ),
    "DRA cpu/memory not added to limits when container limits are omitted": (
        pod_object(c1(BOTH), claims=[claim("x", "c1", "cpu=50m memory=512Mi")]), "cpu=150m memory=1536Mi", "",
    ),
    "DRA hugepages added to limits even when container limits are omitted": (
        pod_object(c1(), claims=[claim("x", "c1", f"{PAGES}=1Gi")]), f"{PAGES}=1Gi", f"{PAGES}=1Gi",
    ),
}  # fmt: skip


def sums(pod: Pod, add: Any, claims: bool) -> dict[str, int]:
    found = {resource: add(pod, resource, with_claims=claims) for resource in ("cpu", "memory", PAGES)}
    return {
        resource: amount.total.nanos for resource, amount in found.items() if isinstance(amount, ResourceSum)
    }


def nanos(text: str) -> dict[str, int]:
    return {part.split("=")[0]: parse_quantity(part.split("=")[1]).nanos for part in text.split()}


@pytest.mark.parametrize("name", SUM_CASES)
def test_sums_of_requests_and_limits_match_component_helpers(name: str) -> None:
    obj, requests, limits = SUM_CASES[name]
    pod = parse_pod(obj)
    assert sums(pod, pod_requests, claims=True) == nanos(requests)
    if limits is not None:
        assert sums(pod, pod_limits, claims=True) == nanos(limits)


def test_sums_without_claims_leave_claims_out() -> None:
    pod = parse_pod(pod_object(c1("cpu=100m", "cpu=100m"), claims=[claim("x", "c1", "cpu=50m")]))
    assert sums(pod, pod_requests, claims=False) == sums(pod, pod_limits, claims=False) == nanos("cpu=100m")


def test_sidecars_count_for_later_init_containers_only() -> None:
    """KEP-753: an init container runs together with the sidecars before it, not with those after it."""
    first, last = sidecar("s1", "cpu=1"), sidecar("s2", "cpu=4")
    mine = parse_pod(pod_object(c1("cpu=2"), init=[first, container("i1", "cpu=3"), last]))
    peak = parse_pod(pod_object(c1("cpu=2"), init=[first, container("i1", "cpu=9"), last]))
    assert sums(mine, pod_requests, claims=True) == nanos("cpu=7")
    assert sums(peak, pod_requests, claims=True) == nanos("cpu=10")


def test_overhead_is_not_added_to_a_limit_of_zero() -> None:
    """PodLimits adds overhead to non-zero limits only."""
    zero, some = (pod(c1("", limits), overhead="cpu=1") for limits in ("cpu=0", "cpu=2"))
    assert sums(zero, pod_limits, claims=True) == nanos("cpu=0")
    assert sums(some, pod_limits, claims=True) == nanos("cpu=3")


def test_container_limit_of_zero_falls_back_to_the_pods() -> None:
    """getCPULimit and getMemoryLimit use the pod-level limit then."""
    mine = pod(c1("", "cpu=0 memory=0"), level=resources("", "cpu=2 memory=1Gi"))
    assert config(mine, V1, "c1") == Config(2048, 200000, GI)
    assert config(pod(c1("", "cpu=0 memory=0")), V1, "c1") == Config(2, None, None)


def groups_of(groups: tuple[ExpectedCgroup, ...]) -> list[tuple[CgroupLevel, str]]:
    return [(group.cgroup.level, group.cgroup.container) for group in groups]


def test_pod_group_comes_before_its_containers_in_order() -> None:
    groups = expected_pod_cgroups(pod(c1(), container("c2"), init=[container("i1")]), V1)
    assert groups_of(groups) == [
        (CgroupLevel.POD, ""),
        (CgroupLevel.CONTAINER, "i1"),
        (CgroupLevel.CONTAINER, "c1"),
        (CgroupLevel.CONTAINER, "c2"),
    ]
    assert knob(groups, SettingKind.WEIGHT, "i1").accepted[0].value == 2
