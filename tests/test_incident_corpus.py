"""Labelled incidents of ``corpus/``: their form, their sources, their labels, and their split."""

import ipaddress
import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from agent.model.health import Severity
from agent.scoreboard.incidents import (
    HELD_OUT_SHARE,
    NODE,
    CorpusError,
    CorpusSplit,
    LabelledIncident,
    LineOrigin,
    find_corpus,
    load_incidents,
    select_split,
)

INCIDENTS: Final = load_incidents(find_corpus())
FAULTS_MIN: Final = 150
HARMLESS_MIN: Final = 50
HEALTH: Final = {Severity.UNHEALTHY: "unhealthy", Severity.UNKNOWN: "unknown"}
LINE: Final = """
[[incident]]
name = "{name}"
what = "A fault."
origin = "synthetic"
source = "https://example.com/"
licence = "none"
log = ["{line}"]
"""


def devices_of(incident: LabelledIncident) -> set[str]:
    """Return the names of devices that the label of an incident may have."""
    return {NODE, "gpus", "cpu-node0", "memory-node0", *incident.gpus, *incident.functions}


def write_incidents(folder: Path, *names: str) -> None:
    """Write a file with one incident per name."""
    (folder / "some.toml").write_text("".join(LINE.format(name=name, line=name) for name in names))


def test_corpus_has_enough_faults_and_harmless_events() -> None:
    kinds = Counter(incident.harmless for incident in INCIDENTS)
    assert kinds[False] >= FAULTS_MIN
    assert kinds[True] >= HARMLESS_MIN


def test_corpus_lines_belong_to_one_incident_each() -> None:
    lines = Counter(line for incident in INCIDENTS for line in set(incident.log))
    assert [line for line, times in lines.items() if times > 1] == []


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.name)
def test_incident_has_a_name_a_source_and_a_right_label(incident: LabelledIncident) -> None:
    assert re.fullmatch(r"[a-z0-9]+(?:[-.][a-z0-9]+)*", incident.name)
    assert incident.what.endswith(".")
    assert re.fullmatch(r"https://[^ ]+", incident.source)
    assert incident.licence
    assert incident.log or incident.nvml
    assert {change.gpu for change in incident.nvml} <= set(incident.gpus)
    for verdict in incident.expect:
        assert verdict.device in devices_of(incident)
        assert re.match(r"(?:gpu|cpu|mem|pci|node)\.", verdict.code)
        expected = "" if verdict.device == NODE else HEALTH.get(verdict.level, "healthy")
        assert verdict.health == expected
    if incident.harmless:
        assert incident.level <= Severity.INFO
    else:
        assert all(verdict.level > Severity.INFO for verdict in incident.expect)
        assert incident.expect


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.name)
def test_incident_lines_have_no_time_host_or_public_address(incident: LabelledIncident) -> None:
    for line in incident.log:
        assert not re.match(r"\[ *\d+\.\d+\]|\w{3} +\d+ \d\d:|<\d+>|kernel:", line)
        assert "(none)" not in line or incident.origin is not LineOrigin.ISSUE
        for address in re.findall(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])", line):
            assert not ipaddress.ip_address(address).is_global


def test_split_follows_from_the_name_alone() -> None:
    known = {
        "xid79-two-gpus-lost": CorpusSplit.OPEN,
        "xid31-chrome": CorpusSplit.OPEN,
        "gsp-heartbeat-timeout": CorpusSplit.HELD_OUT,
    }
    assert {each.name: each.split for each in INCIDENTS if each.name in known} == known


def test_splits_have_all_incidents_and_both_kinds() -> None:
    opened, held = (select_split(INCIDENTS, split) for split in CorpusSplit)
    assert len(opened) + len(held) == len(INCIDENTS)
    assert select_split(INCIDENTS, None) == INCIDENTS
    assert abs(len(held) / len(INCIDENTS) - HELD_OUT_SHARE) < 0.1
    for part in (opened, held):
        assert {incident.harmless for incident in part} == {True, False}


def test_load_incidents_of_a_repeated_name_raises(tmp_path: Path) -> None:
    write_incidents(tmp_path, "a", "b", "a")
    with pytest.raises(CorpusError, match=r"some\.toml: incident 'a' exists twice"):
        load_incidents(tmp_path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[[incident]]\nname = 'a'\n", "missing required field"),
        (LINE.format(name="a", line="b") + "colour = 1\n", "unknown field"),
        (LINE.format(name="a", line="b").replace("synthetic", "hearsay"), "hearsay"),
        ("[[incident", "Expected"),
        (LINE.format(name="a", line="\xff"), "can't decode byte 0xff"),
        (
            LINE.format(name="a", line="b") + "nvml = [{gpu = '0000:01:00.0', after_s = 1}]\n",
            "which nvml names",
        ),
        (
            LINE.format(name="a", line="b") + "expect = [{device = 'node', severity = 'bad', code = 'c'}]\n",
            "Invalid enum value 'bad'",
        ),
    ],
)
def test_load_incidents_of_an_invalid_file_raises_and_names_it(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "bad.toml").write_text(text, encoding="latin-1")
    with pytest.raises(CorpusError, match=rf"bad\.toml: .*{what}"):
        load_incidents(tmp_path)


def test_load_incidents_of_an_empty_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="has no incident files"):
        load_incidents(tmp_path)


def test_find_corpus_of_an_installed_package_names_the_missing_checkout(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="run it from a checkout"):
        find_corpus(tmp_path)
