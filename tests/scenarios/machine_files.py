"""Machine of a row, as plain files: sysfs, procfs, the kernel log, and a fake NVML."""

import itertools
import shutil
import time
from pathlib import Path

from agents import PlainSysfs
from fake_nvml import fake_nvml

from scenarios.row import BUSES, Process, Row

GPU, NVSWITCH = "0x030200", "0x068000"
FIRST: dict[int, Process] = {1: Process("systemd"), 2: Process("kthreadd")}


class MachineFiles:
    """Files of a machine with two CPUs, a hugepage pool, and the GPUs of a row."""

    def __init__(self, row: Row, directory: Path) -> None:
        self._row = row
        self._directory = directory
        self._boots = itertools.count(1)
        self._library = directory / "libnvidia-ml.so.1"
        self.sysfs = PlainSysfs(directory / "sys")
        self.procfs = directory / "proc"
        self.log = directory / "kmsg"
        (directory / "cgroup").mkdir()
        for bus in BUSES[: row.gpus]:
            self._pci_device(bus, GPU)
            self.bind(bus, "nvidia")
            for kind, total in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")):
                self.sysfs.write(f"bus/pci/devices/{bus}/aer_dev_{kind}", f"TOTAL_ERR_{total} 0")
        for number in range(row.nvswitches):
            self._pci_device(f"0000:{number + 5:02x}:00.0", NVSWITCH)
        self.boot()
        for pid, process in (FIRST | row.processes).items():
            self._run(pid, process)
        self.kernel(*row.logged)
        self.scenario(*row.setup)
        if row.library:
            self.install()

    @property
    def flags(self) -> list[str]:
        """Flags that let the agent read this machine instead of the real one."""
        roots = {"sysfs": self.sysfs.root, "procfs": self.procfs, "cgroupfs": self._directory / "cgroup"}
        flags = [word for name, root in roots.items() for word in (f"--{name}-root", str(root))]
        return [*flags, "--nvml-library", str(self._library), "--kmsg", str(self.log)]

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables for the fake."""
        return {"FAKE_NVML": str(self.fake.scenario)}

    def scenario(self, *commands: str) -> None:
        """Set the initial commands of the fake for the next process that loads it."""
        profile = f"profile {self._row.profile} gpus={self._row.gpus}"
        self.fake = fake_nvml(self._directory, profile, *commands, branch=self._row.branch)

    def install(self) -> None:
        """Install the library, as a copy because the fake may be rebuilt meanwhile."""
        new = self._directory / "library.new"
        shutil.copyfile(self.fake.library, new)
        new.rename(self._library)

    def boot(self) -> None:
        """Boot the machine: a new boot ID and an empty kernel log."""
        path = self.procfs / "sys/kernel/random/boot_id"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"00000000-0000-4000-8000-{next(self._boots):012d}\n")
        (self.procfs / "stat").write_text("btime 1700000000\n")
        self.log.write_text("")
        self._lines = itertools.count()

    def kernel(self, *lines: str, times: int = 1, priority: int = 4, at_ns: int = 0) -> None:
        """Write lines to the kernel log, of the time ``at_ns`` or now; from priority 8 on, as a process."""
        head = f"{priority},%d,{(at_ns or time.monotonic_ns()) // 1000},-;"
        with self.log.open("a") as log:
            log.write("".join(f"{head % next(self._lines)}{line}\n" for line in lines * times))

    def end_process(self, pid: int) -> None:
        """Remove a process."""
        shutil.rmtree(self.procfs / str(pid))

    def _run(self, pid: int, process: Process) -> None:
        path = self.procfs / str(pid)
        path.mkdir()
        (path / "comm").write_text(f"{process.name}\n")
        (path / "stat").write_text(f"{pid} ({process.name}) {process.state} 1" + " 0" * 48 + "\n")
        (path / "status").write_text(f"Name:\t{process.name}\nState:\t{process.state} (of a test)\n")
        (path / "cmdline").write_text(f"/usr/bin/{process.name}\0")
        (path / "stack").write_text(process.stack)

    def bind(self, bus: str, driver: str) -> None:
        """Bind a PCI device to a driver."""
        self.sysfs.link(f"bus/pci/devices/{bus}/driver", f"../../drivers/{driver}")

    def _pci_device(self, bus: str, pci_class: str) -> None:
        self.sysfs.write(f"bus/pci/devices/{bus}/vendor", "0x10de")
        self.sysfs.write(f"bus/pci/devices/{bus}/class", pci_class)
