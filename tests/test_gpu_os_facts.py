"""Facts about GPUs without NVML: from trees of plain files, and from this machine."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from named_process import named_process

from agent.model.gpu import StuckProcess
from agent.model.reading import Absence, Missing
from agent.sources.gpu_os_facts import (
    STUCK_READS,
    GpuOsReader,
    GpuProcessScan,
    NvidiaPciDevices,
    read_boot_id,
    read_nvidia_devices,
    scan_gpu_processes,
)
from agent.system.process_stat import read_boot_time, read_process_stat

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
DRIVER = "[<0>] os_acquire_rwlock_write+0x3c/0x50 [nvidia]\n[<0>] do_syscall_64+0x5c/0xf0\n"
DISK = "[<0>] io_schedule+0x46/0x70\n[<0>] ext4_file_read_iter+0x5a/0x150 [ext4]\n"


class Machine:
    """Trees of sysfs and procfs with the first two processes."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.procfs = root / "sys", root / "proc"
        (self.sysfs / "bus/pci/devices").mkdir(parents=True)
        (self.procfs / "sys/kernel/random").mkdir(parents=True)
        (self.procfs / "sys/kernel/random/boot_id").write_text("5b1c3f6a-8f0f-4d4d-9f30-1d2f3e4a5b6c\n")
        self.process(1, "systemd")
        self.process(2, "kthreadd")

    def device(self, bus: str, kind: str, vendor: str = "0x10de", driver: str = "nvidia") -> Path:
        device = self.sysfs / "bus/pci/devices" / bus
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
        if driver:
            (device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        return device

    def process(
        self,
        pid: int,
        name: str,
        state: str = "S",
        stack: str = "",
        files: tuple[str, ...] = (),
        started: int = 7,
    ) -> Path:
        """Add a process to procfs; without a stack it is unreadable for this user."""
        process = self.procfs / str(pid)
        (process / "fd").mkdir(parents=True, exist_ok=True)
        (process / "comm").write_text(f"{name[:15]}\n")
        (process / "cmdline").write_text(f"/usr/bin/{name}\0")
        fields = [str(pid), f"({name[:15]})", state, *["0"] * 18, str(started), *["0"] * 30]
        (process / "stat").write_text(" ".join(fields))
        if stack:
            (process / "stack").write_text(stack)
        for number, target in enumerate(files):
            (process / "fd" / str(number)).symlink_to(target)
        return process

    def reader(self) -> GpuOsReader:
        return GpuOsReader(self.sysfs, self.procfs)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# --- the PCI bus -------------------------------------------------------------------------------------------


def test_gpus_are_in_bus_order(machine):
    for bus in ("0000:e1:00.0", "10000:01:00.0", "0000:1b:00.0"):
        machine.device(bus, "0x030200")
    machine.device("0000:03:00.0", "0x030000")
    assert machine.reader().read().bus_gpus == (
        "0000:03:00.0",
        "0000:1b:00.0",
        "0000:e1:00.0",
        "10000:01:00.0",
    )


def test_devices_other_than_gpus_are_not_counted(machine):
    machine.device("0000:01:00.0", "0x030000", vendor="0x1a03")  # the board's own display
    machine.device("0000:02:00.1", "0x040300")  # a GPU's audio
    machine.device("0000:03:00.0", "0x068000")  # an NVSwitch
    machine.device("0000:04:00.0", "0x030200", driver="vfio-pci")
    virtual = machine.device("0000:05:00.4", "0x030200")
    (virtual / "physfn").symlink_to("../0000:05:00.0")
    machine.device(
        "0000:06:00.0", "0x030200", driver=""
    )  # without a driver, so NVML should list it but does not
    machine.device("0000:07:00.0", "0x030200", driver="nvidia")
    gpus, bound = ("0000:06:00.0", "0000:07:00.0"), ("0000:07:00.0",)
    assert read_nvidia_devices(machine.sysfs) == NvidiaPciDevices(gpus, bound, nvswitches=1)
    read = machine.reader().read()
    assert (read.bus_gpus, read.bound_gpus) == (gpus, bound)


def test_device_removed_during_read_is_skipped(machine):
    (machine.sysfs / "bus/pci/devices/0000:01:00.0").symlink_to("../gone")
    machine.device("0000:02:00.0", "0x030200")
    assert read_nvidia_devices(machine.sysfs) == NvidiaPciDevices(
        ("0000:02:00.0",), ("0000:02:00.0",), nvswitches=0
    )


def test_machine_without_bus_is_missing_and_not_without_gpus(tmp_path):
    assert read_nvidia_devices(tmp_path) == Missing(Absence.ABSENT, errno.ENOENT)


def test_unreadable_bus_is_missing(tmp_path):
    (tmp_path / "bus").write_text("")
    assert read_nvidia_devices(tmp_path) == Missing(Absence.UNREADABLE, errno.ENOTDIR)


# --- the fabric manager ------------------------------------------------------------------------------------


def test_running_fabric_manager_is_found(machine):
    machine.process(900, "nv-fabricmanager")  # a name that the kernel cuts
    assert machine.reader().read().fabric_manager is True


def test_nvswitches_without_fabric_manager_are_reported(machine):
    machine.device("0000:03:00.0", "0x068000")
    machine.process(900, "nv-hostengine")
    assert machine.reader().read().fabric_manager is False


def test_machine_without_nvswitches_needs_no_fabric_manager(machine):
    assert machine.reader().read().fabric_manager == Missing(Absence.ABSENT)


def test_unreadable_bus_leaves_need_of_fabric_manager_unknown(machine, tmp_path):
    (tmp_path / "file").write_text("")
    reader = GpuOsReader(tmp_path / "file", machine.procfs)
    assert reader.read().fabric_manager == Missing(Absence.UNREADABLE, errno.ENOTDIR)


def test_container_with_own_pid_namespace_knows_no_processes(machine):
    machine.device("0000:03:00.0", "0x068000")
    (machine.procfs / "2/comm").write_text("sleep\n")
    assert machine.reader().read().fabric_manager == Missing(Absence.ABSENT)


# --- stuck processes ------------------------------------------------------------------------------


def stuck_in(machine: Machine, reads: int = STUCK_READS) -> tuple[StuckProcess, ...]:
    reader = machine.reader()
    return [reader.read() for _ in range(reads)][-1].stuck


def test_process_asleep_in_driver_is_stuck_at_third_read(machine):
    machine.process(4711, "python3", "D", DRIVER)
    assert stuck_in(machine, 2) == ()
    assert stuck_in(machine, 3) == (StuckProcess(4711, "python3"),)


def test_process_waiting_for_disk_is_not_stuck(machine):
    machine.process(4711, "python3", "D", DISK, files=("/dev/nvidia0",))
    assert stuck_in(machine) == ()


def test_process_in_normal_sleep_with_open_gpu_is_not_stuck(machine):
    machine.process(4711, "python3", "S", DRIVER, files=("/dev/nvidia0",))
    assert stuck_in(machine) == ()


def test_open_gpu_device_counts_where_stacks_are_unreadable(machine):
    machine.process(4711, "python3", "D", files=("/dev/null", "/dev/nvidia-uvm"))
    machine.process(4712, "python3", "D", files=("/dev/null", "socket:[1234]"))
    assert stuck_in(machine) == (StuckProcess(4711, "python3"),)


def test_process_that_cannot_be_inspected_is_not_stuck(machine):
    (machine.process(4711, "python3", "D") / "fd").rmdir()
    assert stuck_in(machine) == ()


def test_stuck_processes_are_missing_without_any_permission(machine):
    machine.process(4711, "python3", "D")
    (machine.procfs / "1/fd").rmdir()
    assert stuck_in(machine) == Missing(Absence.ABSENT, errno.EPERM)


def test_process_that_wakes_is_counted_from_zero(machine):
    reader = machine.reader()
    for state in ("D", "D", "R", "D", "D"):
        machine.process(4711, "python3", state, DRIVER)
        assert reader.read().stuck == ()
    assert reader.read().stuck == (StuckProcess(4711, "python3"),)


def test_reused_pid_is_counted_as_another_process(machine):
    reader = machine.reader()
    for started in (1, 100_000, 200_000, 200_000):
        machine.process(4711, "python3", "D", DRIVER, started=started)
        assert reader.read().stuck == ()
    assert reader.read().stuck == (StuckProcess(4711, "python3"),)


@pytest.mark.parametrize("name", ["stack", "stat"])
def test_stuck_processes_are_unreadable_without_descriptors(machine, monkeypatch, name):
    machine.process(1, "systemd", stack=DISK)
    machine.process(4711, "python3", "D", DRIVER, files=("/dev/nvidia0",))
    reader = machine.reader()
    for _ in range(STUCK_READS):
        reader.read()
    open_file = Path.open

    def open_without_descriptors(path, *args, **options):
        if path.name == name:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_file(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_without_descriptors)
        for _ in range(STUCK_READS):
            assert reader.read().stuck == Missing(Absence.UNREADABLE, errno.EMFILE)
    assert reader.read().stuck == (StuckProcess(4711, "python3"),), "it was not counted from zero"


def test_permission_to_inspect_is_unknown_without_descriptors(machine, monkeypatch):
    def refuse(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    reader = machine.reader()
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert reader.read().stuck == Missing(Absence.UNREADABLE, errno.EMFILE)


def test_unlistable_processes_are_missing(tmp_path):
    assert scan_gpu_processes(tmp_path) == Missing(Absence.ABSENT, errno.ENOENT)


# --- this machine ------------------------------------------------------------------------------------------


def test_boot_id_is_read_from_kernel():
    assert read_boot_id(Path("/proc")) == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_absent_boot_id_is_empty(tmp_path):
    assert read_boot_id(tmp_path) == ""


@pytest.fixture
def fabric_manager(tmp_path):
    """Start a process with the fabric manager's name."""
    with named_process(tmp_path, "nv-fabricmanager") as process:
        yield process


@pytest.mark.usefixtures("fabric_manager")
def test_fabric_manager_on_this_machine_is_found():
    processes = scan_gpu_processes(Path("/proc"))
    if isinstance(processes, Missing):
        pytest.skip("this container sees only its own processes")
    assert processes.fabric_manager


def test_this_machine_can_be_read_repeatedly():
    reader = GpuOsReader(Path("/sys"), Path("/proc"))
    for _ in range(STUCK_READS + 1):
        host = reader.read()
    assert host.boot_id
    if os.geteuid() == 0:
        assert os.getpid() not in {process.pid for process in host.stuck}
    else:
        assert isinstance(host.stuck, Missing), "the stacks of processes are for root only"


def test_running_agent_reads_processes_without_psutil():
    program = """if True:
        import sys
        from pathlib import Path
        from agent.serve.agent_api.service import collect_status
        from agent.sources.gpu_os_facts import GpuOsReader
        GpuOsReader(Path("/sys"), Path("/proc")).read()
        collect_status(0, None, version="", subscribers=())
        print("psutil" in sys.modules)
    """
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


# --- state of a process ------------------------------------------------------------------------------------


def test_state_of_this_process_is_that_of_psutil():
    seen = read_process_stat(Path("/proc/self"))
    process = psutil.Process()
    assert (seen.name, seen.state) == (Path("/proc/self/comm").read_text().rstrip("\n"), "R")
    assert read_boot_time(Path("/proc")) + seen.started_s == pytest.approx(process.create_time(), abs=1)
    assert 0 < round(seen.cpu_s * TICKS_PER_S) <= round(sum(process.cpu_times()[:2]) * TICKS_PER_S)
    assert seen.threads == process.num_threads()
    assert 0.5 < seen.rss_bytes / process.memory_info().rss < 2


def test_name_of_a_process_may_have_blanks_and_parentheses(machine):
    assert read_process_stat(machine.process(4711, "a) R (b", "D")).name == "a) R (b"
    assert read_process_stat(machine.process(4711, "a) R (b", "D")).state == "D"


@pytest.mark.parametrize("text", ["", "1 (a) S 1 2", ") 1 (", "1 (a) S" + " x" * 30])
def test_status_of_another_form_is_refused_and_its_process_left_out(machine, text):
    process = machine.process(4711, "nv-fabricmanager")
    (process / "stat").write_text(text)
    with pytest.raises(ValueError, match=r"stat|invalid literal"):
        read_process_stat(process)
    assert scan_gpu_processes(machine.procfs) == GpuProcessScan(fabric_manager=False, sleeping=frozenset())


def test_boot_time_is_missing_without_its_line(tmp_path):
    (tmp_path / "stat").write_text("cpu 1 2 3\n")
    with pytest.raises(ValueError, match="btime"):
        read_boot_time(tmp_path)
