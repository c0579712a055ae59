"""Whole agent on the real kernel, as a kubelet's client and the command line see it.

The tests check what arrives, in which order. They print how long it took, but do not check that.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from agents import (
    HEALTHY,
    UNHEALTHY,
    Agent,
    entry,
    print_figure,
    short_tmp,
    wait_for_health,
    wait_for_message,
    without_stalls,
)
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


def print_delay(event: str, since_ns: int) -> None:
    print_figure(f"{event}: {(time.monotonic_ns() - since_ns) / 1e6:.1f} ms until the client knows")


def wait_for_note(watcher: Watcher, container: str, code: str = "cgroup.hugetlb.max_hit") -> Any:
    """Return the next report with a note of this code on this container, and the note."""

    def notes_on_container(report: Any) -> list[Any]:
        return [name for name in report.notes if name.cause.code == code and name.subject.endswith(container)]

    report = wait_for_message(
        watcher, lambda report: bool(notes_on_container(report)), f"a note on {container}"
    )
    return report, notes_on_container(report)[0]


def is_stalled(device: Any) -> bool:
    """Return whether a device of a report is Unknown because a thread of a busy machine did not run."""
    return any(cause.code == "source.stalled" for cause in device.causes)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
def test_real_pool_that_shrinks_is_unhealthy_until_restored(short_tmp: Path, version: str) -> None:
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
        unhealthy = wait_for_health(kubelet, POOL, UNHEALTHY)
        print_delay("pool shrunk", since_ns)
        assert unhealthy.message.startswith("mem.hugepages.pool_shrunk: 3 pages of 2mi, 4 at start. Advice: ")

        since_ns = time.monotonic_ns()
        pool.resize(4)
        assert wait_for_health(kubelet, POOL, HEALTHY).message == ""
        print_delay("pool restored, after three clean passes", since_ns)


def test_real_cpu_that_goes_offline_is_unhealthy_until_online(short_tmp: Path) -> None:
    with hotplug(1) as cpu, Agent(short_tmp, *FAST, *NOTHING) as agent, agent.kubelet() as kubelet:
        first = kubelet.next()
        name = next(name for name in names(first) if cpu_in(name, 1))

        since_ns = time.monotonic_ns()
        cpu.set_online(False)
        unhealthy = wait_for_health(kubelet, name, UNHEALTHY)
        print_delay("cpu1 offline", since_ns)
        assert unhealthy.message.startswith("cpu.offline: CPU 1 offline, online at start: ")

        cpu.set_online(True)
        assert wait_for_health(kubelet, name, HEALTHY).message == ""


def cpu_in(device: str, cpu: int) -> bool:
    """Return whether the CPU belongs to the device's NUMA node."""
    node = device.removeprefix("cpu-")
    return device.startswith("cpu-") and Path(f"/sys/devices/system/cpu/cpu{cpu}/{node}").exists()


def test_real_limit_hit_is_a_note_and_not_sent_to_the_kubelet(short_tmp: Path) -> None:
    with hugepages(2048, 4), kubepods_tree(hugetlb=True) as tree:
        flags = [*FAST, "--kubelet-cgroup-root", tree.cgroup_root]
        with (
            Agent(short_tmp, *flags, config=STREAM) as agent,
            agent.kubelet() as kubelet,
            agent.watch_reports() as watcher,
        ):
            container = "c" * 64
            group = tree.make("burstable", POD, container)
            (group / "hugetlb.2MB.max").write_text("4M\n")
            wait_for_message(watcher, lambda report: report.groups == 2, "a pod and its container")

            at_ns = hugetlb_hit(group, 3).at_ns
            report, note = wait_for_note(watcher, container)
            print_delay("limit hit, with the death of the process", at_ns)
            assert note.subject == f"pod {POD} container {container}"
            assert note.cause.evidence == "2mi pages hit the limit (limit 4 MiB)"
            causes = {
                found_device.causes[0].code
                for found_device in report.devices
                if found_device.causes and not is_stalled(found_device)
            }
            assert causes == set()

            # the kubelet receives heartbeats without that note
            for _ in range(3):
                for device in without_stalls(kubelet.next()):
                    assert (device.health, device.message) == (HEALTHY, "")

            tree.remove("burstable", POD)
            wait_for_message(
                watcher,
                lambda report: (
                    report.groups == 0
                    and {found_device.health for found_device in report.devices} == {HEALTHY}
                ),
                "no groups, and healthy devices",
            )
            assert agent.end() == 0
            assert "Traceback" not in agent.log


@pytest.fixture
def thousand() -> Iterator[Any]:
    """Yield a tree for a thousand groups, which need no controller."""
    if unified_root() is None:
        pytest.skip("no cgroup v2 here")
    with kubepods_tree() as tree:
        yield tree


def test_thousand_real_groups_change_no_verdict(short_tmp: Path, thousand: Any) -> None:
    flags = [*FAST, "--kubelet-cgroup-root", thousand.cgroup_root]
    with (
        Agent(short_tmp, *flags, config=STREAM) as agent,
        agent.kubelet() as kubelet,
        agent.watch_reports() as watcher,
    ):
        since_ns = time.monotonic_ns()
        for pod in range(100):
            uid = f"{pod:08x}-0000-0000-0000-000000000000"
            for container in range(9):
                thousand.make("besteffort", uid, f"{pod:032x}{container:032x}")
        wait_for_message(watcher, lambda report: report.groups == 1000, "a thousand groups")
        print_delay("a thousand groups, from the first", since_ns)
        thousand.remove("besteffort")
        empty = wait_for_message(watcher, lambda report: report.groups == 0, "no groups")
        assert empty.core.groups_dropped == 0
        healths = {device.health for device in empty.devices if not is_stalled(device)}
        assert healths <= {HEALTHY}
        while kubelet.pending_count():
            assert {device.health for device in without_stalls(kubelet.next())} <= {HEALTHY}
        assert agent.process.poll() is None


def test_kubepods_tree_may_be_created_and_removed_repeatedly(short_tmp: Path, thousand: Any) -> None:
    flags = [*FAST, "--kubelet-cgroup-root", thousand.cgroup_root]
    with Agent(short_tmp, *flags, config=STREAM) as agent, agent.watch_reports() as watcher:
        for _ in range(2):
            thousand.make("", POD, "d" * 64)
            wait_for_message(watcher, lambda report: report.groups == 2, "a pod and its container")
            thousand.remove()
            wait_for_message(watcher, lambda report: report.groups == 0, "no groups")


def test_missing_configured_pool_is_unhealthy_in_the_first_list(short_tmp: Path) -> None:
    config = '[expect.hugepages]\n"hugepages-2mi-node0" = 1000000\n'
    with (
        Agent(short_tmp, *FAST, *NOTHING, config=config, expect="Unhealthy") as agent,
        agent.kubelet() as kubelet,
    ):
        first = entry(kubelet.next(), POOL)
        assert first.health == UNHEALTHY
        assert first.message.split(". Advice")[0].endswith("pages of 2mi, 1000000 configured")
