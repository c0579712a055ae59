"""Sets of CPUs as integers: bit ``n`` is CPU ``n``. Printed as the kernel prints them."""

from collections.abc import Iterator

CpuSet = int
"""Bit ``n`` set means CPU ``n`` is in the set. Immutable, hashable, ``&`` and ``|`` work."""


def cpus_of(cpus: CpuSet) -> Iterator[int]:
    """The CPU numbers of a set, ascending."""
    while cpus:
        low = cpus & -cpus
        yield low.bit_length() - 1
        cpus ^= low


def format_cpus(cpus: CpuSet) -> str:
    """The kernel's list format: ``0-3,8``; the empty set is ``none``."""
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
    """The inverse of :func:`format_cpus`: ``"0-3,8"`` to a set. Empty text is the empty set.

    Raises:
        ValueError: naming the part that is no CPU number or range.
    """
    cpus = 0
    for part in filter(None, (p.strip() for p in text.split(","))):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"{part!r} is no CPU number or range")
        first, last = int(low), int(high) if dash else int(low)
        if last < first or last >= 8192:
            raise ValueError(f"CPU range {part!r} is empty or reaches beyond CPU 8191")
        cpus |= ((1 << (last - first + 1)) - 1) << first
    return cpus
