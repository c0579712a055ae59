"""Memory of the process that comes back after large data, with the allocator of the systemd unit."""

import os
import subprocess
import sys

PROGRAM = """if True:
    import sys, threading
    from agent.native.process import trim_heap, use_one_heap_arena
    from own_process import resident
    use_one_heap_arena()
    kept = []
    def fill():
        large = [{"claim": str(number), "devices": [number]} for number in range(150_000)]
        kept.extend(large[::5000])
    for _ in range(4):
        thread = threading.Thread(target=fill)
        thread.start()
        thread.join()
    before = resident()
    trim_heap()
    print((before - resident()) >> 20)
"""


def test_memory_of_freed_data_of_threads_comes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONMALLOC": "malloc", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert int(done.stdout) >= 20, "MiB of about 50"
