"""Drivers with faults in their health streams: their versions, the time of their lists, and their ends."""

from collections.abc import Iterator, Sequence

import grpc

from conform.faults import fails, warns
from conform.lists import ListedDevice, health_list
from conform.servers import SERVICES, Driver, RefusedCall, Stream

PLUGIN_SERVICES = SERVICES[:2]
HEALTH_V1, HEALTH_V1ALPHA1 = SERVICES[2:]


# --- versions -----------------------------------------------------------------------------------------------


@fails("health.v1", also={"health.v1alpha1": "fail", "registration.health": "warn"})
class AdvertisesUnservedHealth(Driver):
    """Driver that advertises both services, and serves neither."""

    health_versions = ()


@fails("health.v1", also={"health.v1alpha1": "fail", "registration.health": "warn"})
class ServesNoHealth(Driver):
    """Driver that neither advertises nor serves health, as old drivers."""

    health_versions = ()
    services = PLUGIN_SERVICES


@warns("health.v1", also={"registration.health": "warn"})
class ServesV1alpha1Only(Driver):
    """Driver that was written for kubelet 1.34."""

    health_versions = ("v1alpha1",)
    services = (*PLUGIN_SERVICES, HEALTH_V1ALPHA1)


@fails("health.v1alpha1")
class ServesV1Only(Driver):
    """Driver that was written for kubelet 1.37."""

    health_versions = ("v1",)
    services = (*PLUGIN_SERVICES, HEALTH_V1)


@warns("health.unavailable")
class UnavailableAtFirst(Driver):
    """Driver that answers before its backend has started."""

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        if stream.opened == 0:
            raise RefusedCall(grpc.StatusCode.UNAVAILABLE, "the backend starts")
        yield from super().send_lists(stream)


@fails("health.unavailable")
class AlwaysUnavailable(Driver):
    """Driver that has a backend that does not start."""

    code = grpc.StatusCode.UNAVAILABLE

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        raise RefusedCall(self.code, "the backend is down")
        yield


@fails("health.unavailable")
class AlwaysInternalError(AlwaysUnavailable):
    """Driver that has a bug in every stream."""

    code = grpc.StatusCode.INTERNAL


class _Anything(grpc.GenericRpcHandler):
    """Handler of every method without another handler."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def refuse(request: bytes, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.INTERNAL, "unknown method")

        return grpc.unary_unary_rpc_method_handler(refuse)


@warns("health.unknown_method")
class AnswersUnknownMethods(Driver):
    """Driver that answers unknown methods with INTERNAL."""

    def health_handlers(self) -> list[grpc.GenericRpcHandler]:
        return [*super().health_handlers(), _Anything()]


# --- time of the lists --------------------------------------------------------------------------------------


@fails("health.first_list")
class SendsNoList(Driver):
    """Driver that opens the stream, and sends nothing."""

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        stream.wait_closed()
        return
        yield


@warns("health.first_list", also={"health.reconnect": "warn"}, for_s=6)
class FirstListAfterDelay(Driver):
    """Driver that checks its devices only when a stream opens, which takes a while."""

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        if stream.wait(1.5):
            yield from super().send_lists(stream)


@warns("health.whole", for_s=4)
class SecondDeviceLater(Driver):
    """Driver that has a heartbeat per device, of which the second begins later."""

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return super().devices(stream, lists)[: 1 if stream.age_s < 2 else 2]


@fails("health.heartbeat", for_s=5)
class SendsOneList(Driver):
    """Driver that sends a list only after a change."""

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        yield health_list([ListedDevice(lease_s=3)])
        stream.wait_closed()


@fails("health.heartbeat", for_s=5)
class OmitsADevice(Driver):
    """Driver that omits the second device from every list but the first."""

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        both = [ListedDevice(b"gpu-0", lease_s=3), ListedDevice(b"gpu-1", lease_s=3)]
        return both[: 2 if lists == 0 else 1]


@warns("health.heartbeat", for_s=5)
class HeartbeatCloseToLease(Driver):
    """Driver that loses the lease with a single lost heartbeat."""

    heartbeat_s = 3.5

    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(lease_s=5)]


@warns("health.rate")
class SendsTooOften(Driver):
    """Driver that sends two hundred lists a second, or as many as it can."""

    heartbeat_s = 0.005


# --- end of streams and connections -------------------------------------------------------------------------


@fails("health.ends")
class EndsStreams(Driver):
    """Driver that ends each stream after a second, with OK."""

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        yield health_list(self.devices(stream, 0))
        stream.wait(1)


@fails("health.ends")
class EndsStreamsWithError(EndsStreams):
    """Driver that ends each stream after a second, with an error."""

    def send_lists(self, stream: Stream) -> Iterator[bytes]:
        yield from super().send_lists(stream)
        raise RefusedCall(grpc.StatusCode.INTERNAL, "lost the backend")


@warns("health.goaway")
class ClosesOldConnections(Driver):
    """Driver that sends GOAWAY by age, as servers behind a load balancer do; open streams may continue."""

    options = (("grpc.max_connection_age_ms", 1000),)


@fails("health.goaway")
class ClosesOldConnectionsWithStreams(Driver):
    """Driver that sends GOAWAY by age, and ends open streams after half a second."""

    options = (("grpc.max_connection_age_ms", 1000), ("grpc.max_connection_age_grace_ms", 500))
