"""Wheels for manylinux_2_28, the agent on aarch64 in an emulator, and the source distribution offline."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from agents import run_command
from test_deb import debian_release

pytestmark = pytest.mark.timeout(1200)

REPOSITORY = Path(__file__).parent.parent.parent
DIST = REPOSITORY / "dist"
MACHINES = ("x86_64", "aarch64")
CORE = "agent/native/_core.abi3.so"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]


def wheel_for(machine: str) -> Path:
    """Return the wheel that `make wheels` builds for a machine."""
    found = list(DIST.glob(f"*-manylinux_2_28_{machine}.whl"))
    if not found:
        pytest.skip(f"dist/ has no wheel for {machine}: make wheels")
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("machine", MACHINES)
def test_wheel_needs_no_newer_symbols_than_its_platform_has(machine: str) -> None:
    command = [sys.executable, "-m", "auditwheel", "show", wheel_for(machine)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf'platform\s+tag:\s+"manylinux_2_(\d+)_{machine}"', shown)
    assert found is not None, shown
    assert int(found[1]) <= 28


@pytest.mark.parametrize("machine", MACHINES)
def test_core_of_a_wheel_is_for_its_machine(machine: str, tmp_path: Path) -> None:
    core = Path(zipfile.ZipFile(wheel_for(machine)).extract(CORE, tmp_path)).read_bytes()
    assert (core[:4], core[18]) == (b"\x7fELF", {"x86_64": 62, "aarch64": 183}[machine])


def test_wheel_of_this_machine_scans(tmp_path: Path) -> None:
    wheel = wheel_for(os.uname().machine)
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = "import agent.native._core as core; print(core.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / CORE)
    done = run_command("scan", "-o", "json", cwd=tmp_path)
    assert json.loads(done.stdout)["devices"], done.stderr


def test_wheel_for_aarch64_scans_in_an_emulator(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None or shutil.which("mmdebstrap") is None:
        pytest.skip("qemu-user or mmdebstrap is not installed")
    if os.uname().machine == "aarch64":
        pytest.skip("this machine is the wheel's own")
    wheel = wheel_for("aarch64")
    root, packages = tmp_path / "root", tmp_path / "packages"
    make = ["mmdebstrap", "--quiet", "--arch=arm64", "--variant=extract", "--include=python3,libudev1"]
    made = subprocess.run([*make, debian_release(), root], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"mmdebstrap cannot make a root here: {made.stderr.strip().splitlines()[-1]}")
    (python,) = (
        path for path in (root / "usr/bin").glob("python3.*") if re.fullmatch(r"python3\.\d+", path.name)
    )
    platforms = [
        f"--platform={name}_aarch64" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
    ]
    version = f"--python-version={python.name.removeprefix('python')}"
    install = [
        *PIP,
        "install",
        *platforms,
        version,
        "--only-binary=:all:",
        "--no-deps",
        f"--target={packages}",
    ]
    pins = REPOSITORY / "requirements" / "package.txt"
    subprocess.run([*install, "--require-hashes", "-r", pins], check=True)
    subprocess.run([*install, "--no-index", wheel], check=True)
    program = [emulator, "-L", root, python, "-m", "agent"]
    environ = {"PYTHONPATH": str(packages), "PYTHONHOME": str(root / "usr"), "PATH": os.environ["PATH"]}
    done = run_command("scan", "-o", "json", program=program, env=environ, cwd=tmp_path)
    report = json.loads(done.stdout)
    states = {source["name"]: source["state"] for source in report["sources"]}
    assert (states["cpus"], states["memory"]) == ("ok", "ok"), done.stderr


def test_source_distribution_builds_without_a_network(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a network of its own needs root and unshare")
    sources = list(DIST.glob("drahealth-*.tar.gz"))
    if not sources:
        pytest.skip("dist/ has no source distribution: make wheel")
    build = [
        *PIP,
        "wheel",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
        f"--wheel-dir={tmp_path}",
        *sources,
    ]
    done = subprocess.run(["unshare", "--net", *build], capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip(f"no network of its own here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert CORE in zipfile.ZipFile(wheel).namelist()
