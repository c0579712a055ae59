"""Fixtures and hooks of all tests: short paths, make targets, a last line about skips, no deadlines.

A slow machine is no bug, so hypothesis times neither its examples nor the making of them. It tries few
examples, and many with ``--hypothesis-profile=large``, which ``make test-all`` passes. A shell that starts
this in the background makes it ignore SIGINT, and so would every process that a test ends with Ctrl-C.
"""

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["plugin_schedule", "plugin_skips", "plugin_observers"]

for name, examples in (("small", 15), ("large", 150)):
    settings.register_profile(
        name, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples
    )
settings.load_profile("small")
signal.signal(signal.SIGINT, signal.default_int_handler)

BASE = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Keep tmp_path short: a socket's path has at most 107 bytes, and pytest's own grows with every run."""
    if config.option.basetemp is None:
        config.option.basetemp = config.stash[BASE] = tempfile.mkdtemp(prefix="dh-", dir="/tmp")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Leave the files of a run that failed."""
    if exitstatus != pytest.ExitCode.OK:
        session.config.stash[BASE] = ""


def pytest_unconfigure(config: pytest.Config) -> None:
    if base := config.stash.get(BASE, ""):
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Return the event that hung functions wait for; set at the end, so that no thread stays."""
    made = threading.Event()
    yield made
    made.set()
