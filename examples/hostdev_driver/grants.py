"""Grants of claims, as values; hostdev_driver.grant_store saves them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Self

import msgspec

import drahealth
from hostdev_driver.host import Host, format_cpus, parse_size_kib

RELEASE_S: Final = 60.0
"""Earliest retry for a resource of another claim [s]. It is released by another call of the kubelet, so this
one must not wait for it; the kubelet retries after 60 to 90 s."""


class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Part of one device that a claim holds."""

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
        """Return the grant with hugepages of a NUMA node."""
        return msgspec.structs.replace(self, size=size, pages=pages, numa=numa)

    def with_cpus(self, cpus: Iterable[int], *, exclusive: bool) -> Self:
        """Return the grant with CPUs, exclusive or shared."""
        return msgspec.structs.replace(self, cpus=frozenset(cpus), exclusive=exclusive)

    def with_nodes(self, nodes: tuple[str, ...]) -> Self:
        """Return the grant with the device nodes of a device."""
        return msgspec.structs.replace(self, nodes=nodes)


class Holding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All grants of one claim."""

    claim: str
    """``<namespace>/<name>``, for operators."""
    fingerprint: str
    """Fingerprint of the claim's allocation and parameters."""
    grants: tuple[Grant, ...]


Holdings = Mapping[str, Holding]
"""Holdings by the claim's UID."""


def held(holdings: Holdings, claim: drahealth.Claim) -> tuple[Grant, ...]:
    """Return what the claim holds already; nothing if its allocation has changed."""
    holding = holdings.get(claim.uid)
    return holding.grants if holding and holding.fingerprint == claim.fingerprint else ()


def hold(holdings: Holdings, claim: drahealth.Claim, grants: tuple[Grant, ...]) -> Holdings:
    """Return the holdings in which the claim holds only these grants.

    Raises:
        TransientError: ``cpu.overlap``: another claim holds the CPUs until its unprepare.
    """
    others = release(holdings, claim.uid)
    for grant in grants:
        for holding, theirs in _grants(others):
            shared = grant.cpus & theirs.cpus
            if shared and (grant.exclusive or theirs.exclusive):
                raise drahealth.TransientError(
                    f"CPUs {format_cpus(shared)} of {grant.device} are still held by claim {holding.claim}",
                    code="cpu.overlap",
                    requests=(grant.request,),
                    retry_after_s=RELEASE_S,
                )
    return {**others, claim.uid: Holding(str(claim.ref), claim.fingerprint, grants)}


def release(holdings: Holdings, uid: str) -> Holdings:
    """Return the holdings without a claim."""
    return {other: holding for other, holding in holdings.items() if other != uid}


def check_pages(grants: Iterable[Grant], host: Host) -> None:
    """Check that the host has enough free pages for these grants.

    Raises:
        TransientError: ``mem.hugepages.insufficient``: other processes use the pages.
    """
    needed: dict[tuple[str, int], list[Grant]] = {}
    for grant in grants:
        if grant.pages:
            needed.setdefault((grant.size, grant.numa), []).append(grant)
    for (size, numa), of_pool in needed.items():
        pages, free = sum(grant.pages for grant in of_pool), host.free_pages(size, numa)
        if free < pages:
            raise drahealth.TransientError(
                f"{pages} pages of {size} needed on NUMA node {numa}, {free} are free",
                code="mem.hugepages.insufficient",
                requests=tuple(dict.fromkeys(grant.request for grant in of_pool)),
                retry_after_s=RELEASE_S,
            )


def taken_pages(holdings: Holdings, host: Host, size: str, numa: int) -> int:
    """Return the pages of a pool that others than claims use, if too few are free for the next claims.

    Pages that the pool lacks are not taken: drahealth reports a pool that shrank.

    Raises:
        OSError: A count cannot be read.
    """
    parts = (part.device.part for part in host.found.values())
    offered = sum(
        part.pages
        for part in parts
        if isinstance(part, drahealth.Hugepages) and (part.size, part.numa) == (size, numa)
    )
    held_by_claims = sum(
        grant.pages
        for _, grant in _grants(holdings)
        if grant.pages and parse_size_kib(grant.size) == parse_size_kib(size) and grant.numa == numa
    )
    used, free = host.read_pool(size, numa)
    return max(used - held_by_claims, 0) if free < offered - held_by_claims else 0


def _grants(holdings: Holdings) -> Iterator[tuple[Holding, Grant]]:
    for holding in holdings.values():
        for grant in holding.grants:
            yield holding, grant
