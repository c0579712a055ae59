"""``python -m agent.bench``."""

import signal
import sys

if __name__ == "__main__":  # a process that a suite starts for itself imports this, and only what it measures
    try:
        from agent.bench.main import main
        from agent.system.output import open_outputs

        open_outputs()
        sys.exit(main())
    except KeyboardInterrupt:  # while it was loaded
        sys.exit(128 + signal.SIGINT)
