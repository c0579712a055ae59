"""Records of end-to-end scenarios, committed so that each later release replays them with the same verdicts.

``cd tests && PYTHONPATH=.. ../.venv/bin/python -m record_files`` plays the scenarios that have no record,
with the real agent and a fake NVML, and writes their redacted records.
"""

import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from scenarios.stage import play
from scenarios.table import TABLE

from agent.cli.main import main as command_line

DIRECTORY: Final = Path(__file__).parent / "records"
SCENARIOS: Final = (
    "XID 48 by both is one fault",
    "MIG is switched on and off",
    "a GPU at its temperature limit",
    "a crash of NVML keeps latched faults, and the kernel log reports new ones meanwhile",
    "a detected reset resolves a fault that needs one",
    "a fault of one switch link affects all GPUs with links",
    "a hanging GPU is Unknown, then Unhealthy, and recovers when it answers",
    "a lost GPU that requires a reset before it answers",
    "a pending remapping outlasts the recovery action",
    "an NVLink goes down; a link that was never up is no fault",
)


def parse_record_path(scenario: str) -> Path:
    """Return the directory of a scenario's record."""
    return DIRECTORY / re.sub("[^a-z0-9]+", "-", scenario.lower())[:40].strip("-")


def write_record(scenario: str) -> None:
    """Play a scenario and store its record."""
    (row,) = (row for row in TABLE if row.name == scenario)
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as temporary:
        directory = Path(temporary)
        record = directory / "record"
        failure = play(replace(row, flags=(*row.flags, "--record-dir", str(record))), directory)
        assert not failure, failure
        assert (
            command_line(["record", str(record), "--to", str(parse_record_path(scenario)), "--redact"]) == 0
        )


def main() -> None:
    """Write the records that are missing."""
    for scenario in SCENARIOS:
        if not parse_record_path(scenario).exists():
            sys.stdout.write(f"{scenario}\n")
            write_record(scenario)


if __name__ == "__main__":
    main()
