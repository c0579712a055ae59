"""Table of injected faults: every fault has a test that exists, and docs/reliability.md is current."""

import ast
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from faults import (
    Fault,
    markdown,
    read_faults,
    read_figures,
    read_observers,
    read_results,
    read_seconds,
    unproven_faults,
    with_figures,
)
from faults.kills import Kept
from faults.soak import Sample, evaluate, failures

TESTS = Path(__file__).parent
THEMES = {
    "process", "thread", "file", "disk", "clock", "memory", "descriptors", "sockets", "protocol", "kubelet",
    "driver", "kernel events", "NVML helper", "API server",
}  # fmt: skip


@cache
def functions_of(file: str) -> frozenset[str]:
    """Return the names of the test functions in a file."""
    nodes = ast.walk(ast.parse((TESTS / file).read_text("utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: fault.injected)
def test_injected_fault_has_a_promise_and_a_test(fault: Fault) -> None:
    assert fault.promise
    file, _, name = fault.test.partition("::")
    assert name in functions_of(file)


def test_table_has_a_hundred_different_faults_of_every_theme() -> None:
    faults = read_faults()
    assert len(faults) >= 100
    assert {fault.theme for fault in faults} == THEMES
    names = Counter((fault.theme, fault.injected) for fault in faults)
    assert [name for name, count in names.items() if count > 1] == []


def test_reliability_page_is_current() -> None:
    page = TESTS.parent / "docs/reliability.md"
    assert page.read_text("utf-8") == markdown(read_faults(), read_figures())


def test_reliability_page_has_a_time_and_an_observer_of_each_fault() -> None:
    """A fault without them was added after the last ``make reliability``."""
    figures = read_figures()
    tests = {fault.test for fault in read_faults()}
    assert sorted(tests - (figures["seconds"].keys() & figures["seen_by"].keys())) == []


def test_saved_figures_replace_only_their_section_of_the_page() -> None:
    other = read_figures() | {
        "kills": {"kills": 7, "prepares": 30, "usages": 20, "changes": 9, "lost": 1, "seconds": 60}
    }
    page = with_figures(markdown(read_faults(), read_figures()), other)
    assert page == markdown(read_faults(), other)
    assert "1 min, 7 SIGKILLs | 30 prepares, 20 uses and 9 changes of verdicts recorded, 1 lost" in page


@pytest.mark.parametrize(
    ("growth", "expected"),
    [
        (Sample(0, 0, 0, 0, 0, 0), []),
        (Sample(0, 0, 0, 9, 9, 0), []),
        (Sample(0, 1, 1, 0, 0, 0), ["memory grows"]),
        (Sample(0, 0, 0, 9, 0, 0), ["descriptors without files of cgroups grew"]),
        (Sample(0, 0, 0, 0, 0, 9), ["threads grew"]),
    ],
    ids=["nothing", "files of pods", "memory", "descriptors", "threads"],
)
def test_soak_fails_for_a_resource_that_grows_after_the_warm_up(growth: Sample, expected: list[str]) -> None:
    def sample(hours: float) -> Sample:
        return Sample(3600 * hours, *(round(60 + hours * value, 6) for value in growth[1:]))

    warm_up = [Sample(60.0 * minute, 5 + 3.0 * minute, 30, 5 + minute, 0, 5) for minute in range(15)]
    steady = [sample(0.26 + 0.01 * number) for number in range(75)]
    figures = evaluate(warm_up + steady, 3600)
    assert [problem.partition(" by ")[0] for problem in failures(figures)] == expected


def test_answered_prepare_that_no_ledger_has_is_lost(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    assert kept.find_losses() == []
    kept.add_prepare("c-1")
    assert kept.find_losses() == ["prepare of claim c-1"]


def test_rows_without_a_passed_test_are_listed(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    results.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.test_a" name="test_passes"/>
        <testcase classname="tests.test_a" name="test_one_passes[x]"/>
        <testcase classname="tests.test_a" name="test_one_passes[y]"><skipped message="no"/></testcase>
        <testcase classname="tests.deep.test_b" name="test_skips"><skipped message="no"/></testcase>
        <testcase classname="tests.test_a" name="test_fails[x]"/>
        <testcase classname="tests.test_a" name="test_fails[y]"><failure message="bad"/></testcase>
        </testsuite></testsuites>"""
    )
    tests = ("test_a.py::test_passes", "test_a.py::test_one_passes", "deep/test_b.py::test_skips")
    tests += ("test_a.py::test_fails", "test_a.py::test_is_gone")
    faults = [Fault("disk", f"fault {number}", "promise", test) for number, test in enumerate(tests)]
    assert unproven_faults(faults, read_results([results])) == [
        "fault 2: skipped: deep/test_b.py::test_skips",
        "fault 3: failure: test_a.py::test_fails",
        "fault 4: did not run: test_a.py::test_is_gone",
    ]


def test_reliability_page_has_the_longest_observed_time_per_test(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    results.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.test_a" name="test_one[x]" time="0.52"/>
        <testcase classname="tests.test_a" name="test_one[y]" time="12.3"><properties>
        <property name="seen_by" value="grpcio client"/></properties></testcase>
        <testcase classname="tests.test_a" name="test_other" time="0.004"/>
        </testsuite></testsuites>"""
    )
    faults = [Fault("disk", name, "promise", f"test_a.py::test_{name}") for name in ("one", "other", "new")]
    page = markdown(faults, {"seconds": read_seconds([results]), "seen_by": read_observers([results])})
    assert "| one | promise | 12 s | grpcio client | `test_a.py::test_one` |" in page
    assert "| other | promise | 0.1 s | test | `test_a.py::test_other` |" in page
    assert "| new | promise | not measured | not measured | `test_a.py::test_new` |" in page


OBSERVED_TESTS = """
import os, socket, subprocess
import grpc

def test_alone(): pass
def test_process(): subprocess.run(["true"], check=True)
def test_socket(tmp_path):
    with socket.socket(socket.AF_UNIX) as client, socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s")), server.listen(), client.connect(str(tmp_path / "s"))
def test_channel():
    subprocess.run(["true"], check=True)
    grpc.insecure_channel("unix:/none").close()
"""


def test_run_with_a_junit_file_stores_the_observer_of_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(OBSERVED_TESTS)
    options = ["-p", "plugin_observers", "-p", "no:cacheprovider", "--junitxml", "junit.xml"]
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "pytest", *options, "test_a.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert read_observers([tmp_path / "junit.xml"]) == {
        "test_a.py::test_alone": "test",
        "test_a.py::test_process": "other process",
        "test_a.py::test_socket": "socket client",
        "test_a.py::test_channel": "grpcio client",
    }
