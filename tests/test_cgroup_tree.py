"""Which pods have cgroups: real ones of both versions and both namings, and what only looks like them."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from machine import CGROUPFS, Kubepods, kubepods_tree

from agent.model.claim_sources import LiveContainer, LivePod, Origin, Provenance, SourceAnswer
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.sources.cgroup_tree import read_tree

NOW = Instant(5_000_000_000, 1_700_000_000.0)
POD = "5a3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0"
STATIC = "0badcafe0badcafe0badcafe0badcafe"
ID, OTHER = "e" * 64, "f" * 64


@contextmanager
def process_in(group: Path) -> Iterator[None]:
    """A process lives in a cgroup."""
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(["sleep", "300"]))
        stack.callback(process.kill)
        (group / "cgroup.procs").write_text(f"{process.pid}\n")
        yield


def looks_like(root: Path, group: str, events: str = "populated 0\nfrozen 0\n") -> Path:
    """A cgroup of version 2, of plain files."""
    path = root / group
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.events").write_text(events)
    return path


def read(root: Path) -> SourceAnswer[LivePod]:
    return read_tree(root, "/", NOW)


# --- real cgroups ------------------------------------------------------------------------------------------


@pytest.fixture(params=["v1", "v2", "v1 and v2"])
def tree(request: pytest.FixtureRequest) -> Iterator[Kubepods]:
    version: str = request.param
    controllers = ("memory", "cpu") if "v1" in version else ()
    with kubepods_tree(*controllers, unified="v2" in version) as made:
        yield made


def seen(tree: Kubepods) -> tuple[LivePod, ...]:
    told = read_tree(CGROUPFS, tree.cgroup_root, NOW)
    assert told.is_whole
    return told.items


def test_a_pod_runs_while_a_process_is_in_one_of_its_containers(tree: Kubepods) -> None:
    tree.make("besteffort", STATIC)
    group = tree.make("burstable", POD, ID)
    tree.make("burstable", POD, OTHER)
    with process_in(group):
        assert seen(tree) == (
            LivePod(STATIC, False),
            LivePod(POD, True, (LiveContainer(ID, True), LiveContainer(OTHER, False))),
        )
    assert [pod.running for pod in seen(tree)] == [False, False]
    tree.remove("burstable", POD)
    assert [pod.uid for pod in seen(tree)] == [STATIC]


def test_processes_below_a_container_are_its_own(tree: Kubepods) -> None:
    """With crun they are in one below it."""
    below = tree.make("", POD, ID) / "container"
    below.mkdir()
    with process_in(below):
        assert seen(tree) == (LivePod(POD, True, (LiveContainer(ID, True),)),)


def test_the_names_of_systemd_are_understood() -> None:
    with kubepods_tree("memory", unified=False, systemd=True) as tree:
        with process_in(tree.make("burstable", POD, ID)):
            assert seen(tree) == (LivePod(POD, True, (LiveContainer(ID, True),)),)
        tree.make("", STATIC)
        assert [pod.uid for pod in seen(tree)] == [STATIC, POD]


def test_another_kubelets_pods_are_not_ours(tree: Kubepods) -> None:
    tree.make("", POD, ID)
    told = read_tree(CGROUPFS, f"{tree.cgroup_root}-other", NOW)
    assert (told.absence, told.items) == (Absence.ABSENT, ())


# --- what only looks like cgroups --------------------------------------------------------------------------


def test_who_said_it_and_when(tmp_path: Path) -> None:
    looks_like(tmp_path, "kubepods")
    assert read(tmp_path) == SourceAnswer(Provenance(Origin.CGROUPS, NOW))


def test_where_no_kubelet_has_made_any_nobody_knows(tmp_path: Path) -> None:
    told = read(tmp_path)
    assert told.absence is Absence.ABSENT
    assert told.why == f"{tmp_path}: no kubelet has made cgroups below /"


def test_what_is_neither_a_pod_nor_a_container_is_passed_over(tmp_path: Path) -> None:
    pod = "kubepods.slice/kubepods-pod1.slice"
    for group in (
        f"{pod}/crio-{ID}.scope",
        f"{pod}/crio-conmon-{ID}.scope",
        f"{pod}/x.service",
        "kubepods/x",
    ):
        looks_like(tmp_path, group)
    looks_like(tmp_path, pod)
    assert read(tmp_path).items == (LivePod("1", False, (LiveContainer(ID, False),)),)


@pytest.mark.parametrize("events", ["", "frozen 0\n"])
def test_what_cannot_be_read_is_neither_running_nor_gone(tmp_path: Path, events: str) -> None:
    looks_like(tmp_path, f"kubepods/pod{POD}", events)
    assert read(tmp_path).items == (LivePod(POD, None),)


def test_a_read_that_fails_likewise(tmp_path: Path) -> None:
    (tmp_path / f"kubepods/pod{POD}/cgroup.events").mkdir(parents=True)
    assert read(tmp_path).items == (LivePod(POD, None),)


def test_a_tree_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    loop = tmp_path / "kubepods"
    loop.symlink_to(loop)
    told = read(tmp_path)
    assert (told.absence, told.items) == (Absence.UNREADABLE, ())
    assert told.why == f"{loop}: Too many levels of symbolic links"


def test_a_part_that_cannot_be_listed_leaves_the_rest_and_nobody_is_gone(tmp_path: Path) -> None:
    looks_like(tmp_path, f"kubepods/pod{POD}")
    for qos in ("burstable", "besteffort"):
        (tmp_path / "kubepods" / qos).symlink_to(qos)
    told = read(tmp_path)
    assert told.items == (LivePod(POD, False),)
    assert not told.is_whole
    assert len(told.wrong) == 2
