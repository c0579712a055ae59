"""Table of the conformance checks of a DRA driver.

Numbers such as 1.36 are releases of the kubelet; a text without a release applies to 1.34 to 1.38.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from agent.conform import health_list_checks, health_service_checks, prepare_checks, registration_checks
from agent.conform.outcomes import CheckOutcome, CheckVerdict, not_run, skipped
from agent.conform.prepare_checks import missing_prepared_claims, missing_stage
from agent.conform.session_record import V1, V1ALPHA1, PrepareStage, SessionRecord

# ------------------------------------------------------------------------------------------


def missing_socket(session: SessionRecord) -> CheckOutcome | None:
    """Return the outcome NOT_RUN if the session found no service socket of the driver; None: it found one."""
    return None if session.socket else not_run("no service socket is known: see registration.get_info")


def missing_connection(session: SessionRecord) -> CheckOutcome | None:
    """Return the outcome NOT_RUN if no connection to the driver's service socket succeeded.
    None: one succeeded."""
    missing = None if session.versions else not_run("the service socket takes no connection")
    return missing_socket(session) or missing


def missing_list(session: SessionRecord) -> CheckOutcome | None:
    """Return the outcome NOT_RUN if a session received no health list from the driver, else None."""
    missing = None if session.main.has_lists else not_run("no list was received")
    return missing_connection(session) or missing


def missing_device(session: SessionRecord) -> CheckOutcome | None:
    """Return the outcome NOT_RUN if the driver reported no device in its health lists.
    None: a list has a device."""
    has_device = any(item.devices for stream in session.watched_streams for item in stream.lists)
    return missing_list(session) or (None if has_device else not_run("no device was reported"))


def missing_versions(session: SessionRecord) -> CheckOutcome | None:
    """Return the outcome NOT_RUN unless v1 and v1alpha1 of the health API both reported a device.
    None: both did."""
    silent = [version for version in (V1, V1ALPHA1) if not session.version(version).has_lists]
    missing = not_run(f"no list was received of {' and '.join(silent)}") if silent else None
    return missing_connection(session) or missing or missing_device(session)


def missing_directory(session: SessionRecord) -> CheckOutcome | None:
    """Return the outcome SKIPPED if a session did not test the driver's registration; None: it did."""
    return None if session.directory else skipped("registration is tested with --plugin-dir only")


def missing_get_info(session: SessionRecord) -> CheckOutcome | None:
    """Return the outcome NOT_RUN if no registration socket of the driver answered GetInfo.
    None: one answered."""
    if session.directory and any(record.file.info for record in session.directory.registrations):
        return None
    return missing_directory(session) or not_run("no socket has answered GetInfo")


def missing_get_info_or_connection(session: SessionRecord) -> CheckOutcome | None:
    """Return the outcome NOT_RUN if GetInfo or the connection to the service socket failed.
    None: both succeeded."""
    return missing_get_info(session) or missing_connection(session)


class ConformCheck(NamedTuple):
    """Conformance check: a property that a DRA driver should have."""

    code: str
    title: str
    """Property that the driver should have, in one sentence."""
    why: str
    """What happens in a kubelet if the driver lacks the property."""
    advice: str
    evaluate: Callable[[SessionRecord], CheckOutcome]
    find_missing: Callable[[SessionRecord], CheckOutcome | None]
    """Function that returns an outcome if the session recorded too little for this check; None: enough."""

    @property
    def method(self) -> str:
        """Description of what the check does with a session."""
        return " ".join((self.evaluate.__doc__ or "").split())


class CheckResult(NamedTuple):
    """Conformance check with its outcome for one session."""

    check: ConformCheck
    verdict: CheckVerdict
    observation: str


def run_checks(session: SessionRecord) -> tuple[CheckResult, ...]:
    """Evaluate every conformance check on a session record; return the results in the order of the table."""
    results = []
    for check in CHECKS:
        outcome = check.find_missing(session) or check.evaluate(session)
        results.append(CheckResult(check, outcome.verdict, outcome.observation))
    return tuple(results)


CHECKS: Final = (
    ConformCheck(
        "socket.path",
        "the path of the service socket is at most 107 bytes",
        "The kernel accepts no longer path for a unix socket: the kubelet can never connect.",
        "shorten the directory, or replace the long part of the name by a hash",
        health_service_checks.check_socket_path,
        missing_socket,
    ),
    ConformCheck(
        "health.v1",
        "v1 of the health service exists",
        "Kubelets from 1.37 call v1 if it is advertised. Else they call v1alpha1, which will be removed in "
        "1.40.",
        "serve v1.DRAResourceHealth: its messages are the same bytes as those of v1alpha1",
        health_service_checks.check_v1,
        missing_connection,
    ),
    ConformCheck(
        "health.v1alpha1",
        "v1alpha1 of the health service exists",
        "Kubelets 1.34 to 1.36 call only v1alpha1. They receive nothing, retry every 5 s without end, and "
        "log an error each time.",
        "serve v1alpha1.DRAResourceHealth: its messages are the same bytes as those of v1",
        health_service_checks.check_v1alpha1,
        missing_connection,
    ),
    ConformCheck(
        "health.unavailable",
        "a stream can be opened at once",
        "The kubelet opens the stream again 5 s after any end but UNIMPLEMENTED, with which 1.37 gives up. "
        "Meanwhile every device is Unknown.",
        "serve before the registration socket exists; answer UNAVAILABLE while not ready, never "
        "UNIMPLEMENTED",
        health_service_checks.check_unavailable,
        missing_connection,
    ),
    ConformCheck(
        "health.unknown_method",
        "a method that does not exist is UNIMPLEMENTED",
        "Kubelet 1.37 stops calling a health service on this status alone; it retries on any other every "
        "5 s.",
        "let the gRPC library answer unknown methods",
        health_service_checks.check_unknown_method,
        missing_connection,
    ),
    ConformCheck(
        "health.first_list",
        "the first list comes within 1 s",
        "The kubelet knows no device until then: pods that start show Unknown.",
        "send all devices as soon as the stream is open, Unknown for those without a verdict",
        health_service_checks.check_first_list,
        missing_connection,
    ),
    ConformCheck(
        "health.whole",
        "all devices are reported within 1 s of the first list",
        "A device that was never reported is Unknown in the pod's status, as if it had no health. 1.37 "
        "stores 16,384 devices of a driver, and ignores all others.",
        "begin each stream with all devices",
        health_service_checks.check_all_devices_at_once,
        missing_device,
    ),
    ConformCheck(
        "health.devices",
        "a device is reported",
        "Without a device the kubelet has nothing to show, and most checks have nothing to look at.",
        "test on a node with devices; a driver that has devices reports each, Unknown without a verdict",
        health_list_checks.check_devices,
        missing_list,
    ),
    ConformCheck(
        "health.known",
        "each device is Healthy or Unhealthy within the session",
        "A pod's status shows Unknown, the same as without a health service: the failure of a device is "
        "never noticed.",
        "check the device; send Unknown only while no check has ended",
        health_list_checks.check_known_health,
        missing_device,
    ),
    ConformCheck(
        "health.heartbeat",
        "each device is reported again before its lease ends, best at a third of the lease",
        "A lease counts from receipt. Once it ends the device is Unknown. Pods show that at their next "
        "sync, or when a list leaves the device out; never after a late list with the same verdict.",
        "send every device again at a third of its lease, as long as it is really checked",
        health_list_checks.check_heartbeat,
        missing_device,
    ),
    ConformCheck(
        "health.lease",
        "leases are 0, or 3 s to a day",
        "0 or less means the kubelet's default of 30 s. The kubelet counts nanoseconds in 64 bits: above "
        "9,223,372,036 s they overflow to a lease below zero, and the device is Unknown for good. 1.34 "
        "ignores leases: 30 s.",
        "use three times the heartbeat, at least 30 s",
        health_list_checks.check_lease,
        missing_device,
    ),
    ConformCheck(
        "health.lease.stable",
        "a device's lease does not change",
        "From 1.35 on, a lease that differs is a change: the state file is written and every pod with the "
        "device is synced, at each list.",
        "send the same lease each time",
        health_list_checks.check_stable_lease,
        missing_device,
    ),
    ConformCheck(
        "health.text.stable",
        "a message changes with the health, not by itself",
        "From 1.36 on, a message that differs is a change: the state file is written and every pod with the"
        " device is synced, at each list.",
        "keep temperatures, counts and ages out of the message",
        health_list_checks.check_stable_text,
        missing_device,
    ),
    ConformCheck(
        "health.message.size",
        "a message is at most 1,024 bytes",
        "The kubelet (1.36 on) keeps the first 1,021 bytes and adds three dots. If the cut splits a "
        "character, each of its bytes becomes three, U+FFFD: the message is too long, and the API server "
        "refuses the pod's whole status.",
        "cut longer messages between two characters",
        health_list_checks.check_message_size,
        missing_device,
    ),
    ConformCheck(
        "health.utf8",
        "every string is UTF-8",
        "grpc-go cannot decode the list: the stream ends, the kubelet discards the health of all "
        "the driver's devices, and again every 5 s.",
        "replace bytes that are not UTF-8 before sending",
        health_list_checks.check_utf8,
        missing_device,
    ),
    ConformCheck(
        "health.decode",
        "every list is a NodeWatchResourcesResponse",
        "The kubelet cannot decode it: the stream ends, the kubelet discards the health of all "
        "the driver's devices, and again every 5 s.",
        "use the kubelet's proto files",
        health_list_checks.check_decodable,
        missing_list,
    ),
    ConformCheck(
        "health.size",
        "a list is at most 1 MiB",
        "The kubelet reads no message above 4 MiB: the stream ends with RESOURCE_EXHAUSTED, and the kubelet "
        "discards the health of all devices, and again every 5 s.",
        "split it: a list may have some of the devices, the others keep their last verdict",
        health_list_checks.check_list_size,
        missing_connection,
    ),
    ConformCheck(
        "health.rate",
        "there are at most 20 lists in a second",
        "The kubelet compares each list with all devices it knows, and writes its state file for each "
        "change. Its queue for pods holds 100 such lists; more are lost.",
        "collect the changes of 100 ms, and send them together",
        health_service_checks.check_list_rate,
        missing_list,
    ),
    ConformCheck(
        "health.duplicates",
        "a list has each device once",
        "The last entry counts, but each entry that differs from the one before is a change: the state file "
        "is written and pods are synced at every list.",
        "send one entry for each pool and name",
        health_list_checks.check_duplicates,
        missing_device,
    ),
    ConformCheck(
        "health.names",
        "each entry has a pool and a device as the ResourceSlice names them",
        "The kubelet does not check names: an entry whose names are not exactly those that prepare returned "
        "matches no device.",
        "take the names from the same table as the ResourceSlice",
        health_list_checks.check_device_names,
        missing_device,
    ),
    ConformCheck(
        "health.enum",
        "the health is 0, 1 or 2",
        "The kubelet treats any other number as Unknown.",
        "send 0 (Unknown), 1 (Healthy) or 2 (Unhealthy)",
        health_list_checks.check_health_values,
        missing_device,
    ),
    ConformCheck(
        "health.time",
        "last_updated_time is Unix time in seconds",
        "The kubelet replaces it by its own time; operators and other readers of the stream use it "
        "unchanged.",
        "send the time of the last check, in whole seconds",
        health_list_checks.check_update_times,
        missing_device,
    ),
    ConformCheck(
        "health.time.fresh",
        "last_updated_time is at most half a lease old, and never older than the lease",
        "The kubelet counts the lease from receipt: a verdict that is sent again without a check never "
        "expires, and hides a failed device.",
        "send the time of the last check; if a check does not end, send Unknown or nothing",
        health_list_checks.check_fresh_times,
        missing_device,
    ),
    ConformCheck(
        "health.ends",
        "a stream stays open",
        "After any status, also OK, the kubelet discards the health of all the driver's devices, and retries "
        "5 s later. Pods are not updated.",
        "return from the handler only when the kubelet has disconnected",
        health_service_checks.check_stream_stays_open,
        missing_list,
    ),
    ConformCheck(
        "health.goaway",
        "the server closes no connection by itself",
        "grpc-go opens a new connection, and keeps the open stream until the server's grace period ends. "
        "Then the kubelet discards the health of all devices, at every GOAWAY.",
        "set no MaxConnectionAge and no MaxConnectionIdle on this server",
        health_service_checks.check_goaway,
        missing_connection,
    ),
    ConformCheck(
        "health.versions_agree",
        "v1 and v1alpha1 report the same",
        "Only the kubelet's release decides which version it uses.",
        "serve both from one implementation",
        health_service_checks.check_versions_agree,
        missing_versions,
    ),
    ConformCheck(
        "health.reconnect",
        "a stream that is opened again begins with all devices",
        "The kubelet forgot all devices when the stream before ended, and opens the next on the same "
        "connection or, after a restart, on a new one.",
        "remember what was sent for each stream, not for the process",
        health_service_checks.check_reconnect,
        missing_device,
    ),
    ConformCheck(
        "health.two_kubelets",
        "two kubelets receive the same, and the end of one does not affect the other",
        "A kubelet that restarts connects before the driver notices the end of the old connection.",
        "give each stream its own state and its own context",
        health_service_checks.check_two_kubelets,
        missing_device,
    ),
    ConformCheck(
        "health.stopped_reader",
        "a reader that stops does not delay other streams, and receives the newest list when it resumes",
        "A kubelet under load reads late: queued lists are old, and a driver that waits for it delays all "
        "other streams.",
        "keep only the newest list for each stream, and send it in its own task",
        health_service_checks.check_stopped_reader,
        missing_device,
    ),
    ConformCheck(
        "registration.socket",
        "the registration socket can be found",
        "The kubelet uses every socket below plugins_registry whose name does not begin with a dot, and "
        "ignores all other files.",
        "name it <driver>-reg.sock, or <driver>-<pod uid>-reg.sock for rolling updates",
        registration_checks.check_registration_socket,
        missing_directory,
    ),
    ConformCheck(
        "registration.get_info",
        "GetInfo is answered within 1 s",
        "The kubelet gives up after 1 s, and retries with growing pauses: the driver is not registered "
        "meanwhile.",
        "answer from memory",
        registration_checks.check_get_info,
        missing_directory,
    ),
    ConformCheck(
        "registration.type",
        "the type is DRAPlugin",
        "The kubelet handles a plugin by this type, also as CSIPlugin or DevicePlugin, and refuses a type "
        "without a handler.",
        "send DRAPlugin",
        registration_checks.check_plugin_type,
        missing_get_info,
    ),
    ConformCheck(
        "registration.name",
        "the driver's name is a DNS subdomain of at most 63 bytes",
        "Kubelets from 1.38 refuse other names; the API server refuses a ResourceSlice of such a driver. "
        "Both distinguish upper and lower case: GPU.example.com is another driver than gpu.example.com.",
        "use your own domain in lower case, such as gpu.example.com",
        registration_checks.check_driver_name,
        missing_get_info,
    ),
    ConformCheck(
        "registration.endpoint",
        "the endpoint is an absolute path in the kubelet's directory, and takes connections",
        "The kubelet connects as soon as it has registered the plugin. Kubelets from 1.38 refuse paths "
        "that are relative, too long, or outside of their directory.",
        "serve <kubelet's directory>/plugins/<driver>/dra.sock before the registration socket exists",
        registration_checks.check_endpoint,
        missing_get_info,
    ),
    ConformCheck(
        "registration.versions",
        "v1.DRAPlugin comes first, and all advertised services are known to kubelets",
        "The kubelet uses the first service of the list that it knows, and refuses a list without any.",
        "advertise v1.DRAPlugin, v1beta1.DRAPlugin, v1.DRAResourceHealth, v1alpha1.DRAResourceHealth",
        registration_checks.check_advertised_versions,
        missing_get_info,
    ),
    ConformCheck(
        "registration.health",
        "the advertised health services are those that are served",
        "Kubelets from 1.37 open the stream only if it was advertised, and after UNIMPLEMENTED not until "
        "the plugin registers again. Older kubelets open it in any case.",
        "serve both health services and advertise both; a driver without health advertises none: for "
        "kubeletplugin.Start that is the option HealthService(false)",
        registration_checks.check_advertised_health,
        missing_get_info_or_connection,
    ),
    ConformCheck(
        "registration.prepare",
        "each advertised DRAPlugin version answers",
        "The kubelet calls the version that it chose from the list; without it no pod with a claim starts.",
        "serve all advertised versions at the endpoint",
        registration_checks.check_prepare,
        missing_get_info,
    ),
    ConformCheck(
        "registration.notify",
        "NotifyRegistrationStatus is answered within 5 s",
        "If it fails, the kubelet undoes the registration and starts again.",
        "record the status, and answer at once",
        registration_checks.check_notify,
        missing_get_info,
    ),
    ConformCheck(
        "registration.again",
        "a kubelet that restarts gets the same answer",
        "A kubelet that restarts finds the existing socket, and registers the plugin again.",
        "answer every GetInfo alike while the process runs",
        registration_checks.check_repeated_get_info,
        missing_get_info,
    ),
    ConformCheck(
        "registration.several",
        "no two registration sockets name the same endpoint",
        "The same driver with the same endpoint twice is an error. Two endpoints are a rolling update: "
        "prepare goes to the newest that is connected; kubelets up to 1.38 merge the health of both, and "
        "forget it when either stream ends.",
        "remove the socket of an instance that has ended; during an update only the newer instance should "
        "send health",
        registration_checks.check_endpoints_differ,
        missing_get_info,
    ),
    ConformCheck(
        "registration.refused",
        "a driver that was refused can be registered later",
        "The kubelet reports each of its own failures this way, and tries again.",
        "log the error, and keep serving",
        registration_checks.check_refused_registration,
        missing_get_info,
    ),
    ConformCheck(
        "prepare.first",
        "claims are prepared",
        "The pod stays in ContainerCreating. The kubelet repeats the call every 60 to 90 s, without end.",
        "read the claim from the API server, and prepare the devices of its allocation",
        prepare_checks.check_first_prepare,
        missing_stage(PrepareStage.FIRST),
    ),
    ConformCheck(
        "prepare.answers",
        "each call gets one answer for each claim, by UID, and no other",
        "A claim without an answer, or an answer for another UID, fails the whole call: the pod "
        "does not start, or does not end.",
        "answer each UID of the request, also with an error",
        prepare_checks.check_answers,
        missing_stage(PrepareStage.FIRST),
    ),
    ConformCheck(
        "prepare.devices",
        "the devices and requests are those of the allocation",
        "The kubelet selects a container's CDI ids by the request names, and finds a device's health by pool "
        "and name. With other names the container starts without the device, or its health is never shown.",
        "return pool and device as in status.allocation of the claim, and the request without its subrequest",
        prepare_checks.check_devices,
        missing_prepared_claims,
    ),
    ConformCheck(
        "prepare.health",
        "prepared devices are in the health lists under the same names",
        "The kubelet compares pool and name exactly: the health of a device with other names is "
        "never shown in a pod's status.",
        "take the names of health and prepare from the table of the ResourceSlice",
        prepare_checks.check_health_names,
        missing_prepared_claims,
    ),
    ConformCheck(
        "prepare.first_cdi_id",
        "each device has its own first CDI id",
        "The pod's status shows a device under its first CDI id, and only one device for each id:"
        " a failed device behind a healthy one is never seen.",
        "give each device a CDI id of its own, and return it first",
        prepare_checks.check_first_cdi_id,
        missing_prepared_claims,
    ),
    ConformCheck(
        "prepare.cdi_ids",
        "every CDI id is valid and defined in a CDI file when prepare returns",
        "The container runtime cannot resolve the id: the containers do not start.",
        "write the CDI file before the answer, atomically, with a name that ends in .json",
        prepare_checks.check_cdi_ids,
        missing_prepared_claims,
    ),
    ConformCheck(
        "prepare.cdi_files",
        "CDI files are valid",
        "Runtimes ignore an invalid file, with an unknown field or a version older than its "
        "features, and the containers do not start.",
        "validate the file against the CDI specification",
        prepare_checks.check_cdi_files,
        missing_prepared_claims,
    ),
    ConformCheck(
        "prepare.again",
        "the same claim gets the same answer again",
        "A kubelet that restarts forgets what is prepared, and prepares a claim again for the next pod that "
        "starts with it. An error keeps this pod from starting, another answer changes its devices.",
        "return what was prepared; an existing prepare is no error",
        prepare_checks.check_repeated_prepare,
        missing_stage(PrepareStage.AGAIN),
    ),
    ConformCheck(
        "prepare.second_pod",
        "a claim gets the same answer in a call with other claims",
        "Pods may share a claim. The kubelet prepares it with the other claims of whichever pod starts.",
        "prepare each claim by itself, independent of the other claims of the call",
        prepare_checks.check_second_pod,
        missing_stage(PrepareStage.ALONE),
    ),
    ConformCheck(
        "prepare.two_calls",
        "two calls at once get the same answer",
        "The kubelet gives up after 45 s and calls again, and a restarted kubelet does not know "
        "about calls in progress: the driver then works on both.",
        "let the second call wait for the first, and return its result",
        prepare_checks.check_concurrent_prepares,
        missing_stage(PrepareStage.AT_ONCE),
    ),
    ConformCheck(
        "prepare.missing_claim",
        "a claim that does not exist is not prepared",
        "A claim can be deleted after the kubelet has read it. A driver that prepares a deleted claim takes "
        "devices that the scheduler gives to others.",
        "read the claim in each call, and answer with an error if it does not exist",
        prepare_checks.check_missing_claim,
        missing_stage(PrepareStage.MISSING),
    ),
    ConformCheck(
        "prepare.other_uid",
        "a claim with another UID is not prepared",
        "The claim was deleted and created again: its allocation belongs to another claim of that name.",
        "compare the UID of the request with that of the claim",
        prepare_checks.check_other_uid,
        missing_stage(PrepareStage.OTHER_UID),
    ),
    ConformCheck(
        "prepare.bad_claim",
        "a bad claim has an error of its own, and does not fail the others",
        "The error of a whole call does not name its claim. An error of a good claim hides the "
        "bad one, since the pod's event shows only one of them.",
        "return an error for each claim that failed, and devices for all others",
        prepare_checks.check_bad_claims,
        missing_stage(PrepareStage.BAD),
    ),
    ConformCheck(
        "prepare.rollback",
        "a claim that failed leaves no CDI file",
        "What a failed prepare leaves is not removed if the pod is never started: files add up, "
        "and ids refer to devices of others.",
        "undo all steps of a claim before its error is returned",
        prepare_checks.check_rollback,
        missing_stage(PrepareStage.BAD),
    ),
    ConformCheck(
        "prepare.errors.stable",
        "the same failure has the same text",
        "Events with the same text are counted; each other text is one more event, up to ten within ten "
        "minutes.",
        "keep times, addresses and counts out of the text",
        prepare_checks.check_stable_errors,
        missing_stage(PrepareStage.BAD),
    ),
    ConformCheck(
        "prepare.errors.text",
        "an error is one line of at most 1,024 bytes",
        "kubectl describe shows the text in one line, after the kubelet's own words: a longer one is not "
        "read to its end.",
        "write the cause first, in one line",
        prepare_checks.check_error_text,
        missing_stage(PrepareStage.BAD),
    ),
    ConformCheck(
        "prepare.errors.names",
        "the error of a claim names the other claims that failed",
        "The kubelet stops at the first error, in random order: of several failures the operator sees one.",
        "append the names of the other failed claims of the call",
        prepare_checks.check_error_names,
        missing_stage(PrepareStage.BAD),
    ),
    ConformCheck(
        "prepare.deadline",
        "prepare and unprepare are answered within 45 s, with success best within 10 s",
        "The kubelet gives up after 45 s, and the pod waits for its next attempt, 60 to 90 s later.",
        "limit each step in time; continue in the background, and let the next call join",
        prepare_checks.check_deadline,
        missing_stage(PrepareStage.FIRST),
    ),
    ConformCheck(
        "prepare.restart",
        "the same claim gets the same answer after a restart of the driver",
        "A driver is updated while pods run. What it kept in memory only is lost: devices are "
        "given away twice, or the claim cannot be prepared again.",
        "store what is prepared, or derive it from the claim",
        prepare_checks.check_restart,
        missing_stage(PrepareStage.RESTARTED),
    ),
    ConformCheck(
        "prepare.reboot",
        "after a reboot the answer is the same, and CDI files are written again",
        "/var/run is empty after a reboot, while claims and pods exist: their containers do not "
        "start without the files.",
        "write the CDI files at each prepare, also of a claim that is prepared",
        prepare_checks.check_reboot,
        missing_stage(PrepareStage.REBOOTED),
    ),
    ConformCheck(
        "prepare.after_unprepare",
        "a claim can be prepared again after its unprepare, with the same devices",
        "The next pod that uses the claim does not start, or starts without its devices.",
        "forget the claim at its unprepare, and write its CDI files again",
        prepare_checks.check_prepare_after_unprepare,
        missing_stage(PrepareStage.RELEASED),
    ),
    ConformCheck(
        "unprepare.all",
        "claims are unprepared",
        "The pod stays in Terminating. The kubelet repeats the call without end.",
        "release the devices, and answer without an error",
        prepare_checks.check_unprepare,
        missing_stage(PrepareStage.UNPREPARED),
    ),
    ConformCheck(
        "unprepare.again",
        "a second unprepare is no error",
        "The kubelet repeats the call if it did not receive the answer, or was restarted.",
        "treat a claim that is not prepared as unprepared",
        prepare_checks.check_repeated_unprepare,
        missing_stage(PrepareStage.UNPREPARED_AGAIN),
    ),
    ConformCheck(
        "unprepare.unknown",
        "unprepare of an unknown claim is no error",
        "The kubelet also unprepares claims whose prepare failed or never began; with an error "
        "the pod stays in Terminating.",
        "treat a claim that was never prepared as unprepared",
        prepare_checks.check_unknown_unprepare,
        missing_stage(PrepareStage.UNKNOWN),
    ),
    ConformCheck(
        "unprepare.cdi",
        "the CDI ids of a claim are gone after unprepare",
        "Containers can still be given the devices by these ids, and files add up.",
        "remove the claim's CDI file",
        prepare_checks.check_unprepared_cdi,
        missing_stage(PrepareStage.UNPREPARED),
    ),
    ConformCheck(
        "unprepare.lost_device",
        "unprepare succeeds without the device",
        "A pod on a failed device cannot be deleted: it stays in Terminating until the node is rebooted.",
        "release what the driver recorded; skip steps that need the device",
        prepare_checks.check_lost_device,
        missing_stage(PrepareStage.LOST_DEVICE),
    ),
    ConformCheck(
        "unprepare.deleted_claim",
        "unprepare succeeds without the claim",
        "A claim that was deleted by force is no longer in the API server; its pod stays in Terminating.",
        "identify the claim by its UID, and read nothing from the API server",
        prepare_checks.check_deleted_claim,
        missing_stage(PrepareStage.DELETED_CLAIM),
    ),
)
"""All conformance checks, in the order in which a kubelet depends on them."""
