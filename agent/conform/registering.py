"""Conformance checks of registration: what the kubelet's plugin watcher finds, requests and reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from agent.conform.observed import V1, V1ALPHA1, PluginInfo, RegistrationRecord, SessionRecord, UnaryResult
from agent.conform.verdicts import (
    CheckOutcome,
    CheckVerdict,
    count,
    describe_status,
    failed,
    listed,
    not_run,
    passed,
    seconds,
    shorten,
    warned,
    worst,
)
from agent.model.sockets import PATH_LIMIT

PLUGIN_TYPE: Final = "DRAPlugin"
PLUGIN_SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
"""DRA plugin services that kubelets know, the newest first."""
HEALTH_SERVICES: Final = {V1: "v1.DRAResourceHealth", V1ALPHA1: "v1alpha1.DRAResourceHealth"}
"""Name of the health service by version; the version that the kubelet prefers is first."""
KNOWN: Final = (*PLUGIN_SERVICES, *HEALTH_SERVICES.values())
GET_INFO_S: Final = 1.0
SLOW_S: Final = 0.5
NAME_LIMIT: Final = 63
PATH_SHOWN: Final = 120
SERVICES_SHOWN: Final = 160

_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
SUBDOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
HASHED: Final = re.compile(r"dra-[-_A-Za-z0-9]{22}-reg\.sock")


def _registrations(session: SessionRecord) -> tuple[RegistrationRecord, ...]:
    return session.directory.registrations if session.directory else ()


def _file_name(registration: RegistrationRecord) -> str:
    """Return the name of the registration file, for observations."""
    return shorten(registration.file.path.rpartition("/")[2], 100)


def _evaluate_files(
    session: SessionRecord, evaluate: Callable[[RegistrationRecord], Iterator[CheckOutcome]], good: str
) -> CheckOutcome:
    """Evaluate each registration file; with several files, each observation begins with the file's name."""
    registrations = _registrations(session)
    found = [
        outcome._replace(observation=f"{_file_name(registration)}: {outcome.observation}")
        if len(registrations) > 1
        else outcome
        for registration in registrations
        for outcome in evaluate(registration)
    ]
    return worst(found, passed(good))


def _infos(session: SessionRecord) -> list[PluginInfo]:
    return [registration.file.info for registration in _registrations(session) if registration.file.info]


def socket(session: SessionRecord) -> CheckOutcome:
    """Reads name, type and path length of each registration file of the driver."""
    assert session.directory is not None
    if not session.directory.registrations:
        return failed(f"{session.directory.path}: no socket of this driver")

    def invalid(registration: RegistrationRecord) -> Iterator[CheckOutcome]:
        path, name = registration.file.path, registration.file.path.rpartition("/")[2]
        size = len(path.encode(errors="surrogateescape"))
        if not registration.file.is_socket:
            yield failed(f"{shorten(name)} is not a socket")
        elif name.startswith("."):
            yield failed(f"{shorten(name)} begins with a dot")
        elif size > PATH_LIMIT:
            yield failed(f"{shorten(name)}: its path is {size} bytes, a socket's limit is {PATH_LIMIT}")
        elif (info := registration.file.info) and not _is_conventional(name, info.name):
            yield warned(f"{shorten(name)}: the usual name is {shorten(info.name)}-reg.sock")

    return _evaluate_files(
        session, invalid, listed(_file_name(registration) for registration in _registrations(session))
    )


def _is_conventional(name: str, driver: str) -> bool:
    own = name == f"{driver}-reg.sock" or (name.startswith(f"{driver}-") and name.endswith("-reg.sock"))
    return own or HASHED.fullmatch(name) is not None


def get_info(session: SessionRecord) -> CheckOutcome:
    """Calls GetInfo on each socket, and measures its time."""

    def slow(registration: RegistrationRecord) -> Iterator[CheckOutcome]:
        answer = registration.file.answer
        if answer is None:
            return
        if not answer.ok:
            yield failed(_describe_call(answer))
        elif answer.took_s > SLOW_S:
            outcome = failed if answer.took_s > GET_INFO_S else warned
            yield outcome(f"answered after {seconds(answer.took_s)}")

    answers = [
        registration.file.answer for registration in _registrations(session) if registration.file.answer
    ]
    if not answers:
        return not_run("there is no socket to call")
    return _evaluate_files(
        session, slow, f"answered after {seconds(max(answer.took_s for answer in answers))}"
    )


def _describe_call(answer: UnaryResult) -> str:
    """Return a text about a failed call for an observation."""
    return f"{describe_status(answer.status, answer.text)}, after {seconds(answer.took_s)}"


def plugin_type(session: SessionRecord) -> CheckOutcome:
    """Reads the type in the answer."""
    found = [failed(f"{shorten(info.type)!r}") for info in _infos(session) if info.type != PLUGIN_TYPE]
    return worst(found, passed(PLUGIN_TYPE))


def name(session: SessionRecord) -> CheckOutcome:
    """Reads the driver's name in the answer."""
    found = []
    for info in _infos(session):
        size = len(info.name.encode())
        if size > NAME_LIMIT:
            found.append(failed(f"{shorten(info.name)!r}: {size} bytes, limit {NAME_LIMIT}"))
        elif not SUBDOMAIN.fullmatch(info.name.lower()):
            found.append(failed(f"{shorten(info.name)!r} is not a DNS subdomain"))
        elif info.name != info.name.lower():
            found.append(warned(f"{info.name!r} is not in lower case"))
        elif "." not in info.name:
            found.append(warned(f"{info.name!r} has no domain"))
    return worst(found, passed(listed(info.name for info in _infos(session))))


def endpoint(session: SessionRecord) -> CheckOutcome:
    """Reads the endpoint in the answer, and connects to it."""

    def invalid(registration: RegistrationRecord) -> Iterator[CheckOutcome]:
        endpoint = registration.endpoint
        if endpoint is None or session.directory is None:
            return
        path = shorten(endpoint.path, PATH_SHOWN)
        if not endpoint.absolute:
            yield failed(f"{path!r} is not an absolute path")
        elif endpoint.size > PATH_LIMIT:
            yield failed(f"{path}: {endpoint.size:,} bytes, a socket's limit is {PATH_LIMIT}")
        elif not endpoint.inside:
            yield failed(f"{path}: is not below {session.directory.kubelet_dir}; see --kubelet-dir")
        elif endpoint.error:
            yield failed(f"{path}: {endpoint.error}")

    paths = [registration.endpoint.path for registration in _registrations(session) if registration.endpoint]
    outcome = _evaluate_files(session, invalid, listed(shorten(path, PATH_SHOWN) for path in paths))
    if outcome.verdict is CheckVerdict.PASS and session.socket not in paths:
        return warned(f"{outcome.observation}: not the socket that was tested")
    return outcome


def versions(session: SessionRecord) -> CheckOutcome:
    """Reads the services in the answer, in their order."""
    found = []
    for info in _infos(session):
        plugin = [service for service in info.versions if service in PLUGIN_SERVICES]
        advertised = _services(info) or "nothing"
        if not plugin:
            found.append(failed(f"no DRAPlugin service: {advertised}"))
        elif plugin[0] != PLUGIN_SERVICES[0]:
            found.append(warned(f"{plugin[0]} is the first of the DRAPlugin services: {advertised}"))
        elif unknown := [service for service in info.versions if service not in KNOWN]:
            found.append(warned(f"unknown to kubelets: {listed(map(shorten, unknown))}"))
    return worst(found, passed(listed(map(_services, _infos(session)))))


def _services(info: PluginInfo) -> str:
    return shorten(", ".join(info.versions), SERVICES_SHOWN)


def health(session: SessionRecord) -> CheckOutcome:
    """Compares the health services in the answer with those that sent lists."""
    served = [service for version, service in HEALTH_SERVICES.items() if session.version(version).has_lists]
    missing = [
        service for version, service in HEALTH_SERVICES.items() if session.version(version).unimplemented
    ]
    found = []
    for info in _infos(session):
        advertised = [service for service in HEALTH_SERVICES.values() if service in info.versions]
        if unserved := [service for service in advertised if service in missing]:
            found.append(failed(f"{', '.join(unserved)}: advertised, and UNIMPLEMENTED"))
        elif not advertised:
            found.append(
                failed(f"{', '.join(served)}: served, and not advertised")
                if served
                else warned("none is advertised")
            )
        elif advertised[0] != HEALTH_SERVICES[V1]:
            found.append(warned(f"{advertised[0]} alone is advertised"))
    if not served and not missing:
        return worst(found, not_run("no health service has answered: see health.unavailable"))
    return worst(found, passed("as it is served"))


def prepare(session: SessionRecord) -> CheckOutcome:
    """Calls NodePrepareResources without claims, in each advertised version."""
    calls = [
        (version, answer)
        for registration in _registrations(session)
        for version, answer in registration.prepared
    ]
    found = [failed(f"{version}: {_describe_call(answer)}") for version, answer in calls if not answer.ok]
    if not calls:
        return not_run("no endpoint that advertises a DRAPlugin service takes a connection")
    return worst(
        found, passed(listed(f"{version} after {seconds(answer.took_s)}" for version, answer in calls))
    )


def notify(session: SessionRecord) -> CheckOutcome:
    """Calls NotifyRegistrationStatus: the driver is registered."""

    def wrong(registration: RegistrationRecord) -> Iterator[CheckOutcome]:
        if registration.notified is not None and not registration.notified.ok:
            yield failed(_describe_call(registration.notified))

    slowest_s = max(
        (registration.notified.took_s for registration in _registrations(session) if registration.notified),
        default=0.0,
    )
    return _evaluate_files(session, wrong, f"answered after {seconds(slowest_s)}")


def again(session: SessionRecord) -> CheckOutcome:
    """Calls GetInfo once more, on a new connection."""

    def other(registration: RegistrationRecord) -> Iterator[CheckOutcome]:
        before, now = registration.file.info, registration.again
        if before is None or now is None or now.answer is None:
            return
        if not now.answer.ok:
            yield failed(_describe_call(now.answer))
        elif now.info != before:
            yield failed(f"{_describe_info(now.info)}; before: {_describe_info(before)}")

    return _evaluate_files(session, other, "the same answer")


def _describe_info(info: PluginInfo | None) -> str:
    fields = [info.type, info.name, info.endpoint, *info.versions] if info else ["nothing"]
    return shorten(" ".join(fields), SERVICES_SHOWN)


def several(session: SessionRecord) -> CheckOutcome:
    """Compares the endpoints that the driver's sockets name."""
    by_endpoint: dict[str, list[str]] = {}
    for registration in _registrations(session):
        if registration.endpoint:
            by_endpoint.setdefault(registration.endpoint.path, []).append(_file_name(registration))
    for path, files in by_endpoint.items():
        if len(files) > 1:
            return failed(f"{listed(files)} all name {shorten(path, PATH_SHOWN)}")
    if len(by_endpoint) > 1:
        return warned(
            f"{count(len(by_endpoint), 'endpoint')}, as in a rolling update: kubelets up to 1.37.1 use all"
        )
    return passed(f"{count(len(by_endpoint), 'endpoint')}")


def refused(session: SessionRecord) -> CheckOutcome:
    """Calls NotifyRegistrationStatus with an error, GetInfo, then reports success; only with --refuse."""

    def ended(registration: RegistrationRecord) -> Iterator[CheckOutcome]:
        if registration.refused is None:
            return
        if not registration.refused.info.ok:
            yield failed(f"GetInfo after the refusal: {_describe_call(registration.refused.info)}")
        elif not registration.refused.notified.ok:
            yield failed(f"registration after the refusal: {_describe_call(registration.refused.notified)}")

    if not any(registration.refused for registration in _registrations(session)):
        return not_run("only with --refuse: some drivers exit then")
    return _evaluate_files(session, ended, "it can be registered afterwards")
