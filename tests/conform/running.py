"""``drahealth conform`` as a command, and what it says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from conform.servers import Driver

AT_ONCE: Final = 12
"""Runs that wait, mostly, share two cores."""

PATIENCE_S: Final = 120.0
"""For a run of a few seconds on a machine that has other things to do; whoever needs more hangs."""


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
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environ
    )
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
