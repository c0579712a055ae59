"""The example driver, part by part: what it finds, what users may ask for, and who holds what."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostdev_driver
import pytest
import yaml
from hostdev_driver.claims import ClaimFiles
from hostdev_driver.containers import devices_for
from hostdev_driver.driver import HostDriver
from hostdev_driver.grant_store import GrantStore
from hostdev_driver.grants import Grant, Holdings, check_pages, held, hold, release, taken_pages
from hostdev_driver.host import (
    CpuPlace,
    Hardware,
    Host,
    Pool,
    find_hardware,
    format_cpus,
    format_size,
    parse_cpus,
    parse_size_kib,
)
from hostdev_driver.parameters import requested_grant
from hostdev_driver.saved_hardware import offered_hardware, read_boot_id
from hostdev_samples import (
    DRIVER,
    NODE,
    REF,
    claim_object,
    claim_of,
    gpu,
    host_of,
    paper,
    parameters_of,
    parts,
    pool,
    write,
)
from hypothesis import given
from hypothesis import strategies as st
from private_mounts import within_mounts

import drahealth
from agent.prepare.errors import recorded_operation

__all__ = ["paper"]

EXAMPLE = Path(hostdev_driver.__file__).parent


# --- deployment ------------------------------------------------------------------------------------------


def test_container_with_a_read_only_root_has_a_writable_tmp() -> None:
    """Where the image has gcc, ctypes.util.find_library() needs a temporary file, and Trio calls it."""
    objects = yaml.safe_load_all((EXAMPLE / "deploy.yaml").read_text())
    (pod,) = (obj["spec"]["template"]["spec"] for obj in objects if obj["kind"] == "DaemonSet")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in pod["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert "emptyDir" in volumes[mounts["/tmp"]["name"]]
        assert not mounts["/tmp"].get("readOnly")


# --- devices of the host ---------------------------------------------------------------------------------


def test_every_pool_numa_node_and_gpu_is_a_device(paper: Path) -> None:
    assert parts(host_of(paper)) == {
        "hugepages-2mi-node0-0": drahealth.Hugepages("2Mi", pages=512, numa=0),
        "hugepages-1gi-node0-0": drahealth.Hugepages("1Gi", pages=2, numa=0),
        "cpus-node0-0": drahealth.Cpus("0-1,4-5", numa=0),
        "cpus-node1-0": drahealth.Cpus("2-3,6", numa=1),
        "gpu-3": drahealth.Gpu(pci="0000:3b:00.0"),
    }


def test_pool_is_divided_evenly_and_the_rest_stays(paper: Path) -> None:
    found = parts(host_of(paper, shares=3))
    assert [found[f"hugepages-2mi-node0-{share}"] for share in range(3)] == [
        drahealth.Hugepages("2Mi", pages=170, numa=0)
    ] * 3
    assert not [name for name in found if name.startswith("hugepages-1gi")]  # 2 pages for 3 are none each


def test_cpus_of_a_core_stay_together_and_reserved_ones_out(paper: Path) -> None:
    found = parts(host_of(paper, cpus_each=2))
    assert [part for name, part in found.items() if name.startswith("cpus")] == [
        drahealth.Cpus("0,4", numa=0),
        drahealth.Cpus("1,5", numa=0),
        drahealth.Cpus("2,6", numa=1),
    ]  # and CPU 3, whose sibling is offline, is too few for a device
    found = parts(host_of(paper, reserved={0, 4, 1, 5}))
    assert [name for name in found if name.startswith("cpus")] == ["cpus-node1-0"]


def test_kernel_without_numa_has_one_node(tmp_path: Path) -> None:
    write(tmp_path / "sys/devices/system/cpu/online", "0-1")
    write(tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", 4)
    write(tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 3)
    host = host_of(tmp_path)
    assert parts(host) == {
        "hugepages-2mi-node0-0": drahealth.Hugepages("2Mi", pages=4, numa=0),
        "cpus-node0-0": drahealth.Cpus("0-1"),
    }
    assert host.free_pages("2Mi", 0) == 3


def test_gpus_without_the_nvidia_driver_are_ignored(paper: Path) -> None:
    gpu(paper, "0000:5e:00.0", 4, vendor="0x1002")
    gpu(paper, "0000:5f:00.0", 5, device_class="0x068000")
    host = host_of(paper)
    assert [name for name in host.found if name.startswith("gpu")] == ["gpu-3"]
    assert host.found["gpu-3"].nodes == ("/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm")


def test_real_host_offers_its_online_cpus() -> None:
    cpus = [part for part in parts(Host(NODE)).values() if isinstance(part, drahealth.Cpus)]
    online = parse_cpus(Path("/sys/devices/system/cpu/online").read_text())
    assert set().union(*(parse_cpus(part.cpus) for part in cpus)) == online


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists_survive_a_round_trip(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "3-1", "-1", "1,x", "12345", "1 2"])
def test_invalid_cpu_list_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a CPU number or range"):
        parse_cpus(text)


@pytest.mark.parametrize(
    ("size", "size_kib"), [("64Ki", 64), ("2Mi", 2048), ("1Gi", 1 << 20), ("16Gi", 16 << 20)]
)
def test_sizes_are_kubernetes_quantities(size: str, size_kib: int) -> None:
    assert format_size(size_kib) == size
    assert parse_size_kib(size) == size_kib
    with pytest.raises(ValueError, match="is not a size"):
        parse_size_kib(size.lower())


# --- parameters of claims --------------------------------------------------------------------------------


def test_claim_without_parameters_gets_the_device(paper: Path) -> None:
    host = host_of(paper)
    claim = claim_of(("p", "hugepages-2mi-node0-0"), ("c", "cpus-node1-0"), ("g", "gpu-3"))
    pages, cpus, card = (requested_grant(claim, device, host) for device in claim.devices)
    assert (pages.size, pages.pages, pages.numa) == ("2Mi", 512, 0)
    assert (cpus.cpus, cpus.exclusive) == ({2, 3, 6}, True)
    assert card.nodes[0] == "/dev/nvidia3"


def test_claim_parameters_override_class_parameters(paper: Path) -> None:
    configs = [
        parameters_of("HugepagesParameters", pages=8),
        parameters_of("CpuParameters", cpus="2"),
        parameters_of("HugepagesParameters", pages=4),
    ]
    claim = claim_of(("p", "hugepages-2mi-node0-0"), ("c", "cpus-node1-0"), configs=configs)
    pages, cpus = (requested_grant(claim, device, host_of(paper)) for device in claim.devices)
    assert pages.pages == 4
    assert cpus.cpus == {2}


PAGES, CPUS = "hugepages-2mi-node0-0", "cpus-node1-0"


@pytest.mark.parametrize(
    ("device", "config", "code", "text"),
    [
        (PAGES, parameters_of("HugepagesParameters", pages=0), "config.decode", "0 pages are fewer than 1"),
        (PAGES, parameters_of("HugepagesParameters", size="2mb"), "config.decode", "'2mb' is not a size"),
        (PAGES, parameters_of("HugepagesParameters", page=1), "config.decode", "unknown field `page`"),
        (PAGES, parameters_of("Hugepages"), "config.decode", "did you mean"),
        (
            PAGES,
            parameters_of("HugepagesParameters", pages=513),
            "config.invalid",
            "513 pages are more than the 512",
        ),
        (
            PAGES,
            parameters_of("HugepagesParameters", size="1Gi"),
            "config.conflict",
            "which was given pages of 2Mi",
        ),
        (
            PAGES,
            parameters_of("CpuParameters", "r"),
            "config.conflict",
            "CpuParameters for request r, which was given hugep",
        ),
        (CPUS, parameters_of("CpuParameters", cpus=""), "cpu.opaque_cpuset.invalid", "'' names no CPU"),
        (
            CPUS,
            parameters_of("CpuParameters", cpus="1.5"),
            "cpu.opaque_cpuset.invalid",
            "'1.5' is not a CPU number",
        ),
        (
            CPUS,
            parameters_of("CpuParameters", cpus="0-3"),
            "cpu.opaque_cpuset.invalid",
            "CPUs 0-1 are not of cpus-node1-0",
        ),
        ("gpu-3", parameters_of("GpuParameters", "r", mode="x"), "config.decode", "unknown field `mode`"),
    ],
)
def test_impossible_request_is_bad_config(
    paper: Path, device: str, config: drahealth.ClaimConfig, code: str, text: str
) -> None:
    claim = claim_of(("r", device), configs=[config])
    with pytest.raises(drahealth.BadConfigError) as caught:
        requested_grant(claim, claim.devices[0], host_of(paper))
    assert caught.value.code == code
    assert text in caught.value.summary


def test_unsupported_hugepage_size_is_bad_config(paper: Path) -> None:
    claim = claim_of(("r", PAGES), configs=[parameters_of("HugepagesParameters", size="16Gi")])
    with pytest.raises(
        drahealth.BadConfigError, match="this node has pages of 2Mi, 1Gi, not of 16Gi"
    ) as caught:
        requested_grant(claim, claim.devices[0], host_of(paper))
    assert (caught.value.code, caught.value.requests) == ("mem.hugepages.size_unsupported", ("r",))


@pytest.mark.parametrize(("pool_name", "device"), [(NODE, "gpu-9"), ("node-2", "gpu-3")])
def test_unknown_device_is_reported_as_device_unknown(paper: Path, pool_name: str, device: str) -> None:
    claim = claim_of()
    with pytest.raises(
        drahealth.PermanentError, match=f"{DRIVER}/{pool_name}/{device} is not on this node"
    ) as caught:
        requested_grant(claim, drahealth.ClaimDevice("r", DRIVER, pool_name, device), host_of(paper))
    assert caught.value.code == "device.unknown"


# --- grants ----------------------------------------------------------------------------------------------


def cpu_grant(cpus: str, *, exclusive: bool) -> Grant:
    return Grant(request="r", pool=NODE, device="d").with_cpus(parse_cpus(cpus), exclusive=exclusive)


@pytest.mark.parametrize(
    ("mine", "theirs", "conflict"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_cpus_are_shared_only_if_both_claims_agree(mine: bool, theirs: bool, conflict: bool) -> None:
    first, second = claim_of(uid="1", name="first"), claim_of(uid="2", name="second")
    holdings = hold({}, first, (cpu_grant("0-3", exclusive=theirs),))
    if not conflict:
        assert held(hold(holdings, second, (cpu_grant("2-5", exclusive=mine),)), second)
        return
    with pytest.raises(drahealth.TransientError) as caught:
        hold(holdings, second, (cpu_grant("2-5", exclusive=mine),))
    assert caught.value.code == "cpu.overlap"
    assert caught.value.summary == "CPUs 2-3 of d are still held by claim team-a/first"
    assert held(hold(release(holdings, "1"), second, (cpu_grant("2-5", exclusive=mine),)), second)


def test_reallocated_claim_releases_its_old_devices() -> None:
    before, after = claim_of(("r", "cpus-node0-0")), claim_of(("r", "cpus-node1-0"))
    holdings = hold({}, before, (cpu_grant("0-1", exclusive=True),))
    assert held(holdings, before)
    assert not held(holdings, after)
    holdings = hold(holdings, after, (cpu_grant("0-1", exclusive=True),))  # no conflict with itself
    assert not held(holdings, before)


def page_grant(pages: int, request: str = "r") -> Grant:
    return Grant(request=request, pool=NODE, device="hugepages-2mi-node0-0").with_pages("2Mi", pages, 0)


def test_pages_in_use_are_transient(paper: Path) -> None:
    host = host_of(paper)
    pool(paper / "sys", 0, 2048, 512, free=100)
    check_pages([page_grant(60), page_grant(40, "s")], host)
    with pytest.raises(drahealth.TransientError) as caught:
        check_pages([page_grant(60), page_grant(41, "s")], host)
    assert caught.value.code == "mem.hugepages.insufficient"
    assert caught.value.summary == "101 pages of 2Mi needed on NUMA node 0, 100 are free"
    assert caught.value.requests == ("r", "s")


def test_missing_pool_has_no_free_pages(paper: Path) -> None:
    host = host_of(paper)
    shutil.rmtree(paper / "sys/devices/system/node/node0/hugepages/hugepages-2048kB")
    with pytest.raises(FileNotFoundError) as caught:
        check_pages([page_grant(1)], host)
    mark = recorded_operation(caught.value)
    assert mark is not None
    assert mark.operation is drahealth.Operation.DEVICE


def test_pages_that_claims_use_are_not_taken(paper: Path) -> None:
    host = host_of(paper)
    holdings: Holdings = hold({}, claim_of(), (page_grant(500),))
    pool(paper / "sys", 0, 2048, 512, free=12)
    assert taken_pages(holdings, host, "2Mi", 0) == 0
    assert taken_pages(holdings, host, "1Gi", 0) == 0
    pool(paper / "sys", 0, 2048, 512, free=9)
    assert taken_pages(holdings, host, "2Mi", 0) == 3
    assert taken_pages({}, host, "2Mi", 0) == 503


@pytest.mark.parametrize(
    ("pages", "free", "taken"),
    [
        (400, 400, 0),  # the pool shrank
        (0, 0, 0),
        (400, 390, 10),  # it shrank, and others use 10
        (600, 520, 0),  # it grew: others use 80, and enough are left
        (400, 410, 0),  # it shrank between two reads
    ],
)
def test_pages_that_the_pool_lacks_are_not_taken(paper: Path, pages: int, free: int, taken: int) -> None:
    host = host_of(paper)
    pool(paper / "sys", 0, 2048, pages, free=free)
    assert taken_pages({}, host, "2Mi", 0) == taken


# --- hardware of an earlier driver instance --------------------------------------------------------------


def offered_devices(
    paper: Path, holdings: Holdings | None = None, boot_id: str = "boot-1", **more: Any
) -> Hardware:
    """Return what a driver offers that starts now."""
    found = find_hardware(paper / "sys", paper / "proc")
    return offered_hardware(paper / "hardware.json", found, holdings or {}, boot_id=boot_id, **more)


TWO_MI = Pool(0, 2048)


def test_lost_hardware_stays_offered_after_a_restart(paper: Path) -> None:
    before = host_of(paper, cpus_each=1, hardware=offered_devices(paper))
    pool(paper / "sys", 0, 2048, 300)
    shutil.rmtree(paper / "sys/devices/system/node/node0/hugepages/hugepages-1048576kB")
    write(paper / "sys/devices/system/cpu/online", "0,2-6")
    write(paper / "sys/devices/system/node/node0/cpulist", "0,4-5")  # of CPUs that are online
    shutil.rmtree(paper / "sys/devices/system/cpu/cpu1/topology")
    write(paper / "sys/devices/system/cpu/cpu5/topology/thread_siblings_list", 5)
    shutil.rmtree(paper / "proc/driver")
    assert parts(host_of(paper, cpus_each=1)) != parts(before)
    assert parts(host_of(paper, cpus_each=1, hardware=offered_devices(paper))) == parts(before)
    assert parts(host_of(paper, cpus_each=1, hardware=offered_devices(paper))) == parts(before), (
        "and the next one"
    )


def test_added_hardware_is_offered_after_a_restart(paper: Path) -> None:
    offered_devices(paper)
    pool(paper / "sys", 0, 2048, 600)
    gpu(paper, "0000:5e:00.0", 4)
    write(paper / "sys/devices/system/cpu/online", "0-7")
    again = offered_devices(paper)
    assert (again.pages[TWO_MI], again.gpus["0000:5e:00.0"]) == (600, 4)
    assert again.cpus[7] == CpuPlace(1, 7)


@pytest.mark.parametrize("boot_id", ["boot-2", ""])
def test_boot_ends_the_memory_of_hardware_that_no_claim_holds(paper: Path, boot_id: str) -> None:
    offered_devices(paper)
    pool(paper / "sys", 0, 2048, 300)
    write(paper / "sys/devices/system/cpu/online", "0-5")
    shutil.rmtree(paper / "proc/driver")
    assert offered_devices(paper, boot_id=boot_id) == find_hardware(paper / "sys", paper / "proc")


def test_hardware_that_claims_hold_stays_offered_over_a_boot(paper: Path) -> None:
    grants = (
        page_grant(400),
        cpu_grant("5-6", exclusive=True),
        Grant(request="g", pool=NODE, device="gpu-3"),
    )
    holdings = hold({}, claim_of(), grants)
    offered_devices(paper, holdings)
    pool(paper / "sys", 0, 2048, 300)
    write(paper / "sys/devices/system/cpu/online", "0-5")
    shutil.rmtree(paper / "proc/driver")
    for boot_id in ("boot-2", "boot-3"):
        again = offered_devices(paper, holdings, boot_id)
        assert again.pages[TWO_MI] == 400
        assert set(again.cpus) == {0, 1, 2, 3, 4, 5, 6}
        assert again.gpus == {"0000:3b:00.0": 3}
    assert offered_devices(paper, boot_id="boot-4") == find_hardware(paper / "sys", paper / "proc"), (
        "released"
    )


def test_pages_of_the_store_are_offered_without_a_saved_file(paper: Path) -> None:
    pool(paper / "sys", 0, 2048, 300)
    holdings = hold({}, claim_of(), (page_grant(200),))
    assert offered_devices(paper, holdings, shares=2).pages[TWO_MI] == 400, "200 in each of two shares"


def test_given_pool_sizes_outrank_found_and_saved_ones(paper: Path) -> None:
    offered_devices(paper)
    given = {TWO_MI: 300, Pool(1, 1 << 20): 2}
    assert (
        offered_devices(paper, given=given).pages
        == {TWO_MI: 300, Pool(0, 1 << 20): 2, Pool(1, 2048): 0} | given
    )
    assert offered_devices(paper).pages[TWO_MI] == 512, "given sizes are not saved"
    held = hold({}, claim_of(), (page_grant(400),))
    assert offered_devices(paper, held, given=given).pages[TWO_MI] == 400, "a claim holds more"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"version": 1, "boot_id": "boot-1", "pag',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"version": 2, "boot_id": "boot-1"}',
        b'{"version": 1, "boot_id": "boot-1", "cpus": [["0", 1]]}',
        b" " * (1 << 20) + b'{"version": 1, "boot_id": "boot-1"}',
    ],
    ids=["empty", "torn", "binary", "nested", "newer", "mistyped", "large"],
)
def test_unusable_hardware_file_is_logged_and_replaced(
    paper: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    whole = offered_devices(paper)
    (paper / "hardware.json").write_bytes(data)
    assert offered_devices(paper) == whole
    assert f"{paper / 'hardware.json'}: not usable: " in caplog.text
    caplog.clear()
    pool(paper / "sys", 0, 2048, 300)
    assert offered_devices(paper) == whole
    assert not caplog.records
    assert [path.name for path in paper.glob(".*")] == []


def test_unwritable_hardware_file_is_logged(
    tmp_path: Path, paper: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = find_hardware(paper / "sys", paper / "proc")
    (tmp_path / "state").write_text("a file where a directory should be")
    assert offered_hardware(tmp_path / "state/hardware.json", found, {}, boot_id="boot-1") == found
    assert "could not be written: " in caplog.text


def test_boot_id_of_a_real_host_is_known() -> None:
    assert read_boot_id(Path("/proc"))
    assert read_boot_id(Path("/nowhere")) == ""


# --- the store of grants -----------------------------------------------------------------------------------


def test_grants_survive_a_restart(tmp_path: Path, paper: Path) -> None:
    claim, grants = claim_of(("r", PAGES)), (page_grant(512), cpu_grant("0-3", exclusive=True))
    GrantStore(tmp_path / "state/ledger.json").hold(claim, grants, host_of(paper))
    pool(paper / "sys", 0, 2048, 512, free=0)  # the claim's own pods use them now
    again = GrantStore(tmp_path / "state/ledger.json")
    assert again.hold(claim, (page_grant(1),), host_of(paper)) == grants
    again.release(claim.uid)
    again.release(claim.uid)
    assert GrantStore(tmp_path / "state/ledger.json").read() == {}


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (b"", "state.checkpoint_corrupt", "is damaged"),
        (b'{"version": 1, "claims": {"u": {"cla', "state.checkpoint_corrupt", "is damaged"),
        (b'{"version": 1, "claims": {}, "more": 1}', "state.checkpoint_corrupt", "unknown field `more`"),
        (b"\xff\xfe", "state.checkpoint_corrupt", "is damaged"),
        (b'{"version": 2, "holds": []}', "state.version_newer", "has version 2, this driver reads version 1"),
    ],
)
def test_corrupt_store_grants_nothing_and_is_not_changed(
    tmp_path: Path, paper: Path, data: bytes, code: str, text: str
) -> None:
    path = tmp_path / "ledger.json"
    path.write_bytes(data)
    store = GrantStore(path)
    with pytest.raises(drahealth.PermanentError, match=text) as caught:
        store.hold(claim_of(), (page_grant(1),), host_of(paper))
    assert caught.value.code == code
    assert caught.value.scope is drahealth.Scope.DRIVER
    assert path.read_bytes() == data
    path.unlink()  # read and removed
    assert store.hold(claim_of(), (page_grant(1),), host_of(paper)) == (page_grant(1),)


def test_unsaved_grant_is_not_held(tmp_path: Path, paper: Path) -> None:
    (tmp_path / "state").write_text("a file where a directory should be")
    store = GrantStore(tmp_path / "state/ledger.json")
    with pytest.raises(OSError, match="state") as caught:
        store.hold(claim_of(), (page_grant(1),), host_of(paper))
    mark = recorded_operation(caught.value)
    assert mark is not None
    assert mark.operation is drahealth.Operation.STATE
    (tmp_path / "state").unlink()
    assert store.read() == {}


# --- edits of containers ---------------------------------------------------------------------------------


def test_variables_name_all_devices_of_a_request() -> None:
    grant = Grant(request="cpus", pool=NODE, device="cpus-node0-0").with_cpus({0, 1, 4}, exclusive=True)
    two = Grant(request="cpus", pool=NODE, device="cpus-node1-0").with_cpus({2}, exclusive=True)
    other = Grant(request="more/small", pool=NODE, device="cpus-node1-1").with_cpus({3}, exclusive=True)
    devices = devices_for([grant, two, other])
    assert [device.name for device in devices] == [
        "cpus.cpus-node0-0",
        "cpus.cpus-node1-0",
        "more.small.cpus-node1-1",
    ]
    assert [dict(device.env) for device in devices] == [{"HOSTDEV_CPUS": "0-2,4"}] * 2 + [
        {"HOSTDEV_CPUS": "3"}
    ]


def test_hugepages_are_mounted_with_their_size_limit() -> None:
    (device,) = devices_for([page_grant(4)])
    assert device.env == {"HOSTDEV_HUGEPAGES": "/dev/hugepages/hugepages-2mi-node0-0", "HOSTDEV_NUMA": "0"}
    (mount,) = device.mounts
    assert (mount.type, mount.container_path) == ("hugetlbfs", "/dev/hugepages/hugepages-2mi-node0-0")
    assert mount.options == ("nosuid", "nodev", "pagesize=2048K", "size=8192K", "mode=1777")


def test_kernel_accepts_the_mount_options(tmp_path: Path) -> None:
    if not Path("/sys/kernel/mm/hugepages/hugepages-2048kB").is_dir():
        pytest.skip("no hugepages of 2 MiB on this machine")
    (device,) = devices_for([page_grant(4)])
    options = ",".join(device.mounts[0].options)
    script = 'mount -t hugetlbfs -o "$1" hugetlbfs "$2" && stat -f -c "%S %b" "$2" && stat -c %a "$2"'
    mounted = within_mounts('mount -t tmpfs none "$1"', tmp_path)
    command = [*mounted, "sh", "-c", script, "sh", options, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["2097152 4", "1777"], done.stderr


# --- the driver ------------------------------------------------------------------------------------------


@pytest.fixture
def hostdev(tmp_path: Path, paper: Path) -> HostDriver:
    monitor = drahealth.Monitor(
        DRIVER, config=drahealth.Config(node_name=NODE), hardware=False, state_dir=None
    )
    return HostDriver(monitor, host_of(paper), GrantStore(tmp_path / "ledger.json"), tmp_path / "cdi")


def test_prepared_claim_has_a_cdi_file_and_an_id_per_device(tmp_path: Path, hostdev: HostDriver) -> None:
    claim = claim_of(("p", PAGES), ("c", CPUS), ("g", "gpu-3"))
    prepared = hostdev.prepare(claim)
    assert [
        (prepared_device.requests, prepared_device.pool, prepared_device.device)
        for prepared_device in prepared
    ] == [
        (("p",), NODE, PAGES),
        (("c",), NODE, CPUS),
        (("g",), NODE, "gpu-3"),
    ]
    (file,) = (tmp_path / "cdi").iterdir()
    names = [f"{DRIVER}/device={device['name']}" for device in json.loads(file.read_bytes())["devices"]]
    assert [list(prepared_device.cdi_ids) for prepared_device in prepared] == [[name] for name in names]
    assert len(set(names)) == 3
    shutil.rmtree(tmp_path / "cdi")  # a reboot
    assert hostdev.prepare(claim) == prepared
    assert file.exists()
    hostdev.unprepare(claim.ref)
    hostdev.unprepare(claim.ref)
    assert not file.exists()
    assert hostdev.store.read() == {}


def test_failed_cdi_write_causes_no_second_grant(tmp_path: Path, hostdev: HostDriver) -> None:
    (tmp_path / "cdi").write_text("a file where a directory should be")
    with pytest.raises(OSError, match="cdi") as caught:
        hostdev.prepare(claim_of(("c", CPUS)))
    mark = recorded_operation(caught.value)
    assert mark is not None
    assert mark.operation is drahealth.Operation.CDI
    (tmp_path / "cdi").unlink()
    assert hostdev.prepare(claim_of(("c", CPUS)))


def test_cdi_file_that_cannot_be_removed_keeps_no_grant(tmp_path: Path, hostdev: HostDriver) -> None:
    claim = claim_of(("c", CPUS))
    hostdev.prepare(claim)
    shutil.rmtree(tmp_path / "cdi")
    (tmp_path / "cdi").write_text("a file where a directory should be")
    with pytest.raises(OSError, match="cdi"):
        hostdev.unprepare(claim.ref)
    assert hostdev.store.read() == {}


def test_use_of_unclaimed_pages_is_reported(paper: Path, hostdev: HostDriver) -> None:
    device = hostdev.host.found[PAGES].device
    assert hostdev.pages_left(device) is None
    pool(paper / "sys", 0, 2048, 512, free=511)
    finding = hostdev.pages_left(device)
    assert finding is not None
    assert (finding.code, finding.severity) == ("hostdev.pages_taken", drahealth.Severity.DEGRADED)
    hostdev.store.hold(claim_of(), (page_grant(1),), hostdev.host)
    assert hostdev.pages_left(device) is None


# --- claims from files ------------------------------------------------------------------------------------


def test_claims_file_has_the_format_of_kubectl(tmp_path: Path) -> None:
    (tmp_path / "team-a_train.json").write_text(json.dumps(claim_object()))
    assert ClaimFiles(tmp_path, DRIVER)(REF).devices == (drahealth.ClaimDevice("g", DRIVER, NODE, "gpu-3"),)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (None, "claim.not_found"),
        (b"", "claim.malformed"),
        (b"[]", "claim.malformed"),
        (b"\xff", "claim.malformed"),
        (b"[" * 100_000, "claim.malformed"),
        (b'{"kind": "List"}', "claim.malformed"),
    ],
)
def test_missing_or_invalid_claim_file_is_transient(tmp_path: Path, data: bytes | None, code: str) -> None:
    if data is not None:
        (tmp_path / "team-a_train.json").write_bytes(data)
    with pytest.raises(drahealth.TransientError) as caught:
        ClaimFiles(tmp_path, DRIVER)(REF)
    assert caught.value.code == code


# --- the program -----------------------------------------------------------------------------------------


def program(*args: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "hostdev_driver", *args]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{root}:{root / 'examples'}"},
    )


def test_host_name_in_capitals_gives_a_node_name_in_lower_case() -> None:
    lines = (
        "import socket; socket.gethostname = lambda: 'Node-A.example.com'",
        "from hostdev_driver.arguments import ARGUMENTS",
        "print(ARGUMENTS['identity']['--node-name']['default'])",
    )
    root = Path(__file__).parents[1]
    environment = {"PYTHONPATH": f"{root}:{root / 'examples'}"}
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "node-a.example.com\n"


def test_help_names_every_argument() -> None:
    done = program("--help")
    assert done.returncode == 0, done.stderr
    for name in (
        "--driver-name",
        "--node-name",
        "--kubelet-dir",
        "--plugin-dir",
        "--registry-dir",
        "--cdi-dir",
    ):
        assert name in done.stdout
    for name in ("--claims", "--kubeconfig", "--pod-uid", "--sysfs-root", "--state-dir", "--hugepages"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ((), 78, "KUBERNETES_SERVICE_HOST and _PORT are not set"),
        (("--reserved-cpus", "x"), 2, "'x' is not a CPU number or range"),
        (("--hugepage-shares", "0"), 2, "0 is not 1 to 4096"),
        (("--hugepages", "2Mi=64"), 2, "'2Mi=64' is not NODE:SIZE=PAGES, such as 0:2Mi=64"),
        (("--hugepages", "0:2mb=64"), 2, "'2mb' is not a size"),
    ],
)
def test_invalid_arguments_are_explained(tmp_path: Path, args: tuple[str, ...], code: int, text: str) -> None:
    done = program("--kubelet-dir", str(tmp_path), *args)
    assert done.returncode == code
    assert text in done.stderr


def test_readme_matches_the_code() -> None:
    here = Path(__file__).parents[1] / "examples/hostdev_driver"
    code = (here / "driver.py").read_text()
    assert f"```python\n{code}```" in (here / "README.md").read_text()
    ours = code[code.index("class HostDriver") :]
    assert f"```python\n{ours}```" in (here.parents[1] / "README.md").read_text()
    assert len(code.splitlines()) < 60
