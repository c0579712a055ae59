"""The lowest and highest versions of the dependencies that pyproject.toml allows pass a part of the tests."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")
TOOLS = (
    "grpcio",
    "grpcio-tools",
    "hypothesis",
    "packaging",
    "pytest",
    "pytest-timeout",
    "pytest-trio",
    "pytest-xdist",
)
SELECTION = (
    "test_embed_monitor.py",
    "test_embed_service.py",
    "test_prepare_store.py",
    "test_serve_codec.py",
    "test_serve_dra_plugin.py",
    "test_serve_frames.py",
)
"""Tests of trio, grpclib, h2, betterproto, msgspec, cffi: what a driver uses."""


def run(*command: str | Path, **environ: str) -> None:
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_driver_works_with_the_lowest_and_highest_dependencies(tmp_path: Path, resolution: str) -> None:
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    (tmp_path / "in.txt").write_text("\n".join(declared))
    compiled = [UV, "pip", "compile", "--quiet", "--resolution", resolution, tmp_path / "in.txt"]
    found = subprocess.run(
        [*compiled, "--python", sys.executable, "-o", tmp_path / "pins.txt"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode and "fetch" in found.stderr:
        pytest.skip("no package index can be reached")
    assert found.returncode == 0, found.stderr
    run(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    run(UV, "pip", "install", "--quiet", "--python", python, "-r", tmp_path / "pins.txt", *TOOLS)
    tests = [f"tests/{name}" for name in SELECTION]
    options = ("-q", "-p", "no:cacheprovider", "-m", "not slow")
    run(python, "-m", "pytest", *options, *tests, PYTHONPATH=str(REPOSITORY))
