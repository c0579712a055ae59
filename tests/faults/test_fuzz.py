"""Parsers with their valid inputs, the saved inputs of former bugs, and a few random ones."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.fuzz import CORPUS, Target, fuzz, inputs_of, mutate, open_targets, outcome

NAMES = [
    "http2", "http", "link-SyncDevices", "link-ReportChecks", "link-WatchTaints", "link-CheckClaims",
    "link-Classify", "link-ReportPrepare", "conform-prepare", "conform-health",
    "checkpoint", "kubelet-health", "cpu-manager", "declaration", "history", "gpu-faults",
    "ledger", "taints", "config", "web-config", "objects", "claim", "kubelet-config", "cdi", "pod-resources",
    "pods-api", "report", "clear-request", "kernel-line", "nvml-inventory", "record",
]  # fmt: skip


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    with open_targets() as targets:
        yield targets


def test_every_target_is_listed_and_every_corpus_has_a_target(targets: dict[str, Target]) -> None:
    assert list(targets) == NAMES
    assert {path.name for path in CORPUS.iterdir()} <= set(NAMES)


def test_share_of_damaged_histories_is_still_read(targets: dict[str, Target]) -> None:
    """An input that is refused at once tests little: the format of SQLite is binary."""
    target, chance = targets["history"], random.Random(1)
    names = [outcome(target, mutate(chance.choice(target.seeds), target.seeds, chance)) for _ in range(60)]
    assert sum(":" not in name for name in names) >= 12, names


@pytest.mark.parametrize("name", NAMES)
def test_parser_raises_only_the_errors_of_its_contract(
    targets: dict[str, Target], name: str, tmp_path: Path
) -> None:
    inputs = inputs_of(name, targets[name])
    for data in inputs:
        outcome(targets[name], data)
    assert outcome(targets[name], inputs[0]).find(":") < 0, "the first input is valid"
    assert fuzz(name, targets[name], seconds=0.1, seed=1, found=tmp_path) > 0
