"""Containers of the real host that are throttled and killed (cgroup v1)."""

from pathlib import Path

from agents import HEALTHY
from kubelet_files import checkpoint, claim
from kubelet_files import device as prepared_device
from machine import Kubepods, cpu_load, oom_kill

from agent.config.config import CHECKPOINT
from host_scenarios.declarations import device
from host_scenarios.figures import REAL
from host_scenarios.hosts import RealHost
from host_scenarios.stage import OWNER

QOS = "burstable"
PERIOD_US = 10_000


def make_container(pods: Kubepods, pod: str, container: str) -> dict[str, Path]:
    """Create a container; return its directory in each hierarchy."""
    first = pods.make(QOS, pod, container)
    relative = first.relative_to(pods.roots[0])
    return {root.name: root / relative for root in pods.roots}


def cap(group: Path) -> None:
    """Limit the container to a tenth of a CPU, less than it gets on a busy machine."""
    (group / "cpu.cfs_period_us").write_text(f"{PERIOD_US}\n")
    (group / "cpu.cfs_quota_us").write_text(f"{PERIOD_US // 10}\n")


def bind(pods: Kubepods, group: Path, cpus: str) -> None:
    """Restrict the container and its parents to these CPUs."""
    top = next(root for root in pods.roots if root.name == "cpuset")
    relative = group.relative_to(top)
    for level in [*reversed(relative.parents), relative][1:]:
        (top / level / "cpuset.cpus").write_text(f"{cpus}\n")


def test_throttled_container_is_a_note(real: RealHost) -> None:
    pod, container = "1a3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0", "1" * 64
    group = make_container(real.pods, pod, container)["cpu"]
    cap(group)
    real.stage.cause("container throttled by its CPU quota (cgroup v1)", REAL)
    with cpu_load(group):
        text = "cgroup.cpu.throttled: throttled in more than 25 % of its CPU periods in 60 s"
        note = real.stage.expect_note(f"pod {pod} container {container}", text)
    assert note["severity"] == "info"
    assert note["devices"] == []
    real.pods.remove(QOS, pod)


def test_oom_killed_container_is_a_note(real: RealHost) -> None:
    pod, container = "2a3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0", "2" * 64
    group = make_container(real.pods, pod, container)["memory"]
    (group / "memory.limit_in_bytes").write_text(f"{16 << 20}\n")
    real.stage.follower.wait_for(lambda entry: entry["cgroups"]["watched"] == 2, "a pod and its container")
    real.stage.cause("container killed at its memory limit (cgroup v1), with the start of the process", REAL)
    oom_kill(group)
    text = "cgroup.memory.oom_kill: processes were killed: out of memory (limit 16 MiB)"
    real.stage.expect_note(f"pod {pod} container {container}", text)
    real.pods.remove(QOS, pod)


def test_throttled_exclusive_cpus_are_reported_to_their_driver(real: RealHost) -> None:
    pod, container = "3a3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0", "3" * 64
    shared = device("cpuset-0", "cpu", cpus="0")
    real.stage.declare(device("cpuset-1", "cpu", cpus="1", exclusive=True) + shared)
    real.stage.expect_health("cpuset-1", HEALTHY, "", OWNER)
    groups = make_container(real.pods, pod, container)
    bind(real.pods, groups["cpuset"], "1")
    drivers = {OWNER: {"Devices": [prepared_device("cpuset-1", pool="node")]}}
    new = real.kubelet / "new"
    new.write_bytes(checkpoint([claim("c-1", pods=[pod], drivers=drivers)]))
    new.rename(real.kubelet / CHECKPOINT)
    cap(groups["cpu"])
    real.stage.cause("container throttled on exclusive CPUs that are declared", REAL)
    expected = (
        f"cgroup.cpu.throttled_exclusive: pod {pod} container {container}: throttled on exclusive CPUs 1"
    )
    with cpu_load(groups["cpu"]):
        real.stage.expect_health("cpuset-1", HEALTHY, expected, OWNER)
    note = real.stage.expect_note(f"pod {pod} container {container}", "cgroup.cpu.throttled_exclusive: ")
    assert note["devices"] == [f"{OWNER}/node/cpuset-1"]
    real.stage.expect_health("cpuset-0", HEALTHY, "", OWNER)
    (real.kubelet / CHECKPOINT).write_bytes(checkpoint([]))
    real.stage.cause("the throttled container is removed", REAL)
    real.pods.remove(QOS, pod)
    real.stage.expect_health("cpuset-1", HEALTHY, "", OWNER)
