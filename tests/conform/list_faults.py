"""Drivers whose health lists are wrong, while their streams behave."""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property

from conform.faults import fails, warns
from conform.lists import LEASE_S, Told, health_list
from conform.servers import Driver, Stream

DAY_S = 86_400
GO_LIMIT_S = 9_223_372_036
"""The longest time that Go's nanoseconds hold."""


class Says(Driver):
    """Says something else of one of two devices."""

    told: Told

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return (self.told, Told(b"gpu-1"))


class SaysBytes(Driver):
    """Sends something else than a list."""

    data = b""

    def speak(self, stream: Stream) -> Iterator[bytes]:
        yield self.data
        stream.stay()


# --- leases -------------------------------------------------------------------------------------------------


@warns("health.lease")
class LeaseBelowZero(Says):
    told = Told(lease_s=-1)


@warns("health.lease")
class LeaseOfTwoSeconds(Says):
    heartbeat_s = 0.2
    told = Told(lease_s=2)


@warns("health.lease")
class LeaseOfMoreThanADay(Says):
    told = Told(lease_s=DAY_S + 1)


@fails("health.lease")
class LeaseOfThreeCenturies(Says):
    told = Told(lease_s=GO_LIMIT_S + 1)


@warns("health.lease.stable")
class LeaseThatAlternates(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(lease_s=LEASE_S + lists % 2)]


# --- texts --------------------------------------------------------------------------------------------------


@fails("health.text.stable")
class TextWithATemperature(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(message=b"%d degrees" % (60 + lists))]


@warns("health.text.stable")
class TextThatWanders(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(message=(b"warm", b"rather warm", b"hot")[lists % 3])]


@warns("health.message.size")
class TextTooLong(Says):
    told = Told(message=b"x" * 1025)


@fails("health.message.size")
class TextCutInACharacter(Says):
    told = Told(message=b"x" * 1020 + "é".encode() * 10)


@fails("health.utf8")
class TextInLatin1(Says):
    told = Told(message="zu heiß".encode("latin-1"))


@fails("health.utf8")
class NameInLatin1(Says):
    told = Told(name=b"gpu-\xe9")


@fails("health.utf8")
class PoolInLatin1(Says):
    told = Told(pool=b"node-\xe9")


# --- bytes --------------------------------------------------------------------------------------------------


@fails("health.decode")
class HalfAList(SaysBytes):
    data = health_list([Told()])[:-3]


@fails("health.decode")
class NoProtobuf(SaysBytes):
    data = b'{"devices": [{"name": "gpu-0", "health": "Healthy"}]}'


@fails("health.decode")
class EndlessNumber(SaysBytes):
    data = b"\xff" * 32


class _Many(Driver):
    """Lists of this size, more or less."""

    size = 0
    heartbeat_s = 1.0

    @cached_property
    def data(self) -> bytes:
        one = len(health_list([Told(b"gpu-0000", message=b"x" * 1000)]))
        return health_list(Told(b"gpu-%04d" % at, message=b"x" * 1000) for at in range(self.size // one + 1))

    def speak(self, stream: Stream) -> Iterator[bytes]:
        yield self.data
        while stream.wait(self.heartbeat_s):
            yield self.data


@fails("health.size")
class ListOverTheLimit(_Many):
    size = 4 << 20


@warns("health.size")
class ListNearTheLimit(_Many):
    size = (1 << 20) + 1


# --- devices ------------------------------------------------------------------------------------------------


@warns("health.duplicates")
class ToldTwice(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(), Told()]


@fails("health.duplicates")
class ToldTwiceInContradiction(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(), Told(health=2)]


@fails("health.names")
class DeviceWithoutIdentifier(Says):
    told = Told(nameless=True)


@fails("health.names")
class DeviceWithoutName(Says):
    told = Told(name=b"")


@fails("health.names")
class DeviceWithoutPool(Says):
    told = Told(pool=b"")


@warns("health.names")
class DeviceNamedAsInNvml(Says):
    told = Told(name=b"GPU_0")


@warns("health.names")
class PoolNamedAsInWindows(Says):
    told = Told(pool=b"NODE_A")


@warns("health.enum")
class HealthOfSevenths(Says):
    told = Told(health=7)


@warns("health.enum")
class HealthBelowZero(Says):
    told = Told(health=-1)


@warns("health.time")
class NeverLooked(Says):
    told = Told(at_s=0)


@warns("health.time")
class LookedBeforeTheEpoch(Says):
    told = Told(at_s=-1)


@warns("health.time")
class WillLook(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(at_s=int(time.time()) + 3600)]


@warns("health.time")
class CountsMilliseconds(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(at_s=time.time_ns() // 1_000_000)]


@warns("health.time")
class CountsNanoseconds(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(at_s=time.time_ns())]
