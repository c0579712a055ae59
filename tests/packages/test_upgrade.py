"""Upgrade from release 0.1 and downgrade to it: faults, history and declarations stay, both ways.

Both agents are processes of their own code, one after the other on the same directories.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agents import UNHEALTHY, Agent, run_command, short_tmp, wait_for_health
from fake_nvml import FakeNvml, fake_nvml
from golden.files import RELEASE
from golden.release import DECLARATION
from wire.serving import eventually

pytestmark = pytest.mark.timeout(1200)
__all__ = ["short_tmp"]

REPOSITORY = Path(__file__).parent.parent.parent
RELEASE_0_1 = "22a9da6"
"""Last revision of release 0.1."""
DECLARED = 8
"""Number of devices in the declaration."""
CONFIG = '[gpu]\nprobation = "1h"\n'


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tree with the code of release 0.1, and its core."""
    tree = tmp_path_factory.mktemp("release")
    archive = tree / "tree.tar"
    git = ["git", "-C", REPOSITORY]
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    known = subprocess.run(
        [*git, "cat-file", "-e", f"{RELEASE_0_1}^{{commit}}"], capture_output=True, check=False
    )
    if known.returncode != 0:
        pytest.skip(f"this checkout has no revision {RELEASE_0_1}")
    subprocess.run([*git, "archive", f"--output={archive}", RELEASE_0_1], check=True)
    subprocess.run(["tar", "-xf", archive, "-C", tree, "--exclude=tests"], check=True)
    build = [sys.executable, "-c", "from setuptools import setup; setup()", "build_ext", "--inplace"]
    built = subprocess.run(build, cwd=tree, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return tree


@dataclass(frozen=True)
class Facts:
    """State that an agent keeps about the past of its node."""

    faults: dict[str, tuple[str, ...]]
    """Codes of the causes of each Unhealthy GPU."""
    declared: dict[str, str]
    """Health of each declared device by name."""
    changes: list[Any]
    """Changes of verdicts of GPU 0 in the history, without those of this run, oldest first."""


class Node:
    """Node with two GPUs, on whose directories agents of two releases run one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fake: FakeNvml = fake_nvml(directory, "profile h100 gpus=2")
        self.places = ("--runtime-dir", str(directory / "run")), ("--state-dir", str(directory / "state"))

    def run_agent(self, tree: Path, *unhealthy: str, act: Callable[[], object] = lambda: None) -> Facts:
        """Run the agent of a tree until the named GPUs are Unhealthy; return what it knows."""
        _, state = self.places
        changes = self.history(tree) if (self.directory / "state" / "history.sqlite").exists() else []
        with Agent(
            self.directory,
            *("--nvml-library", str(self.fake.library), *state),
            config=CONFIG,
            environ={"FAKE_NVML": str(self.fake.scenario)},
            expect="gpu-1",
            wrapper=["env", f"--chdir={tree}"],
        ) as agent:
            act()
            with agent.kubelet() as kubelet:
                for name in unhealthy:
                    wait_for_health(kubelet, name, UNHEALTHY)
            report = self.complete_report(tree)
            assert agent.end() == 0, agent.log
            assert "set aside" not in agent.log
        devices = report["devices"]
        return Facts(
            faults={
                device["name"]: tuple(cause["code"] for cause in device["causes"])
                for device in devices
                if not device["driver"] and device["health"] == "Unhealthy"
            },
            declared={device["name"]: device["health"] for device in devices if device["driver"]},
            changes=changes,
        )

    def complete_report(self, tree: Path) -> Any:
        """Return a report of the running agent for which it has read all sources and declarations."""
        runtime, _ = self.places
        reports: list[Any] = []

        def is_complete() -> bool:
            reports[:] = [self.ask(tree, "watch", "--once", *runtime)]
            declared = [device for device in reports[0]["devices"] if device["driver"]]
            states = {source["state"] for source in reports[0]["sources"]}
            return len(declared) == DECLARED and "starting" not in states

        eventually(is_complete, lambda: f"{DECLARED} declared devices: {reports}")
        return reports[0]

    def history(self, tree: Path) -> list[Any]:
        """Return the changes of verdicts of GPU 0, as the command of a tree shows them."""
        _, state = self.places
        found = self.ask(tree, "history", "--device", "gpu-0", *state)["changes"]
        fields = ("device", "at", "from", "to", "causes")  # without times that pass
        return [{name: change[name] for name in fields} for change in found]

    def ask(self, tree: Path, *verb: str) -> Any:
        """Return the JSON document that a command of a tree prints."""
        done = run_command(*verb, "-o", "json", cwd=tree)
        assert done.returncode <= 3, done.stderr
        return json.loads(done.stdout)


def test_upgrade_and_downgrade_keep_faults_history_and_declarations(release: Path, short_tmp: Path) -> None:
    node = Node(short_tmp)

    def declare_and_break() -> None:
        directory = short_tmp / "run" / "devices.d"
        eventually(directory.is_dir, "the directory of declarations")
        (directory / DECLARATION).write_bytes((RELEASE / DECLARATION).read_bytes())
        node.fake.send("gpu 0 xid 79")

    before = node.run_agent(release, "gpu-0", act=declare_and_break)
    assert before.faults == {"gpu-0": ("gpu.xid.79",)}
    written = node.history(release)
    assert written

    upgraded = node.run_agent(REPOSITORY, "gpu-0", "gpu-1", act=lambda: node.fake.send("gpu 1 xid 79"))
    assert upgraded.faults == {"gpu-0": ("gpu.xid.79",), "gpu-1": ("gpu.xid.79",)}
    assert len(upgraded.declared) == DECLARED
    assert upgraded.changes == written

    later = node.history(REPOSITORY)
    downgraded = node.run_agent(release, "gpu-0", "gpu-1")
    assert (downgraded.faults, downgraded.declared) == (upgraded.faults, upgraded.declared)
    assert downgraded.changes == later
