"""``python -m agent.bench``."""

import sys

if __name__ == "__main__":  # a process that a suite starts for itself imports this, and only what it measures
    from agent.bench.main import main
    from agent.output import open_outputs

    open_outputs()
    sys.exit(main())
