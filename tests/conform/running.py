"""``drahealth conform`` as a command, and what it says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from patience import PATIENCE_S

from conform.servers import Driver

AT_ONCE: Final = 8
"""Runs that wait, mostly, share two cores."""
TIMED: Final = frozenset({"health.first_list", "health.whole", "health.reconnect", "registration.get_info"})
"""Checks that compare a time with a limit: of a driver on a busy machine they may say worse than its due."""
WORSE: Final = {"pass": "warn", "warn": "fail"}
"""By what is due of them: what they may say."""


class Said(NamedTuple):
    """What a run left."""

    code: int
    output: str
    errors: str

    @property
    def document(self) -> Any:
        """Of ``-o json``."""
        return json.loads(self.output)

    @property
    def results(self) -> dict[str, str]:
        """Result by code."""
        return {check["code"]: check["result"] for check in self.document["results"]}

    @property
    def blamed(self) -> dict[str, str]:
        """The same of those that do not pass, though they could be judged."""
        return {code: result for code, result in self.results.items() if result in {"warn", "fail"}}

    def says(self, due: Mapping[str, str]) -> bool:
        """Whether what is due is blamed, and nothing else but what a busy machine may be to blame for."""

        def is_due(code: str) -> bool:
            result, right = self.results[code], due.get(code, "pass")
            return result == right or (code in TIMED and result == WORSE.get(right))

        return all(map(is_due, due.keys() | self.blamed.keys()))

    def result(self, code: str) -> Any:
        """All that is said of a check."""
        [found] = [check for check in self.document["results"] if check["code"] == code]
        return found

    def saw(self, code: str) -> str:
        """What a check saw."""
        return str(self.result(code)["saw"])


def conform(*flags: object, output: str = "json") -> Said:
    """Runs it."""
    command = [sys.executable, "-m", "agent", "conform", *map(str, flags), "-o", output]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DRAHEALTH_")}
    limit_s = 5 * PATIENCE_S  # others run beside it
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s, env=environ)
    return Said(ran.returncode, ran.stdout, ran.stderr)


def conform_driver(driver: Driver, *flags: object, for_s: int) -> Said:
    """Runs it against all sockets of a driver."""
    return conform(
        "--plugin-dir", driver.registry, "--kubelet-dir", driver.root, "--for", f"{for_s}s", *flags
    )


def conform_socket(socket: Path, *flags: object, for_s: int = 2) -> Said:
    """Runs it against a service socket alone."""
    return conform("--socket", socket, "--for", f"{for_s}s", *flags)


Runs = Mapping[str, "Future[Said]"]
"""By the name of what is run against."""


def seen(runs: Runs, name: str, again: Callable[[], Said], due: Mapping[str, str]) -> Said:
    """What a run says. If it is not just what is due, what counts is another with no other beside it."""
    said = runs[name].result()
    if said.blamed == due:
        return said
    wait(runs.values())
    return again()


@contextmanager
def at_once(request: pytest.FixtureRequest, work: Mapping[str, Callable[[], Said]]) -> Iterator[Runs]:
    """Begins all work whose name is a parameter of a test that is to run, several at a time.

    Each test waits for its own. The work of tests that nobody waits for any more is not begun.
    """
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    mine = [item for item in items if request.fixturename in item.fixturenames and item.path == request.path]
    asked = {item.callspec.params["name"] for item in mine}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(run) for name, run in work.items() if name in asked}
        pool.shutdown(cancel_futures=True)
