"""``drahealth scan`` on libraries that are broken: always a verdict and an exit code, never a signal."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from fake_nvml import library
from patience import PATIENCE_S
from scenarios.machine_files import MachineFiles
from scenarios.row import Row

GOOD_ELF_BYTES: Final = 4096


def compiled(target: Path, source: str, *flags: str) -> Path:
    """Compile a library from C source. Skips the test without a compiler."""
    if shutil.which("gcc") is None:
        pytest.skip("a broken library is compiled with gcc")
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target), *flags]
    subprocess.run(command, input=source, text=True, check=True)
    return target


def truncated(target: Path) -> Path:
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


def written(content: bytes, mode: int = 0o644) -> Callable[[Path], Path]:
    def write(target: Path) -> Path:
        target.write_bytes(content)
        target.chmod(mode)
        return target

    return write


def source(text: str) -> Callable[[Path], Path]:
    return lambda target: compiled(target, text)


INIT: Final = "int nvmlInit_v2(void) {{ {body} }}\n" + "".join(
    f"int {name}() {{{{ return 999; }}}}\n"
    for name in ("nvmlShutdown", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2")
)
HEAD: Final = "#define _GNU_SOURCE\n" + "".join(
    f"#include <{name}.h>\n" for name in ("signal", "stdlib", "sys/mman", "unistd")
)

READ_BEHIND_END: Final = 'return *(volatile int *)mmap(0, 1, PROT_READ, MAP_SHARED, memfd_create("x", 0), 0);'

LIBRARIES: Final[dict[str, tuple[Callable[[Path], Path], str]]] = {
    "empty file": (written(b""), "file too short"),
    "text": (written(b"not a library\n"), "file too short"),
    "zeros": (written(bytes(GOOD_ELF_BYTES)), "invalid ELF header"),
    "truncated": (truncated, ""),
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
        source(
            HEAD
            + INIT.format(
                body='return *(volatile int *)mmap(0, 1, PROT_READ, MAP_SHARED, memfd_create("x", 0), 0);'
            )
        ),
        "killed by SIGBUS",
    ),
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
    command = [sys.executable, "-m", "agent", "scan", "-o", "json", *machine.flags, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


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
def test_comparison_of_readers_with_a_broken_library_ends_with_an_exit_code(
    machine: MachineFiles, tmp_path: Path, make: Callable[[Path], Path], reason: str, backend: str
) -> None:
    make(tmp_path / "libnvidia-ml.so.1")
    ran = scan(machine, "--backend", backend)
    assert ran.returncode == 3, (reason, ran.stderr)
    assert "Traceback" not in ran.stderr
