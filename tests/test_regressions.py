"""``--check`` detects mistakes that raise the cost of the agent: copies of this tree with one mistake each.

Each mistake is a plausible line of code. The check runs on the changed sources as in any checkout, with only
the guards that must miss.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from patience import PATIENCE_S

from agent.bench.guards import compiler
from agent.bench.revisions import BUILD

ROOT: Final = Path(__file__).resolve().parents[1]
COPIED: Final = ("agent", "benchmarks", "deploy", "native", "pyproject.toml", "setup_build.py")
IGNORED: Final = shutil.ignore_patterns("__pycache__", "build", "tests", "fuzz")


class Mistake(NamedTuple):
    """Replacement of a text in a file that plants a mistake."""

    file: str
    old_text: str
    new_text: str
    missed: tuple[str, ...]
    """Guards that must miss."""
    is_built: bool = False
    """Whether the extension module must be rebuilt, because the guards run it."""


MISTAKES: Final = {
    "an extra open per file": Mistake(
        "native/src/core/files.c",
        "        n = pread(f->fd,",
        '        close(openat(s->sysfs_fd, ".", O_RDONLY));\n        n = pread(f->fd,',
        ("system_calls.pass", "instructions.pass"),
    ),
    "unchanged bytes are parsed": Mistake(
        "native/src/core/files.c",
        "if (f->seen && !f->err && (uint32_t)n == f->len && !memcmp(buf, f->last, f->len))",
        "if (f->err)",
        ("instructions.pass",),
    ),
    "no descriptor of a cgroup is held": Mistake(
        "native/src/cgroup/cgroup_held.c",
        "    if (c->held_num == c->held_max) {",
        "    if (c->held_num <= c->held_max) {",
        ("system_calls.second_100_groups", "system_calls.still_100_groups", "system_calls.sweep_100_groups"),
    ),
    "unchanged text of a cgroup is parsed": Mistake(
        "native/src/cgroup/cgroup_files.c",
        "if (n > 0 && held->digest ==",
        "if (n > 0 && ~held->digest ==",
        ("instructions.sweep_100_groups",),
    ),
    "unchanged results of a GPU are stored": Mistake(
        "native/src/gpu/gpu_batch.c",
        "    if (s->plan_reusable && digest == s->results_digest)\n",
        "    if (!s->plan_reusable && digest == s->results_digest)\n",
        ("instructions.pass_8_gpus",),
    ),
    "a clock read per result of a GPU": Mistake(
        "native/src/gpu/gpu_batch.c",
        "        batch[i].valueType = NO_TYPE;\n",
        "        batch[i].valueType = NO_TYPE;\n        batch[i].timestamp = (long long)dh_now_ns();\n",
        ("instructions.pass_8_gpus",),
    ),
    "unchanged groups are swept as often as changing ones": Mistake(
        "native/src/cgroup/cgroups.c",
        "#define WHOLE_SWEEPS 6\n",
        "#define WHOLE_SWEEPS 1\n",
        ("system_calls.still_100_groups",),
    ),
    "an allocation per pass": Mistake(
        "native/src/core/sampler.c",
        "    s->now_ns = s->source_start_ns = dh_now_ns();\n    s->resync = ",
        "    void *volatile log = malloc(64);\n\n    free(log);\n"
        "    s->now_ns = s->source_start_ns = dh_now_ns();\n    s->resync = ",
        ("allocations.pass",),
    ),
    "a Python wakeup per tick": Mistake(
        "native/src/core/sampler.c",
        "    if (s->first)\n        s->wake = true;\n",
        "    s->wake = true;\n",
        ("system_calls.pass", "wakeups.quiet_passes"),
        is_built=True,
    ),
    "each GPU wakes its own thread for a short pass": Mistake(
        "native/src/gpu/gpu_schedule.c",
        "    w->is_common = true;\n",
        "    w->is_common = false;\n",
        ("wakeups.pass_8_gpus",),
        is_built=True,
    ),
    "an evaluation every second": Mistake(
        "agent/engine/loop.py",
        "next_evaluation_ns(self._state.due_ns, self._next_publish_ns())\n",
        "next_evaluation_ns(self._clock().mono_ns + NS, self._next_publish_ns())\n",
        ("wakeups.quiet_minute",),
    ),
    "each evaluation includes everything": Mistake(
        "agent/engine/loop.py",
        "            self._full_ns = now_ns + self.heartbeat_period_ns\n",
        "            self._full_ns = now_ns\n",
        ("opcodes.change", "opcodes.change_8_gpus", "opcodes.cgroup_event"),
    ),
    "each evaluation includes the whole host": Mistake(
        "agent/engine/step.py",
        "    if not (is_full or is_incomplete or snapshot.clear_requests):\n",
        "    if not (is_full or is_incomplete or snapshot.machine or snapshot.clear_requests):\n",
        ("opcodes.change", "opcodes.change_8_gpus"),
    ),
    "each evaluation includes all GPUs": Mistake(
        "agent/engine/step.py",
        "    if not (is_full or snapshot.clear_requests):\n",
        "    if not (is_full or snapshot.gpus or snapshot.clear_requests):\n",
        ("opcodes.change_8_gpus",),
    ),
    "a further call for each rule of a GPU": Mistake(
        "agent/health/gpu/verdicts.py",
        "        elif limit is None:\n",
        "        elif limit is None and evaluation.change_of(device.name, rule):\n",
        ("opcodes.heartbeat_8_gpus",),
    ),
    "a heartbeat wakes the I/O thread twice": Mistake(
        "agent/system/threads/latest_value.py",
        "                waiter.set_result(None)\n",
        "                waiter.get_loop().call_later(0.01, waiter.set_result, None)\n",
        ("heartbeat_waits.io",),
    ),
    "a stream is never lent to the publishing thread": Mistake(
        "agent/serve/grpc/idle_streams.py",
        "        if self._row is not None or stream.lent is not None or not stream.is_idle():\n",
        "        if self._row is None or stream.lent is not None or not stream.is_idle():\n",
        ("publication_calls.publish_1", "publication_calls.publish_64"),
    ),
    "a process imports modules that it does not use": Mistake(
        "agent/node/nvml_process_main.py",
        "import contextlib\n",
        "import asyncio\nimport contextlib\n",
        ("modules.nvml_process",),
    ),
    "a heartbeat wakes the core thread twice": Mistake(
        "agent/app/daemon.py",
        "        self._record_verdicts(report)\n        self._publish_to_clients(report)\n",
        "        self._record_verdicts(report)\n        self._publish_to_clients(report)\n"
        "        yield_to_senders()\n",
        ("heartbeat_waits.core",),
    ),
    "a heartbeat wakes the thread of the history": Mistake(
        "agent/node/verdict_recorder.py",
        "            if self._has_work():\n                self._changed.notify()\n",
        "            self._changed.notify()\n",
        ("heartbeat_waits.core_wakes",),  # its own wake may come at the same time
    ),
    "the thread of the history wakes more often than the heartbeat": Mistake(
        "agent/node/verdict_recorder.py",
        "self._has_work(), self._mark_due_in_s())",
        "self._has_work(), self._mark_due_in_s() / 2)",
        ("heartbeat_waits.history",),
    ),
    "a heartbeat wakes the thread of the log": Mistake(
        "agent/cli/output/log.py",
        "        if is_repeat and facts == self._facts:\n",
        "        if is_repeat and facts is self._facts:\n",
        ("heartbeat_waits.log", "heartbeat_waits.core_wakes"),
    ),
    "an evaluation that retains memory": Mistake(
        "agent/engine/step.py",
        "    settings = state.settings\n    started = ",
        "    step.__annotations__[str(len(step.__annotations__))] = object()\n"
        "    settings = state.settings\n    started = ",
        ("allocations.quiet_look",),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_check_reports_planted_mistake(mistake: Mistake, tmp_path: Path) -> None:
    for tool in (compiler(), "strace", "valgrind"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    copy_with_mistake(tmp_path, mistake)
    completed = check(tmp_path, mistake.missed)
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert completed.stdout.splitlines()[-1].endswith(
        f"{len(mistake.missed)} missed: {', '.join(mistake.missed)}"
    )


def copy_with_mistake(tree: Path, mistake: Mistake) -> None:
    """Copy this checkout and plant the mistake."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=IGNORED)
        else:
            shutil.copy2(ROOT / name, tree)
    text = (tree / mistake.file).read_text()
    assert text.count(mistake.old_text) == 1, f"{mistake.file} has changed: update the planted mistake"
    (tree / mistake.file).write_text(text.replace(mistake.old_text, mistake.new_text))
    if mistake.is_built:
        subprocess.run([sys.executable, *BUILD], cwd=tree, check=True, capture_output=True)


def check(tree: Path, guards: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "agent.bench", "--check", *guards]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(
        command,
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,
        check=False,
    )
