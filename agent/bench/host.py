"""What a figure was measured on: machine, kernel, compiler, Python, load, date. Facts, no judgement."""

import datetime
import importlib.util
import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

from agent.bench.budgets import checkout
from agent.version import VERSION


class Host(NamedTuple):
    """The header's facts."""

    date: str
    """UTC, when the run began."""
    version: str
    cpu: str
    cpus: int
    governor: str
    kernel: str
    python: str
    compiler: str
    flags: str
    load: str
    """1-minute average when the run began."""


def host() -> Host:
    """This machine, now."""
    return Host(
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        version=VERSION,
        cpu=_cpu_model(),
        cpus=os.cpu_count() or 0,
        governor=_read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "not told",
        kernel=platform.release(),
        python=platform.python_version(),
        compiler=core_compiler(),
        flags=_flags(),
        load=f"{os.getloadavg()[0]:.2f}",
    )


def core_compiler() -> str:
    """The compiler that built the core, as it signed the module."""
    spec = importlib.util.find_spec("agent.native._core")
    data = Path(spec.origin).read_bytes() if spec and spec.origin else b""
    signed = re.search(rb"GCC: \([^)]*\) ([\d.]+)|clang version ([\d.]+)", data)
    if signed is None:
        return "unknown compiler"
    return f"gcc {signed[1].decode()}" if signed[1] else f"clang {signed[2].decode()}"


def _flags() -> str:
    root = checkout()
    found = re.search(r"^CFLAGS\b.*?\[(.*?)\]", (root / "setup_build.py").read_text(), re.M) if root else None
    return found[1].replace('"', "").replace(",", "") if found else "flags not known outside a checkout"


def _cpu_model() -> str:
    found = re.search(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.M)
    return found[1] if found else platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
