"""Store of grants on disk: what each claim holds survives a restart; two claims never get one resource."""

import os
import threading
from pathlib import Path
from typing import Final

import msgspec

import drahealth
from hostdev_driver.grants import Grant, Holding, Holdings, check_pages, held, hold, release
from hostdev_driver.host import Host

VERSION: Final = 1


class _Head(msgspec.Struct):
    version: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    claims: dict[str, Holding]


class GrantStore:
    """File of what claims hold. Thread-safe.

    The file is read at each call: during a rolling update two instances of the driver use it one after the
    other (``PluginServer(serialize=True)``).

    A corrupt file is not changed: it is unknown what claims hold, and a new grant might give a resource to
    two claims. So all claims fail with this cause until an operator repairs the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def read(self) -> Holdings:
        """Return what claims hold now.

        Raises:
            PermanentError: ``state.checkpoint_corrupt``, ``state.version_newer``.
            OSError: The file cannot be read now.
        """
        with self._lock:
            return self._read()

    def hold(self, claim: drahealth.Claim, grants: tuple[Grant, ...], host: Host) -> tuple[Grant, ...]:
        """Record these grants for the claim, unless it holds some already; returns what it holds.

        Raises:
            TransientError: Another claim holds a resource: ``cpu.overlap``, ``mem.hugepages.insufficient``.
            PermanentError, OSError: See :meth:`read`; or the file cannot be written, and nothing is recorded.
        """
        with self._lock:
            holdings = self._read()
            if already := held(holdings, claim):
                return already
            new_holdings = hold(holdings, claim, grants)
            check_pages(grants, host)
            self._write(new_holdings)
            return grants

    def release(self, uid: str) -> None:
        """Drop what a claim holds; a claim that holds nothing is no error.

        Raises:
            PermanentError, OSError: See :meth:`hold`.
        """
        with self._lock:
            holdings = self._read()
            if uid in holdings:
                self._write(release(holdings, uid))

    def _read(self) -> Holdings:
        with drahealth.doing(drahealth.Operation.STATE, self._path):
            try:
                return _decode(self._path, self._path.read_bytes())
            except FileNotFoundError:
                return {}

    def _write(self, holdings: Holdings) -> None:
        data = msgspec.json.encode(_File(VERSION, dict(holdings)))
        new = self._path.with_name(f".{self._path.name}.new")
        with drahealth.doing(drahealth.Operation.STATE, self._path):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(new, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.rename(self._path)


def _decode(path: Path, data: bytes) -> Holdings:
    try:
        version = msgspec.json.decode(data, type=_Head).version
        if version > VERSION:
            raise drahealth.PermanentError(
                f"{path} has version {version}, this driver reads version {VERSION}",
                code="state.version_newer",
                scope=drahealth.Scope.DRIVER,
            )
        return msgspec.json.decode(data, type=_File).claims
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise drahealth.PermanentError(
            f"{path} is damaged: {error}", code="state.checkpoint_corrupt", scope=drahealth.Scope.DRIVER
        ) from None
