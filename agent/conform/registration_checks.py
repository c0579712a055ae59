"""Conformance checks of the driver's registration with the kubelet's plugin watcher."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from agent.conform.outcomes import (
    CheckOutcome,
    CheckVerdict,
    describe_status,
    failed,
    format_count,
    format_seconds,
    join_first,
    not_run,
    passed,
    shorten,
    skipped,
    warned,
    worst_outcome,
)
from agent.conform.session_record import (
    V1,
    V1ALPHA1,
    PluginInfo,
    RegistrationRecord,
    SessionRecord,
    UnaryCallResult,
)
from agent.model.socket_address import SOCKET_PATH_LIMIT

PLUGIN_TYPE: Final = "DRAPlugin"
PLUGIN_SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
"""Names of the DRA plugin service that kubelets know, the newest first."""
HEALTH_SERVICES: Final = {V1: "v1.DRAResourceHealth", V1ALPHA1: "v1alpha1.DRAResourceHealth"}
"""Name of the health service by API version; the version that the kubelet prefers is first."""
KNOWN_SERVICES: Final = (*PLUGIN_SERVICES, *HEALTH_SERVICES.values())
GET_INFO_S: Final = 1.0
"""Timeout of GetInfo in the kubelet [s]."""
SLOW_S: Final = 0.5
"""Duration of GetInfo above which a check warns [s]."""
NAME_LIMIT: Final = 63
"""Longest valid driver name [bytes]."""
PATH_SHOWN: Final = 120
SERVICES_SHOWN: Final = 160

_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
SUBDOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
HASHED_NAME: Final = re.compile(r"dra-[-_A-Za-z0-9]{22}-reg\.sock")


def _registrations(session: SessionRecord) -> tuple[RegistrationRecord, ...]:
    return session.directory.registrations if session.directory else ()


def _file_name(registration: RegistrationRecord) -> str:
    return shorten(registration.file.path.rpartition("/")[2], 100)


def _evaluate_files(
    session: SessionRecord,
    evaluate: Callable[[RegistrationRecord], Iterator[CheckOutcome]],
    observation_if_good: str,
) -> CheckOutcome:
    """Return the worst outcome of evaluating all registration files of a driver; PASS if there is no outcome.

    With several files, each observation begins with the file's name.
    """
    registrations = _registrations(session)
    found = [
        outcome._replace(observation=f"{_file_name(registration)}: {outcome.observation}")
        if len(registrations) > 1
        else outcome
        for registration in registrations
        for outcome in evaluate(registration)
    ]
    return worst_outcome(found, passed(observation_if_good))


def _get_info_answers(session: SessionRecord) -> list[PluginInfo]:
    return [registration.file.info for registration in _registrations(session) if registration.file.info]


def check_registration_socket(session: SessionRecord) -> CheckOutcome:
    """Reads the name, type and path length of each registration socket of the driver."""
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
        elif size > SOCKET_PATH_LIMIT:
            yield failed(
                f"{shorten(name)}: its path is {size} bytes, a socket's limit is {SOCKET_PATH_LIMIT}"
            )
        elif (info := registration.file.info) and not _is_conventional(name, info.name):
            yield warned(f"{shorten(name)}: the usual name is {shorten(info.name)}-reg.sock")

    return _evaluate_files(
        session, invalid, join_first(_file_name(registration) for registration in _registrations(session))
    )


def _is_conventional(name: str, driver: str) -> bool:
    own = name == f"{driver}-reg.sock" or (name.startswith(f"{driver}-") and name.endswith("-reg.sock"))
    return own or HASHED_NAME.fullmatch(name) is not None


def check_get_info(session: SessionRecord) -> CheckOutcome:
    """Calls GetInfo on each registration socket, and measures the duration."""

    def find_slow(registration: RegistrationRecord) -> Iterator[CheckOutcome]:
        answer = registration.file.get_info
        if answer is None:
            return
        if not answer.is_ok:
            yield failed(_describe_call(answer))
        elif answer.took_s > SLOW_S:
            outcome = failed if answer.took_s > GET_INFO_S else warned
            yield outcome(f"answered after {format_seconds(answer.took_s)}")

    answers = [
        registration.file.get_info for registration in _registrations(session) if registration.file.get_info
    ]
    if not answers:
        return not_run("there is no socket to call")
    return _evaluate_files(
        session, find_slow, f"answered after {format_seconds(max(answer.took_s for answer in answers))}"
    )


def _describe_call(answer: UnaryCallResult) -> str:
    return f"{describe_status(answer.status, answer.text)}, after {format_seconds(answer.took_s)}"


def check_plugin_type(session: SessionRecord) -> CheckOutcome:
    """Reads the plugin type in the answer to GetInfo."""
    found = [
        failed(f"{shorten(info.type)!r}") for info in _get_info_answers(session) if info.type != PLUGIN_TYPE
    ]
    return worst_outcome(found, passed(PLUGIN_TYPE))


def check_driver_name(session: SessionRecord) -> CheckOutcome:
    """Reads the driver's name in the answer to GetInfo."""
    found = []
    for info in _get_info_answers(session):
        size = len(info.name.encode())
        if size > NAME_LIMIT:
            found.append(failed(f"{shorten(info.name)!r}: {size} bytes, limit {NAME_LIMIT}"))
        elif not SUBDOMAIN.fullmatch(info.name.lower()):
            found.append(failed(f"{shorten(info.name)!r} is not a DNS subdomain"))
        elif info.name != info.name.lower():
            found.append(warned(f"{info.name!r} is not in lower case"))
        elif "." not in info.name:
            found.append(warned(f"{info.name!r} has no domain"))
    return worst_outcome(found, passed(join_first(info.name for info in _get_info_answers(session))))


def check_endpoint(session: SessionRecord) -> CheckOutcome:
    """Reads the endpoint in the answer to GetInfo, and connects to it."""

    def invalid(registration: RegistrationRecord) -> Iterator[CheckOutcome]:
        endpoint = registration.endpoint
        if endpoint is None or session.directory is None:
            return
        path = shorten(endpoint.path, PATH_SHOWN)
        if not endpoint.is_absolute:
            yield failed(f"{path!r} is not an absolute path")
        elif endpoint.size > SOCKET_PATH_LIMIT:
            yield failed(f"{path}: {endpoint.size:,} bytes, a socket's limit is {SOCKET_PATH_LIMIT}")
        elif not endpoint.is_in_kubelet_dir:
            yield failed(f"{path}: is not below {session.directory.kubelet_dir}; see --kubelet-dir")
        elif endpoint.error:
            yield failed(f"{path}: {endpoint.error}")

    paths = [registration.endpoint.path for registration in _registrations(session) if registration.endpoint]
    outcome = _evaluate_files(session, invalid, join_first(shorten(path, PATH_SHOWN) for path in paths))
    if outcome.verdict is CheckVerdict.PASS and session.socket not in paths:
        return warned(f"{outcome.observation}: not the socket that was tested")
    return outcome


def check_advertised_versions(session: SessionRecord) -> CheckOutcome:
    """Checks that the answer to GetInfo advertises a DRAPlugin service, the newest version first."""
    found = []
    for info in _get_info_answers(session):
        plugin = [service for service in info.versions if service in PLUGIN_SERVICES]
        advertised = _format_services(info) or "nothing"
        if not plugin:
            found.append(failed(f"no DRAPlugin service: {advertised}"))
        elif plugin[0] != PLUGIN_SERVICES[0]:
            found.append(warned(f"{plugin[0]} is the first of the DRAPlugin services: {advertised}"))
        elif unknown := [service for service in info.versions if service not in KNOWN_SERVICES]:
            found.append(warned(f"unknown to kubelets: {join_first(map(shorten, unknown))}"))
    return worst_outcome(found, passed(join_first(map(_format_services, _get_info_answers(session)))))


def _format_services(info: PluginInfo) -> str:
    return shorten(", ".join(info.versions), SERVICES_SHOWN)


def check_advertised_health(session: SessionRecord) -> CheckOutcome:
    """Compares the health services in the answer to GetInfo with those that sent lists."""
    served = [service for version, service in HEALTH_SERVICES.items() if session.version(version).has_lists]
    missing = [
        service for version, service in HEALTH_SERVICES.items() if session.version(version).is_unimplemented
    ]
    found = []
    for info in _get_info_answers(session):
        advertised = [service for service in HEALTH_SERVICES.values() if service in info.versions]
        if unserved := [service for service in advertised if service in missing]:
            outcome = failed if served else warned
            found.append(outcome(f"{', '.join(unserved)}: advertised but not served (UNIMPLEMENTED)"))
        elif not advertised:
            found.append(
                failed(f"{', '.join(served)}: served but not advertised")
                if served
                else warned("none is advertised")
            )
        elif advertised[0] != HEALTH_SERVICES[V1]:
            found.append(warned(f"{advertised[0]} alone is advertised"))
    if not served and not missing:
        return worst_outcome(found, not_run("no health service has answered: see health.unavailable"))
    return worst_outcome(found, passed("as it is served"))


def check_prepare(session: SessionRecord) -> CheckOutcome:
    """Calls NodePrepareResources without claims, in each advertised version of DRAPlugin."""
    calls = [
        (version, answer)
        for registration in _registrations(session)
        for version, answer in registration.prepared
    ]
    found = [failed(f"{version}: {_describe_call(answer)}") for version, answer in calls if not answer.is_ok]
    if not calls:
        return not_run("no endpoint that advertises a DRAPlugin service takes a connection")
    return worst_outcome(
        found,
        passed(join_first(f"{version} after {format_seconds(answer.took_s)}" for version, answer in calls)),
    )


def check_notify(session: SessionRecord) -> CheckOutcome:
    """Calls NotifyRegistrationStatus with success; not with --no-notify."""
    if not any(registration.notified for registration in _registrations(session)):
        return skipped("--no-notify is given")

    def wrong(registration: RegistrationRecord) -> Iterator[CheckOutcome]:
        if registration.notified is not None and not registration.notified.is_ok:
            yield failed(_describe_call(registration.notified))

    slowest_s = max(
        (registration.notified.took_s for registration in _registrations(session) if registration.notified),
        default=0.0,
    )
    return _evaluate_files(session, wrong, f"answered after {format_seconds(slowest_s)}")


def check_repeated_get_info(session: SessionRecord) -> CheckOutcome:
    """Calls GetInfo a second time, on a new connection, and compares the answers."""

    def other(registration: RegistrationRecord) -> Iterator[CheckOutcome]:
        before, now = registration.file.info, registration.second_file
        if before is None or now is None or now.get_info is None:
            return
        if not now.get_info.is_ok:
            yield failed(_describe_call(now.get_info))
        elif now.info != before:
            yield failed(f"{_describe_info(now.info)}; before: {_describe_info(before)}")

    if not any(registration.second_file for registration in _registrations(session)):
        return not_run("GetInfo was not called again")
    return _evaluate_files(session, other, "the same answer")


def _describe_info(info: PluginInfo | None) -> str:
    fields = [info.type, info.name, info.endpoint, *info.versions] if info else ["nothing"]
    return shorten(" ".join(fields), SERVICES_SHOWN)


def check_endpoints_differ(session: SessionRecord) -> CheckOutcome:
    """Compares the endpoints that the driver's registration sockets name."""
    by_endpoint: dict[str, list[str]] = {}
    for registration in _registrations(session):
        if registration.endpoint:
            by_endpoint.setdefault(registration.endpoint.path, []).append(_file_name(registration))
    for path, files in by_endpoint.items():
        if len(files) > 1:
            return failed(f"{join_first(files)} all advertise {shorten(path, PATH_SHOWN)}")
    if len(by_endpoint) > 1:
        return warned(
            f"{format_count(len(by_endpoint), 'endpoint')}, as in a rolling update: "
            "kubelets up to 1.38 use all"
        )
    return passed(f"{format_count(len(by_endpoint), 'endpoint')}")


def check_refused_registration(session: SessionRecord) -> CheckOutcome:
    """Calls NotifyRegistrationStatus with an error, then GetInfo, then NotifyRegistrationStatus with success;
    only with --refuse."""

    def find_ended(registration: RegistrationRecord) -> Iterator[CheckOutcome]:
        if registration.refused is None:
            return
        if not registration.refused.info.is_ok:
            yield failed(f"GetInfo after the refusal: {_describe_call(registration.refused.info)}")
        elif not registration.refused.notified.is_ok:
            yield failed(f"registration after the refusal: {_describe_call(registration.refused.notified)}")

    if not any(registration.refused for registration in _registrations(session)):
        return skipped("only with --refuse: some drivers exit then")
    return _evaluate_files(session, find_ended, "it can be registered afterwards")
