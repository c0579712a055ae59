"""The core reports, remembers and taints over a node's life what the release before did, step by step."""

import pytest
from golden import files, stories
from golden.compare import check
from golden.files import list_golden_files, load


@pytest.mark.parametrize("name", stories.STORIES)
def test_each_step_of_a_story_equals_the_golden_one(name: str) -> None:
    golden, today = load(files.STORIES / f"{name}.json"), stories.steps(name)
    assert [step["step"] for step in today] == [step["step"] for step in golden]
    for before, now in zip(golden, today, strict=True):
        check(before, now, before["step"])


def test_every_golden_story_has_a_case() -> None:
    assert list_golden_files(files.STORIES) == sorted(stories.STORIES)
