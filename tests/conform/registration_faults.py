"""Drivers with faults in registration: their sockets, and their answers to GetInfo."""

import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
from patience import PATIENCE_S

from conform.faults import fails, warns
from conform.health_faults import HEALTH_V1ALPHA1, PLUGIN_SERVICES
from conform.servers import SERVICES, Driver, DriverInfo, RefusedCall

LONG = "d" * 80
"""Name that makes any path too long."""


# --- sockets ------------------------------------------------------------------------------------------------


@fails("socket.path", also={"registration.endpoint": "fail"})
class ServiceSocketPathTooLong(Driver):
    @property
    def service(self) -> Path:
        return self.root / "plugins" / self.name / LONG / "dra.sock"


@fails("registration.socket")
class RegistrationSocketHidden(Driver):
    @property
    def registration(self) -> Path:
        return self.registry / f".{self.name}-reg.sock"


@fails("registration.socket")
class RegistrationSocketPathTooLong(Driver):
    @property
    def registration(self) -> Path:
        return self.registry / LONG / f"{self.name}-reg.sock"


@warns("registration.socket")
class RegistrationSocketWithUnusualName(Driver):
    @property
    def registration(self) -> Path:
        return self.registry / "plugin.sock"


# --- GetInfo ------------------------------------------------------------------------------------------------


@fails("registration.get_info")
class GetInfoHangs(Driver):
    def get_info(self, previous_calls: int) -> DriverInfo:
        self.ended.wait(PATIENCE_S)
        return self.info()


@fails("registration.get_info")
class GetInfoTooLate(Driver):
    def get_info(self, previous_calls: int) -> DriverInfo:
        self.ended.wait(1.5)
        return self.info()


@warns("registration.get_info")
class GetInfoSlow(Driver):
    def get_info(self, previous_calls: int) -> DriverInfo:
        self.ended.wait(0.7)
        return self.info()


@fails("registration.get_info")
class GetInfoRefused(Driver):
    def get_info(self, previous_calls: int) -> DriverInfo:
        raise RefusedCall(grpc.StatusCode.UNAVAILABLE, "starting")


@fails("registration.type")
class OtherPluginType(Driver):
    def info(self) -> DriverInfo:
        return super().info()._replace(kind="CSIPlugin")


class _Named(Driver):
    """Driver that answers with another name than that of its directory."""

    info_name = ""

    def info(self) -> DriverInfo:
        return super().info()._replace(name=self.info_name)


@warns("registration.name", also={"registration.socket": "warn"})
class NameInUpperCase(_Named):
    info_name = "GPU.Example.com"


@fails("registration.name", also={"registration.socket": "warn"})
class NameWithAnUnderscore(_Named):
    info_name = "gpu_0.example.com"


@fails("registration.name", also={"registration.socket": "warn"})
class NameTooLong(_Named):
    info_name = f"gpu.{'x' * 48}.example.com"


@fails("registration.name", also={"registration.socket": "warn"})
class EmptyName(_Named):
    info_name = ""


@warns("registration.name")
class NameWithoutADot(Driver):
    name = "gpu"


class _WithEndpoint(Driver):
    """Driver that answers with another endpoint than that of its services."""

    info_endpoint: Callable[[Driver], Path | str]

    def info(self) -> DriverInfo:
        return super().info()._replace(endpoint=str(self.info_endpoint()))


@fails("registration.endpoint")
class EndpointRelative(_WithEndpoint):
    def info_endpoint(self) -> str:
        return f"plugins/{self.name}/dra.sock"


@fails("registration.endpoint")
class EndpointOutside(_WithEndpoint):
    """Driver that serves outside of the kubelet's directory, which kubelets from 1.38 refuse."""

    @property
    def service(self) -> Path:
        return self.root.with_name(f"{self.root.name}-else") / "dra.sock"

    def info_endpoint(self) -> Path:
        return self.service

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.service.parent)


@fails("registration.endpoint")
class EndpointWithoutServer(_WithEndpoint):
    def info_endpoint(self) -> Path:
        return self.root / "plugins" / "missing.sock"


# --- services -----------------------------------------------------------------------------------------------


@fails("registration.versions")
class AdvertisesHealthAlone(Driver):
    services = SERVICES[2:]


@warns("registration.versions")
class AdvertisesTheOldPluginAlone(Driver):
    services = SERVICES[1:]
    plugin_versions = ("v1beta1",)


@warns("registration.versions")
class AdvertisesTheOldPluginFirst(Driver):
    services = (*reversed(SERVICES[:2]), *SERVICES[2:])


@warns("registration.versions")
class AdvertisesVersionNumber(Driver):
    """Driver that advertises a version number, as plugins of other kinds do."""

    services = (*SERVICES, "1.0.0")


@fails("registration.health")
class DoesNotAdvertiseHealth(Driver):
    services = PLUGIN_SERVICES


@fails("registration.health", also={"health.v1": "warn"})
class AdvertisesUnservedV1Health(Driver):
    health_versions = ("v1alpha1",)


@warns("registration.health")
class AdvertisesTheOldHealthAlone(Driver):
    services = (*PLUGIN_SERVICES, HEALTH_V1ALPHA1)


# --- prepare and notify -------------------------------------------------------------------------------------


@fails("registration.prepare")
class AdvertisesUnservedPluginVersion(Driver):
    plugin_versions = ("v1",)


@fails("registration.prepare")
class RefusesEmptyPrepare(Driver):
    def prepare(self, version: str) -> None:
        raise RefusedCall(grpc.StatusCode.INVALID_ARGUMENT, "no claims")


@fails("registration.prepare")
class PrepareHangs(Driver):
    def prepare(self, version: str) -> None:
        self.ended.wait(PATIENCE_S)


@fails("registration.notify")
class NotifyUnimplemented(Driver):
    def notify(self, status: bytes) -> None:
        raise RefusedCall(grpc.StatusCode.UNIMPLEMENTED)


@fails("registration.notify")
class NotifyHangs(Driver):
    def notify(self, status: bytes) -> None:
        self.ended.wait(PATIENCE_S)


# --- repeated and several -----------------------------------------------------------------------------------


@fails("registration.again")
class GetInfoOnlyOnce(Driver):
    def get_info(self, previous_calls: int) -> DriverInfo:
        if previous_calls > 0:
            raise RefusedCall(grpc.StatusCode.FAILED_PRECONDITION, "registered already")
        return self.info()


@fails("registration.again")
class GetInfoChanges(Driver):
    def get_info(self, previous_calls: int) -> DriverInfo:
        info = self.info()
        return info._replace(services=info.services[: 4 if previous_calls == 0 else 3])


@fails("registration.several")
class RegistersTwice(Driver):
    """Driver that has two registration sockets for one service."""

    def serve(self) -> None:
        super().serve()
        self.listen(self.registry / f"{self.name}-2-reg.sock", [self.registration_handler()])


@warns("registration.several")
class RollingUpdate(Driver):
    """Driver that has two instances, which both send health."""

    def serve(self) -> None:
        super().serve()
        self.other = _Newer(self.root)
        self.other.serve()

    def stop(self) -> None:
        self.other.stop()
        super().stop()


class _Newer(Driver):
    instance = "-1f2e3d4c-0000-4000-8000-000000000000"


@fails("registration.refused", "--refuse")
class EndsAfterRefusal(Driver):
    """Driver that serves no GetInfo after a registration that was refused."""

    refused = False

    def notify(self, status: bytes) -> None:
        # plugin_registered=false is not written in proto3, the error is
        self.refused = self.refused or not status.startswith(b"\x08\x01")

    def get_info(self, previous_calls: int) -> DriverInfo:
        if self.refused:
            raise RefusedCall(grpc.StatusCode.UNAVAILABLE, "was refused")
        return self.info()
