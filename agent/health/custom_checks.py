"""Checks that operators configure as commands: their results count like those of drivers' own checks.

A result concerns the devices whose names match the check's pattern, or the Kubernetes node. Until the first
run has ended, a check is listed as not evaluated, and changes no verdict.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agent.devices.inventory import InventoryDevice
from agent.health.declared.driver_checks import (
    check_conditions_subject,
    check_sources,
    evaluate_driver_checks,
)
from agent.health.evaluation import Evaluation, Subject
from agent.health.host.verdicts import MACHINE_SUBJECT
from agent.health.verdict import VerdictContext, replace_causes
from agent.model.custom_checks import CustomCheck, CustomCheckResult
from agent.model.declared_devices import DriverCheckSample
from agent.model.health import DeviceHealth, NonDeviceCause, NotApplicable
from agent.model.source_state import SourceSample
from agent.model.time import NS, Instant

NOT_RUN_YET: Final = "its command has not ended yet, or runs in the agent only"

_Results = Mapping[tuple[str, str], CustomCheckResult]


def custom_check_sources(
    checks: Sequence[CustomCheck], results: Iterable[CustomCheckResult], now: Instant
) -> Iterable[SourceSample]:
    """Return a source for the report for each custom check that has a result."""
    if not checks:
        return ()
    by_name = {check.name: check for check in checks}
    samples = [
        _sample(by_name[result.check], result.device, result, now)
        for result in results
        if result.check in by_name
    ]
    return check_sources(samples, now)


class CustomCheckEvaluation:
    """Results of the custom checks in one evaluation, for each device and for the Kubernetes node."""

    def __init__(
        self, evaluation: Evaluation, checks: Sequence[CustomCheck], results: Iterable[CustomCheckResult]
    ) -> None:
        self._evaluation = evaluation
        self._checks = checks
        self._results: _Results = {(result.check, result.device): result for result in results}

    def samples(self, subject: Subject) -> list[DriverCheckSample]:
        """Return the newest result of each custom check of a device.

        A check without a result is listed as not evaluated.
        """
        return self._samples(subject, [check for check in self._checks if check.matches(subject)])

    def _samples(self, subject: Subject, checks: Iterable[CustomCheck]) -> list[DriverCheckSample]:
        samples = []
        for check in checks:
            result = self._results.get((check.name, subject if check.is_per_device else ""))
            if result is None:
                self._evaluation.not_evaluated.append(NotApplicable(subject, check.code, NOT_RUN_YET))
            samples.append(_sample(check, subject, result, self._evaluation.now))
        return samples

    def add_to_host(self, previous: VerdictContext, verdicts: dict[InventoryDevice, DeviceHealth]) -> None:
        """Add the causes from custom checks to the verdicts on the host's devices."""
        if not self._checks:
            return
        for device, found in verdicts.items():
            samples = self.samples(device.subject)
            if causes := samples and evaluate_driver_checks(self._evaluation, device.subject, samples):
                more = [*found.causes, *causes]
                verdicts[device] = replace_causes(self._evaluation, previous, device, found, more)

    def notes(self) -> list[NonDeviceCause]:
        """Return the causes that custom checks of the Kubernetes node found; they are notes of the report."""
        if not self._checks:
            return []
        samples = self._samples(MACHINE_SUBJECT, [check for check in self._checks if not check.devices])
        causes = evaluate_driver_checks(self._evaluation, MACHINE_SUBJECT, samples)
        return [NonDeviceCause(MACHINE_SUBJECT, cause) for cause in causes]

    def keep_faults_of_unread_devices(self, known: Iterable[Subject]) -> None:
        """Keep faults from before a restart of the agent, of devices that no source has read since."""
        if not self._checks:
            return
        present = {check_conditions_subject(subject) for subject in (*known, MACHINE_SUBJECT)}
        prefixes = tuple(f"{check.code}/" for check in self._checks)
        for (subject, code), condition in self._evaluation.previous.items():
            if condition.last_pass == 0 and code.startswith(prefixes) and subject not in present:
                self._evaluation.repeat_finding(subject, code, passes=0)


def _sample(
    check: CustomCheck, subject: Subject, result: CustomCheckResult | None, now: Instant
) -> DriverCheckSample:
    return DriverCheckSample(
        check.code,
        subject,
        finding=result.finding if result else None,
        no_result_reason=result.no_result_reason if result else "",
        passes=result.passes if result else 0,
        beat_ns=result.beat_ns if result else now.mono_ns,
        period_ns=int((check.period_s + check.timeout_s) * NS),
        raise_after=check.raise_after,
        clear_after=check.clear_after,
    )
