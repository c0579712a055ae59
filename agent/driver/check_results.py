"""Results of a driver's health checks: their validation, and the results that drivers send over sockets.

A driver in another process runs its checks itself. Each result is valid for a limited time; afterwards
agent.health.declared.driver_reports makes the device Unknown.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from agent.driver.merged_snapshot_source import DriverCheckKey
from agent.errors import ConfigError
from agent.health.verdict import truncate_utf8
from agent.model.declared_devices import DriverCheckSample, EqualRuns
from agent.model.health import Finding, Repair
from agent.model.time import NS
from agent.prepare.kubelet_message import normalize, sanitize, shorten
from agent.serve.driver_link.handler_interface import DriverCheckResult
from agent.sources.declaration_file import CHECKS_MAX, DEVICES_MAX, parse_label

CODE_BYTES: Final = 100
EVIDENCE_BYTES: Final = 500
ADVICE_BYTES: Final = 300
NO_EVIDENCE: Final = "the check gave no evidence"
"""Evidence text for a finding that states none."""
RESULTS_MAX: Final = DEVICES_MAX * CHECKS_MAX
"""Largest number of check results that are kept for one driver; the oldest ones are dropped."""

_CODE: Final = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+")


def validated_finding(finding: Finding) -> Finding:
    """Return a finding whose evidence and advice are shortened to one line each.

    Raises:
        ValueError: The code is not dotted, or is too long.
        TypeError: A text is not a string, or the repair is not a Repair.
    """
    for label, text in (("code", finding.code), ("evidence", finding.evidence), ("advice", finding.advice)):
        if not isinstance(text, str):
            raise TypeError(f"finding: {label} is a {type(text).__name__}, not a string")
    if finding.repair is not None and not isinstance(finding.repair, Repair):
        raise TypeError(f"finding: repair is {finding.repair!r}, not one of {', '.join(map(str, Repair))}")
    if (size := len(finding.code.encode("utf-8", "replace"))) > CODE_BYTES:
        raise ValueError(f"finding: code is {size} bytes, limit {CODE_BYTES}; shorten it")
    if not _CODE.fullmatch(finding.code):
        raise ValueError(f"finding code {finding.code!r} is not a dotted code, such as fpga.bank_locked")
    evidence = truncate_utf8(sanitize(finding.evidence), EVIDENCE_BYTES) or NO_EVIDENCE
    return finding._replace(evidence=evidence, advice=truncate_utf8(sanitize(finding.advice), ADVICE_BYTES))


class _Reported(NamedTuple):
    """Newest result of one health check on one device, as the driver reported it over its socket."""

    sample: DriverCheckSample
    run: int
    same_results: int
    """Number of consecutive runs of the check that had this result."""
    equal_runs: EqualRuns


class ReportedChecks:
    """Newest results of the checks that one driver reports over its socket. Thread-safe. Never blocks."""

    def __init__(
        self,
        driver: str,
        node: str,
        on_samples: Callable[[str, Sequence[DriverCheckSample], bool], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Create a collection without results.

        Args:
            driver: Name of the driver.
            node: Name of the Kubernetes node, which is the pool of devices that name no pool.
            on_samples: Called with the driver's name, all its newest samples, and whether the engine loop
                must read them at once.
            clock_ns: Returns CLOCK_MONOTONIC [ns].
        """
        self._driver = driver
        self._node = node
        self._on_samples = on_samples
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._reported: dict[DriverCheckKey, _Reported] = {}

    def report(self, results: Sequence[DriverCheckResult]) -> None:
        """Store new results of health checks: all of them, or none after an error.

        A result of an earlier run than the stored result is ignored.

        Raises:
            ConfigError: A name or a finding is not valid; the error names the result and the value.
        """
        valid = [_validate(result, f"results[{index}]") for index, result in enumerate(results)]
        now_ns = self._clock_ns()
        with self._lock:
            wake = False
            for result in valid:
                subject = f"{self._driver}/{result.pool or self._node}/{result.device}"
                key = subject, result.check
                before = self._reported.get(key)
                if before is not None and _is_late(before, result, now_ns):
                    continue
                reported = _next_reported(before, result, subject, now_ns)
                self._reported.pop(key, None)  # the newest ones are last
                self._reported[key] = reported
                # while results still count the core must see each one; later ones can wait for its heartbeat
                limit = max(result.raise_after, result.clear_after)
                was_expired = before and now_ns - before.sample.beat_ns > before.sample.lease_ns
                wake |= reported.same_results <= limit or bool(was_expired)
            for key in list(self._reported)[: max(0, len(self._reported) - RESULTS_MAX)]:
                del self._reported[key]
            self._on_samples(self._driver, [reported.sample for reported in self._reported.values()], wake)


def _validate(result: DriverCheckResult, label: str) -> DriverCheckResult:
    try:
        parse_label(result.check, "link-up")
        parse_label(result.device, "gpu-3")
        finding = validated_finding(result.finding) if result.finding else None
    except ValueError as error:
        raise ConfigError(f"{label}: {error}") from None
    reason = result.no_result_reason
    return result._replace(finding=finding, no_result_reason=shorten(normalize(reason)) if reason else "")


def _next_reported(
    before: _Reported | None, result: DriverCheckResult, subject: str, now_ns: int
) -> _Reported:
    """Return the newest result of a check on a device, with the number of consecutive runs that had it."""
    outcome = result.finding, result.no_result_reason
    beat_ns = _end_of_run_ns(result, now_ns)
    passes, same_results, equal_runs = 0, 0, EqualRuns()
    if before is not None:
        passes, equal_runs = before.sample.passes, before.equal_runs
        if outcome == (before.sample.finding, before.sample.no_result_reason):
            same_results = before.same_results
    # a driver that has restarted numbers its runs from 1 again, but they have ended later
    is_repeated = (
        before is not None
        and same_results > 0
        and 0 < result.run == before.run
        and _is_within_half_period(before, result, now_ns)
    )
    if not is_repeated:
        passes, same_results = passes + 1, same_results + 1
        equal_runs = equal_runs.next(*outcome)
    sample = DriverCheckSample(
        result.check,
        subject,
        finding=result.finding,
        no_result_reason=result.no_result_reason,
        passes=passes,
        beat_ns=beat_ns,
        period_ns=int(result.every_s * NS),
        raise_after=result.raise_after,
        clear_after=result.clear_after,
        lease_ns=int(result.lease_s * NS),
        equal_passes=equal_runs.equal_passes,
    )
    return _Reported(sample, result.run, same_results, equal_runs)


def _is_late(before: _Reported, result: DriverCheckResult, now_ns: int) -> bool:
    """Return whether a result is of an earlier run than the stored result ``before``.

    A driver that has restarted numbers its runs from 1 again: a lower number than the stored one is late only
    if it is not the first, and comes within half a period.
    """
    if before.run and result.run > before.run:
        return False
    is_earlier_run = 1 < result.run < before.run and _is_within_half_period(before, result, now_ns)
    return is_earlier_run or _end_of_run_ns(result, now_ns) < before.sample.beat_ns


def _is_within_half_period(before: _Reported, result: DriverCheckResult, now_ns: int) -> bool:
    return _end_of_run_ns(result, now_ns) - before.sample.beat_ns < result.every_s * NS / 2


def _end_of_run_ns(result: DriverCheckResult, now_ns: int) -> int:
    return now_ns - int(result.age_s * NS)
