"""The container image: its content, and a scan without root, writable files and a shell."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
from containers import Process, oci_config, run_container
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from patience import PATIENCE_S

pytestmark = pytest.mark.timeout(1200)

REPOSITORY = Path(__file__).parent.parent.parent
SBOM = REPOSITORY / "tools" / "sbom.py"


def image_settings(image: str) -> dict[str, Any]:
    printed = subprocess.run(
        ["buildah", "inspect", "--type", "image", image], capture_output=True, check=True
    )
    found: dict[str, Any] = json.loads(printed.stdout)["OCIv1"]["config"]
    return found


def test_image_scans_as_an_ordinary_user_with_a_read_only_root(
    image: str, image_root: Path, oci_runtime: str
) -> None:
    settings = image_settings(image)
    uid, gid = map(int, settings["User"].split(":"))
    assert uid > 0
    env = dict(entry.split("=", 1) for entry in settings["Env"])
    process = Process([*settings["Entrypoint"], "scan", "-o", "json"], uid, gid, env=env)
    with run_container(oci_runtime, oci_config(image_root, process, ())) as container:
        output, _ = container.process.communicate(timeout=PATIENCE_S)
    assert container.process.returncode in {0, 1, 2, 3}, output
    assert json.loads(output)["devices"]


LEAVE_ORPHAN = """
import os, pathlib, time
def count():
    return len([*pathlib.Path("/proc").glob("[0-9]*")])
before = count()
if (child := os.fork()) == 0:
    os._exit(os.fork() and 0)
os.waitpid(child, 0)
while count() > before:
    time.sleep(0.01)
"""


def test_first_process_of_the_image_collects_processes_left_behind(
    image: str, image_root: Path, oci_runtime: str
) -> None:
    *first, program = image_settings(image)["Entrypoint"]
    assert program == "/opt/drahealth/bin/drahealth"
    process = Process([*first, "/opt/drahealth/bin/python", "-c", LEAVE_ORPHAN], 65532, 65532)
    with run_container(oci_runtime, oci_config(image_root, process, ())) as container:
        output, _ = container.process.communicate(timeout=PATIENCE_S)
    assert container.process.returncode == 0, output


def test_image_has_no_shell_and_no_package_manager(image_root: Path) -> None:
    programs = {path.name for part in ("usr/bin", "usr/sbin") for path in (image_root / part).glob("*")}
    assert "drahealth" in programs
    unwanted = {"sh", "bash", "dash", "busybox", "perl", "apt-get", "dpkg", "pip", "gcc"}
    assert unwanted & programs == set()


def test_image_has_no_file_with_the_rights_of_its_owner(image_root: Path) -> None:
    """No setuid or setgid program, and no file that an ordinary user may change."""
    found = [path for path in image_root.rglob("*") if not path.is_symlink()]
    modes = {path.relative_to(image_root): path.stat().st_mode for path in found}
    assert [path for path, mode in modes.items() if mode & (stat.S_ISUID | stat.S_ISGID)] == []
    writable = [path for path, mode in modes.items() if mode & stat.S_IWOTH]
    assert writable == [Path("tmp")]


def components(root: Path) -> dict[str, str]:
    """Return the versions of the components in the bill of materials of a root filesystem, by name."""
    environ = os.environ | {"SOURCE_DATE_EPOCH": "0"}
    first, second = (
        subprocess.run([sys.executable, SBOM, root], env=environ, capture_output=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(first.decode()) is None
    document = json.loads(first)
    assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", "drahealth")
    return {item["name"]: item["version"] for item in document["components"]}


def pinned_versions() -> dict[str, str]:
    """Return the pinned versions of the packages that this Python needs, by name."""
    lines = (REPOSITORY / "requirements" / "package.txt").read_text().splitlines()
    found = [Requirement(line.removesuffix("\\")) for line in lines if re.match(r"[a-z0-9]", line)]
    needed = (item for item in found if item.marker is None or item.marker.evaluate())
    return {item.name: str(item.specifier).removeprefix("==") for item in needed}


def debian_packages(root: Path) -> dict[str, str]:
    """Return the versions of an image's Debian packages by name."""
    files = (root / "var/lib/dpkg/status.d").iterdir()
    found = [HeaderParser().parsestr(file.read_text()) for file in files]
    return {fields["Package"]: fields["Version"] for fields in found}


def test_bill_of_materials_has_every_pinned_and_every_debian_package(image_root: Path) -> None:
    debian = debian_packages(image_root)
    del debian["drahealth"]
    assert {"libc6", "libssl3"} <= debian.keys()
    assert components(image_root) == debian | pinned_versions()


def test_package_contains_its_bill_of_materials(image_root: Path) -> None:
    document = json.loads((image_root / "usr/share/doc/drahealth/sbom.cdx.json").read_text())
    assert {"grpclib", "trio"} <= {item["name"] for item in document["components"]}
