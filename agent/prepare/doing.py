"""What a driver was doing when an exception came: a mark on the exception as it passes.

The same errno means something else in each operation. The mark is an attribute of the exception, so that
nothing has to be kept anywhere; the innermost one stays.
"""

from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple

from agent.model.prepare import Operation

_MARK: Final = "_drahealth_doing"


class Doing(NamedTuple):
    """What was done, and to what."""

    operation: Operation
    path: str = ""
    """A file, or the name of a device; empty: not said."""


class doing:
    """Marks an exception that passes with what was being done::

        with doing(Operation.CDI, path):
            path.write_text(spec)

    Args:
        path: What it is done to: a file, or with ``Operation.DEVICE`` the name of a device of the claim.

    Raises:
        ValueError: there is no such operation.
    """

    # No contextlib.contextmanager: it assigns to the exception, which one that is frozen does not stand.

    def __init__(self, operation: Operation, path: object = "") -> None:
        self._doing = Doing(Operation(operation), str(path))

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and done_by(error) is None:
            with suppress(Exception):  # one that takes no attribute is judged without
                setattr(error, _MARK, self._doing)


def done_by(error: BaseException) -> Doing | None:
    """The mark of an exception; None: it has none."""
    mark = getattr(error, _MARK, None)
    return mark if isinstance(mark, Doing) else None
