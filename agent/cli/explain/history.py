"""What the agent has recorded of uses, for ``drahealth explain``: who had a device, and is gone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agent.cli.explain.words import HISTORY, Account
from agent.cli.output.text import format_count
from agent.errors import Busy
from agent.model.reading import Absence
from agent.node.pods.history_recorder import FILE
from agent.store.files import CorruptFile
from agent.system.clock import read_clocks
from agent.system.threads.with_timeout import DISK_S, late, run_with_timeout

if TYPE_CHECKING:
    from agent.model.uses import DeviceUsage
    from agent.store.history import Record

_Recorded = tuple[tuple["DeviceUsage", ...], tuple[Account, ...]]


async def read_history(state_dir: Path | None) -> _Recorded:
    """Those that go on, then those that ended last first. Where nothing is recorded there is no account."""
    if state_dir is None:
        return (), ()
    path = state_dir / FILE
    try:
        record = await run_with_timeout(partial(_read, path), DISK_S)
    except (FileNotFoundError, NotADirectoryError):
        return (), ()
    except TimeoutError:
        why = late(path, DISK_S)
    except OSError as error:
        why = f"{path}: {error.strerror}"
    except (Busy, CorruptFile) as error:
        why = f"{path}: {error}"
    else:
        uses = (*record.running, *record.ended)
        found = format_count(len(uses), "use of a device", "uses of devices")
        return uses, (Account(HISTORY, str(path), read_clocks(), record.left_s, found),)
    return (), (Account(HISTORY, str(path), read_clocks(), absence=Absence.UNREADABLE, why=why),)


def _read(path: Path) -> Record:
    path.lstat()
    from agent.store.history import read  # SQLite: nothing to load where there is no file

    return read(path)
