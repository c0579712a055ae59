"""Declarations of drivers while the agent runs: files that appear, change, are invalid and go."""

import pytest
from agents import DRIVER, HEALTHY, UNHEALTHY, UNKNOWN
from scenarios.row import BUSES

from host_scenarios.declarations import device
from host_scenarios.figures import EMULATED, REAL
from host_scenarios.hosts import Paper
from host_scenarios.stage import LATE, NEWCOMER, OWNER

UNKNOWN_UUID = "GPU-00000000-0000-0000-0000-000000000000"
THINGS = [
    ("no-such-cpu", "cpu", {"cpus": "900"}, "cpu.missing: CPU 900 does not exist, declared: 900"),
    ("elsewhere", "cpu", {"cpus": "7", "numa": 2},
     "cpu.numa: CPU 7 on NUMA node 7, declared: NUMA node 2"),
    ("no-such-pool", "hugepages", {"size": "1Gi", "pages": 4, "numa": 0},
     "mem.hugepages.missing: no pool of 1gi pages on NUMA node 0"),
    ("too-many-pages", "hugepages", {"size": "2Mi", "pages": 500, "numa": 0},
     "mem.hugepages.pool_shrunk: never more than 8 pages of 2mi on NUMA node 0, 500 declared"),
    ("no-such-node", "memory", {"numa": 63}, "mem.missing: no NUMA node 63"),
    ("too-much-memory", "memory", {"numa": 0, "size": "64Gi"},
     "mem.missing: 1024 MiB on NUMA node 0, 65536 MiB declared"),
    ("no-such-card", "pci", {"address": "0000:77:00.0"}, "pci.missing: no 0000:77:00.0 on the PCI bus"),
    ("no-such-gpu", "gpu", {"uuid": UNKNOWN_UUID},
     f"gpu.not_found: {UNKNOWN_UUID} is not among the 2 GPUs of NVML"),
]  # fmt: skip


def test_new_declaration_makes_the_socket_the_drivers_own(paper: Paper) -> None:
    host = paper.stage.device_names(DRIVER)
    assert {"cpu-node0", "memory-node0", "gpu-0", "gpu-1", "hugepages-2mi-node0"} <= host
    assert paper.stage.device_names(LATE) == host
    paper.stage.cause("a driver's first file in devices.d", REAL)
    paper.stage.declare(device("cores", "cpu", cpus="7"), LATE)
    paper.stage.expect_health("cores", HEALTHY, "", LATE)
    assert paper.stage.device_names(LATE) == {"cores"}
    assert paper.stage.device_names(OWNER) == {"nic-0", "nic-1"}
    assert paper.stage.device_names(DRIVER) == host


def test_changed_declaration_makes_removed_devices_unknown(paper: Paper) -> None:
    paper.stage.declare(device("before", "cpu", cpus="7"), NEWCOMER)
    paper.stage.expect_health("before", HEALTHY, "", NEWCOMER)
    paper.stage.cause("a declaration without a device that it had", REAL)
    paper.stage.declare(device("after", "cpu", cpus="7"), NEWCOMER)
    paper.stage.expect_health("before", UNKNOWN, "declared.gone: no longer declared by its driver", NEWCOMER)
    paper.stage.expect_health("after", HEALTHY, "", NEWCOMER)


def test_invalid_declaration_keeps_all_devices(paper: Paper) -> None:
    paper.stage.declare(device("kept", "cpu", cpus="7"), NEWCOMER)
    paper.stage.expect_health("kept", HEALTHY, "", NEWCOMER)
    paper.stage.cause("a declaration with a key that does not exist", REAL)
    paper.stage.declare(device("kept", "cpu", cpus="7", colour="green"), NEWCOMER)
    note = paper.stage.expect_note(f"driver {NEWCOMER}", "declared.file: ")
    assert f"devices.d/{NEWCOMER}.toml" in note["evidence"]
    assert "colour" in note["evidence"]
    paper.stage.expect_health("kept", HEALTHY, "", NEWCOMER)
    paper.stage.declare(device("kept", "cpu", cpus="7"), NEWCOMER)
    paper.stage.follower.wait_for(
        lambda entry: all(note["code"] != "declared.file" for note in entry["notes"]), "no note any more"
    )


def test_removed_declaration_leaves_its_devices_unknown(paper: Paper) -> None:
    paper.stage.declare(device("orphan", "cpu", cpus="7"), NEWCOMER)
    paper.stage.expect_health("orphan", HEALTHY, "", NEWCOMER)
    paper.stage.cause("a driver's file in devices.d removed", REAL)
    paper.stage.remove_declaration(NEWCOMER)
    paper.stage.expect_health("orphan", UNKNOWN, "declared.gone: no longer declared by its driver", NEWCOMER)
    assert "cpu-node0" not in paper.stage.device_names(NEWCOMER)


@pytest.mark.parametrize(("name", "kind", "keys", "verdict"), THINGS, ids=[name for name, *_ in THINGS])
def test_device_unlike_its_declaration_is_unhealthy(
    paper: Paper, name: str, kind: str, keys: dict[str, object], verdict: str
) -> None:
    paper.stage.cause(f"declared: {name}", EMULATED)
    paper.stage.declare(device(name, kind, **keys), NEWCOMER)
    paper.stage.expect_health(name, UNHEALTHY, verdict, NEWCOMER)


def test_declared_gpu_has_the_hosts_verdict_at_its_driver_only(paper: Paper) -> None:
    paper.stage.declare(device("card-0", "gpu", pci=BUSES[0]), NEWCOMER)
    paper.stage.expect_health("card-0", HEALTHY, "", NEWCOMER)
    paper.stage.cause("NVML: a GPU is lost, declared by its PCI address", EMULATED)
    paper.host.fake.send("gpu 0 lost")
    paper.stage.expect_health("card-0", UNHEALTHY, "gpu.", NEWCOMER)
    paper.stage.expect_health("gpu-0", UNHEALTHY, "gpu.")
    paper.host.fake.send("gpu 0 back")
    paper.stage.expect_health("card-0", HEALTHY, "", NEWCOMER)


def test_two_drivers_may_use_the_same_device_name(paper: Paper) -> None:
    paper.stage.declare(device("nic-0", "pci", address="0000:78:00.0"), NEWCOMER)
    paper.stage.expect_health("nic-0", UNHEALTHY, "pci.missing: no 0000:78:00.0 on the PCI bus", NEWCOMER)
    paper.stage.expect_health("nic-0", HEALTHY, "", OWNER)
