"""What drivers declare while the agent runs: files that come, change, are wrong and go."""

import pytest
from agents import DRIVER, HEALTHY, UNHEALTHY, UNKNOWN
from scenarios.row import BUSES

from host_scenarios.declarations import device
from host_scenarios.figures import EMULATED, REAL
from host_scenarios.hosts import Paper
from host_scenarios.stage import NEWCOMER, OWNER

NOBODYS = "GPU-00000000-0000-0000-0000-000000000000"
THINGS = [
    ("no-such-cpu", "cpu", {"cpus": "900"}, "cpu.missing: CPU 900 does not exist, declared: 900"),
    ("elsewhere", "cpu", {"cpus": "7", "numa": 2},
     "cpu.numa: CPU 7 on NUMA node 7, declared: NUMA node 2"),
    ("no-such-pool", "hugepages", {"size": "1Gi", "pages": 4, "numa": 0},
     "mem.hugepages.missing: no pool of 1gi pages on node 0"),
    ("too-many-pages", "hugepages", {"size": "2Mi", "pages": 500, "numa": 0},
     "mem.hugepages.pool_shrunk: never more than 8 pages of 2mi on node 0, 500 declared"),
    ("no-such-node", "memory", {"numa": 63}, "mem.missing: no NUMA node 63"),
    ("too-much-memory", "memory", {"numa": 0, "size": "64Gi"},
     "mem.missing: 1024 MiB on NUMA node 0, 65536 MiB declared"),
    ("no-such-card", "pci", {"address": "0000:77:00.0"}, "pci.missing: no 0000:77:00.0 on the PCI bus"),
    ("no-such-gpu", "gpu", {"uuid": NOBODYS}, f"gpu.not_found: no {NOBODYS} among the 2 GPUs of NVML"),
]  # fmt: skip


def test_a_file_that_appears_makes_the_socket_the_drivers_own(paper: Paper) -> None:
    host = paper.stage.lists(DRIVER)
    assert {"cpu-node0", "memory-node0", "gpu-0", "gpu-1", "hugepages-2mi-node0"} <= host
    assert paper.stage.lists(NEWCOMER) == host
    paper.stage.cause("a driver's first file in devices.d", REAL)
    paper.stage.declare(device("cores", "cpu", cpus="7"), NEWCOMER)
    paper.stage.hears("cores", HEALTHY, "", NEWCOMER)
    assert paper.stage.lists(NEWCOMER) == {"cores"}
    assert paper.stage.lists(OWNER) == {"nic-0", "nic-1"}
    assert paper.stage.lists(DRIVER) == host


def test_a_file_that_changes_is_followed_and_what_it_no_longer_names_is_unknown(paper: Paper) -> None:
    paper.stage.declare(device("before", "cpu", cpus="7"), NEWCOMER)
    paper.stage.hears("before", HEALTHY, "", NEWCOMER)
    paper.stage.cause("a declaration without a device that it had", REAL)
    paper.stage.declare(device("after", "cpu", cpus="7"), NEWCOMER)
    paper.stage.hears("before", UNKNOWN, "declared.gone: no longer declared by its driver", NEWCOMER)
    paper.stage.hears("after", HEALTHY, "", NEWCOMER)


def test_a_file_that_is_wrong_costs_no_device(paper: Paper) -> None:
    paper.stage.declare(device("kept", "cpu", cpus="7"), NEWCOMER)
    paper.stage.hears("kept", HEALTHY, "", NEWCOMER)
    paper.stage.cause("a declaration with a key that does not exist", REAL)
    paper.stage.declare(device("kept", "cpu", cpus="7", colour="green"), NEWCOMER)
    note = paper.stage.notes(f"driver {NEWCOMER}", "declared.file: ")
    assert f"devices.d/{NEWCOMER}.toml" in note["evidence"]
    assert "colour" in note["evidence"]
    paper.stage.hears("kept", HEALTHY, "", NEWCOMER)
    paper.stage.declare(device("kept", "cpu", cpus="7"), NEWCOMER)
    paper.stage.follower.hear(
        lambda one: all(note["code"] != "declared.file" for note in one["notes"]), "no note any more"
    )


def test_a_file_that_is_removed_leaves_its_devices_unknown(paper: Paper) -> None:
    paper.stage.declare(device("orphan", "cpu", cpus="7"), NEWCOMER)
    paper.stage.hears("orphan", HEALTHY, "", NEWCOMER)
    paper.stage.cause("a driver's file in devices.d removed", REAL)
    paper.stage.recant(NEWCOMER)
    paper.stage.hears("orphan", UNKNOWN, "declared.gone: no longer declared by its driver", NEWCOMER)
    assert "cpu-node0" not in paper.stage.lists(NEWCOMER)


@pytest.mark.parametrize(("name", "kind", "keys", "verdict"), THINGS, ids=[name for name, *_ in THINGS])
def test_what_is_not_as_it_is_declared_is_unhealthy_and_says_why(
    paper: Paper, name: str, kind: str, keys: dict[str, object], verdict: str
) -> None:
    paper.stage.cause(f"declared: {name}", EMULATED)
    paper.stage.declare(device(name, kind, **keys), NEWCOMER)
    paper.stage.hears(name, UNHEALTHY, verdict, NEWCOMER)


def test_a_declared_gpu_is_what_the_hosts_is_and_only_at_its_drivers(paper: Paper) -> None:
    paper.stage.declare(device("card-0", "gpu", pci=BUSES[0]), NEWCOMER)
    paper.stage.hears("card-0", HEALTHY, "", NEWCOMER)
    paper.stage.cause("NVML: a GPU is lost, declared by its PCI address", EMULATED)
    paper.host.fake.tell("gpu 0 lost")
    paper.stage.hears("card-0", UNHEALTHY, "gpu.", NEWCOMER)
    paper.stage.hears("gpu-0", UNHEALTHY, "gpu.")
    paper.host.fake.tell("gpu 0 back")
    paper.stage.hears("card-0", HEALTHY, "", NEWCOMER)


def test_two_drivers_may_call_two_things_the_same(paper: Paper) -> None:
    paper.stage.declare(device("nic-0", "pci", address="0000:78:00.0"), NEWCOMER)
    paper.stage.hears("nic-0", UNHEALTHY, "pci.missing: no 0000:78:00.0 on the PCI bus", NEWCOMER)
    paper.stage.hears("nic-0", HEALTHY, "", OWNER)
