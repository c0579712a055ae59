"""Entry point of ``drahealth`` and ``python -m agent``.

The process exits with the exit code of the command line and skips the interpreter's cleanup: Ctrl-C could
interrupt the cleanup, and a thread that hangs in a library could block it forever.
"""

import os

INTERRUPTED = 130
"""Exit code of a shell for a command that SIGINT ended."""


def process() -> None:
    """Run the command line, then end the process with its exit code."""
    try:
        # imported inside the try: imports take half the time of most commands, and Ctrl-C may come meanwhile
        from agent.native.library_search import find_libraries_by_name

        find_libraries_by_name()
        from agent.cli.main import main
        from agent.system.output import unbuffer_outputs

        unbuffer_outputs()
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:  # an error outside main's own handling
        import traceback

        traceback.print_exc()
        code = os.EX_SOFTWARE
    os._exit(code)


if __name__ == "__main__":
    process()
