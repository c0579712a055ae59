"""``python -m agent.bench.hugepage_limit_hitter``: a process that hits the hugepage limits of cgroups.

Each line on standard input is the path of a cgroup. The process joins the cgroup, requests one 2 MiB page,
which the cgroup must refuse, and prints a line of JSON: the time just before the request (CLOCK_MONOTONIC,
ns), and whether the request was refused.
"""

import json
import mmap
import os
import sys
import time

MAP_HUGETLB = 0x40000
MAP_HUGE_2MB = 21 << 26
PAGE = 2 << 20


def main() -> None:
    """Hit the limit of each cgroup until standard input ends."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB
    for line in sys.stdin:
        with open(os.path.join(line.rstrip("\n"), "cgroup.procs"), "w") as procs:
            procs.write(str(os.getpid()))
        t_ns = time.monotonic_ns()
        try:
            mmap.mmap(-1, PAGE, flags=flags).close()
        except OSError:
            refused = True
        else:
            refused = False
        print(json.dumps({"t_ns": t_ns, "refused": refused}), flush=True)


if __name__ == "__main__":
    main()
