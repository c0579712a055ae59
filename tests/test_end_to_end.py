"""The whole agent on the real kernel, as a kubelet's client and the command line see it.

What is asserted is what arrives, and in which order; how long it took is said, and judged by nobody here.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from agents import HEALTHY, UNHEALTHY, Agent, entry, hear, hear_health, say, short_tmp
from machine import hotplug, hugepages, hugetlb_hit, kubepods_tree, unified_root
from wire.google import Watcher, names

NS: Final = 1_000_000_000
POD: Final = "0f3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0"
POOL: Final = "hugepages-2mi-node0"
FAST: Final = ("--period", "100ms", "--node-name", "real")
NOTHING: Final = ("--kubelet-cgroup-root", f"/drahealth-test-{os.getpid()}-none")
STREAM: Final = '[stream]\nheartbeat = "500ms"\n'
__all__ = ["short_tmp"]


@pytest.fixture
def two_nodes() -> None:
    if (Path("/sys/devices/system/node") / "node1").exists():
        pytest.skip("more than one NUMA node: on which of them pages go is the kernel's choice")


def took(what: str, since_ns: int) -> None:
    say(f"{what}: {(time.monotonic_ns() - since_ns) / 1e6:.1f} ms until the client knows")


def noted(watcher: Watcher, container: str, code: str = "cgroup.hugetlb.max_hit") -> Any:
    """The next picture with a note of this code on this container, and the note."""

    def about(picture: Any) -> list[Any]:
        return [n for n in picture.notes if n.cause.code == code and n.subject.endswith(container)]

    picture = hear(watcher, lambda one: bool(about(one)), f"a note on {container}")
    return picture, about(picture)[0]


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
def test_a_real_pool_that_shrinks_and_comes_back(short_tmp: Path, version: str) -> None:
    with (
        hugepages(2048, 4) as pool,
        Agent(short_tmp, *FAST, *NOTHING) as agent,
        agent.kubelet(version) as kubelet,
    ):
        first = kubelet.next()
        assert {"cpu-node0", POOL} <= set(names(first))
        assert entry(first, POOL).health == HEALTHY

        since_ns = time.monotonic_ns()
        pool.resize(3)
        sick = hear_health(kubelet, POOL, UNHEALTHY)
        took("pool shrunk", since_ns)
        assert sick.message.startswith("mem.hugepages.pool_shrunk: 3 pages of 2mi, 4 at start. Advice: ")

        since_ns = time.monotonic_ns()
        pool.resize(4)
        assert hear_health(kubelet, POOL, HEALTHY).message == ""
        took("pool restored, after three clean passes", since_ns)


def test_a_real_cpu_that_goes_offline_and_comes_back(short_tmp: Path) -> None:
    with hotplug(1) as cpu, Agent(short_tmp, *FAST, *NOTHING) as agent, agent.kubelet() as kubelet:
        first = kubelet.next()
        name = next(n for n in names(first) if cpu_in(n, 1))

        since_ns = time.monotonic_ns()
        cpu.set_online(False)
        sick = hear_health(kubelet, name, UNHEALTHY)
        took("cpu1 offline", since_ns)
        assert sick.message.startswith("cpu.offline: CPU 1 offline, online at start: ")

        cpu.set_online(True)
        assert hear_health(kubelet, name, HEALTHY).message == ""


def cpu_in(device: str, cpu: int) -> bool:
    """Whether the CPU is of the device's NUMA node."""
    node = device.removeprefix("cpu-")
    return device.startswith("cpu-") and Path(f"/sys/devices/system/cpu/cpu{cpu}/{node}").exists()


def test_a_real_limit_that_is_hit_is_a_note_for_people_and_none_for_the_kubelet(short_tmp: Path) -> None:
    with hugepages(2048, 4), kubepods_tree(hugetlb=True) as tree:
        flags = [*FAST, "--kubelet-cgroup-root", tree.cgroup_root]
        with (
            Agent(short_tmp, *flags, config=STREAM) as agent,
            agent.kubelet() as kubelet,
            agent.onlooker() as onlooker,
        ):
            container = "c" * 64
            group = tree.make("burstable", POD, container)
            (group / "hugetlb.2MB.max").write_text("4M\n")
            hear(onlooker, lambda picture: picture.groups == 2, "a pod and its container")

            at_ns = hugetlb_hit(group, 3).at_ns
            picture, note = noted(onlooker, container)
            took("limit hit, with the death of the process", at_ns)
            assert note.subject == f"pod {POD} container {container}"
            assert note.cause.evidence == "2mi pages hit the limit (limit 4 MiB)"
            assert {device.causes[0].code for device in picture.devices if device.causes} == set()

            # the kubelet hears heartbeats, and nothing of that
            for _ in range(3):
                for device in kubelet.next().devices:
                    assert (device.health, device.message) == (HEALTHY, "")

            tree.remove("burstable", POD)
            gone = hear(onlooker, lambda one: one.groups == 0, "no group any more")
            assert [device.health for device in gone.devices] == [HEALTHY] * len(gone.devices)
            assert agent.end() == 0
            assert "Traceback" not in agent.log


@pytest.fixture
def thousand() -> Iterator[Any]:
    """A tree for a thousand groups, which need no controller."""
    if unified_root() is None:
        pytest.skip("no cgroup v2 here")
    with kubepods_tree() as tree:
        yield tree


def test_a_thousand_real_groups_at_once_disturb_no_verdict(short_tmp: Path, thousand: Any) -> None:
    flags = [*FAST, "--kubelet-cgroup-root", thousand.cgroup_root]
    with (
        Agent(short_tmp, *flags, config=STREAM) as agent,
        agent.kubelet() as kubelet,
        agent.onlooker() as onlooker,
    ):
        since_ns = time.monotonic_ns()
        for pod in range(100):
            uid = f"{pod:08x}-0000-0000-0000-000000000000"
            for container in range(9):
                thousand.make("besteffort", uid, f"{pod:032x}{container:032x}")
        hear(onlooker, lambda picture: picture.groups == 1000, "a thousand groups")
        took("a thousand groups, from the first", since_ns)
        thousand.remove("besteffort")
        gone = hear(onlooker, lambda picture: picture.groups == 0, "no group any more")
        assert gone.core.groups_dropped == 0
        assert {device.health for device in gone.devices} == {HEALTHY}
        while kubelet.pending():
            assert {device.health for device in kubelet.next().devices} <= {HEALTHY}
        assert agent.process.poll() is None


def test_a_kubepods_tree_may_come_and_go_and_come_again(short_tmp: Path, thousand: Any) -> None:
    flags = [*FAST, "--kubelet-cgroup-root", thousand.cgroup_root]
    with Agent(short_tmp, *flags, config=STREAM) as agent, agent.onlooker() as onlooker:
        for _ in range(2):
            thousand.make("", POD, "d" * 64)
            hear(onlooker, lambda picture: picture.groups == 2, "a pod and its container")
            thousand.remove()
            hear(onlooker, lambda picture: picture.groups == 0, "no group any more")


def test_a_configured_pool_is_missed_from_the_first_list_on(short_tmp: Path) -> None:
    config = '[expect.hugepages]\n"hugepages-2mi-node0" = 1000000\n'
    with (
        Agent(short_tmp, *FAST, *NOTHING, config=config, expect="Unhealthy") as agent,
        agent.kubelet() as kubelet,
    ):
        first = entry(kubelet.next(), POOL)
        assert first.health == UNHEALTHY
        assert first.message.split(". Advice")[0].endswith("pages of 2mi, 1000000 configured")
