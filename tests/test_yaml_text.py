"""YAML with JSON's types; constructs that kubectl does not write are refused with their position."""

import json
import math
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agent.sources.yaml_text import DEPTH_MAX, SHARED_MAX, parse_yaml

POD = """\
apiVersion: v1
kind: Pod
metadata:
  annotations:
    note: |
      two
      lines
    switch: "on"
  creationTimestamp: "2026-01-02T03:04:05Z"
  deletionGracePeriodSeconds: 30
  labels: {}
  name: "012"
spec:
  containers:
  - command: []
    resources:
      limits:
        cpu: 500m
        hugepages-2Mi: 64Mi
        memory: "1e3"
    stdin: true
  overhead: null
status:
  observedGeneration: 9007199254740993
"""


def parse_document(text: str) -> Any:
    (document,) = parse_yaml(text.encode())
    return document


def test_pod_written_by_kubectl_is_parsed() -> None:
    assert parse_document(POD) == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "annotations": {"note": "two\nlines\n", "switch": "on"},
            "creationTimestamp": "2026-01-02T03:04:05Z",
            "deletionGracePeriodSeconds": 30,
            "labels": {},
            "name": "012",
        },
        "spec": {
            "containers": [
                {
                    "command": [],
                    "resources": {"limits": {"cpu": "500m", "hugepages-2Mi": "64Mi", "memory": "1e3"}},
                    "stdin": True,
                }
            ],
            "overhead": None,
        },
        "status": {"observedGeneration": 2**53 + 1},
    }


class Quoting(yaml.SafeDumper):
    """Dumper that quotes all texts: PyYAML would leave others plain than JSON's types need."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


Quoting.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)
SOUND = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | SOUND,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SOUND, inner, max_size=4),
    max_leaves=20,
).filter(lambda value: "inf" not in repr(value))


@given(DOCUMENTS)
def test_json_values_written_as_yaml_are_read_back(document: Any) -> None:
    assert parse_document(yaml.dump(document, Dumper=Quoting)) == document


WORDS = (
    "n Y oN tRUE NuLL 012 0o14 0x1f 1_000 1:20 +1 .5 1. .inf .nan NaN 2026-01-02 2026-01-02T03:04:05Z"
    " 10Gi 500m << = 1.2.3.4 -x 1e 0x 1e3x"
)


@pytest.mark.parametrize("word", WORDS.split())
def test_plain_scalar_unknown_to_json_is_text(word: str) -> None:
    assert parse_document(f"a: {word}") == {"a": word}
    assert parse_document(f"{word}: 1") == {word: 1}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("True", True),
        ("FALSE", False),
        ("yes", True),
        ("On", True),
        ("NO", False),
        ("off", False),
        ("Null", None),
        ("NULL", None),
        ("~", None),
    ],
)
def test_other_spelling_of_a_boolean_or_null_has_its_value(word: str, value: object) -> None:
    assert parse_document(f"a: {word}") == {"a": value}
    assert parse_document(f'a: "{word}"') == {"a": word}


@given(st.binary() | st.text(alphabet="-:?[]{}&*!|>'\"%@#,\n\t a0~<", max_size=40).map(str.encode))
def test_random_bytes_give_documents_or_error_with_position(data: bytes) -> None:
    error = ""
    try:
        parse_yaml(data)
    except ValueError as caught:
        error = str(caught)
    assert not error or re.match(r"line \d+, column \d+: \S", error)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("false", False),
        ("-7", -7),
        ("1.5e3", 1500.0),
    ],
)
def test_plain_scalar_known_to_json_has_its_value(word: str, value: object) -> None:
    assert parse_document(f"a: {word}") == {"a": value}


def test_large_number_is_exact_or_refused() -> None:
    assert parse_document(f"a: {'9' * 30}") == {"a": 10**30 - 1}
    assert math.isfinite(parse_document("a: 1e308")["a"])


def test_documents_keep_order_and_empty_ones_are_none() -> None:
    assert parse_yaml(b"a: 1\n---\n# nothing\n---\n- 2\n...\n") == ({"a": 1}, None, [2])
    assert parse_yaml(b"# nothing\n") == ()


def test_alias_is_the_same_object_as_its_anchor() -> None:
    """PyYAML dumps repeated objects with anchors and aliases."""
    document = {"a": (twice := [{"b": 1}, "c"]), "d": twice}
    assert "*id001" in (text := yaml.safe_dump(document))
    assert parse_document(text) == document
    assert parse_document("a: &x 1\nb: [*x, &x 2, *x]") == {"a": 1, "b": [1, 2, 2]}


def test_alias_expansion_is_limited() -> None:
    twenty = "x: &x [" + "0, " * 19 + "]\n"
    assert len(parse_document(f"{twenty}y: [" + "*x, " * (SHARED_MAX // 20) + "]")["y"]) == SHARED_MAX // 20
    with pytest.raises(ValueError, match=r"^line 2, column .*more than 1,000,000 values$"):
        parse_document(f"{twenty}y: [" + "*x, " * (SHARED_MAX // 20 + 1) + "]")


def doubling_lists(times: int) -> str:
    """Return lists whose size doubles with each line."""
    lines = (f"n{n}: &n{n} [*n{n - 1}, *n{n - 1}]\n" for n in range(1, times))
    return "n0: &n0 [x, x]\n" + "".join(lines)


def chain(deep: int) -> str:
    """Return nested lists, each an alias of the previous one."""
    return "- &n0 []\n" + "".join(f"- &n{n} [*n{n - 1}]\n" for n in range(1, deep))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (doubling_lists(40), "line 18, column 18: unsupported YAML: aliases that add more than 1,000,000"),
        (chain(200), "line 100, column 9: unsupported YAML: lists and maps nested more than 100 deep"),
        ("a: &a [*a]", "line 1, column 8: unsupported YAML: alias without a complete value before it, *a"),
        ("a: &a 1\nb: &a [*a]", "line 2, column 8: unsupported YAML: alias without a complete value before"),
        ("a: *b", "line 1, column 4: unsupported YAML: alias without a complete value before it, *b"),
        ("a: &a 1\n---\nb: *a", "line 3, column 4: unsupported YAML: alias without a complete value before"),
        ("a: &a {b: 1}\nc:\n  <<: *a", "line 3, column 3: unsupported YAML: merge, <<: *a"),
        ("<<: {a: 1}", "line 1, column 1: unsupported YAML: merge, <<"),
        ("a: &a {b: 1}\n<<: [*a]", "line 2, column 1: unsupported YAML: merge, <<"),
        ("a: 1\nb: !!python/object:os.system x", "line 2, column 4: unsupported YAML: tag, tag:yaml"),
        ("- !x {}", "line 1, column 3: unsupported YAML: tag, !x"),
        ("a: 1\nb:\n  c: 1\n  c: 2", "line 4, column 3: unsupported YAML: duplicate key, 'c'"),
        ("? [a]\n: 1", "line 1, column 3: unsupported YAML: key that is not a string"),
        ("a: 1e999", "line 1, column 4: unsupported YAML: number out of range, 1e999"),
        (f"a: {'9' * 5000}", "line 1, column 4: unsupported YAML: number out of range, 9999"),
        ("[" * 100_000, "line 1, column 101: unsupported YAML: lists and maps nested more than 100 deep"),
        ("- " * 100_000, "line 1, column 201: unsupported YAML: lists and maps nested more than 100 deep"),
        ("a:\n\t- b", "line 2, column 1: while scanning for the next token"),
        ("a: 1\nb: c: d", "line 2, column 5: mapping values are not allowed"),
        ("a: 1\nb: \x00", "line 2, column 4: control characters are not allowed"),
    ],
)  # fmt: skip
def test_constructs_that_kubectl_does_not_write_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(why)}"):
        parse_yaml(text.encode())


def test_invalid_utf_8_is_refused_with_position() -> None:
    with pytest.raises(ValueError, match=r"^line 2, column 4: "):
        parse_yaml(b"a: 1\nb: \xff\n")


def test_document_at_depth_limit_is_parsed() -> None:
    assert json.dumps(parse_document("[" * DEPTH_MAX + "]" * DEPTH_MAX)) == "[" * DEPTH_MAX + "]" * DEPTH_MAX
