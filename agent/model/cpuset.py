"""Sets of CPUs as integers, and the kernel's list format of them."""

from collections.abc import Iterator

CpuSet = int
"""Set of CPUs: bit ``n`` is CPU ``n``. ``&``, ``|`` and ``~`` combine sets."""


def cpus_of(cpus: CpuSet) -> Iterator[int]:
    """Yield the CPU numbers of a set in ascending order."""
    while cpus:
        low = cpus & -cpus
        yield low.bit_length() - 1
        cpus ^= low


def format_cpus(cpus: CpuSet) -> str:
    """Format a set in the kernel's list format: ``0-3,8``; the empty set is ``none``."""
    if not cpus:
        return "none"
    parts: list[str] = []
    first = last = -1
    for cpu in cpus_of(cpus):
        if cpu != last + 1 or first < 0:
            if first >= 0:
                parts.append(str(first) if first == last else f"{first}-{last}")
            first = cpu
        last = cpu
    parts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(parts)


def parse_cpus(text: str) -> CpuSet:
    """Parse the kernel's list format, ``0-3,8``. Empty text is the empty set.

    Raises:
        ValueError: A part is not a CPU number or range; the text names it.
    """
    cpus = 0
    for part in filter(None, (p.strip() for p in text.split(","))):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"{part!r} is not a CPU number or range")
        first, last = int(low), int(high) if dash else int(low)
        if last < first or last >= 8192:
            raise ValueError(f"CPU range {part!r} is empty or exceeds CPU 8191")
        cpus |= ((1 << (last - first + 1)) - 1) << first
    return cpus
