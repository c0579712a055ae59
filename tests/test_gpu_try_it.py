"""Commands in the catalog for trying a rule are valid commands of the fake NVML."""

import json
import re
from pathlib import Path
from typing import Final

import pytest
from fake_nvml import fake_nvml, play

from agent.health.gpu.rule_state import gpu_rules
from agent.model.settings import GpuLimits

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

COMMAND: Final = re.compile(r"(?:gpu \d|init|reload) [^;]+")
T4: Final = "with profile t4: "
LINES: Final = {rule.code: rule.try_it for rule in gpu_rules(GpuLimits())}
BY_HAND: Final = {
    "gpu.driver.process",
    "gpu.driver.deaf",
    "gpu.driver.stuck_process",
    "gpu.unbound",
    "gpu.fabric.manager",
    "gpu.pcie.aer.fatal",
    "gpu.pcie.aer.nonfatal",
    "gpu.pcie.aer.correctable",
}
"""Rules that do not depend on NVML alone."""


def test_every_nvml_rule_has_a_command_for_the_fake() -> None:
    assert {code for code, text in LINES.items() if not COMMAND.search(text)} == BY_HAND


@pytest.mark.parametrize("profile", ["h100", "t4"])
def test_fake_nvml_accepts_every_command(profile: str, tmp_path: Path) -> None:
    lines = [text for text in LINES.values() if text.startswith(T4) == (profile == "t4")]
    commands = [command.strip() for text in lines for command in COMMAND.findall(text)]
    assert commands
    answer = play(
        fake_nvml(tmp_path, f"profile {profile} gpus=8"),
        f"""
        answer = []
        for command in json.loads({json.dumps(json.dumps(commands))}):
            try:
                send(command)
            except ValueError as error:
                answer.append(str(error))
        """,
    )
    assert answer == []
