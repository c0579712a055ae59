"""What was told, and when: the questions that several checks ask of streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Final

from agent.conform.observed import Device, Key, Observed, Stream, StreamEnd, Watch
from agent.conform.verdicts import Judgement, failed, spell, warned, worst

DEFAULT_LEASE_S: Final = 30
"""The kubelet's, for a device whose lease is 0 or negative [s]."""
OVERFLOW_S: Final = 9_223_372_036
"""The longest lease that the kubelet's nanoseconds hold [s]."""
JUST_S: Final = 1.0
"""What changed so shortly before need not be known to everybody yet [s]."""

NAMES_LIMIT: Final = 60
"""Of a pool, and of a name, as it is shown [characters]."""

Telling = tuple[float, Device]
"""When a device was told, and what."""


def name_of(key: Key) -> str:
    """A device as ``pool/name``."""
    pool, name = (spell(part, NAMES_LIMIT) or "(empty)" for part in key)
    return f"{pool}/{name}"


def lease_of(device: Device) -> float:
    """How long the kubelet believes it [s]; one that overflows has ended at once."""
    if device.lease_s > OVERFLOW_S:
        return 0.0
    return device.lease_s if device.lease_s > 0 else DEFAULT_LEASE_S


def tellings(stream: Stream) -> dict[Key, list[Telling]]:
    """Each device's, in order; of several in one list the last, as the kubelet takes it."""
    found: dict[Key, list[Telling]] = {}
    for one in stream.lists:
        for key, device in {device.key: device for device in one.devices}.items():
            found.setdefault(key, []).append((one.at_s, device))
    return found


def steps(stream: Stream) -> Iterator[tuple[Key, Telling, Telling]]:
    """Every two tellings of a device that follow each other."""
    for key, told in tellings(stream).items():
        for before, after in pairwise(told):
            yield key, before, after


def entries(stream: Stream) -> Iterator[Device]:
    """All that was told, each thing once, in the order of its first time."""
    yield from dict.fromkeys(device for one in stream.lists for device in one.devices)


def known_at(streams: Iterable[Stream], at_s: float) -> dict[Key, Telling]:
    """The last word on each device, up to then."""
    known: dict[Key, Telling] = {}
    for stream in streams:
        for one in stream.lists:
            if one.at_s <= at_s:
                known |= {device.key: (one.at_s, device) for device in one.devices}
    return known


def lists_of(watch: Watch) -> int:
    """How many lists were heard."""
    return sum(len(stream.lists) for stream in watch.streams)


def is_ours(end: StreamEnd) -> bool:
    """Whether our side ended it."""
    return bool(end.too_large or end.flooded)


def over_streams(
    seen: Observed, judge: Callable[[Stream], Iterable[Judgement]], otherwise: Judgement
) -> Judgement:
    """What is found in the streams of the version that 1.37 hears; if that is nothing, in the other's."""
    found = [one for stream in seen.main.streams if stream.lists for one in judge(stream)]
    if found:
        return worst(found, otherwise)
    other = seen.other
    found = [one for stream in other.streams if stream.lists for one in judge(stream)]
    return worst((one._replace(saw=f"{other.version}: {one.saw}") for one in found), otherwise)


def differences(
    one: Iterable[Stream], other: Iterable[Stream], at_s: float, its: str, theirs: str
) -> Iterator[Judgement]:
    """What two were told differently up to then; without what changed just before.

    Args:
        one: The streams of the first.
        other: Those of the second.
        at_s: The moment.
        its: What the first is called.
        theirs: What the second is called.
    """
    one, other = list(one), list(other)
    known, known_too = known_at(one, at_s), known_at(other, at_s)
    just = changed_since(one, at_s - JUST_S, at_s) | changed_since(other, at_s - JUST_S, at_s)
    for key in sorted((known.keys() | known_too.keys()) - just):
        if key not in known or key not in known_too:
            yield failed(f"{name_of(key)}: {its if key in known else theirs} only")
            continue
        mine, yours = known[key][1], known_too[key][1]
        if mine.health != yours.health:
            yield failed(f"{name_of(key)}: health {mine.health} for {its}, {yours.health} for {theirs}")
        elif mine.message != yours.message:
            yield warned(f"{name_of(key)}: one message for {its}, another for {theirs}")


def changed_since(streams: Iterable[Stream], since_s: float, at_s: float) -> set[Key]:
    """The devices of which something new was said after ``since_s``, up to ``at_s``. That a stream begins is
    nothing new.
    """
    said: dict[Key, tuple[int, bytes]] = {}
    changed: set[Key] = set()
    for stream in streams:
        for number, one in enumerate(stream.lists):
            for device in one.devices:
                words = (device.health, device.message)
                is_new = said.get(device.key, words if number == 0 else None) != words
                if is_new and since_s < one.at_s <= at_s:
                    changed.add(device.key)
                said[device.key] = words
    return changed
