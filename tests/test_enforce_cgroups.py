"""Cgroups are where kubelet and runtimes make them, and a path says whose it is.

The rows with a name of a Go test are that test's, kubelet v1.37.1.
"""

import pytest
from enforce_pods import UID
from hypothesis import given
from hypothesis import strategies as st

from agent.allocatable.cgroups import Level, Place, container_path, parse_path, pod_path, qos_path
from agent.allocatable.facts import CgroupDriver
from agent.allocatable.pod import Qos

ID = "9b1d" * 16
ESCAPED = UID.replace("-", "_")
CGROUPFS, SYSTEMD = CgroupDriver


@pytest.mark.parametrize(
    ("qos", "driver", "root", "path"),
    [
        (Qos.GUARANTEED, CGROUPFS, "/", f"/kubepods/pod{UID}"),
        (Qos.BURSTABLE, CGROUPFS, "/", f"/kubepods/burstable/pod{UID}"),
        (Qos.BEST_EFFORT, CGROUPFS, "/kubelet", f"/kubelet/kubepods/besteffort/pod{UID}"),
        (Qos.GUARANTEED, SYSTEMD, "/", f"/kubepods.slice/kubepods-pod{ESCAPED}.slice"),
        (
            Qos.BEST_EFFORT,
            SYSTEMD,
            "/",
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{ESCAPED}.slice",
        ),
        (
            Qos.BURSTABLE,
            SYSTEMD,
            "/kubelet",
            "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice"
            f"/kubelet-kubepods-burstable-pod{ESCAPED}.slice",
        ),
        (
            Qos.GUARANTEED,
            SYSTEMD,
            "/a-b/c/",
            f"/a_b.slice/a_b-c.slice/a_b-c-kubepods.slice/a_b-c-kubepods-pod{ESCAPED}.slice",
        ),
    ],
)
def test_a_pods_cgroup(qos: Qos, driver: CgroupDriver, root: str, path: str) -> None:
    assert pod_path(UID, qos, driver, root) == path
    assert parse_path(path, root) == Place(Level.POD, qos, UID)


def test_get_pod_container_name() -> None:
    """TestGetPodContainerName, with the kubelet's own prefix kubepods."""
    assert pod_path("fake-uid-1", Qos.GUARANTEED, CGROUPFS) == "/kubepods/podfake-uid-1"
    assert pod_path("fake-uid-2", Qos.GUARANTEED, SYSTEMD) == "/kubepods.slice/kubepods-podfake_uid_2.slice"


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
def test_cgroup_name_to_systemd(root: str, path: str) -> None:
    """TestCgroupNameToSystemd(Basename): dashes of a name are escaped, each level repeats those above."""
    assert qos_path(Qos.GUARANTEED, SYSTEMD, root) == path


@pytest.mark.parametrize(("root", "path"), [("/", "/kubepods"), ("/Burstable", "/Burstable/kubepods")])
def test_cgroup_name_to_cgroupfs(root: str, path: str) -> None:
    """TestCgroupNameToCgroupfs."""
    assert qos_path(Qos.GUARANTEED, CGROUPFS, root) == path


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
def test_a_containers_cgroup(driver: CgroupDriver, runtime: str, name: str) -> None:
    pod = pod_path(UID, Qos.BURSTABLE, driver)
    path = container_path(pod, ID, runtime, driver)
    assert path == f"{pod}/{name}"
    assert parse_path(path) == Place(Level.CONTAINER, Qos.BURSTABLE, UID, ID)


def test_what_crun_has_below_a_container_is_the_containers() -> None:
    path = container_path(pod_path(UID, Qos.GUARANTEED, SYSTEMD), ID, "cri-o", SYSTEMD)
    assert parse_path(f"{path}/container") == Place(Level.CONTAINER, Qos.GUARANTEED, UID, ID)


@pytest.mark.parametrize("driver", list(CgroupDriver))
@pytest.mark.parametrize("qos", list(Qos))
def test_a_class_is_no_pod(driver: CgroupDriver, qos: Qos) -> None:
    """TestIsCgroupPod, its rows of classes."""
    assert parse_path(qos_path(qos, driver)) == Place(Level.QOS, qos)


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
def test_a_cgroup_that_is_nobodys(path: str) -> None:
    """TestIsCgroupPod, its rows of others; and what CRI-O has beside containers."""
    assert parse_path(path) is None


def test_another_kubelets_pods_are_not_ours() -> None:
    """kind runs a kubelet below /kubelet on a node that may have one of its own."""
    path = pod_path(UID, Qos.BURSTABLE, SYSTEMD, "/kubelet")
    assert parse_path(path) is None
    assert parse_path(path, "/kubelet") is not None


@given(
    st.from_regex(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}", fullmatch=True),
    st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    st.sampled_from(list(Qos)),
    st.sampled_from(list(CgroupDriver)),
    st.sampled_from(["containerd", "cri-o", "docker"]),
    st.sampled_from(["/", "", "/kubelet", "kubelet/", "/a/b-c"]),
)
def test_every_path_leads_back(
    uid: str, ident: str, qos: Qos, driver: CgroupDriver, runtime: str, root: str
) -> None:
    pod = pod_path(uid, qos, driver, root)
    assert parse_path(pod, root) == Place(Level.POD, qos, uid)
    assert parse_path(container_path(pod, ident, runtime, driver), root) == Place(
        Level.CONTAINER, qos, uid, ident
    )
