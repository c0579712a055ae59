"""Cgroup paths of pods, containers and QoS classes, and the owner that a path is parsed into.

A docstring that names a Go test marks rows from that test of kubelet v1.37.1.
"""

import pytest
from cgroup_audit_pods import UID
from hypothesis import given
from hypothesis import strategies as st

from agent.cgroup_audit.cgroup_paths import (
    CgroupLevel,
    CgroupOwner,
    container_path,
    parse_path,
    pod_path,
    qos_path,
)
from agent.cgroup_audit.kubelet_config import CgroupDriver
from agent.cgroup_audit.pod_model import QosClass

ID = "9b1d" * 16
ESCAPED = UID.replace("-", "_")
CGROUPFS, SYSTEMD = CgroupDriver


@pytest.mark.parametrize(
    ("qos", "driver", "root", "path"),
    [
        (QosClass.GUARANTEED, CGROUPFS, "/", f"/kubepods/pod{UID}"),
        (QosClass.BURSTABLE, CGROUPFS, "/", f"/kubepods/burstable/pod{UID}"),
        (QosClass.BEST_EFFORT, CGROUPFS, "/kubelet", f"/kubelet/kubepods/besteffort/pod{UID}"),
        (QosClass.GUARANTEED, SYSTEMD, "/", f"/kubepods.slice/kubepods-pod{ESCAPED}.slice"),
        (
            QosClass.BEST_EFFORT,
            SYSTEMD,
            "/",
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{ESCAPED}.slice",
        ),
        (
            QosClass.BURSTABLE,
            SYSTEMD,
            "/kubelet",
            "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice"
            f"/kubelet-kubepods-burstable-pod{ESCAPED}.slice",
        ),
        (
            QosClass.GUARANTEED,
            SYSTEMD,
            "/a-b/c/",
            f"/a_b.slice/a_b-c.slice/a_b-c-kubepods.slice/a_b-c-kubepods-pod{ESCAPED}.slice",
        ),
    ],
)
def test_pod_path_follows_qos_driver_and_root(
    qos: QosClass, driver: CgroupDriver, root: str, path: str
) -> None:
    assert pod_path(UID, qos, driver, root) == path
    assert parse_path(path, root) == CgroupOwner(CgroupLevel.POD, qos, UID)


def test_pod_path_matches_the_kubelets() -> None:
    """Go test TestGetPodContainerName, with the kubelet's prefix kubepods."""
    assert pod_path("fake-uid-1", QosClass.GUARANTEED, CGROUPFS) == "/kubepods/podfake-uid-1"
    assert (
        pod_path("fake-uid-2", QosClass.GUARANTEED, SYSTEMD) == "/kubepods.slice/kubepods-podfake_uid_2.slice"
    )


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("/", "/kubepods.slice"),
        ("/test/a/b", "/test.slice/test-a.slice/test-a-b.slice/test-a-b-kubepods.slice"),
        (
            "/pod-6c1a4e95-6bb6-11e6-bc26-28d2444e470d",
            "/pod_6c1a4e95_6bb6_11e6_bc26_28d2444e470d.slice"
            "/pod_6c1a4e95_6bb6_11e6_bc26_28d2444e470d-kubepods.slice",
        ),
    ],
)
def test_qos_path_in_systemd_naming_matches_the_kubelets(root: str, path: str) -> None:
    """Go test TestCgroupNameToSystemd(Basename): dashes are escaped, each level repeats its parents."""
    assert qos_path(QosClass.GUARANTEED, SYSTEMD, root) == path


@pytest.mark.parametrize(("root", "path"), [("/", "/kubepods"), ("/Burstable", "/Burstable/kubepods")])
def test_qos_path_in_cgroupfs_naming_matches_the_kubelets(root: str, path: str) -> None:
    """Go test TestCgroupNameToCgroupfs."""
    assert qos_path(QosClass.GUARANTEED, CGROUPFS, root) == path


@pytest.mark.parametrize(
    ("driver", "runtime", "name"),
    [
        (SYSTEMD, "containerd", f"cri-containerd-{ID}.scope"),
        (SYSTEMD, "cri-o", f"crio-{ID}.scope"),
        (SYSTEMD, "docker", f"docker-{ID}.scope"),
        (CGROUPFS, "containerd", ID),
        (CGROUPFS, "cri-o", f"crio-{ID}"),
        (CGROUPFS, "docker", ID),
    ],
)
def test_container_path_follows_driver_and_runtime(driver: CgroupDriver, runtime: str, name: str) -> None:
    pod = pod_path(UID, QosClass.BURSTABLE, driver)
    path = container_path(pod, ID, runtime, driver)
    assert path == f"{pod}/{name}"
    assert parse_path(path) == CgroupOwner(CgroupLevel.CONTAINER, QosClass.BURSTABLE, UID, ID)


def test_cgroup_below_a_crun_container_belongs_to_the_container() -> None:
    path = container_path(pod_path(UID, QosClass.GUARANTEED, SYSTEMD), ID, "cri-o", SYSTEMD)
    assert parse_path(f"{path}/container") == CgroupOwner(CgroupLevel.CONTAINER, QosClass.GUARANTEED, UID, ID)


@pytest.mark.parametrize("driver", list(CgroupDriver))
@pytest.mark.parametrize("qos", list(QosClass))
def test_qos_path_is_parsed_as_qos_class(driver: CgroupDriver, qos: QosClass) -> None:
    """Go test TestIsCgroupPod, its rows of QoS classes."""
    assert parse_path(qos_path(qos, driver)) == CgroupOwner(CgroupLevel.QOS, qos)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/system",
        "/system/kubelet",
        "/system.slice/kubelet.service",
        "/kubepods/podthis-uid-contains-reserved-word-pod",
        "/kubepods.slice/kubepods-podthis_uid_contains_reserved_word_pod.slice",
        f"/kubepods/pod{UID}.slice/..",
        f"/kubepods/pod{UID}/",
        "/kubepods/pod",
        "/kubepods/burstable/pod",
        f"/kubepods/burstable/{UID}",
        f"/kubepods.slice/pod{ESCAPED}.slice",
        f"/kubepods.slice/kubepods-burstable-pod{ESCAPED}.slice",
        f"/kubepods/pod{UID}/crio-conmon-{ID}",
        f"/kubepods.slice/kubepods-pod{ESCAPED}.slice/crio-conmon-{ID}.scope",
        f"/kubepods.slice/kubepods-pod{ESCAPED}.slice/libpod-conmon-{ID}.scope",
        f"/kubepods.slice/kubepods-pod{ESCAPED}.slice/{ID}",
        f"/kubepods/pod{UID}/cri-containerd-{ID}.scope",
        f"/elsewhere/kubepods/pod{UID}",
    ],
)
def test_foreign_cgroup_has_no_owner(path: str) -> None:
    """Go test TestIsCgroupPod, its rows of other cgroups; and cgroups of CRI-O's monitors."""
    assert parse_path(path) is None


def test_pod_of_another_kubelets_root_has_no_owner() -> None:
    """kind runs a kubelet below /kubelet on a host that may run its own kubelet."""
    path = pod_path(UID, QosClass.BURSTABLE, SYSTEMD, "/kubelet")
    assert parse_path(path) is None
    assert parse_path(path, "/kubelet") is not None


@given(
    st.from_regex(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}", fullmatch=True),
    st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    st.sampled_from(list(QosClass)),
    st.sampled_from(list(CgroupDriver)),
    st.sampled_from(["containerd", "cri-o", "docker"]),
    st.sampled_from(["/", "", "/kubelet", "kubelet/", "/a/b-c"]),
)
def test_pod_and_container_paths_parse_back_to_their_owner(
    uid: str, ident: str, qos: QosClass, driver: CgroupDriver, runtime: str, root: str
) -> None:
    pod = pod_path(uid, qos, driver, root)
    assert parse_path(pod, root) == CgroupOwner(CgroupLevel.POD, qos, uid)
    assert parse_path(container_path(pod, ident, runtime, driver), root) == CgroupOwner(
        CgroupLevel.CONTAINER, qos, uid, ident
    )
