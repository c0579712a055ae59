"""Drivers with faults in their health lists, and correct streams."""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property

from conform.faults import fails, warns
from conform.lists import LEASE_S, UNKNOWN, ListedDevice, health_list
from conform.servers import Driver, Stream

DAY_S = 86_400
GO_LIMIT_S = 9_223_372_036
"""Longest time that Go's nanoseconds hold."""


class ChangedDevice(Driver):
    """Driver that reports one of two devices with other values."""

    listed: ListedDevice

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return (self.listed, ListedDevice(b"gpu-1"))


class SendsBytes(Driver):
    """Driver that sends bytes in place of a list."""

    data = b""

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        yield self.data
        stream.wait_closed()


# --- leases -------------------------------------------------------------------------------------------------


@warns("health.lease")
class LeaseBelowZero(ChangedDevice):
    listed = ListedDevice(lease_s=-1)


@warns("health.lease")
class LeaseOfTwoSeconds(ChangedDevice):
    heartbeat_s = 0.2
    listed = ListedDevice(lease_s=2)


@warns("health.lease")
class LeaseOfMoreThanADay(ChangedDevice):
    listed = ListedDevice(lease_s=DAY_S + 1)


@fails("health.lease")
class LeaseOfThreeCenturies(ChangedDevice):
    listed = ListedDevice(lease_s=GO_LIMIT_S + 1)


@warns("health.lease.stable")
class LeaseThatAlternates(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(lease_s=LEASE_S + lists % 2)]


# --- texts --------------------------------------------------------------------------------------------------


@fails("health.text.stable")
class TextWithATemperature(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(message=b"%d degrees" % (60 + lists))]


@warns("health.text.stable")
class TextThatChanges(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(message=(b"warm", b"rather warm", b"hot")[lists % 3])]


@warns("health.message.size")
class TextTooLong(ChangedDevice):
    listed = ListedDevice(message=b"x" * 1025)


@fails("health.message.size")
class TextCutInACharacter(ChangedDevice):
    listed = ListedDevice(message=b"x" * 1020 + "é".encode() * 10)


@fails("health.utf8")
class TextInLatin1(ChangedDevice):
    listed = ListedDevice(message="zu heiß".encode("latin-1"))


@fails("health.utf8")
class NameInLatin1(ChangedDevice):
    listed = ListedDevice(name=b"gpu-\xe9")


@fails("health.utf8")
class PoolInLatin1(ChangedDevice):
    listed = ListedDevice(pool=b"node-\xe9")


# --- bytes --------------------------------------------------------------------------------------------------


@fails("health.decode")
class HalfAList(SendsBytes):
    data = health_list([ListedDevice()])[:-3]


@fails("health.decode")
class NoProtobuf(SendsBytes):
    data = b'{"devices": [{"name": "gpu-0", "health": "Healthy"}]}'


@fails("health.decode")
class EndlessNumber(SendsBytes):
    data = b"\xff" * 32


class _Many(Driver):
    """Driver that sends lists of about this size."""

    size = 0
    heartbeat_s = 1.0

    @cached_property
    def data(self) -> bytes:
        entry_size = len(health_list([ListedDevice(b"gpu-0000", message=b"x" * 1000)]))
        return health_list(
            ListedDevice(b"gpu-%04d" % number, message=b"x" * 1000)
            for number in range(self.size // entry_size + 1)
        )

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
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
class DuplicateDevice(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(), ListedDevice()]


@fails("health.duplicates")
class ContradictoryDuplicate(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(), ListedDevice(health=2)]


@fails("health.names")
class DeviceWithoutIdentifier(ChangedDevice):
    listed = ListedDevice(nameless=True)


@fails("health.names")
class DeviceWithoutName(ChangedDevice):
    listed = ListedDevice(name=b"")


@fails("health.names")
class DeviceWithoutPool(ChangedDevice):
    listed = ListedDevice(pool=b"")


@warns("health.names")
class DeviceNamedAsInNvml(ChangedDevice):
    listed = ListedDevice(name=b"GPU_0")


@warns("health.names")
class PoolNamedAsInWindows(ChangedDevice):
    listed = ListedDevice(pool=b"NODE_A")


@warns("health.devices", for_s=2)
class NoDevices(Driver):
    """Driver that sends empty lists."""

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return ()


@fails("health.known")
class AlwaysUnknown(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(health=UNKNOWN)]


@warns("health.known")
class OneAlwaysUnknown(ChangedDevice):
    listed = ListedDevice(health=UNKNOWN)


@fails("health.time.fresh")
class TimeOf2001(ChangedDevice):
    """Driver that reports Healthy without a check since 2001."""

    listed = ListedDevice(at_s=1_000_000_000)


@warns("health.time.fresh")
class TimeOfAnOldCheck(Driver):
    """Driver that reports the verdict of a check that took place two thirds of a lease ago."""

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(lease_s=30, at_s=int(time.time()) - 20)]


@warns("health.enum")
class HealthSeven(ChangedDevice):
    listed = ListedDevice(health=7)


@warns("health.enum")
class HealthBelowZero(ChangedDevice):
    listed = ListedDevice(health=-1)


@warns("health.time")
class TimeZero(ChangedDevice):
    listed = ListedDevice(at_s=0)


@warns("health.time")
class TimeBelowZero(ChangedDevice):
    listed = ListedDevice(at_s=-1)


@warns("health.time")
class TimeInTheFuture(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(at_s=int(time.time()) + 3600)]


@warns("health.time")
class TimeInMilliseconds(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(at_s=time.time_ns() // 1_000_000)]


@warns("health.time")
class TimeInNanoseconds(Driver):
    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(at_s=time.time_ns())]
