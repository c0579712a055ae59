"""CPUs of the real host that go offline and return."""

from agents import HEALTHY, UNHEALTHY
from machine import hotplug

from host_scenarios.declarations import device
from host_scenarios.figures import REAL
from host_scenarios.hosts import RealHost
from host_scenarios.stage import OWNER


def test_offline_cpu_is_unhealthy_until_it_returns(real: RealHost) -> None:
    with hotplug(1) as cpu:
        real.stage.cause("cpu1 offline", REAL)
        cpu.set_online(False)
        real.stage.expect_health("cpu-node0", UNHEALTHY, "cpu.offline: CPU 1 offline, online at start: ")
        real.stage.cause("cpu1 online again", REAL)
        cpu.set_online(True)
        real.stage.expect_health("cpu-node0", HEALTHY, "")


def test_declared_cpus_are_affected_by_their_own_cpus_only(real: RealHost) -> None:
    cpus = device("cpuset-0", "cpu", cpus="0") + device("cpuset-1", "cpu", cpus="1", numa=0)
    real.stage.declare(cpus)
    for name in ("cpuset-0", "cpuset-1"):
        real.stage.expect_health(name, HEALTHY, "", OWNER)
    with hotplug(1) as cpu:
        real.stage.cause("cpu1 offline, declared as `cpuset-1`", REAL)
        cpu.set_online(False)
        real.stage.expect_health("cpuset-1", UNHEALTHY, "cpu.offline: CPU 1 offline, declared: 1", OWNER)
        real.stage.expect_health("cpuset-0", HEALTHY, "", OWNER)
        real.stage.cause("cpu1 online again, declared as `cpuset-1`", REAL)
        cpu.set_online(True)
        real.stage.expect_health("cpuset-1", HEALTHY, "", OWNER)
