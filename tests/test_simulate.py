"""Simulated nodes: no invariant is violated, and each one can be."""

import json
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest

import agent.simulate.node_run as node_run
from agent.devices import taints
from agent.engine import step as engine
from agent.errors import OutputError, OutputPipeClosed
from agent.health.gpu import state as gpu_state
from agent.model.health import Health, Severity, Taints
from agent.prepare import prepare_ledger
from agent.serve.health import service
from agent.simulate import fault_model, main
from agent.simulate.fault_model import (
    FAULT_KINDS,
    MachineSpec,
    NodeScript,
    ScriptEvent,
    encode_script,
    random_script,
    read_script,
)
from agent.simulate.invariants import BROKEN, CAUSE, CLEARS, HISTORY, INVARIANTS, PREPARES, TAINTS, VERIFIED
from agent.simulate.node_run import NodeRun

SCRIPTS = Path(__file__).parent / "simulated"
GPU_NODE = MachineSpec(2, "H100", (0, 2), 1, 4, 512)


def script(*events, length=3000, machine=GPU_NODE):
    return NodeScript(machine, length, tuple(ScriptEvent(*event) for event in events))


def violated_invariant(*events, **options):
    """Return the invariant that a script violates; None: none."""
    found = NodeRun(script(*events, **options)).run().violation
    return found and found.invariant


# --- scripts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.json")), ids=lambda path: path.stem)
def test_saved_script_violates_no_invariant(path):
    assert NodeRun(read_script(path)).run().violation is None


@pytest.mark.parametrize("seed", range(4))
def test_random_nodes_violate_no_invariant(seed):
    assert NodeRun(random_script(seed, 0, 0.2, 300)).run().violation is None


@pytest.mark.parametrize("kind", sorted(FAULT_KINDS))
def test_each_kind_of_event_alone_violates_no_invariant(kind):
    run = NodeRun(script((600, kind, 0, 90), (900, "agent-restart", 0, 5)))
    result = run.run()
    assert result.violation is None
    assert result.kinds[kind] >= 1


@pytest.mark.parametrize("kind", sorted(kind.name for kind in FAULT_KINDS.values() if kind.median_s))
def test_overlapping_faults_of_one_kind_violate_no_invariant(kind):
    assert violated_invariant((600, kind, 0, 60), (620, kind, 0, 600)) is None


def test_end_of_a_hang_that_a_crash_of_nvml_ended_leaves_a_later_hang():
    events = ((600, "gpu-hang", 0, 400), (700, "nvml-crash", 0, 5), (900, "gpu-hang", 0, 600))
    assert violated_invariant(*events) is None


def test_same_seed_gives_the_same_script_and_verdicts():
    first, second = (NodeRun(random_script(3, 1, 0.1, 300), records=True).run() for _ in range(2))
    assert first.verdicts == second.verdicts
    assert random_script(3, 1, 0.1, 300) != random_script(3, 2, 0.1, 300)


@pytest.mark.parametrize("seed", range(3))
def test_skipping_quiet_time_changes_no_verdict(seed):
    machine = MachineSpec(1, "H100", (), 1, 4, 512)
    given = random_script(seed, 0, 0.08, 400, machine)
    skipping, stepping = (NodeRun(given, skips=skips, records=True).run() for skips in (True, False))
    assert [found for _, found in skipping.verdicts] == [found for _, found in stepping.verdicts]
    for (skipped_s, _), (stepped_s, _) in zip(skipping.verdicts, stepping.verdicts, strict=True):
        assert abs(skipped_s - stepped_s) <= node_run.HEARTBEAT_S, "heartbeats are at other times"
    assert skipping.evaluations < stepping.evaluations


def test_script_survives_a_file(tmp_path):
    given = random_script(5, 0, 0.5, 100)
    (tmp_path / "script.json").write_text(encode_script(given))
    assert read_script(tmp_path / "script.json") == given


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 9}, "version 9"),
        ({"extra": 1}, "extra"),
        ({"events": [{"at": 1, "kind": "flood"}]}, "kind 'flood'"),
        ({"events": [{"at": 1, "kind": "gpu-hang", "target": 2}]}, "target 2"),
        ({"machine": {"gpus": 2, "migs": [1]}}, "migs has 1 numbers for 2 GPUs"),
        ({"machine": {"gpus": 2, "model": "A1"}}, "model 'A1'"),
        ({"machine": {"gpus": 1, "migs": [8]}}, "<= 7 - at"),
        ({"length": 10**12}, "<= 316224000"),
        ({"events": [{"at": 1, "kind": "clock-step", "lasts": 10**18}]}, "<= 316224000"),
    ],
)
def test_invalid_script_is_refused_with_its_place(tmp_path, change, text):
    path = tmp_path / "script.json"
    path.write_text(json.dumps(json.loads(encode_script(script())) | change))
    with pytest.raises(fault_model.ConfigError, match=text):
        read_script(path)


# --- each invariant can fail --------------------------------------------------------------------------------


def test_every_invariant_has_a_mutation():
    """The tests below violate each one."""
    assert set(INVARIANTS) == {BROKEN, CAUSE, CLEARS, HISTORY, PREPARES, TAINTS, VERIFIED}


def test_ignored_xids_leave_a_broken_gpu_healthy(monkeypatch):
    monkeypatch.setattr(gpu_state, "ingest_faults", lambda log, *_: log)
    assert violated_invariant((600, "gpu-halted", 0, 600)) == BROKEN


def test_missing_recovery_leaves_a_gpu_unhealthy(monkeypatch):
    monkeypatch.setattr(gpu_state, "resolve_faults", lambda log, *_: (log, None))
    assert violated_invariant((600, "gpu-gsp", 0, 60)) in (CAUSE, CLEARS)


def test_cause_that_outlasts_its_fault_is_found_while_another_fault_lasts(monkeypatch):
    monkeypatch.setattr(gpu_state, "resolve_faults", lambda log, *_: (log, None))
    assert violated_invariant((600, "gpu-gsp", 0, 60), (700, "gpu-hot", 0, 2200)) == CAUSE


def change_devices(monkeypatch, change):
    """Let each report have only the changed devices that are not None."""
    real = node_run.step

    def changed_step(*args, **options):
        state, report = real(*args, **options)
        devices = [changed for device in report.devices if (changed := change(device))]
        return state, replace(report, devices=tuple(devices))

    monkeypatch.setattr(node_run, "step", changed_step)


def test_device_that_reports_lack_is_found(monkeypatch):
    change_devices(monkeypatch, lambda device: None if device.device == "cpu-node0" else device)
    assert violated_invariant() == CLEARS


def test_fault_that_is_only_a_note_is_found(monkeypatch):
    monkeypatch.setattr("agent.health.gpu.heat.Severity", type("S", (), {"DEGRADED": Severity.INFO}))
    assert violated_invariant((600, "gpu-hot", 0, 600)) == BROKEN


def test_broken_device_that_is_only_unknown_is_found(monkeypatch):
    def unknown(device):
        is_bad = device.health is Health.UNHEALTHY
        return device._replace(health=Health.UNKNOWN, severity=Severity.UNKNOWN) if is_bad else device

    change_devices(monkeypatch, unknown)
    machine = MachineSpec(2, "H100", (), 1, 4, 512, False)
    assert violated_invariant((600, "gpu-halted", 0, 600), machine=machine) == BROKEN


def test_lease_that_is_too_long_is_found_before_a_stopped_agent_continues(monkeypatch):
    change_devices(monkeypatch, lambda device: device._replace(timeout_s=45))
    assert violated_invariant((600, "agent-stop", 0, 90), (610, "gpu-halted", 0, 600)) == BROKEN


def test_unknown_cause_that_stays_is_found(monkeypatch):
    """A source that has resumed is never trusted again."""
    monkeypatch.setattr("agent.health.verdict.CLEAN_PASSES", 10**9)
    assert violated_invariant((600, "source-hang", 0, 30)) == CLEARS


def test_verdict_without_its_fault_is_found(monkeypatch):
    monkeypatch.setattr("agent.health.gpu.heat.Severity", type("S", (), {"DEGRADED": Severity.UNHEALTHY}))
    assert violated_invariant((600, "gpu-hot", 0, 60)) == CAUSE


def test_repeated_verdict_without_a_reading_is_found(monkeypatch):
    real = service.HealthFeed.pending_messages
    monkeypatch.setattr(service.HealthFeed, "pending_messages", lambda feed, _, *rest: real(feed, 0, *rest))
    monkeypatch.setattr(engine, "_schedule_stall_detection", lambda *_, **__: None)
    monkeypatch.setattr(engine, "find_stalls", lambda *_: {})
    assert violated_invariant((600, "source-hang", 0, 600)) == VERIFIED


def test_taint_that_goes_at_once_is_found(monkeypatch):
    monkeypatch.setattr(taints._DecisionContext, "quiet_until", lambda self, gone_ns: gone_ns)
    machine = MachineSpec(0, "H100", (), 1, 4, 512, False)
    assert violated_invariant((600, "pool-shrunk", 0, 5), machine=machine) == TAINTS


def test_time_that_the_history_loses_is_found(monkeypatch):
    real = node_run.VerdictChangeLog.handle_report

    def forget_changes(log, report, boot_s):
        if len(log.pending) < 40:
            real(log, report, boot_s)

    monkeypatch.setattr(node_run.VerdictChangeLog, "handle_report", forget_changes)
    events = [(600 + 300 * number, "gpu-hang", 0, 30) for number in range(8)]
    assert violated_invariant(*events, length=4000) == HISTORY


def test_device_that_the_history_lacks_is_found(monkeypatch):
    real = node_run.VerdictChangeLog.handle_report

    def forget_cpus(log, report, boot_s):
        devices = [device for device in report.devices if device.device != "cpu-node0"]
        real(log, replace(report, devices=tuple(devices)), boot_s)

    monkeypatch.setattr(node_run.VerdictChangeLog, "handle_report", forget_cpus)
    assert violated_invariant() == HISTORY


def test_device_without_a_taint_is_found(monkeypatch):
    real = node_run.decide_taints
    monkeypatch.setattr(node_run, "decide_taints", lambda *args: replace(real(*args), taints=Taints()))
    assert violated_invariant((600, "gpu-halted", 0, 600)) == TAINTS


def test_driver_fault_that_is_not_added_is_found(monkeypatch):
    monkeypatch.setattr(prepare_ledger, "add_faults", lambda known, *_: known)
    assert violated_invariant((600, "prepare-fault", 0, 60)) == PREPARES


# --- shrinking and the command ------------------------------------------------------------------------------


def test_shrunk_script_has_only_the_needed_events(monkeypatch):
    monkeypatch.setattr(gpu_state, "ingest_faults", lambda log, *_: log)
    given = script(
        (400, "clock-step", 0, 60),
        (600, "gpu-hot", 1, 60),
        (900, "gpu-halted", 1, 600),
        (950, "gpu-hang", 0, 9),
    )

    def fails(candidate):
        found = NodeRun(candidate).run().violation
        return found and found.t_ns / 1e9

    shorter = main.shrink(given, fails)
    assert [(event.at, event.kind) for event in shorter.events] == [(300, "gpu-halted")]
    assert shorter.machine == MachineSpec(2, "H100", (), 1, 2, 0, False)
    assert shorter.length < 400


def test_minimal_subset_keeps_only_the_needed_events():
    tested = []

    def is_enough(part):
        tested.append(part)
        return {3, 17} <= set(part)

    assert main.minimal_subset(range(64), is_enough) == [3, 17]
    assert len(tested) < 100


def test_command_prints_sums_of_a_fleet(capsys):
    assert main.main(["--nodes", "3", "--days", "0.05", "--rate-factor", "200", "--jobs", "1"]) == 0
    assert "3 nodes, 0.15 node-days" in capsys.readouterr().out


def test_command_prints_and_saves_the_script_of_a_violation(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_state, "ingest_faults", lambda log, *_: log)
    (tmp_path / "in.json").write_text(encode_script(script((600, "gpu-halted", 0, 600))))
    arguments = ["--script", str(tmp_path / "in.json"), "--save", str(tmp_path / "out.json")]
    assert main.main(arguments) == 1
    assert capsys.readouterr().out == (tmp_path / "out.json").read_text()
    assert read_script(tmp_path / "out.json").note.startswith(BROKEN)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nodes", "0"],
        ["--days", "-1"],
        ["--jobs", "0"],
        ["--rate-factor", "0"],
        ["--rate-factor", "1e-320"],
    ],
)
def test_command_refuses_values_out_of_range(arguments):
    with pytest.raises(SystemExit, match="2"):
        main.main(arguments)


FLEET = ["--nodes", "1", "--days", "0.01", "--jobs", "1"]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (OutputError("standard output: No space left on device"), 74, "No space left on device"),
        (OutputPipeClosed("standard output: Broken pipe"), 141, ""),
        (BrokenProcessPool("terminated abruptly"), 70, "a process was killed; lower --jobs"),
    ],
)
def test_command_that_cannot_end_has_its_own_status(monkeypatch, capsys, error, status, text):
    def fail(*_):
        raise error

    monkeypatch.setattr(main, "_print_sums", fail)
    assert main.main(FLEET) == status
    assert text in capsys.readouterr().err


def test_violation_whose_script_cannot_be_saved_stays_a_violation(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_state, "ingest_faults", lambda log, *_: log)
    (tmp_path / "in.json").write_text(encode_script(script((600, "gpu-halted", 0, 600))))
    assert main.main(["--script", str(tmp_path / "in.json"), "--save", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "gpu-halted" in out
    assert f"file {tmp_path}: cannot be written: Is a directory" in err
