"""Test vectors of KEP-5517's arithmetic from tests/data/cgroup-vectors.json.

The file describes the pods in prose; PODS has them as objects. If a vector has several results, each is
accepted.
"""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from cgroup_audit_pods import (
    SIZES,
    SYSTEMD,
    V1,
    V2,
    claim,
    container,
    exact_value,
    knob,
    pod,
    resources,
    values,
)

from agent.cgroup_audit.cgroup_settings import SettingKind
from agent.cgroup_audit.expected_cgroups import ExpectedCgroup, expected_pod_cgroups
from agent.cgroup_audit.expected_values import systemd_quota
from agent.cgroup_audit.kubelet_config import NodeFacts
from agent.cgroup_audit.pod_model import Pod
from agent.model.pod_findings import NO_LIMIT

VECTORS: Final[dict[str, dict[str, Any]]] = {
    vector["id"]: vector
    for vector in json.loads((Path(__file__).parent / "data" / "cgroup-vectors.json").read_text())
}
V08: Final = container("c1", "cpu=2 memory=128Mi", "cpu=4 memory=256Mi")
PODS: Final[dict[str, Pod]] = {
    "V01": pod(container("c1", "cpu=500m memory=256Mi", "cpu=1 memory=512Mi")),
    "V02": pod(
        container("c1", "cpu=2 memory=2Gi", "cpu=4 memory=4Gi"), claims=[claim("x", "c1", "cpu=5 memory=5Gi")]
    ),
    "V03": pod(container("c1"), claims=[claim("x", "c1", "cpu=5")]),
    "V04": pod(
        container("c1", "cpu=2 memory=2Gi", "cpu=4 memory=4Gi"),
        container("c2", "cpu=4 memory=4Gi", "cpu=8 memory=8Gi"),
        claims=[claim("x", "c1 c2", "cpu=5 memory=5Gi")],
    ),
    "V05": pod(
        container("c1"),
        container("c2"),
        level=resources("cpu=5 memory=5Gi", "cpu=5 memory=5Gi"),
        claims=[claim("x", "c1 c2", "cpu=5 memory=5Gi")],
    ),
    "V08": pod(V08, claims=[claim("x", "c1", "cpu=200m memory=128Mi")]),
    "V10": pod(container("c1", "cpu=2 memory=128Mi"), claims=[claim("x", "c1", "cpu=200m memory=128Mi")]),
    "V11": pod(V08, claims=[claim("x", "c1", "cpu=200m memory=128Mi")]),
    "V14": pod(
        container("c1", "cpu=1 memory=1Gi hugepages-2Mi=64Mi", "cpu=1 memory=1Gi hugepages-2Mi=64Mi"),
        claims=[claim("x", "c1", "hugepages-2Mi=128Mi")],
    ),
    "V15": pod(
        container("c1", "cpu=1 memory=1Gi", "cpu=1 memory=1Gi"),
        container("c2", "cpu=1 memory=1Gi", "cpu=1 memory=1Gi"),
        claims=[claim("x", "c1", "hugepages-1Gi=2Gi")],
    ),
}
VECTORS_WITHOUT_POD: Final = {"V12", "V13", "V17"}


def facts_of(ident: str, facts: NodeFacts) -> NodeFacts:
    counts = VECTORS[ident]["in"].get("gate", True)
    return NodeFacts(facts.cgroup_version, facts.cgroup_driver, hugepages_kib=SIZES, counts_claims=counts)


def test_every_vector_is_tested() -> None:
    assert PODS.keys() | VECTORS_WITHOUT_POD == VECTORS.keys()


@pytest.mark.parametrize("ident", PODS)
def test_expected_values_match_the_vector(ident: str) -> None:
    first = expected_pod_cgroups(PODS[ident], facts_of(ident, V1))
    second = expected_pod_cgroups(PODS[ident], facts_of(ident, V2))
    for group, expected_values in VECTORS[ident]["out"].items():
        name = "" if group == "pod" else group.removesuffix("_alt_shares")
        for key, value in expected_values.items():
            check_value(key, value, name, first, second)


def check_value(
    key: str, value: Any, name: str, first: tuple[ExpectedCgroup, ...], second: tuple[ExpectedCgroup, ...]
) -> None:
    """Assert that a value of a vector is accepted, in v1 or v2."""
    if key == "cpu_shares":
        assert value in values(knob(first, SettingKind.WEIGHT, name))
    elif key.startswith("cpu_weight"):
        assert value in values(knob(second, SettingKind.WEIGHT, name))
    elif key == "cpu_max":
        quota, period = value.split()
        assert exact_value(second, SettingKind.QUOTA, name) == (NO_LIMIT if quota == "max" else int(quota))
        if quota != "max":
            assert exact_value(second, SettingKind.PERIOD, name) == int(period)
    elif key == "memory_max":
        assert exact_value(second, SettingKind.MEMORY, name) == (NO_LIMIT if value == "max" else value)
    else:
        hugetlb, size, *rest = key.split(".")
        assert (hugetlb, rest[-1]) == ("hugetlb", "max")
        kind = SettingKind.RESERVED if "rsvd" in rest else SettingKind.PAGES
        assert exact_value(second, kind, name, {"2MB": SIZES[0], "1GB": SIZES[1]}[size]) == value


def test_weight_of_a_pod_with_only_a_claim_accepts_code_and_kep() -> None:
    """V03: kubelet 1.37.1 writes the minimum, KEP-5517 the shares of the claim."""
    weight = knob(expected_pod_cgroups(PODS["V03"], V1), SettingKind.WEIGHT)
    assert values(weight) == [2, 5120]
    assert "KEP-5517's text: 5000m (claim x)" in weight.accepted[1].note


def test_weight_under_a_pod_level_limit_accepts_code_and_kep() -> None:
    """V05: kubelet 1.37.1 derives shares from the pod-level limit, KEP-5517 the minimum."""
    weight = knob(expected_pod_cgroups(PODS["V05"], V1), SettingKind.WEIGHT, "c1")
    assert values(weight) == [5120, 2]
    assert weight.accepted[1].note.startswith("KEP-5517's text")


def test_arithmetic_names_amounts_claims_and_result() -> None:
    groups = expected_pod_cgroups(PODS["V08"], V2)
    assert knob(groups, SettingKind.WEIGHT).arithmetic == (
        "2000m (c1) + 200m (claim x) = 2200m -> shares 2252 -> weight 86"
    )
    assert knob(groups, SettingKind.QUOTA, "c1").arithmetic == (
        "4000m (limit) + 200m (claim x) = 4200m -> 420000 us of 100000"
    )
    assert knob(groups, SettingKind.MEMORY).arithmetic == (
        "256Mi (c1) + 128Mi (claim x) = 384Mi -> 402653184 bytes"
    )


@pytest.mark.parametrize(
    ("limit", "cgroupfs", "systemd"),
    [("1255m", *map(str, VECTORS["V12"]["out"].values()))]
    + [(limit, *pair) for limit, pair in VECTORS["V13"]["out"].items()],
)
def test_quota_with_systemd_accepts_exact_and_rounded_value(limit: str, cgroupfs: str, systemd: str) -> None:
    """V12, V13. The exact value is accepted too, because crun writes it before systemd rounds."""
    mine = pod(container("c1", limits=f"cpu={limit} memory=1Gi"))
    written, rounded = int(cgroupfs.split()[0]), int(systemd.split()[0])
    assert systemd_quota(written, 100_000) == rounded
    for name in ("", "c1"):
        assert values(knob(expected_pod_cgroups(mine, V2), SettingKind.QUOTA, name)) == [written]
        assert values(knob(expected_pod_cgroups(mine, SYSTEMD), SettingKind.QUOTA, name)) == sorted(
            {written, rounded}
        )


def test_memory_limit_accepts_exact_value_and_whole_pages() -> None:
    """Test vector V17."""
    out = VECTORS["V17"]["out"]
    mine = pod(container("c1", limits="memory=1G cpu=1"))
    for page_bytes, read in ((4096, out["read_back_4k"]), (65536, out["read_back_64k"])):
        memory = knob(expected_pod_cgroups(mine, NodeFacts(page_bytes=page_bytes)), SettingKind.MEMORY)
        assert [(value.value, value.is_rounded) for value in memory.accepted] == [
            (out["written"], False),
            (read, True),
        ]
