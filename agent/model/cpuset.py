"""Sets of CPUs as integers, and their text in the kernel's list format (``0-3,8``)."""

from collections.abc import Iterator

CpuSet = int
"""Set of CPUs as an integer: bit ``n`` is set if CPU ``n`` is in the set."""


def cpu_numbers(cpus: CpuSet) -> Iterator[int]:
    """Yield the numbers of the CPUs in a set, in ascending order."""
    while cpus:
        low = cpus & -cpus
        yield low.bit_length() - 1
        cpus ^= low


def format_cpus(cpus: CpuSet) -> str:
    """Format a set of CPUs in the kernel's list format: ``0-3,8``; the empty set is ``none``."""
    if not cpus:
        return "none"
    parts: list[str] = []
    first = last = -1
    for cpu in cpu_numbers(cpus):
        if cpu != last + 1 or first < 0:
            if first >= 0:
                parts.append(str(first) if first == last else f"{first}-{last}")
            first = cpu
        last = cpu
    parts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(parts)


def parse_cpus(text: str) -> CpuSet:
    """Parse a set of CPUs in the kernel's list format, ``0-3,8``. An empty text is the empty set.

    Raises ValueError: a part is not a CPU number or range up to CPU 8191; the message names the part.
    """
    cpus = 0
    for part in filter(None, (p.strip() for p in text.split(","))):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"{part!r} is not a CPU number or range, such as 0-3")
        first, last = int(low), int(high) if dash else int(low)
        if last < first or last >= 8192:
            raise ValueError(f"CPU range {part!r} is empty or exceeds CPU 8191, the limit")
        cpus |= ((1 << (last - first + 1)) - 1) << first
    return cpus
