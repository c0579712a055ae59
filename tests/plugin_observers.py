"""Observers of each test's result: an independent client, another process, or the test alone.

With ``--junitxml`` each test gets the property ``seen_by``, for docs/reliability.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import pytest
from faults import GRPCIO, OBSERVER_PROPERTY, OTHER_PROCESS, SOCKET_CLIENT, most_independent

if TYPE_CHECKING:
    from collections.abc import Iterator

EVENTS: Final = {
    "socket.connect": SOCKET_CLIENT,
    "subprocess.Popen": OTHER_PROCESS,
    "os.posix_spawn": OTHER_PROCESS,
    "os.fork": OTHER_PROCESS,
}
"""Observers by the audit event of Python that shows them."""

_found: set[str] = set()


def _note_event(event: str, _: tuple[Any, ...]) -> None:
    if event in EVENTS:
        _found.add(EVENTS[event])


def _note_channels() -> None:
    """Note each channel that grpcio makes; its C core causes no audit event."""
    import grpc
    import grpc.aio

    for module in (grpc, grpc.aio):
        make = module.insecure_channel

        def record_and_make(*args: Any, make: Any = make, **kwargs: Any) -> Any:
            _found.add(GRPCIO)
            return make(*args, **kwargs)

        module.insecure_channel = record_and_make


def pytest_configure(config: pytest.Config) -> None:
    """Observe tests only for a JUnit file: an audit hook stays until the end of the process."""
    if config.option.xmlpath:
        _note_channels()
        sys.addaudithook(_note_event)


@pytest.fixture(autouse=True)
def observer(request: pytest.FixtureRequest) -> Iterator[None]:
    """Store what saw the result of a test as its property, if there is a JUnit file."""
    _found.clear()
    yield
    if request.config.option.xmlpath:
        request.node.user_properties.append((OBSERVER_PROPERTY, most_independent(_found)))
