"""The example driver, part by part: what it finds, what users may ask for, and who holds what."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hostdev_driver.book import Book, Grant, check_pages, held, hold, release, unheld_pages
from hostdev_driver.claims import ClaimFiles
from hostdev_driver.containers import devices_for
from hostdev_driver.driver import HostDriver
from hostdev_driver.host import Host, format_cpus, kib_of, parse_cpus, size_of
from hostdev_driver.ledger import Ledger
from hostdev_driver.parameters import wanted
from hostdev_paper import (
    DRIVER,
    NODE,
    REF,
    claim_object,
    claim_of,
    gpu,
    host_of,
    paper,
    parts,
    pool,
    said,
    write,
)
from hypothesis import given
from hypothesis import strategies as st

import agent
from agent.prepare.doing import done_by

__all__ = ["paper"]


# --- what there is ---------------------------------------------------------------------------------------


def test_every_pool_every_nodes_cpus_and_every_gpu_is_a_device(paper: Path) -> None:
    assert parts(host_of(paper)) == {
        "hugepages-2mi-node0-0": agent.Hugepages("2Mi", pages=512, numa=0),
        "hugepages-1gi-node0-0": agent.Hugepages("1Gi", pages=2, numa=0),
        "cpus-node0-0": agent.Cpus("0-1,4-5", numa=0),
        "cpus-node1-0": agent.Cpus("2-3,6", numa=1),
        "gpu-3": agent.Gpu(pci="0000:3b:00.0"),
    }


def test_a_pool_is_shared_out_evenly_and_what_is_left_over_stays(paper: Path) -> None:
    found = parts(host_of(paper, shares=3))
    assert [found[f"hugepages-2mi-node0-{share}"] for share in range(3)] == [
        agent.Hugepages("2Mi", 170, 0)
    ] * 3
    assert not [name for name in found if name.startswith("hugepages-1gi")]  # 2 pages for 3 are none each


def test_cpus_of_one_core_stay_together_and_reserved_ones_stay_out(paper: Path) -> None:
    found = parts(host_of(paper, cpus_each=2))
    assert [part for name, part in found.items() if name.startswith("cpus")] == [
        agent.Cpus("0,4", numa=0),
        agent.Cpus("1,5", numa=0),
        agent.Cpus("2,6", numa=1),
    ]  # and CPU 3, whose sibling is offline, is too few for a device
    found = parts(host_of(paper, reserved={0, 4, 1, 5}))
    assert [name for name in found if name.startswith("cpus")] == ["cpus-node1-0"]


def test_a_kernel_without_numa_has_one_node(tmp_path: Path) -> None:
    write(tmp_path / "sys/devices/system/cpu/online", "0-1")
    write(tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", 4)
    write(tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 3)
    host = host_of(tmp_path)
    assert parts(host) == {
        "hugepages-2mi-node0-0": agent.Hugepages("2Mi", pages=4, numa=0),
        "cpus-node0-0": agent.Cpus("0-1"),
    }
    assert host.free_pages("2Mi", 0) == 3


def test_gpus_that_are_not_nvidias_driver_s_are_not_ours(paper: Path) -> None:
    gpu(paper, "0000:5e:00.0", 4, vendor="0x1002")
    gpu(paper, "0000:5f:00.0", 5, device_class="0x068000")
    host = host_of(paper)
    assert [name for name in host.found if name.startswith("gpu")] == ["gpu-3"]
    assert host.found["gpu-3"].nodes == ("/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm")


def test_this_very_host_has_its_online_cpus_to_hand_out() -> None:
    cpus = [part for part in parts(Host(NODE)).values() if isinstance(part, agent.Cpus)]
    online = parse_cpus(Path("/sys/devices/system/cpu/online").read_text())
    assert set().union(*(parse_cpus(part.cpus) for part in cpus)) == online


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists_are_written_as_they_are_read(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "3-1", "-1", "1,x", "12345", "1 2"])
def test_what_is_no_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no CPU number or range"):
        parse_cpus(text)


@pytest.mark.parametrize(
    ("size", "size_kib"), [("64Ki", 64), ("2Mi", 2048), ("1Gi", 1 << 20), ("16Gi", 16 << 20)]
)
def test_sizes_are_kubernetes_own(size: str, size_kib: int) -> None:
    assert size_of(size_kib) == size
    assert kib_of(size) == size_kib
    with pytest.raises(ValueError, match="is no size"):
        kib_of(size.lower())


# --- what users may ask for ------------------------------------------------------------------------------


def test_without_parameters_a_claim_gets_the_device(paper: Path) -> None:
    host = host_of(paper)
    claim = claim_of(("p", "hugepages-2mi-node0-0"), ("c", "cpus-node1-0"), ("g", "gpu-3"))
    pages, cpus, card = (wanted(claim, device, host) for device in claim.devices)
    assert (pages.size, pages.pages, pages.numa) == ("2Mi", 512, 0)
    assert (cpus.cpus, cpus.exclusive) == ({2, 3, 6}, True)
    assert card.nodes[0] == "/dev/nvidia3"


def test_the_claims_word_outranks_its_classes_and_others_parameters_are_others(paper: Path) -> None:
    configs = [
        said("HugepagesParameters", pages=8),
        said("CpuParameters", cpus="2"),
        said("HugepagesParameters", pages=4),
    ]
    claim = claim_of(("p", "hugepages-2mi-node0-0"), ("c", "cpus-node1-0"), configs=configs)
    pages, cpus = (wanted(claim, device, host_of(paper)) for device in claim.devices)
    assert pages.pages == 4
    assert cpus.cpus == {2}


PAGES, CPUS = "hugepages-2mi-node0-0", "cpus-node1-0"


@pytest.mark.parametrize(
    ("device", "config", "code", "text"),
    [
        (PAGES, said("HugepagesParameters", pages=0), "config.decode", "0 pages are fewer than 1"),
        (PAGES, said("HugepagesParameters", size="2mb"), "config.decode", "'2mb' is no size"),
        (PAGES, said("HugepagesParameters", page=1), "config.decode", "unknown field `page`"),
        (PAGES, said("Hugepages"), "config.decode", "did you mean"),
        (PAGES, said("HugepagesParameters", pages=513), "config.invalid", "513 pages are more than the 512"),
        (PAGES, said("HugepagesParameters", size="1Gi"), "config.conflict", "which was given pages of 2Mi"),
        (
            PAGES,
            said("CpuParameters", "r"),
            "config.conflict",
            "CpuParameters for request r, which was given hugep",
        ),
        (CPUS, said("CpuParameters", cpus=""), "cpu.opaque_cpuset.invalid", "'' names no CPU"),
        (CPUS, said("CpuParameters", cpus="1.5"), "cpu.opaque_cpuset.invalid", "'1.5' is no CPU number"),
        (
            CPUS,
            said("CpuParameters", cpus="0-3"),
            "cpu.opaque_cpuset.invalid",
            "CPUs 0-1 are not of cpus-node1-0",
        ),
        ("gpu-3", said("GpuParameters", "r", mode="x"), "config.decode", "unknown field `mode`"),
    ],
)
def test_what_can_never_be_had_is_the_users(
    paper: Path, device: str, config: agent.ClaimConfig, code: str, text: str
) -> None:
    claim = claim_of(("r", device), configs=[config])
    with pytest.raises(agent.BadConfig) as caught:
        wanted(claim, claim.devices[0], host_of(paper))
    assert caught.value.code == code
    assert text in caught.value.summary


def test_a_size_that_the_kernel_has_not_is_the_nodes(paper: Path) -> None:
    claim = claim_of(("r", PAGES), configs=[said("HugepagesParameters", size="16Gi")])
    with pytest.raises(agent.PermanentError, match="this node has pages of 2Mi, 1Gi, not of 16Gi") as caught:
        wanted(claim, claim.devices[0], host_of(paper))
    assert caught.value.code == "mem.hugepages.size_unsupported"


@pytest.mark.parametrize(("pool_name", "device"), [(NODE, "gpu-9"), ("node-2", "gpu-3")])
def test_a_device_of_another_time_or_node_is_unknown(paper: Path, pool_name: str, device: str) -> None:
    claim = claim_of()
    with pytest.raises(
        agent.PermanentError, match=f"{DRIVER}/{pool_name}/{device} is not on this node"
    ) as caught:
        wanted(claim, agent.ClaimDevice("r", DRIVER, pool_name, device), host_of(paper))
    assert caught.value.code == "device.unknown"


# --- who holds what --------------------------------------------------------------------------------------


def cpu_grant(cpus: str, *, exclusive: bool) -> Grant:
    return Grant(request="r", pool=NODE, device="d").with_cpus(parse_cpus(cpus), exclusive=exclusive)


@pytest.mark.parametrize(
    ("mine", "theirs", "conflict"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_cpus_are_shared_only_if_both_agree(mine: bool, theirs: bool, conflict: bool) -> None:
    first, second = claim_of(uid="1", name="first"), claim_of(uid="2", name="second")
    book = hold({}, first, (cpu_grant("0-3", exclusive=theirs),))
    if not conflict:
        assert held(hold(book, second, (cpu_grant("2-5", exclusive=mine),)), second)
        return
    with pytest.raises(agent.TransientError) as caught:
        hold(book, second, (cpu_grant("2-5", exclusive=mine),))
    assert caught.value.code == "cpu.overlap"
    assert caught.value.summary == "CPUs 2-3 of d are still held by claim team-a/first"
    assert held(hold(release(book, "1"), second, (cpu_grant("2-5", exclusive=mine),)), second)


def test_a_claim_that_was_allocated_anew_holds_nothing_of_before() -> None:
    before, after = claim_of(("r", "cpus-node0-0")), claim_of(("r", "cpus-node1-0"))
    book = hold({}, before, (cpu_grant("0-1", exclusive=True),))
    assert held(book, before)
    assert not held(book, after)
    book = hold(book, after, (cpu_grant("0-1", exclusive=True),))  # no conflict with itself
    assert not held(book, before)


def page_grant(pages: int, request: str = "r") -> Grant:
    return Grant(request=request, pool=NODE, device="hugepages-2mi-node0-0").with_pages("2Mi", pages, 0)


def test_pages_that_somebody_uses_are_waited_for(paper: Path) -> None:
    host = host_of(paper)
    pool(paper / "sys", 0, 2048, 512, free=100)
    check_pages([page_grant(60), page_grant(40, "s")], host)
    with pytest.raises(agent.TransientError) as caught:
        check_pages([page_grant(60), page_grant(41, "s")], host)
    assert caught.value.code == "mem.hugepages.insufficient"
    assert caught.value.summary == "101 pages of 2Mi needed on NUMA node 0, 100 are free"
    assert caught.value.requests == ("r", "s")


def test_a_pool_that_went_away_is_no_free_pages(paper: Path) -> None:
    host = host_of(paper)
    shutil.rmtree(paper / "sys/devices/system/node/node0/hugepages/hugepages-2048kB")
    with pytest.raises(FileNotFoundError) as caught:
        check_pages([page_grant(1)], host)
    mark = done_by(caught.value)
    assert mark is not None
    assert mark.operation is agent.Operation.DEVICE


def test_pages_that_claims_hold_need_not_be_free(paper: Path) -> None:
    host = host_of(paper)
    book: Book = hold({}, claim_of(), (page_grant(500),))
    assert unheld_pages({}, host, "2Mi", 0) == 512
    assert unheld_pages(book, host, "2Mi", 0) == 12
    assert unheld_pages(book, host, "1Gi", 0) == 2


# --- the book on disk ------------------------------------------------------------------------------------


def test_what_is_held_outlives_the_driver(tmp_path: Path, paper: Path) -> None:
    claim, grants = claim_of(("r", PAGES)), (page_grant(512), cpu_grant("0-3", exclusive=True))
    Ledger(tmp_path / "state/ledger.json").hold(claim, grants, host_of(paper))
    pool(paper / "sys", 0, 2048, 512, free=0)  # the claim's own pods use them now
    again = Ledger(tmp_path / "state/ledger.json")
    assert again.hold(claim, (page_grant(1),), host_of(paper)) == grants
    again.release(claim.uid)
    again.release(claim.uid)
    assert Ledger(tmp_path / "state/ledger.json").read() == {}


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (b"", "state.checkpoint_corrupt", "is damaged"),
        (b'{"version": 1, "claims": {"u": {"cla', "state.checkpoint_corrupt", "is damaged"),
        (b'{"version": 1, "claims": {}, "more": 1}', "state.checkpoint_corrupt", "unknown field `more`"),
        (b"\xff\xfe", "state.checkpoint_corrupt", "is damaged"),
        (b'{"version": 2, "holds": []}', "state.version_newer", "is of version 2, this driver reads 1"),
    ],
)
def test_a_book_that_cannot_be_read_hands_out_nothing_and_is_left_alone(
    tmp_path: Path, paper: Path, data: bytes, code: str, text: str
) -> None:
    path = tmp_path / "ledger.json"
    path.write_bytes(data)
    ledger = Ledger(path)
    with pytest.raises(agent.PermanentError, match=text) as caught:
        ledger.hold(claim_of(), (page_grant(1),), host_of(paper))
    assert caught.value.code == code
    assert caught.value.scope is agent.Scope.DRIVER
    assert path.read_bytes() == data
    path.unlink()  # somebody looked
    assert ledger.hold(claim_of(), (page_grant(1),), host_of(paper)) == (page_grant(1),)


def test_what_could_not_be_written_is_not_held(tmp_path: Path, paper: Path) -> None:
    (tmp_path / "state").write_text("a file where a directory should be")
    ledger = Ledger(tmp_path / "state/ledger.json")
    with pytest.raises(OSError, match="state") as caught:
        ledger.hold(claim_of(), (page_grant(1),), host_of(paper))
    mark = done_by(caught.value)
    assert mark is not None
    assert mark.operation is agent.Operation.STATE
    (tmp_path / "state").unlink()
    assert ledger.read() == {}


# --- what containers see ---------------------------------------------------------------------------------


def test_variables_name_all_that_a_request_has() -> None:
    one = Grant(request="cpus", pool=NODE, device="cpus-node0-0").with_cpus({0, 1, 4}, exclusive=True)
    two = Grant(request="cpus", pool=NODE, device="cpus-node1-0").with_cpus({2}, exclusive=True)
    other = Grant(request="more/small", pool=NODE, device="cpus-node1-1").with_cpus({3}, exclusive=True)
    devices = devices_for([one, two, other])
    assert [device.name for device in devices] == [
        "cpus.cpus-node0-0",
        "cpus.cpus-node1-0",
        "more.small.cpus-node1-1",
    ]
    assert [dict(device.env) for device in devices] == [{"HOSTDEV_CPUS": "0-2,4"}] * 2 + [
        {"HOSTDEV_CPUS": "3"}
    ]


def test_pages_are_mounted_with_their_size_as_the_limit() -> None:
    (device,) = devices_for([page_grant(4)])
    assert device.env == {"HOSTDEV_HUGEPAGES": "/dev/hugepages/hugepages-2mi-node0-0", "HOSTDEV_NUMA": "0"}
    (mount,) = device.mounts
    assert (mount.type, mount.container_path) == ("hugetlbfs", "/dev/hugepages/hugepages-2mi-node0-0")
    assert mount.options == ("nosuid", "nodev", "pagesize=2048K", "size=8192K", "mode=1777")


def test_the_kernel_takes_the_mount_as_it_is_asked_for(tmp_path: Path) -> None:
    if not Path("/sys/kernel/mm/hugepages/hugepages-2048kB").is_dir():
        pytest.skip("no hugepages of 2 MiB on this machine")
    (device,) = devices_for([page_grant(4)])
    options = ",".join(device.mounts[0].options)
    script = 'mount -t hugetlbfs -o "$1" hugetlbfs "$2" && stat -f -c "%S %b" "$2" && stat -c %a "$2"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", options, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "permitted" in done.stderr or "permission" in done.stderr:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
    assert done.stdout.splitlines() == ["2097152 4", "1777"], done.stderr


# --- the driver ------------------------------------------------------------------------------------------


@pytest.fixture
def hostdev(tmp_path: Path, paper: Path) -> HostDriver:
    monitor = agent.Monitor(DRIVER, config=agent.Config(node_name=NODE), hardware=False, state_dir=None)
    return HostDriver(monitor, host_of(paper), Ledger(tmp_path / "ledger.json"), tmp_path / "cdi")


def test_a_prepared_claim_has_a_file_and_a_cdi_id_for_each_device(
    tmp_path: Path, hostdev: HostDriver
) -> None:
    claim = claim_of(("p", PAGES), ("c", CPUS), ("g", "gpu-3"))
    prepared = hostdev.prepare(claim)
    assert [(one.requests, one.pool, one.device) for one in prepared] == [
        (("p",), NODE, PAGES),
        (("c",), NODE, CPUS),
        (("g",), NODE, "gpu-3"),
    ]
    (file,) = (tmp_path / "cdi").iterdir()
    names = [f"{DRIVER}/device={device['name']}" for device in json.loads(file.read_bytes())["devices"]]
    assert [list(one.cdi_ids) for one in prepared] == [[name] for name in names]
    assert len(set(names)) == 3
    shutil.rmtree(tmp_path / "cdi")  # a reboot
    assert hostdev.prepare(claim) == prepared
    assert file.exists()
    hostdev.unprepare(claim.ref)
    hostdev.unprepare(claim.ref)
    assert not file.exists()
    assert hostdev.ledger.read() == {}


def test_a_cdi_file_that_could_not_be_written_costs_no_second_grant(
    tmp_path: Path, hostdev: HostDriver
) -> None:
    (tmp_path / "cdi").write_text("a file where a directory should be")
    with pytest.raises(OSError, match="cdi") as caught:
        hostdev.prepare(claim_of(("c", CPUS)))
    mark = done_by(caught.value)
    assert mark is not None
    assert mark.operation is agent.Operation.CDI
    (tmp_path / "cdi").unlink()
    assert hostdev.prepare(claim_of(("c", CPUS)))


def test_pages_that_nobody_claimed_and_somebody_uses_are_told_of(paper: Path, hostdev: HostDriver) -> None:
    device = hostdev.host.found[PAGES].device
    assert hostdev.pages_left(device) is None
    pool(paper / "sys", 0, 2048, 512, free=511)
    finding = hostdev.pages_left(device)
    assert finding is not None
    assert (finding.code, finding.severity) == ("hostdev.pages_taken", agent.Severity.DEGRADED)
    hostdev.ledger.hold(claim_of(), (page_grant(1),), hostdev.host)
    assert hostdev.pages_left(device) is None


# --- claims from files ------------------------------------------------------------------------------------


def test_a_claims_file_is_what_kubectl_writes(tmp_path: Path) -> None:
    (tmp_path / "team-a_train.json").write_text(json.dumps(claim_object()))
    assert ClaimFiles(tmp_path, DRIVER)(REF).devices == (agent.ClaimDevice("g", DRIVER, NODE, "gpu-3"),)


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
def test_a_claim_without_a_proper_file_may_have_one_later(
    tmp_path: Path, data: bytes | None, code: str
) -> None:
    if data is not None:
        (tmp_path / "team-a_train.json").write_bytes(data)
    with pytest.raises(agent.TransientError) as caught:
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
    for name in ("--claims", "--api-server", "--pod-uid", "--sysfs-root", "--state-dir", "--hugepage-shares"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ((), 78, "KUBERNETES_SERVICE_HOST and _PORT are not set"),
        (("--reserved-cpus", "x"), 2, "'x' is no CPU number or range"),
        (("--hugepage-shares", "0"), 2, "0 is not 1 to 4096"),
    ],
)
def test_what_cannot_be_run_says_why(tmp_path: Path, args: tuple[str, ...], code: int, text: str) -> None:
    done = program("--kubelet-dir", str(tmp_path), *args)
    assert done.returncode == code
    assert text in done.stderr


def test_the_readme_shows_the_driver_as_it_is() -> None:
    here = Path(__file__).parents[1] / "examples/hostdev_driver"
    code = (here / "driver.py").read_text()
    assert f"```python\n{code}```" in (here / "README.md").read_text()
    ours = code[code.index("class HostDriver") :]
    assert f"```python\n{ours}```" in (here.parents[1] / "README.md").read_text()
    assert len(code.splitlines()) < 60
