"""No verdict changes unnoticed between releases: committed records replay with the verdicts of their time."""

import pytest
from record_files import DIRECTORY, SCENARIOS, parse_record_path

from agent.cli.main import main
from agent.record.events import CLASSES
from agent.record.segment_file import SegmentReader, segment_paths
from agent.record.value_codec import FORMER_NAMES

RECORDS = {path.name: path for path in sorted(DIRECTORY.iterdir())}
SIZE_MAX = 64 << 10


def test_each_scenario_has_a_small_redacted_record() -> None:
    assert {parse_record_path(scenario) for scenario in SCENARIOS} == set(RECORDS.values())
    segments = [path for record in RECORDS.values() for path in segment_paths(record)]
    assert all(SegmentReader(path).head.is_redacted for path in segments)
    assert [path for path in segments if path.stat().st_size > SIZE_MAX] == []


@pytest.mark.parametrize("name", RECORDS)
def test_committed_record_replays_with_the_verdicts_of_its_time(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["replay", str(RECORDS[name])])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert "gpu-0 " in out


def test_committed_records_have_every_health() -> None:
    """A record without a fault would hold nothing."""
    seen = {
        verdict.health
        for record in RECORDS.values()
        for path in segment_paths(record)
        for step in SegmentReader(path).steps()
        for verdict in step.verdicts
    }
    assert seen == {0, 1, 2}


def test_former_names_of_classes_lead_to_recorded_classes() -> None:
    known = {known_class.type.__name__ for known_class in CLASSES}
    assert set(FORMER_NAMES.values()) <= known
    assert not FORMER_NAMES.keys() & known
