"""File whose reads hang uninterruptibly, like calls into a hung GPU driver: a FUSE mount without a server.

When it is released, every read fails, and nothing stays mounted.
"""

import errno
import os
import select
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

REQUEST: Final = struct.Struct("<IIQQIIIHH")
REPLY: Final = struct.Struct("<IiQ")
GETATTR, OPEN, READ, INIT, FORGET, INTERRUPT = 3, 14, 15, 26, 2, 36
MODE: Final = 0o100444
DIRECT_IO: Final = 1

# Sources: include/uapi/linux/fuse.h, protocol 7.31.
BODIES: Final = {
    INIT: struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 1, 1, 4096, 1, 1, 0, 0),
    # valid for 0 s; inode 1, one link
    GETATTR: struct.pack("<QII" + "QQQQQQIIIIIIIIII", 0, 0, 0, *[1, *[0] * 8, MODE, 1, 0, 0, 0, 4096, 0]),
    OPEN: struct.pack("<QII", 0, DIRECT_IO, 0),
}


@contextmanager
def hung_file(path: Path, let_go: Callable[[], bool]) -> Iterator[threading.Event]:
    """Make reads of an existing file hang until the context ends. Yield an event that the first read sets.

    Args:
        path: File to mount over; it is unchanged afterwards.
        let_go: Called a few times a second; once it returns True, reads fail with EIO.

    Raises:
        OSError: FUSE is not available, or this user may not mount.
    """
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    options = f"fd={fuse},rootmode={MODE:o},user_id=0,group_id=0"
    mount = ["mount", "-i", "-t", "fuse", "-o", options, "hung", str(path)]
    done = subprocess.run(mount, pass_fds=[fuse], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        os.close(fuse)
        raise OSError(done.stderr.strip())
    ended, is_read = threading.Event(), threading.Event()
    server = threading.Thread(target=_serve, args=(fuse, let_go, ended, is_read))
    server.start()
    try:
        yield is_read
    finally:
        ended.set()
        server.join()
        os.close(fuse)  # the kernel fails all pending reads
        subprocess.run(["umount", "-l", str(path)], check=True)


def _serve(fuse: int, let_go: Callable[[], bool], ended: threading.Event, is_read: threading.Event) -> None:
    waiting: list[int] = []
    while not ended.is_set():
        readable, _, _ = select.select([fuse], [], [], 0.05)
        if let_go():
            while waiting:
                _answer(fuse, waiting.pop(), -errno.EIO)
        if not readable:
            continue
        try:
            request = os.read(fuse, 1 << 17)
        except BlockingIOError:  # its process was killed meanwhile
            continue
        _, opcode, unique, *_ = REQUEST.unpack_from(request)
        if opcode == READ:
            waiting.append(unique)
            is_read.set()
        elif opcode not in (FORGET, INTERRUPT):
            body = BODIES.get(opcode)
            _answer(fuse, unique, 0 if body else -errno.ENOSYS, body or b"")


def _answer(fuse: int, unique: int, error: int, body: bytes = b"") -> None:
    os.write(fuse, REPLY.pack(REPLY.size + len(body), error, unique) + body)
