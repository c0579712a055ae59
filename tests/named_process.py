"""Real process with a given name."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def named_process(directory: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the process; it ends with its standard input."""
    program = directory / name
    # not written here: a child of another thread could have the file open, which then cannot be executed
    subprocess.run(["cp", Path("/bin/cat").resolve(), program], check=True)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"up\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"up\n"
        yield process
        process.stdin.close()
