"""Drivers that tell one kubelet otherwise than another, or not at all while there is another."""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import grpc

from conform.faults import fails, warns
from conform.lists import Told, health_list
from conform.servers import Driver, Refused, Stream

MUCH = tuple(Told(b"gpu-%d" % number, message=b"x" * 600, lease_s=60) for number in range(200))
"""More than the buffers on its way hold, once or twice; and believed for longer than anybody is held up."""


@fails("health.versions_agree")
class TellsEachVersionItsOwn(Driver):
    """The old version is served by other code, which knows of no faults."""

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        told = super().devices(stream, lists)
        return [Told(one.name) for one in told] if stream.version == "v1alpha1" else told


@warns("health.versions_agree")
class WordsItForEachVersion(Driver):
    """The old version has shorter texts."""

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        told = super().devices(stream, lists)
        return (
            [one._replace(message=one.message[:10]) for one in told] if stream.version == "v1alpha1" else told
        )


@fails("health.reconnect", also={"health.two_kubelets": "fail", "health.stopped_reader": "fail"}, for_s=5)
class TellsTheFirstOnly(Driver):
    """Whoever comes later hears of one device."""

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        told = super().devices(stream, lists)
        return told if stream.opened == 0 else told[:1]


@warns("health.reconnect", for_s=6)
class WaitsForTheBeat(Driver):
    """Whoever comes later hears nothing before a while has passed."""

    def speak(self, stream: Stream) -> Iterator[bytes]:
        if stream.opened == 0 or stream.wait(1.5):
            yield from super().speak(stream)


class _Knows(Driver):
    """Keeps a list of its streams."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.streams: list[Stream] = []
        self.lock = threading.Lock()

    def speak(self, stream: Stream) -> Iterator[bytes]:
        with self.lock:
            others = [one for one in self.streams if one.version == stream.version]
            self.streams.append(stream)
        try:
            yield from self.speak_beside(stream, others)
        finally:
            with self.lock:
                self.streams.remove(stream)

    def speak_beside(self, stream: Stream, others: Sequence[Stream]) -> Iterator[bytes]:
        """What it says on a stream, when these were there before it."""
        return super().speak(stream)


@fails("health.two_kubelets", also={"health.ends": "fail"})
class SpeaksToTheNewest(_Knows):
    """A kubelet that connects must be the old one's successor: the old stream is ended."""

    def speak_beside(self, stream: Stream, others: Sequence[Stream]) -> Iterator[bytes]:
        for other in others:
            other.ended.set()
        yield from Driver.speak(self, stream)


@fails("health.two_kubelets")
class SpeaksToTheOldest(_Knows):
    """There is one stream, and whoever comes second hears nothing while it lasts."""

    def speak_beside(self, stream: Stream, others: Sequence[Stream]) -> Iterator[bytes]:
        for other in others:
            while not other.ended.is_set():
                if not stream.wait(0.05):
                    return
        yield from Driver.speak(self, stream)


@fails("health.two_kubelets", also={"health.ends": "fail"})
class EndsThemTogether(_Knows):
    """When a kubelet is gone, so must be all of its streams."""

    def speak_beside(self, stream: Stream, others: Sequence[Stream]) -> Iterator[bytes]:
        try:
            yield from Driver.speak(self, stream)
        finally:
            with self.lock:
                gone = [one for one in self.streams if one.version == stream.version]
            for one in gone:
                one.ended.set()


@fails("health.stopped_reader", for_s=10)
class WaitsForTheSlowest(Driver):
    """One thread speaks to all in turn, and a list is too large for the buffers on its way."""

    heartbeat_s = 0.2

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._lists: dict[Stream, queue.Queue[bytes]] = {}
        self._speaker = threading.Thread(target=self._speak_in_turn)

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return MUCH

    def speak(self, stream: Stream) -> Iterator[bytes]:
        mine = queue.Queue[bytes](1)
        mine.put(health_list(self.devices(stream, 0)))
        self._lists[stream] = mine
        try:
            while not stream.ended.is_set():
                with suppress(queue.Empty):
                    yield mine.get(timeout=0.05)
        finally:
            del self._lists[stream]

    def serve(self) -> None:
        super().serve()
        self._speaker.start()

    def stop(self) -> None:
        super().stop()
        self._speaker.join()

    def _speak_in_turn(self) -> None:
        while not self.ended.wait(self.heartbeat_s):
            for stream, lists in list(self._lists.items()):
                while not self.ended.is_set() and stream in self._lists:
                    with suppress(queue.Full):
                        lists.put(health_list(self.devices(stream, 1)), timeout=0.05)
                        break


@warns("health.stopped_reader")
class CutsOffTheSlow(Driver):
    """Who does not take a list in a second gets none any more."""

    heartbeat_s = 0.1

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return MUCH

    def speak(self, stream: Stream) -> Iterator[bytes]:
        for said in super().speak(stream):
            began_s = stream.age_s
            yield said
            if stream.age_s - began_s > 1:
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow")
