"""``drahealth scan`` on libraries that are broken: always a verdict and an exit code, never a signal."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from agents import run_command
from fake_nvml import library
from scenarios.machine_files import MachineFiles
from scenarios.row import Row

GOOD_ELF_BYTES: Final = 4096


def compile_library(target: Path, source: str, *flags: str) -> Path:
    """Compile a library from C source. Skips the test without a compiler."""
    if shutil.which("gcc") is None:
        pytest.skip("a broken library is compiled with gcc")
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target), *flags]
    subprocess.run(command, input=source, text=True, check=True)
    return target


def write_truncated_library(target: Path) -> Path:
    """Write the fake library without its end: the loader's first access behind it is a SIGBUS."""
    whole = library().read_bytes()
    target.write_bytes(whole[: len(whole) // 8])
    return target


def other_architecture(target: Path) -> Path:
    """Write the fake library with the machine number of another architecture in its header."""
    data = bytearray(library().read_bytes())
    data[18:20] = (243).to_bytes(2, "little")  # e_machine: RISC-V
    target.write_bytes(data)
    return target


def directory(target: Path) -> Path:
    """Create a directory, which the loader can open and not read."""
    target.mkdir()
    return target


def writer_of(content: bytes, mode: int = 0o644) -> Callable[[Path], Path]:
    def write(target: Path) -> Path:
        target.write_bytes(content)
        target.chmod(mode)
        return target

    return write


def source(text: str) -> Callable[[Path], Path]:
    return lambda target: compile_library(target, text)


INIT: Final = (
    "int nvmlInit_v2(void) {{ {body} }}\nint nvmlInitWithFlags(unsigned f) {{ {body} }}\n"
    + "".join(
        f"int {name}() {{{{ return 999; }}}}\n"
        for name in ("nvmlShutdown", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2")
    )
)
HEAD: Final = "#define _GNU_SOURCE\n" + "".join(
    f"#include <{name}.h>\n" for name in ("signal", "stdlib", "sys/mman", "unistd")
)

READ_BEHIND_END: Final = 'return *(volatile int *)mmap(0, 1, PROT_READ, MAP_SHARED, memfd_create("x", 0), 0);'

LEAK: Final = "for (int i = 0; i < 600; i++) *(volatile char *)malloc(1 << 20) = 1; return 999;"

LIBRARIES: Final[dict[str, tuple[Callable[[Path], Path], str]]] = {
    "empty file": (writer_of(b""), "file too short"),
    "directory": (directory, "cannot read file data: Is a directory"),
    "text": (writer_of(b"not a library\n"), "file too short"),
    "zeros": (writer_of(bytes(GOOD_ELF_BYTES)), "invalid ELF header"),
    "truncated": (write_truncated_library, ""),
    "other architecture": (other_architecture, "not a library of this architecture"),
    "no function": (source("int x;"), "no function nvmlInit_v2"),
    "crash while loaded": (
        source(f"{HEAD}__attribute__((constructor)) void f(void) {{ *(volatile int *)0 = 1; }}"),
        "killed by SIGSEGV",
    ),
    "exit while loaded": (
        source(f"{HEAD}__attribute__((constructor)) void f(void) {{ exit(0); }}"),
        "ended with exit code 0",
    ),
    "crash in nvmlInit": (
        source(HEAD + INIT.format(body="*(volatile int *)0 = 1; return 0;")),
        "killed by SIGSEGV",
    ),
    "abort in nvmlInit": (source(HEAD + INIT.format(body="abort();")), "killed by SIGABRT"),
    "SIGBUS in nvmlInit": (
        source(HEAD + INIT.format(body=READ_BEHIND_END)),
        "killed by SIGBUS",
    ),
    "real-time signal in nvmlInit": (  # the C core blocks it; it ends the process of pynvml
        source(HEAD + INIT.format(body="raise(40); return 999;")),
        "UNKNOWN (999)",
    ),
    "leak in nvmlInit": (source(HEAD + INIT.format(body=LEAK)), "killed by SIGSEGV"),
    "exit in nvmlInit": (source(HEAD + INIT.format(body="_exit(3);")), "ended with exit code 3"),
    "error of nvmlInit": (source(HEAD + INIT.format(body="return 999;")), "UNKNOWN (999)"),
    "signal handlers": (
        source(HEAD + INIT.format(body="for (int i = 1; i < 32; i++) signal(i, SIG_IGN); return 999;")),
        "UNKNOWN (999)",
    ),
}


@pytest.fixture
def machine(tmp_path: Path) -> MachineFiles:
    """Machine with one GPU that is bound to the driver; its library is the test's."""
    return MachineFiles(Row("a broken library", (), gpus=1, library=False), tmp_path)


def scan(machine: MachineFiles, *flags: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | machine.environ
    return run_command("scan", "-o", "json", *machine.flags, *flags, env=env)


@pytest.mark.parametrize(("make", "reason"), LIBRARIES.values(), ids=list(LIBRARIES))
def test_scan_with_a_broken_library_ends_with_an_unknown_gpu(
    machine: MachineFiles, tmp_path: Path, make: Callable[[Path], Path], reason: str
) -> None:
    make(tmp_path / "libnvidia-ml.so.1")
    ran = scan(machine)
    assert ran.returncode == 3, ran.stderr
    devices = {device["name"]: device for device in json.loads(ran.stdout)["devices"]}
    assert devices["gpu-0"]["health"] == "Unknown"
    assert reason in ran.stdout
    assert devices["cpu-node0"]["health"] == "Healthy"


@pytest.mark.parametrize("backend", ["both", "pynvml"])
@pytest.mark.parametrize(("make", "reason"), LIBRARIES.values(), ids=list(LIBRARIES))
def test_backend_comparison_with_a_crashing_library_ends_with_an_exit_code(
    machine: MachineFiles, tmp_path: Path, make: Callable[[Path], Path], reason: str, backend: str
) -> None:
    make(tmp_path / "libnvidia-ml.so.1")
    ran = scan(machine, "--backend", backend)
    assert ran.returncode == 3, (reason, ran.stderr)
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("library", "end"),
    [("leak in nvmlInit", "SIGSEGV"), ("real-time signal in nvmlInit", "signal 40")],
)
def test_reader_that_its_library_ends_names_the_signal(
    machine: MachineFiles, tmp_path: Path, library: str, end: str
) -> None:
    LIBRARIES[library][0](tmp_path / "libnvidia-ml.so.1")
    ran = scan(machine, "--backend", "pynvml")
    expected = f"drahealth: GPU readers: the process that called NVML was killed by {end}\n"
    assert (ran.returncode, ran.stderr) == (3, expected)


HANG: Final = source(HEAD + INIT.format(body="for (;;) pause();"))


def test_scan_with_a_hanging_library_ends_with_an_unknown_gpu(machine: MachineFiles, tmp_path: Path) -> None:
    HANG(tmp_path / "libnvidia-ml.so.1")
    ran = scan(machine)
    assert ran.returncode == 3, ran.stderr
    assert {d["name"]: d["health"] for d in json.loads(ran.stdout)["devices"]}["gpu-0"] == "Unknown"


NO_LIST: Final = "no list of devices from nvml in time; its devices may be missing\n"


def test_scan_exits_as_unknown_while_nvml_has_not_listed_gpus(tmp_path: Path) -> None:
    """The GPUs are not on the PCI bus that the scan reads, so that only NVML knows them."""
    machine = MachineFiles(Row("no GPU on the bus", (), gpus=0, library=False), tmp_path)
    HANG(tmp_path / "libnvidia-ml.so.1")
    ran = scan(machine)
    assert (ran.returncode, ran.stderr) == (3, f"drahealth: scan: {NO_LIST}")
    document = json.loads(ran.stdout)
    assert {device["health"] for device in document["devices"]} == {"Healthy"}
    assert {source["name"]: source["state"] for source in document["sources"]}["nvml"] == "starting"
    ran = scan(machine, "-o", "table", "--exit-style", "npd")
    assert (ran.returncode, ran.stdout) == (2, f"unknown: {NO_LIST}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("both", "pynvml was not called: NVML does not answer nvmlInit"),
        ("pynvml", "pynvml: no answer within 30 s; NVML hangs"),
    ],
)
def test_backend_comparison_with_a_hanging_library_ends_with_the_reason(
    machine: MachineFiles, tmp_path: Path, backend: str, reason: str
) -> None:
    HANG(tmp_path / "libnvidia-ml.so.1")
    ran = scan(machine, "--backend", backend)
    assert ran.returncode == 3, ran.stderr
    assert reason in ran.stdout + ran.stderr


@pytest.mark.parametrize("backend", ["native", "both", "pynvml"])
def test_scan_with_endless_texts_ends_with_a_verdict(machine: MachineFiles, backend: str) -> None:
    machine.scenario("endless on")
    machine.install()
    ran = scan(machine, "--backend", backend)
    assert ran.returncode in (0, 1, 2, 3), ran.stderr
    assert "Traceback" not in ran.stderr
    document = json.loads(ran.stdout)
    assert document.get("devices") or document["gpus"]


@pytest.mark.parametrize("backend", ["native", "both", "pynvml"])
@pytest.mark.parametrize("command", ["crash segv", "crash bus", "crash abort", "crash exit 0", "leak 600"])
def test_scan_with_a_library_that_crashes_late_ends_with_an_exit_code(
    machine: MachineFiles, backend: str, command: str
) -> None:
    machine.scenario(f"at 20ms {command}")
    machine.install()
    ran = scan(machine, "--backend", backend)
    assert ran.returncode in (0, 1, 2, 3), ran.stderr
    assert "Traceback" not in ran.stderr
