"""A driver with patient limits: ``python -m driver_scenarios.patient MODULE FLAGS``.

A prepare that failed waits for the disk and for the health streams, 1.5 s each, and answers without them if
they are slower. The scenarios are about what it waits for, which takes longer on a busy machine.
"""

import runpy
import sys

from patience import PATIENCE_S

from agent.driver import ledger_writer, prepare_failure_tracker


def main() -> None:
    """Run the module of the driver as a program, with its own arguments."""
    ledger_writer.MAX_DISK_WAIT_S = PATIENCE_S  # type: ignore[misc]
    prepare_failure_tracker.DELIVERY_S = PATIENCE_S  # type: ignore[misc]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
