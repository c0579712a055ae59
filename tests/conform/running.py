"""Runs of ``drahealth conform`` as a command, and their results."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pytest
from patience import PATIENCE_S

from conform.servers import Driver

T = TypeVar("T")

CONFORM_WARNS: Final = "assert 1 == 0"
"""Output of pytest if the test of a new driver in Python gets conform's exit code for a warning."""
CONCURRENT_RUNS: Final = 8
"""Number of concurrent runs: they mostly wait, and share two cores."""
TIMED: Final = frozenset({"health.first_list", "health.whole", "health.reconnect", "registration.get_info"})
"""Checks that compare a time with a limit: on a busy machine their result may be worse than expected."""
WORSE_RESULT: Final = {"pass": "warn", "warn": "fail"}
"""Worse result that a timed check may have, by its expected result."""


EXITS: Final = {"fail": 2, "warn": 1, "not run": 3}
"""Exit code by result, the decisive result first."""


class ConformRun(NamedTuple):
    """Exit code and outputs of a run."""

    code: int
    output: str
    errors: str

    @property
    def document(self) -> Any:
        """Document of ``-o json``."""
        return json.loads(self.output)

    @property
    def results(self) -> dict[str, str]:
        """Results by code."""
        return {check["code"]: check["result"] for check in self.document["results"]}

    @property
    def not_passed(self) -> dict[str, str]:
        """Warnings and failures by code."""
        return {code: result for code, result in self.results.items() if result in {"warn", "fail"}}

    def matches(self, expected: Mapping[str, str]) -> bool:
        """Return whether the results are as expected, or worse only in timed checks."""

        def is_expected(code: str) -> bool:
            result, expected_result = self.results[code], expected.get(code, "pass")
            return result == expected_result or (
                code in TIMED and result == WORSE_RESULT.get(expected_result)
            )

        return all(map(is_expected, expected.keys() | self.not_passed.keys()))

    def with_results_of(self, earlier: "ConformRun", expected: Mapping[str, str]) -> "ConformRun":
        """Return this run, with the results of an earlier one for checks that are as expected only there."""
        document, found = self.document, {check["code"]: check for check in earlier.document["results"]}

        def is_unexpected(check: Mapping[str, Any]) -> bool:
            return bool(check["result"] != expected.get(check["code"], "pass"))

        document["results"] = [
            min(check, found.get(check["code"], check), key=is_unexpected) for check in document["results"]
        ]
        made = self._replace(output=json.dumps(document))
        return made._replace(code=exit_code(made))

    def result(self, code: str) -> Any:
        """Return the whole result of a check."""
        [result] = [check for check in self.document["results"] if check["code"] == code]
        return result

    def observation(self, code: str) -> str:
        """Return the observation of a check."""
        return str(self.result(code)["saw"])


def conform(*flags: object, output: str = "json") -> ConformRun:
    """Run the command."""
    command = [sys.executable, "-m", "agent", "conform", *map(str, flags), "-o", output]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DRAHEALTH_")}
    limit_s = 5 * PATIENCE_S  # other runs are concurrent
    completed = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=limit_s, env=environ
    )
    return ConformRun(completed.returncode, completed.stdout, completed.stderr)


def conform_driver(driver: Driver, *flags: object, for_s: int) -> ConformRun:
    """Run the command against all sockets of a driver; ``{root}`` in a flag is the kubelet's directory."""
    given = [str(flag).format(root=driver.root) for flag in flags]
    return conform(
        "--plugin-dir", driver.registry, "--kubelet-dir", driver.root, "--for", f"{for_s}s", *given
    )


def conform_socket(socket: Path, *flags: object, for_s: int = 2) -> ConformRun:
    """Run the command against a service socket alone."""
    return conform("--socket", socket, "--for", f"{for_s}s", *flags)


Runs = Mapping[str, "Future[ConformRun]"]
"""Pending runs by name."""


REPETITIONS: Final = 8
"""Limit of repetitions of a run. On a busy machine, a check of a driver's delays may see less of them, and a
run may have other delays. If conform judges a driver wrongly, all repetitions fail."""


def checked_run(
    runs: Runs, name: str, rerun: Callable[[], ConformRun], expected: Mapping[str, str]
) -> ConformRun:
    """Return a run. It is repeated alone until each check had its expected result in one of the runs.

    On a busy machine each run may have a delay somewhere. A check that conform judges wrongly has its
    expected result in no run.
    """
    run = runs[name].result()
    if run.not_passed == expected:
        return run
    wait(runs.values())

    def rerun_and_complete() -> ConformRun:
        nonlocal run
        again = rerun()
        assert again.code == exit_code(again)
        run = again.with_results_of(run, expected)
        return run

    return repeated_run(rerun_and_complete, lambda run: run.not_passed == expected)


def exit_code(run: ConformRun) -> int:
    """Return the exit code for the worst result."""
    results = set(run.results.values())
    return next((code for result, code in EXITS.items() if result in results), 0)


def repeated_run(run_once: Callable[[], T], is_expected: Callable[[T], bool]) -> T:
    """Return the first run that is as expected, or else the last one, for the caller's assertions."""
    run = run_once()
    for _ in range(REPETITIONS):
        if is_expected(run):
            break
        run = run_once()
    return run


@contextmanager
def concurrent_runs(
    request: pytest.FixtureRequest, work: Mapping[str, Callable[[], ConformRun]]
) -> Iterator[Runs]:
    """Start all work whose name is a parameter of a selected test, several at a time.

    Each test waits for its own run. At the end of the module, work that has not begun is cancelled.
    """
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    queue_of_stream = [
        item for item in items if request.fixturename in item.fixturenames and item.path == request.path
    ]
    previous_calls = {item.callspec.params["name"] for item in queue_of_stream}
    with ThreadPoolExecutor(CONCURRENT_RUNS) as pool:
        yield {name: pool.submit(run) for name, run in work.items() if name in previous_calls}
        pool.shutdown(cancel_futures=True)
