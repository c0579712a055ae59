"""Pods found in the cgroup tree: real cgroups of both versions and drivers, and trees of plain files."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from machine import CGROUPFS, Kubepods, kubepods_tree

from agent.model.claim_sources import ContainerCgroup, Origin, PodCgroup, Provenance, SourceAnswer
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.sources.pod_cgroups import read_live_pods

NOW = Instant(5_000_000_000, 1_700_000_000.0)
POD = "5a3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0"
STATIC = "0badcafe0badcafe0badcafe0badcafe"
ID, OTHER = "e" * 64, "f" * 64


@contextmanager
def process_in(group: Path) -> Iterator[None]:
    """Run a process in a cgroup."""
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(["sleep", "300"]))
        stack.callback(process.kill)
        (group / "cgroup.procs").write_text(f"{process.pid}\n")
        yield


def make_plain_cgroup(root: Path, group: str, events: str = "populated 0\nfrozen 0\n") -> Path:
    """Create a cgroup of version 2 from plain files."""
    path = root / group
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.events").write_text(events)
    return path


def read(root: Path) -> SourceAnswer[PodCgroup]:
    return read_live_pods(root, "/", NOW)


# --- real cgroups ------------------------------------------------------------------------------------------


@pytest.fixture(params=["v1", "v2", "v1 and v2"])
def tree(request: pytest.FixtureRequest) -> Iterator[Kubepods]:
    version: str = request.param
    controllers = ("memory", "cpu") if "v1" in version else ()
    with kubepods_tree(*controllers, unified="v2" in version) as made:
        yield made


def live_pods(tree: Kubepods) -> tuple[PodCgroup, ...]:
    answer = read_live_pods(CGROUPFS, tree.cgroup_root, NOW)
    assert answer.is_complete
    return answer.items


def test_pod_runs_while_a_container_has_a_process(tree: Kubepods) -> None:
    tree.make("besteffort", STATIC)
    group = tree.make("burstable", POD, ID)
    tree.make("burstable", POD, OTHER)
    with process_in(group):
        assert live_pods(tree) == (
            PodCgroup(STATIC, False),
            PodCgroup(POD, True, (ContainerCgroup(ID, True), ContainerCgroup(OTHER, False))),
        )
    assert [pod.running for pod in live_pods(tree)] == [False, False]
    tree.remove("burstable", POD)
    assert [pod.uid for pod in live_pods(tree)] == [STATIC]


def test_processes_in_child_cgroups_count_for_the_container(tree: Kubepods) -> None:
    """With crun the processes are in a child cgroup."""
    below = tree.make("", POD, ID) / "container"
    below.mkdir()
    with process_in(below):
        assert live_pods(tree) == (PodCgroup(POD, True, (ContainerCgroup(ID, True),)),)


def test_systemd_cgroup_names_are_parsed() -> None:
    with kubepods_tree("memory", unified=False, systemd=True) as tree:
        with process_in(tree.make("burstable", POD, ID)):
            assert live_pods(tree) == (PodCgroup(POD, True, (ContainerCgroup(ID, True),)),)
        tree.make("", STATIC)
        assert [pod.uid for pod in live_pods(tree)] == [STATIC, POD]


def test_pods_of_another_kubelet_are_ignored(tree: Kubepods) -> None:
    tree.make("", POD, ID)
    answer = read_live_pods(CGROUPFS, f"{tree.cgroup_root}-other", NOW)
    assert (answer.absence, answer.items) == (Absence.ABSENT, ())


# --- plain files --------------------------------------------------------------------------


def test_answer_has_origin_and_time(tmp_path: Path) -> None:
    make_plain_cgroup(tmp_path, "kubepods")
    assert read(tmp_path) == SourceAnswer(Provenance(Origin.CGROUPS, NOW))


def test_tree_without_kubelet_cgroups_is_absent(tmp_path: Path) -> None:
    answer = read(tmp_path)
    assert answer.absence is Absence.ABSENT
    assert answer.reason == f"{tmp_path}: no kubelet has created cgroups below /"


def test_other_cgroups_are_ignored(tmp_path: Path) -> None:
    pod = "kubepods.slice/kubepods-pod1.slice"
    for group in (
        f"{pod}/crio-{ID}.scope",
        f"{pod}/crio-conmon-{ID}.scope",
        f"{pod}/x.service",
        "kubepods/x",
    ):
        make_plain_cgroup(tmp_path, group)
    make_plain_cgroup(tmp_path, pod)
    assert read(tmp_path).items == (PodCgroup("1", False, (ContainerCgroup(ID, False),)),)


@pytest.mark.parametrize("events", ["", "frozen 0\n"])
def test_unreadable_cgroup_has_unknown_state(tmp_path: Path, events: str) -> None:
    make_plain_cgroup(tmp_path, f"kubepods/pod{POD}", events)
    assert read(tmp_path).items == (PodCgroup(POD, None),)


def test_failed_read_gives_unknown_state(tmp_path: Path) -> None:
    (tmp_path / f"kubepods/pod{POD}/cgroup.events").mkdir(parents=True)
    assert read(tmp_path).items == (PodCgroup(POD, None),)


def test_unlistable_tree_is_unreadable_and_not_empty(tmp_path: Path) -> None:
    loop = tmp_path / "kubepods"
    loop.symlink_to(loop)
    answer = read(tmp_path)
    assert (answer.absence, answer.items) == (Absence.UNREADABLE, ())
    assert answer.reason == f"cgroup directory {loop}: Too many levels of symbolic links"


def test_unlistable_part_of_tree_marks_answer_incomplete(tmp_path: Path) -> None:
    make_plain_cgroup(tmp_path, f"kubepods/pod{POD}")
    for qos in ("burstable", "besteffort"):
        (tmp_path / "kubepods" / qos).symlink_to(qos)
    answer = read(tmp_path)
    assert answer.items == (PodCgroup(POD, False),)
    assert not answer.is_complete
    assert len(answer.invalid) == 2
