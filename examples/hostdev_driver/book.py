"""Which claim holds what. Values in, values out: what is on disk is hostdev_driver.ledger's."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Self

import msgspec

import agent
from hostdev_driver.host import Host, format_cpus, kib_of

RELEASE_S: Final = 60.0
"""What somebody else has is free when that pod has ended, of which the kubelet tells us in another call: this
one must not wait for it. The kubelet is back after 60 to 90 s [s]."""


class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a claim was given of one device."""

    request: str
    pool: str
    device: str
    share_id: str = ""
    cpus: frozenset[int] = frozenset()
    exclusive: bool = False
    size: str = ""
    pages: int = 0
    numa: int = 0
    nodes: tuple[str, ...] = ()

    def with_pages(self, size: str, pages: int, numa: int) -> Self:
        """Some pages of a NUMA node."""
        return msgspec.structs.replace(self, size=size, pages=pages, numa=numa)

    def with_cpus(self, cpus: Iterable[int], *, exclusive: bool) -> Self:
        """Some CPUs, alone or with others."""
        return msgspec.structs.replace(self, cpus=frozenset(cpus), exclusive=exclusive)

    def with_nodes(self, nodes: tuple[str, ...]) -> Self:
        """The device nodes of a device."""
        return msgspec.structs.replace(self, nodes=nodes)


class Holding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a claim holds."""

    claim: str
    """``<namespace>/<name>``, for people."""
    fingerprint: str
    """Of the allocation and the parameters that it follows from."""
    grants: tuple[Grant, ...]


Book = Mapping[str, Holding]
"""By the claim's UID."""


def held(book: Book, claim: agent.Claim) -> tuple[Grant, ...]:
    """What the claim holds already; nothing if it was allocated anew since."""
    holding = book.get(claim.uid)
    return holding.grants if holding and holding.fingerprint == claim.fingerprint else ()


def hold(book: Book, claim: agent.Claim, grants: tuple[Grant, ...]) -> Book:
    """The book in which the claim holds this, and nothing else.

    Raises:
        TransientError: ``cpu.overlap``: CPUs that another claim holds, which will be unprepared one day.
    """
    others = release(book, claim.uid)
    for grant in grants:
        for holding, theirs in _grants(others):
            shared = grant.cpus & theirs.cpus
            if shared and (grant.exclusive or theirs.exclusive):
                raise agent.TransientError(
                    f"CPUs {format_cpus(shared)} of {grant.device} are still held by claim {holding.claim}",
                    code="cpu.overlap",
                    requests=(grant.request,),
                    retry_after_s=RELEASE_S,
                )
    return {**others, claim.uid: Holding(str(claim.ref), claim.fingerprint, grants)}


def release(book: Book, uid: str) -> Book:
    """The book in which a claim holds nothing."""
    return {other: holding for other, holding in book.items() if other != uid}


def check_pages(grants: Iterable[Grant], host: Host) -> None:
    """That there are as many free pages as a claim is about to hold.

    Raises:
        TransientError: ``mem.hugepages.insufficient``: somebody else uses them, for now.
    """
    needed: dict[tuple[str, int], list[Grant]] = {}
    for grant in grants:
        if grant.pages:
            needed.setdefault((grant.size, grant.numa), []).append(grant)
    for (size, numa), wanting in needed.items():
        pages, free = sum(grant.pages for grant in wanting), host.free_pages(size, numa)
        if free < pages:
            raise agent.TransientError(
                f"{pages} pages of {size} needed on NUMA node {numa}, {free} are free",
                code="mem.hugepages.insufficient",
                requests=tuple(dict.fromkeys(grant.request for grant in wanting)),
                retry_after_s=RELEASE_S,
            )


def unheld_pages(book: Book, host: Host, size: str, numa: int) -> int:
    """Pages of a pool that no claim holds: they must be free when one comes for them."""
    parts = (one.device.part for one in host.found.values())
    all_pages = sum(
        part.pages
        for part in parts
        if isinstance(part, agent.Hugepages) and (part.size, part.numa) == (size, numa)
    )
    taken = sum(
        grant.pages
        for _, grant in _grants(book)
        if grant.pages and kib_of(grant.size) == kib_of(size) and grant.numa == numa
    )
    return max(all_pages - taken, 0)


def _grants(book: Book) -> Iterator[tuple[Holding, Grant]]:
    for holding in book.values():
        for grant in holding.grants:
            yield holding, grant
