"""Tests of the fake kubelet run with the real one, too, unless FAKE_ONLY has a reason. Its benchmark runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from go_driver.module import DRIVER, go_module
from kubelet_real.implementations import FAKE_ONLY, binary_of

TESTS: Final = Path(__file__).parent
FILES: Final = (
    "conform/test_kubelet_agrees.py",
    "driver_scenarios",
    "go_driver",
    "test_embed_processes.py",
    "test_fake_kubelet.py",
    "test_fake_kubelet_events.py",
    "test_fake_kubelet_health.py",
)
"""Files whose tests meet the fake kubelet."""
OUTSIDE: Final = frozenset(
    {
        "conform/test_kubelet_agrees.py::test_driver_that_fails_also_disturbs_a_kubelet",  # a run of conform
        "driver_scenarios/test_explain.py::test_reports_of_a_linked_driver_are_in_the_agents_record",
    }
)
"""Tests with a counterpart for the real kubelet, or with a kubelet that is no fake one."""
COLLECT: Final = """
import json, sys
import pytest

class Collector:
    def pytest_collection_finish(self, session):
        is_real = lambda item: item.get_closest_marker("kubelet_real") is not None
        found = [[item.nodeid.partition("[")[0], item.fixturenames, is_real(item)] for item in session.items]
        print("ITEMS" + json.dumps(found))

flags = ["--collect-only", "-qq", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*flags, *sys.argv[1:]], plugins=[Collector()]))
"""
KUBELETS: Final = {"kubelet", "make_kubelet", "node", "make_node", "manager", "events", "update", "plugins"}
"""Fixtures that start a kubelet or a part of it."""


def collect_tests() -> tuple[set[str], set[str]]:
    """Return the tests that meet a kubelet, and those of them that run with the real one."""
    command = [sys.executable, "-c", COLLECT, *(str(TESTS / name) for name in FILES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ITEMS")]
    meeting, real = set(), set()
    for name, fixtures, is_real in json.loads(line.removeprefix("ITEMS")):
        test = name.removeprefix("tests/")
        if is_real:
            real.add(test)
        if is_real or KUBELETS & set(fixtures) or test.startswith("test_fake_kubelet"):
            meeting.add(test)
    return meeting, real


def test_each_test_of_the_fake_kubelet_runs_with_the_real_one_or_says_why() -> None:
    meeting, real = collect_tests()
    assert real
    assert meeting - real - OUTSIDE == set(FAKE_ONLY)


@pytest.mark.kubelet_real
@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.36", "1.37"])
def test_benchmark_of_the_real_kubelet_has_a_row_for_each_fault(version: str) -> None:
    binary_of(version)
    go_module(DRIVER)
    command = [sys.executable, "benchmarks/real_kubelet.py", "1", version]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.endswith("ms |")]
    assert len(rows) == 4
