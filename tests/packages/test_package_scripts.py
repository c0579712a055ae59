"""The scripts of deb and rpm, with the real dpkg and a systemctl that only records the service's state.

test_deb.py has the whole package under systemd; these tests need neither a container nor the package.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest
import yaml
from private_mounts import within_mounts

PROJECT: Final = Path(__file__).parent.parent.parent
CONTROL_SCRIPTS: Final = {
    "preinst": "preinstall", "postinst": "postinstall", "prerm": "preremove", "postrm": "postremove"
}  # fmt: skip
"""Script of a package in nfpm.yaml, by its name in a deb."""
MOUNTS: Final = """
mount --make-rprivate /
for directory in /run /etc/systemd /var/lib; do mount -t tmpfs none "$directory"; done
mkdir -p /run/systemd/system
"""
SYSTEMCTL: Final = """#!/bin/sh
cd "${0%/*}"
while [ "${1#--}" != "$1" ]; do shift; done
case $1 in
    mask) touch masked ;;
    preset) [ ! -e masked ] && touch enabled ;;
    is-enabled) [ -e enabled ] ;;
    start) echo "start" >>starts && touch active ;;
    try-restart) [ ! -e active ] || echo "restart" >>starts ;;
    disable) rm -f enabled active ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("dpkg") is None, reason="dpkg is not installed")


def scripts() -> dict[str, Path]:
    """Return the files of the packages' scripts by their keys in nfpm.yaml."""
    known = yaml.safe_load((PROJECT / "deploy" / "packages" / "nfpm.yaml").read_text())["scripts"]
    return {key: PROJECT / path for key, path in known.items()}


def build_deb(directory: Path, version: str) -> Path:
    """Build a deb that has the scripts and one settings file, and nothing else."""
    content = directory / f"content-{version}"
    fields = {"Package": "drahealth", "Version": version, "Architecture": "all", "Maintainer": "a"}
    (content / "DEBIAN").mkdir(parents=True)
    (content / "DEBIAN" / "control").write_text(
        "".join(f"{name}: {value}\n" for name, value in {**fields, "Description": "b"}.items())
    )
    (content / "DEBIAN" / "conffiles").write_text("/etc/default/drahealth\n")
    for name, key in CONTROL_SCRIPTS.items():
        if key in scripts():
            (content / "DEBIAN" / name).write_bytes(scripts()[key].read_bytes())
            (content / "DEBIAN" / name).chmod(0o755)
    (content / "etc" / "default").mkdir(parents=True)
    (content / "etc" / "default" / "drahealth").write_text("# Arguments.\n")
    deb = directory / f"{version}.deb"
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", content, deb], check=True, capture_output=True
    )
    return deb


def state_after(directory: Path, *steps: str) -> tuple[str, list[str]]:
    """Run shell commands, with `dpkg`, `rpm` and `systemctl`; return the service's state and its starts."""
    (directory / "systemctl").write_text(SYSTEMCTL)
    (directory / "systemctl").chmod(0o755)
    database = directory / "database"
    for name in ("info", "updates", "triggers", "parts"):
        (database / name).mkdir(parents=True)
    for name in ("status", "available"):
        (database / name).touch()
    options = f"--admindir={database} --instdir={directory}/root --force-script-chrootless --force-not-root"
    (directory / "root").mkdir()
    script = f"""
        set -eu; cd {directory}; PATH={directory}:$PATH; export DPKG_FRONTEND_LOCKED=1
        dpkg() {{ command dpkg {options} "$@" >>dpkg.log 2>&1 || {{ cat dpkg.log; exit 1; }}; }}
        is() {{ [ -e "$1" ] && echo "$1" || echo "not $1"; }}
        {"; ".join(steps)}
        echo "$(is enabled), $(is active)"; ls -A /var/lib/drahealth 2>/dev/null
    """
    command = within_mounts(MOUNTS)
    ended = subprocess.run([*command, "sh", "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode in {0, 2}, ended.stdout + ended.stderr  # 2: ls found no directory
    state, *left = ended.stdout.splitlines()
    assert left == [], left
    starts = directory / "starts"
    return state, starts.read_text().split() if starts.exists() else []


REINSTALL: Final = "dpkg -i 1.deb; dpkg -r drahealth; dpkg -i 1.deb"


@pytest.mark.parametrize(
    ("steps", "state", "starts"),
    [
        (["dpkg -i 1.deb"], "enabled, active", ["start"]),
        (["dpkg -i 1.deb", "dpkg -i 2.deb"], "enabled, active", ["start", "restart"]),
        (["dpkg -i 1.deb", "dpkg -r drahealth"], "not enabled, not active", ["start"]),
        ([REINSTALL], "enabled, active", ["start", "start"]),
        (["dpkg -i 1.deb", "dpkg -r drahealth", "dpkg -i 2.deb"], "enabled, active", ["start", "start"]),
        (["dpkg -i 1.deb", "dpkg -P drahealth", "dpkg -i 2.deb"], "enabled, active", ["start", "start"]),
        (
            [REINSTALL, "systemctl disable --now", "dpkg -i 2.deb"],
            "not enabled, not active",
            ["start", "start"],
        ),
        (
            ["dpkg -i 1.deb", "systemctl disable --now", "dpkg -i 2.deb"],
            "not enabled, not active",
            ["start"],
        ),
        (["systemctl mask", "dpkg -i 1.deb"], "not enabled, not active", []),
        (["rmdir /run/systemd/system", "dpkg -i 1.deb"], "enabled, not active", []),
        (
            ["rmdir /run/systemd/system", "dpkg -i 1.deb; mkdir /run/systemd/system", "dpkg -i 2.deb"],
            "enabled, not active",
            [],
        ),
        (
            ["rmdir /run/systemd/system", "dpkg -i 1.deb", "dpkg -r drahealth"],
            "not enabled, not active",
            [],
        ),
    ],
    ids=[
        "install", "upgrade", "remove", "reinstall", "reinstall-later", "purge", "disable-later", "disable",
        "masked", "in-an-image", "in-an-image-and-upgrade", "in-an-image-and-remove",
    ],
)  # fmt: skip
def test_deb_leaves_the_service_in_the_state_of_the_step(
    tmp_path: Path, steps: list[str], state: str, starts: list[str]
) -> None:
    for version in ("1", "2"):
        build_deb(tmp_path, version)
    assert state_after(tmp_path, *steps) == (state, starts)


def test_purge_leaves_the_directories_that_another_agent_uses(tmp_path: Path) -> None:
    build_deb(tmp_path, "1")
    directories = "/run/drahealth /var/lib/drahealth"
    state, _ = state_after(
        tmp_path,
        "dpkg -i 1.deb; dpkg -r drahealth",
        f"mkdir -p {directories}; for at in {directories}; do touch $at/agent.lock; done",
        "exec 8</run/drahealth/agent.lock 9</var/lib/drahealth/agent.lock; flock 8; flock 9",
        "dpkg -P drahealth",
        f"for at in {directories}; do [ -e $at/agent.lock ]; done",
        "exec 8<&- 9<&-; dpkg -i 1.deb; dpkg -P drahealth",
        f"for at in {directories}; do [ ! -e $at ]; done",
    )
    assert state == "not enabled, not active"


RPM_INSTALL: Final = "sh $before 1; sh $after 1"
RPM_UPGRADE: Final = "sh $before 2; sh $after 2; sh $erase 1; sh $erased 1"
RPM_ERASE: Final = "sh $erase 0; sh $erased 0"


@pytest.mark.parametrize(
    ("steps", "state", "starts"),
    [
        ([RPM_INSTALL], "enabled, active", ["start"]),
        ([RPM_INSTALL, RPM_UPGRADE], "enabled, active", ["start", "restart"]),
        ([RPM_INSTALL, RPM_ERASE], "not enabled, not active", ["start"]),
        ([RPM_INSTALL, RPM_ERASE, RPM_INSTALL], "enabled, active", ["start", "start"]),
        ([RPM_INSTALL, "systemctl disable --now", RPM_UPGRADE], "not enabled, not active", ["start"]),
        (["systemctl mask", RPM_INSTALL], "not enabled, not active", []),
    ],
    ids=["install", "upgrade", "erase", "reinstall", "disable", "masked"],
)
def test_rpm_leaves_the_service_in_the_state_of_the_step(
    tmp_path: Path, steps: list[str], state: str, starts: list[str]
) -> None:
    """The scripts get the arguments with which rpm calls them, in its order."""
    known = scripts()
    keys = {"before": "preinstall", "after": "postinstall", "erase": "preremove", "erased": "postremove"}
    names = "; ".join(f"{name}={known[key]}" for name, key in keys.items())
    assert state_after(tmp_path, names, *steps) == (state, starts)
