"""The book on disk: who holds what outlives the driver, and two prepares never hand out the same."""

import os
import threading
from pathlib import Path
from typing import Final

import msgspec

import agent
from hostdev_driver.book import Book, Grant, Holding, check_pages, held, hold, release
from hostdev_driver.host import Host

VERSION: Final = 1


class _Head(msgspec.Struct):
    version: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    claims: dict[str, Holding]


class Ledger:
    """A book that is kept in a file. May be used by several threads.

    It is read each time: while one instance of the driver replaces another both use it, one after the other
    as ``PluginServer(serialize=True)`` has it.

    A file that cannot be read is left as it is: what claims hold is not known then, and handing out anything
    might give it to two of them. So claims fail, and say why, until somebody looks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def read(self) -> Book:
        """What is held now.

        Raises:
            PermanentError: ``state.checkpoint_corrupt``, ``state.version_newer``.
            OSError: It cannot be read now.
        """
        with self._lock:
            return self._read()

    def hold(self, claim: agent.Claim, grants: tuple[Grant, ...], host: Host) -> tuple[Grant, ...]:
        """What the claim holds from now on: what it held before, or else these.

        Raises:
            TransientError: Another claim has it: ``cpu.overlap``, ``mem.hugepages.insufficient``.
            PermanentError, OSError: As :meth:`read`; or it cannot be written, and nothing is held.
        """
        with self._lock:
            book = self._read()
            if already := held(book, claim):
                return already
            held_then = hold(book, claim, grants)
            check_pages(grants, host)
            self._write(held_then)
            return grants

    def release(self, uid: str) -> None:
        """The claim holds nothing any more. One that held nothing is no error.

        Raises:
            PermanentError, OSError: As :meth:`hold`.
        """
        with self._lock:
            book = self._read()
            if uid in book:
                self._write(release(book, uid))

    def _read(self) -> Book:
        with agent.doing(agent.Operation.STATE, self._path):
            try:
                return _decode(self._path, self._path.read_bytes())
            except FileNotFoundError:
                return {}

    def _write(self, book: Book) -> None:
        data = msgspec.json.encode(_File(VERSION, dict(book)))
        new = self._path.with_name(f".{self._path.name}.new")
        with agent.doing(agent.Operation.STATE, self._path):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(new, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.rename(self._path)


def _decode(path: Path, data: bytes) -> Book:
    try:
        version = msgspec.json.decode(data, type=_Head).version
        if version > VERSION:
            raise agent.PermanentError(
                f"{path} is of version {version}, this driver reads {VERSION}",
                code="state.version_newer",
                scope=agent.Scope.DRIVER,
            )
        return msgspec.json.decode(data, type=_File).claims
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise agent.PermanentError(
            f"{path} is damaged: {error}", code="state.checkpoint_corrupt", scope=agent.Scope.DRIVER
        ) from None
