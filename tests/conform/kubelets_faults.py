"""Drivers that treat several kubelets differently, or delay one because of another."""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import grpc

from conform.faults import fails, warns
from conform.lists import ListedDevice, health_list
from conform.servers import Driver, RefusedCall, Stream

LARGE_LIST = tuple(ListedDevice(b"gpu-%d" % number, message=b"x" * 600, lease_s=60) for number in range(200))
"""List above the size of the buffers on its way, once or twice; with a lease above any delay."""


@fails("health.versions_agree")
class DifferentHealthPerVersion(Driver):
    """Driver that serves v1alpha1 by other code, which knows no faults."""

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        listed = super().devices(stream, lists)
        return [ListedDevice(device.name) for device in listed] if stream.version == "v1alpha1" else listed


@warns("health.versions_agree")
class DifferentTextPerVersion(Driver):
    """Driver that has shorter texts in v1alpha1."""

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        listed = super().devices(stream, lists)
        return (
            [device._replace(message=device.message[:10]) for device in listed]
            if stream.version == "v1alpha1"
            else listed
        )


@fails("health.reconnect", also={"health.two_kubelets": "fail", "health.stopped_reader": "fail"}, for_s=5)
class FullListForFirstStreamOnly(Driver):
    """Driver that sends only one device on later streams."""

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        listed = super().devices(stream, lists)
        return listed if stream.opened == 0 else listed[:1]


@warns("health.reconnect", for_s=6)
class LaterStreamsWaitForHeartbeat(Driver):
    """Driver that sends nothing on later streams until a while has passed."""

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        if stream.opened == 0 or stream.wait(1.5):
            yield from super().send_lists(stream)


class _TracksStreams(Driver):
    """Driver that keeps a list of its streams."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.streams: list[Stream] = []
        self.lock = threading.Lock()

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        with self.lock:
            others = [found_stream for found_stream in self.streams if found_stream.version == stream.version]
            self.streams.append(stream)
        try:
            yield from self.send_lists_with_others(stream, others)
        finally:
            with self.lock:
                self.streams.remove(stream)

    def send_lists_with_others(self, stream: Stream, others: Sequence[Stream]) -> Iterator[bytes]:
        """Yield the lists of a stream, given the older streams of its version."""
        return super().send_lists(stream)


@fails("health.two_kubelets", also={"health.ends": "fail"})
class EndsOlderStreams(_TracksStreams):
    """Driver that ends the old stream when a kubelet connects, as if the kubelet had restarted."""

    def send_lists_with_others(self, stream: Stream, others: Sequence[Stream]) -> Iterator[bytes]:
        for other in others:
            other.ended.set()
        yield from Driver.send_lists(self, stream)


@fails("health.two_kubelets")
class ServesOldestStreamOnly(_TracksStreams):
    """Driver that sends nothing on a second stream while the first lasts."""

    def send_lists_with_others(self, stream: Stream, others: Sequence[Stream]) -> Iterator[bytes]:
        for other in others:
            while not other.ended.is_set():
                if not stream.wait(0.05):
                    return
        yield from Driver.send_lists(self, stream)


@fails("health.two_kubelets", also={"health.ends": "fail"})
class EndsAllStreamsTogether(_TracksStreams):
    """Driver that ends all streams when one kubelet disconnects."""

    def send_lists_with_others(self, stream: Stream, others: Sequence[Stream]) -> Iterator[bytes]:
        try:
            yield from Driver.send_lists(self, stream)
        finally:
            with self.lock:
                ended_streams = [
                    found_stream for found_stream in self.streams if found_stream.version == stream.version
                ]
            for found_stream in ended_streams:
                found_stream.ended.set()


@fails("health.stopped_reader", for_s=10)
class WaitsForSlowReaders(Driver):
    """Driver that sends to all in turn from one thread, with a list above the size of the buffers."""

    heartbeat_s = 0.2

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._lists: dict[Stream, queue.Queue[bytes]] = {}
        self._speaker = threading.Thread(target=self._send_in_turn)

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return LARGE_LIST

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        queue_of_stream = queue.Queue[bytes](1)
        queue_of_stream.put(health_list(self.devices(stream, 0)))
        self._lists[stream] = queue_of_stream
        try:
            while not stream.ended.is_set():
                with suppress(queue.Empty):
                    yield queue_of_stream.get(timeout=0.05)
        finally:
            del self._lists[stream]

    def serve(self) -> None:
        super().serve()
        self._speaker.start()

    def stop(self) -> None:
        super().stop()
        self._speaker.join()

    def _send_in_turn(self) -> None:
        while not self.ended.wait(self.heartbeat_s):
            for stream, lists in list(self._lists.items()):
                while not self.ended.is_set() and stream in self._lists:
                    with suppress(queue.Full):
                        lists.put(health_list(self.devices(stream, 1)), timeout=0.05)
                        break


@warns("health.stopped_reader")
class EndsSlowStreams(Driver):
    """Driver that ends the stream of a reader that does not take a list within a second."""

    heartbeat_s = 0.1

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return LARGE_LIST

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        for run in super().send_lists(stream):
            began_s = stream.age_s
            yield run
            if stream.age_s - began_s > 1:
                raise RefusedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow")
