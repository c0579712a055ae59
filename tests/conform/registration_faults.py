"""Drivers that are wrong where the kubelet meets them: sockets, and what they say of themselves."""

import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
from patience import PATIENCE_S

from conform.faults import fails, warns
from conform.health_faults import HEALTH_V1ALPHA1, PLUGIN_SERVICES
from conform.servers import SERVICES, Driver, Info, Refused

LONG = "d" * 80
"""Longer than any kubelet's."""


# --- sockets ------------------------------------------------------------------------------------------------


@fails("socket.path", also={"registration.endpoint": "fail"})
class ServiceSocketTooFarDown(Driver):
    @property
    def service(self) -> Path:
        return self.root / "plugins" / self.name / LONG / "dra.sock"


@fails("registration.socket")
class RegistrationSocketHidden(Driver):
    @property
    def registration(self) -> Path:
        return self.registry / f".{self.name}-reg.sock"


@fails("registration.socket")
class RegistrationSocketTooFarDown(Driver):
    @property
    def registration(self) -> Path:
        return self.registry / LONG / f"{self.name}-reg.sock"


@warns("registration.socket")
class RegistrationSocketOfAnyName(Driver):
    @property
    def registration(self) -> Path:
        return self.registry / "plugin.sock"


# --- GetInfo ------------------------------------------------------------------------------------------------


@fails("registration.get_info")
class NeverIntroducesItself(Driver):
    def get_info(self, asked: int) -> Info:
        self.ended.wait(PATIENCE_S)
        return self.info()


@fails("registration.get_info")
class IntroducesItselfLate(Driver):
    def get_info(self, asked: int) -> Info:
        self.ended.wait(1.5)
        return self.info()


@warns("registration.get_info")
class IntroducesItselfSlowly(Driver):
    def get_info(self, asked: int) -> Info:
        self.ended.wait(0.7)
        return self.info()


@fails("registration.get_info")
class RefusesToIntroduceItself(Driver):
    def get_info(self, asked: int) -> Info:
        raise Refused(grpc.StatusCode.UNAVAILABLE, "starting")


@fails("registration.type")
class OfAnotherKind(Driver):
    def info(self) -> Info:
        return super().info()._replace(kind="CSIPlugin")


class _Called(Driver):
    """Has another name than its directory."""

    called = ""

    def info(self) -> Info:
        return super().info()._replace(name=self.called)


@warns("registration.name", also={"registration.socket": "warn"})
class NameInUpperCase(_Called):
    called = "GPU.Example.com"


@fails("registration.name", also={"registration.socket": "warn"})
class NameWithAnUnderscore(_Called):
    called = "gpu_0.example.com"


@fails("registration.name", also={"registration.socket": "warn"})
class NameTooLong(_Called):
    called = f"gpu.{'x' * 48}.example.com"


@fails("registration.name", also={"registration.socket": "warn"})
class NameLess(_Called):
    called = ""


@warns("registration.name")
class NameWithoutADot(Driver):
    name = "gpu"


class _At(Driver):
    """Says that its services are somewhere else."""

    where: Callable[[Driver], Path | str]

    def info(self) -> Info:
        return super().info()._replace(endpoint=str(self.where()))


@fails("registration.endpoint")
class EndpointRelative(_At):
    def where(self) -> str:
        return f"plugins/{self.name}/dra.sock"


@fails("registration.endpoint")
class EndpointOutside(_At):
    """The services are there, where no kubelet after 1.37 will look."""

    @property
    def service(self) -> Path:
        return self.root.with_name(f"{self.root.name}-else") / "dra.sock"

    def where(self) -> Path:
        return self.service

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.service.parent)


@fails("registration.endpoint")
class EndpointOfNobody(_At):
    def where(self) -> Path:
        return self.root / "plugins" / "nobody.sock"


# --- which services -----------------------------------------------------------------------------------------


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
class AdvertisesNumbers(Driver):
    """As plugins of other kinds do."""

    services = (*SERVICES, "1.0.0")


@fails("registration.health")
class HidesItsHealth(Driver):
    services = PLUGIN_SERVICES


@fails("registration.health", also={"health.v1": "warn"})
class PromisesTheNewHealth(Driver):
    health_versions = ("v1alpha1",)


@warns("registration.health")
class AdvertisesTheOldHealthAlone(Driver):
    services = (*PLUGIN_SERVICES, HEALTH_V1ALPHA1)


# --- prepare and notify -------------------------------------------------------------------------------------


@fails("registration.prepare")
class PromisesTheOldPlugin(Driver):
    plugin_versions = ("v1",)


@fails("registration.prepare")
class CannotPrepareNothing(Driver):
    def prepare(self, version: str) -> None:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "no claims")


@fails("registration.prepare")
class PreparesForEver(Driver):
    def prepare(self, version: str) -> None:
        self.ended.wait(PATIENCE_S)


@fails("registration.notify")
class WantsNoNews(Driver):
    def notify(self, status: bytes) -> None:
        raise Refused(grpc.StatusCode.UNIMPLEMENTED)


@fails("registration.notify")
class TakesItsTimeOverNews(Driver):
    def notify(self, status: bytes) -> None:
        self.ended.wait(PATIENCE_S)


# --- again, and several -------------------------------------------------------------------------------------


@fails("registration.again")
class IntroducesItselfOnce(Driver):
    def get_info(self, asked: int) -> Info:
        if asked > 0:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "registered already")
        return self.info()


@fails("registration.again")
class ForgetsWhatItServes(Driver):
    def get_info(self, asked: int) -> Info:
        info = self.info()
        return info._replace(services=info.services[: 4 if asked == 0 else 3])


@fails("registration.several")
class RegistersTwice(Driver):
    """Two registration sockets, one service."""

    def serve(self) -> None:
        super().serve()
        self.listen(self.registry / f"{self.name}-2-reg.sock", [self.registration_handler()])


@warns("registration.several")
class RollsAnUpdate(Driver):
    """There are two of it, and both speak."""

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
class TakesOffence(Driver):
    """A registration that was refused was its last."""

    refused = False

    def notify(self, status: bytes) -> None:
        # plugin_registered=false is not written in proto3, the error is
        self.refused = self.refused or not status.startswith(b"\x08\x01")

    def get_info(self, asked: int) -> Info:
        if self.refused:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "was refused")
        return self.info()
