"""``python -m agent``: the same as the command ``drahealth``."""

import sys

from agent.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
