"""Drivers whose health streams are wrong: which are served, when they speak, when they end."""

from collections.abc import Iterator, Sequence

import grpc

from conform.faults import fails, warns
from conform.lists import Told, health_list
from conform.servers import SERVICES, Driver, Refused, Stream

PLUGIN_SERVICES = SERVICES[:2]
HEALTH_V1, HEALTH_V1ALPHA1 = SERVICES[2:]


# --- which are served ---------------------------------------------------------------------------------------


@fails("health.v1", also={"health.v1alpha1": "fail", "registration.health": "fail"})
class PromisesHealth(Driver):
    """It advertises both services, and serves none."""

    health_versions = ()


@fails("health.v1", also={"health.v1alpha1": "fail", "registration.health": "warn"})
class HasNoHealth(Driver):
    """Of before there was any."""

    health_versions = ()
    services = PLUGIN_SERVICES


@warns("health.v1", also={"registration.health": "warn"})
class SpeaksTheOldVersion(Driver):
    """Written for kubelet 1.34."""

    health_versions = ("v1alpha1",)
    services = (*PLUGIN_SERVICES, HEALTH_V1ALPHA1)


@fails("health.v1alpha1")
class SpeaksTheNewVersion(Driver):
    """Written for kubelet 1.37."""

    health_versions = ("v1",)
    services = (*PLUGIN_SERVICES, HEALTH_V1)


@warns("health.unavailable")
class IsNotReadyAtFirst(Driver):
    """Its backend starts after it."""

    def speak(self, stream: Stream) -> Iterator[bytes]:
        if stream.opened == 0:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the backend starts")
        yield from super().speak(stream)


@fails("health.unavailable")
class IsNeverReady(Driver):
    """Its backend does not start."""

    code = grpc.StatusCode.UNAVAILABLE

    def speak(self, stream: Stream) -> Iterator[bytes]:
        raise Refused(self.code, "the backend is away")
        yield


@fails("health.unavailable")
class IsBroken(IsNeverReady):
    """It has a bug."""

    code = grpc.StatusCode.INTERNAL


class _Anything(grpc.GenericRpcHandler):
    """Takes every method that nobody else took."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def refuse(request: bytes, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.INTERNAL, "no such thing")

        return grpc.unary_unary_rpc_method_handler(refuse)


@warns("health.unknown_method")
class KnowsEveryMethod(Driver):
    """What it does not know is an internal error."""

    def health_handlers(self) -> list[grpc.GenericRpcHandler]:
        return [*super().health_handlers(), _Anything()]


# --- when they speak ----------------------------------------------------------------------------------------


@fails("health.first_list")
class SaysNothing(Driver):
    """The stream is open, and that is all."""

    def speak(self, stream: Stream) -> Iterator[bytes]:
        stream.stay()
        return
        yield


@warns("health.first_list", also={"health.reconnect": "warn"}, for_s=6)
class LooksFirst(Driver):
    """It looks at its devices when somebody asks, and that takes a while."""

    def speak(self, stream: Stream) -> Iterator[bytes]:
        if stream.wait(1.5):
            yield from super().speak(stream)


@warns("health.whole", for_s=4)
class TellsOneByOne(Driver):
    """Each device has its own heartbeat, and the second one's begins later."""

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return super().devices(stream, lists)[: 1 if stream.age_s < 2 else 2]


@fails("health.heartbeat", for_s=5)
class SaysItOnce(Driver):
    """It speaks again when something changes, and nothing does."""

    def speak(self, stream: Stream) -> Iterator[bytes]:
        yield health_list([Told(lease_s=3)])
        stream.stay()


@fails("health.heartbeat", for_s=5)
class ForgetsADevice(Driver):
    """Every list but the first is without the second device."""

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        both = [Told(b"gpu-0", lease_s=3), Told(b"gpu-1", lease_s=3)]
        return both[: 2 if lists == 0 else 1]


@warns("health.heartbeat", for_s=5)
class CutsItFine(Driver):
    """One heartbeat that is lost is one too many."""

    heartbeat_s = 3.0

    def devices(self, stream: Stream, lists: int) -> Sequence[Told]:
        return [Told(lease_s=5)]


@warns("health.rate")
class SpeaksTooOften(Driver):
    """Two hundred times a second, or as often as it can."""

    heartbeat_s = 0.005


# --- when they end ------------------------------------------------------------------------------------------


@fails("health.ends")
class SaysGoodbye(Driver):
    """A stream lasts a second, and ends in order."""

    def speak(self, stream: Stream) -> Iterator[bytes]:
        yield health_list(self.devices(stream, 0))
        stream.wait(1)


@fails("health.ends")
class Stumbles(SaysGoodbye):
    """A stream lasts a second, and ends with an error."""

    def speak(self, stream: Stream) -> Iterator[bytes]:
        yield from super().speak(stream)
        raise Refused(grpc.StatusCode.INTERNAL, "lost the backend")


@warns("health.goaway")
class RenewsConnections(Driver):
    """As is the custom for servers behind a load balancer; what is open may stay."""

    options = (("grpc.max_connection_age_ms", 1000),)


@fails("health.goaway")
class EndsConnections(Driver):
    """Likewise, and nothing may stay for more than half a second."""

    options = (("grpc.max_connection_age_ms", 1000), ("grpc.max_connection_age_grace_ms", 500))
