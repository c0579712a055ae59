"""The container image from the deb in dist/, built once for all tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import runtime

BUILD = Path(__file__).parent.parent.parent / "deploy" / "container" / "build"


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the image; return its name."""
    if os.geteuid() != 0:
        pytest.skip("a build of the image needs root")
    for program in ("buildah", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    tried = subprocess.run(["buildah", "from", "scratch"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"buildah cannot make a container here: {tried.stderr.strip().splitlines()[-1]}")
    subprocess.run(["buildah", "rm", tried.stdout.strip()], capture_output=True, check=True)
    apt = tmp_path_factory.mktemp("apt") / "apt.conf"
    apt.write_text(apt_configuration())
    name = f"localhost/drahealth-test-{os.getpid()}"
    built = subprocess.run(
        [BUILD, name], env=os.environ | {"APT_CONF": str(apt)}, capture_output=True, text=True, check=False
    )
    if built.returncode == 75:
        pytest.skip(f"mmdebstrap cannot make a base here: {built.stderr.strip().splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    yield name
    subprocess.run(["buildah", "rmi", "--force", name], capture_output=True, check=True)


def apt_configuration() -> str:
    """Return this machine's settings of how apt reaches its mirrors."""
    printed = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    wanted = ("Acquire::Check-", "Acquire::http", "Acquire::https")
    return "".join(f"{line}\n" for line in printed.splitlines() if line.startswith(wanted))


@pytest.fixture(scope="session")
def image_root(image: str) -> Iterator[Path]:
    """Return the mounted root filesystem of the image."""
    container = subprocess.run(
        ["buildah", "from", image], capture_output=True, text=True, check=True
    ).stdout.strip()
    mounted = subprocess.run(["buildah", "mount", container], capture_output=True, text=True, check=True)
    yield Path(mounted.stdout.strip())
    subprocess.run(["buildah", "rm", container], capture_output=True, check=True)


@pytest.fixture(scope="session")
def oci_runtime(image_root: Path) -> str:
    """Return the OCI runtime that starts containers of the image."""
    found = runtime(image_root)
    if found is None:
        pytest.skip("no OCI runtime is installed that can start a container here")
    return found
