"""The deb in a fresh Debian root under systemd: install, upgrade, remove, install again, purge.

One boot of the root as a container serves all tests: a probe unit records each step in files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from patience import PATIENCE_S
from test_systemd import left_behind

pytestmark = pytest.mark.timeout(1200)

DIST = Path(__file__).parent.parent.parent / "dist"
NEXT_VERSION = "99.0"
"""Version of the package to which the probe upgrades; its content is the same."""

PROBE = r"""#!/bin/bash
cd /results
exec 2>probe-errors
export DEBIAN_FRONTEND=noninteractive
show() { systemctl show drahealth -p "$1" --value; }
running() {
    for _ in {1..300}; do
        ! drahealth status -o json >/dev/null 2>&1 || return 0
        sleep 0.1
    done
    journalctl --no-pager -u drahealth >journal 2>&1
    systemctl poweroff
    exit 1
}
files() {
    find / -xdev \( -path /proc -o -path /results -o -path /var/log -o -path /tmp \) -prune -o -print | sort
}
files >0-files

dpkg -i /packages/this.deb >1-dpkg 2>&1; echo $? >1-rc
running
show ActiveState >1-active
systemctl is-enabled drahealth >1-enabled
show MainPID >1-pid
drahealth status -o json >1-status
drahealth scan -o json >1-scan; echo $? >1-scan-rc
( cd / && md5sum --quiet --check /var/lib/dpkg/info/drahealth.md5sums ) >1-sums 2>&1
man -w drahealth drahealth-run drahealth.toml >1-man 2>&1
cat /usr/share/bash-completion/completions/drahealth >1-bash
cat /usr/share/zsh/vendor-completions/_drahealth >1-zsh
drahealth completion bash >1-bash-printed
drahealth completion zsh >1-zsh-printed

echo 'DRAHEALTH_RUN_ARGS="--node-name kept --listen unix:/run/drahealth/http.sock"' >/etc/default/drahealth
dpkg -i --force-confold /packages/next.deb >2-dpkg 2>&1; echo $? >2-rc
running
show MainPID >2-pid
drahealth scan -o json >2-scan
drahealth status -o json >2-status
/opt/drahealth/bin/python - >2-metrics 2>&1 <<'END'
import socket
server = socket.socket(socket.AF_UNIX)
server.connect("/run/drahealth/http.sock")
server.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
answer = b""
while part := server.recv(65536):
    answer += part
print(answer.decode())
END
dpkg-query -W -f '${Version}' drahealth >2-version
( cd / && md5sum --quiet --check /var/lib/dpkg/info/drahealth.md5sums ) >2-sums 2>&1

dpkg -r drahealth >3-dpkg 2>&1; echo $? >3-rc
show LoadState >3-load
ls -d /opt/drahealth /usr/bin/drahealth /var/lib/drahealth /etc/default/drahealth >3-left 2>&1

dpkg -i --force-confold /packages/next.deb >4-dpkg 2>&1; echo $? >4-rc
running
systemctl is-enabled drahealth >4-enabled
drahealth status -o json >4-status

dpkg --purge drahealth >5-dpkg 2>&1; echo $? >5-rc
files >5-files
touch finished
systemctl poweroff
"""
PROBE_UNIT = """
[Unit]
After=basic.target
[Service]
Type=oneshot
ExecStart=/probe
StandardOutput=journal+console
"""


def debian_release() -> str:
    """Return the name of this machine's release of Debian; skip on others."""
    text = Path("/etc/os-release").read_text()
    release = re.search(r"^VERSION_CODENAME=(\S+)$", text, re.MULTILINE)
    if "ID=debian" not in text.splitlines() or release is None:
        pytest.skip("this machine is no Debian, whose release the container would have")
    return release[1]


def build_root(root: Path) -> None:
    """Make a minimal Debian of this machine's release, with systemd and Python."""
    release = debian_release()
    made = subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,systemd,systemd-sysv,dbus,man-db",
         release, str(root)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip(f"mmdebstrap cannot make a root here: {made.stderr.strip().splitlines()[-1]}")


def next_package(this: Path, directory: Path) -> Path:
    """Return a copy of a deb with a later version and a change in its service's arguments file."""
    content = directory / "content"
    subprocess.run(["dpkg-deb", "--raw-extract", this, content], check=True)
    control = content / "DEBIAN" / "control"
    control.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {NEXT_VERSION}", control.read_text()))
    default = content / "etc" / "default" / "drahealth"
    default.write_text(default.read_text() + "# A later release.\n")
    result = directory / "next.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", "-Zgzip", content, result],
                   check=True, capture_output=True)  # fmt: skip
    return result


def install_without_systemd(root: Path, package: Path, results: Path) -> None:
    """Install and purge the package in a root where no systemd runs, as when the image of a node is built.

    Records the links that enable the service after each step.
    """
    shutil.copy(package, root / "this.deb")
    for step, command in (("0-built", ["-i", "/this.deb"]), ("0-purged", ["--purge", "drahealth"])):
        done = subprocess.run(
            ["chroot", root, "dpkg", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        directories = (root / "etc" / "systemd" / "system").glob("*.wants")
        enabled = [found.name for found in directories if (found / "drahealth.service").is_symlink()]
        (results / step).write_text("\n".join([f"{done.returncode}", *enabled]))
    (root / "this.deb").unlink()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the probe's records, after the container has ended."""
    if os.geteuid() != 0:
        pytest.skip("a container with systemd needs root")
    for program in ("mmdebstrap", "systemd-nspawn", "dpkg-deb"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    packages = sorted(DIST.glob("drahealth_*.deb"))
    assert len(packages) == 1, f"{DIST}: {len(packages)} debs; make packages"
    base = tmp_path_factory.mktemp("deb")
    root, results, offered = base / "root", base / "results", base / "packages"
    for directory in (results, offered):
        directory.mkdir()
    build_root(root)
    install_without_systemd(root, packages[0], results)
    shutil.copy(packages[0], offered / "this.deb")
    shutil.move(next_package(packages[0], base), offered)
    (root / "probe").write_text(PROBE)
    (root / "probe").chmod(0o755)
    units = root / "etc" / "systemd" / "system"
    (units / "probe.service").write_text(PROBE_UNIT)
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    (units / "multi-user.target.wants" / "probe.service").symlink_to("../probe.service")

    before = left_behind()
    command = [
        "systemd-nspawn", f"--directory={root}", "--boot", "--register=no", "--keep-unit",
        "--private-network", "--capability=CAP_SYSLOG", "--console=pipe",
        f"--machine=drahealth-deb-{os.getpid()}",
        f"--bind={results}:/results", f"--bind-ro={offered}:/packages",
    ]  # fmt: skip
    container = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        console, _ = container.communicate(timeout=5 * PATIENCE_S)
    except subprocess.TimeoutExpired:
        container.terminate()  # systemd-nspawn powers the container off
        console, _ = container.communicate(timeout=PATIENCE_S)
    finally:
        for group in sorted(left_behind() - before, reverse=True):  # children first
            group.rmdir()
        shutil.rmtree(root)
    failed = re.search(r"^Failed to .*", console, re.MULTILINE)  # a message of systemd-nspawn, not of systemd
    if failed and not (results / "0-files").exists():
        pytest.skip(f"systemd-nspawn cannot boot here: {failed[0]}")
    steps = {path.name: path.read_text() for path in sorted(results.iterdir()) if path.name != "0-files"}
    assert (results / "finished").exists(), (console, steps)
    return results


def text(results: Path, name: str) -> str:
    return (results / name).read_text().strip()


def document(results: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(text(results, name))
    return found


def test_installed_service_runs_and_is_enabled(results: Path) -> None:
    assert text(results, "1-rc") == "0", text(results, "1-dpkg")
    assert (text(results, "1-active"), text(results, "1-enabled")) == ("active", "enabled")


def test_package_in_a_built_image_is_enabled_for_the_boot(results: Path) -> None:
    assert text(results, "0-built").splitlines() == ["0", "multi-user.target.wants"]
    assert text(results, "0-purged") == "0"


def test_installed_command_scans_the_node(results: Path) -> None:
    assert document(results, "1-scan")["devices"]
    assert text(results, "1-scan-rc") in {"0", "1", "2", "3"}


def test_manual_finds_pages_of_the_package(results: Path) -> None:
    assert text(results, "1-man").splitlines() == [
        "/usr/share/man/man1/drahealth.1.gz",
        "/usr/share/man/man1/drahealth-run.1.gz",
        "/usr/share/man/man5/drahealth.toml.5.gz",
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_file_is_that_of_the_command(results: Path, shell: str) -> None:
    assert "_drahealth" in text(results, f"1-{shell}")
    assert text(results, f"1-{shell}") == text(results, f"1-{shell}-printed")


@pytest.mark.parametrize("step", ["1", "2"])
def test_files_of_the_package_are_not_changed_at_work(results: Path, step: str) -> None:
    """Python would write other bytecode if that of the package did not fit."""
    changed = re.findall(r"^\./(.*): FAILED$", text(results, f"{step}-sums"), re.MULTILINE)
    assert [path for path in changed if not path.startswith("etc/")] == []


def test_upgrade_restarts_the_service_and_keeps_its_arguments(results: Path) -> None:
    assert text(results, "2-rc") == "0", text(results, "2-dpkg")
    assert text(results, "2-version") == NEXT_VERSION
    assert text(results, "2-pid") not in {"0", text(results, "1-pid")}
    assert document(results, "2-status")["node"] == "kept"


def test_metrics_of_the_service_are_scraped_in_its_sandbox(results: Path) -> None:
    answer = text(results, "2-metrics")
    assert re.match(r"HTTP/1\.[01] 200 ", answer), answer
    assert re.search(r"^drahealth_\w+(\{.*\})? ", answer, re.MULTILINE)


def test_removal_stops_the_service_and_keeps_settings_and_state(results: Path) -> None:
    assert text(results, "3-rc") == "0", text(results, "3-dpkg")
    assert text(results, "3-load") == "not-found"
    left = {line for line in text(results, "3-left").splitlines() if line.startswith("/")}
    assert left == {"/etc/default/drahealth", "/var/lib/drahealth"}


def test_installation_after_a_removal_keeps_the_arguments_of_the_service(results: Path) -> None:
    assert text(results, "4-rc") == "0", text(results, "4-dpkg")
    assert text(results, "4-enabled") == "enabled"
    assert document(results, "4-status")["node"] == "kept"


def test_purge_removes_all_files(results: Path) -> None:
    assert text(results, "5-rc") == "0", text(results, "5-dpkg")
    before, after = (set(text(results, name).splitlines()) for name in ("0-files", "5-files"))
    caches = ("/var/lib/dpkg/", "/var/lib/systemd/", "/var/cache/man/")  # of dpkg, systemd and man-db
    made = {path for path in after - before if not path.startswith(caches)}
    assert made == set()
