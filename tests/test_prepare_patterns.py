"""Texts: masks make them the same each time, patterns read them last of all."""

import re
import warnings
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_cases import ONE, TWO

from agent.model.prepare import ErrorClass
from agent.prepare.classify import PrepareContext, classify
from agent.prepare.error_tables import (
    BUILTIN_PATTERNS,
    CHOICES_MAX,
    OPEN_REPEATS_MAX,
    PATTERN_CHARS,
    PATTERNS_MAX,
    SEARCH_CHARS,
    ErrorPattern,
    parse_patterns,
)
from agent.prepare.kubelet_message import SUMMARY_CHARS, TEXT_CHARS, TEXT_MASKS, normalize, sanitize, shorten

ANY = st.text(max_size=300)

# --- masks -------------------------------------------------------------------------------------------------

MASKED = [
    ("at 2026-11-21T10:04:04.123Z it failed", "at <time> it failed"),
    ("at 2026/11/21 10:04:04 +01:00 it failed", "at <time> it failed"),
    ("10:04:04,123 ERROR no", "<time> ERROR no"),
    ("Date: Sat, 21 Nov 2026 10:04:04 GMT", "Date: <time>"),
    ("stamp 1795255444.25", "stamp <time>"),
    ("request id: 7f3a-22.x failed", "request id: <id> failed"),
    ("trace_id=abc123", "trace_id=<id>"),
    ("resourceVersion: 48213", "resourceVersion: <version>"),
    ("object 0f3c1a2b-4d5e-6f70-8192-a3b4c5d6e7f8 gone", "object <uuid> gone"),
    ("mapped at 0x7f3a2c001000", "mapped at <address>"),
    ("killed pid 4711", "killed pid <number>"),
    ("process 4711, thread=12", "process <number>, thread=<number>"),
    ("attempt 3/10 failed, retry #4", "attempt <number> failed, retry #<number>"),
    ("dial 10.0.0.1:43122 refused", "dial 10.0.0.1:<port> refused"),
    ("localhost:8080 and [::1]:53242", "localhost:<port> and [::1]:<port>"),
    ("HTTPConnectionPool(host='10.0.0.1', port=8080)", "HTTPConnectionPool(host='10.0.0.1', port=<port>)"),
    ("took 12.5 ms of 1m30.25s", "took <duration> of <duration>"),
    ("gave up after 873.4µs", "gave up after <duration>"),  # as Go writes it
    ("cannot open '/tmp/abc/x.json'", "cannot open '/tmp/<name>'"),
    ("no file tmp8f_k2x9a here", "no file <name> here"),
    ("open '/etc/cdi/tmpabcdefgh'", "open '/etc/cdi/<name>'"),
    ("open /etc/cdi/.gpu.json.k3j2h1x8: no", "open /etc/cdi/.gpu.json.<name>: no"),
    ("open /etc/cdi/gpu.json.tmp.4711", "open /etc/cdi/gpu.json.tmp.<name>"),
    ("open /etc/cdi/gpu.json.tmp-a7_", "open /etc/cdi/gpu.json.tmp-<name>"),
    ("open /proc/4711/fd/9", "open /proc/<number>/fd/9"),
    (
        "Task-17 and ThreadPoolExecutor-0_3 broke off",
        "Task-<number> and ThreadPoolExecutor-<number> broke off",
    ),
    ("digest 9f86d081884c7d659a2feaa0c55ad015 differs", "digest <hex> differs"),
    ("at 1795255444123456789", "at <number>"),
    ("<Bank object at 0x7f3a> is locked", "<Bank object> is locked"),
]


@pytest.mark.parametrize(("text", "masked"), MASKED)
def test_variable_text_is_masked(text: str, masked: str) -> None:
    assert normalize(text) == masked


def test_every_mask_has_a_sample() -> None:
    assert {mask.pattern for mask in TEXT_MASKS} == {
        mask.pattern for mask in TEXT_MASKS for text, _ in MASKED if mask.pattern.search(text)
    }


@pytest.mark.parametrize(
    "text",
    [
        "3 pages of 2Mi, 512 needed",
        "GPU-0f3c1a2b-4d5e-6f70-8192-a3b4c5d6e7f8 at 0000:3b:00.0",
        "MAC 00:11:22:33:44:55",
        "register 0x1f is 0xdead",
        "1610612736 bytes",
        "/dev/nvidia0 and /var/lib/driver/tmp",
        "ratio 0.75, template, temporary",
        "/run/.hostdev.lock and /etc/cdi/gpu.json.tmp and /var/.driver-state",
        "/proc/driver/nvidia, Task 17, /etc/.driver.template",
        "line 1 column 14 (char 13)",
        "mlx5_0 port 1 is down",
    ],
)
def test_stable_facts_are_not_masked(text: str) -> None:
    assert normalize(text) == text


@given(ANY)
def test_normalized_text_is_one_printable_line_and_idempotent(text: str) -> None:
    done = normalize(text)
    assert done.isprintable()
    assert done == done.strip()
    done.encode()


@given(ANY)
def test_sanitize_is_idempotent(text: str) -> None:
    assert sanitize(sanitize(text)) == sanitize(text)


def test_control_characters_and_surrogates_are_removed() -> None:
    assert sanitize("a\r\n\tb\x00c\x1b[31m\u2028d\udc80\u202e") == "a b c [31m d?"


def test_only_the_beginning_of_a_long_text_is_read() -> None:
    assert len(normalize("a b " * 10_000_000)) <= TEXT_CHARS


def test_short_text_is_not_shortened() -> None:
    assert shorten("x" * SUMMARY_CHARS) == "x" * SUMMARY_CHARS
    assert shorten("x" * (SUMMARY_CHARS + 1)) == "x" * (SUMMARY_CHARS - 3) + "..."


# --- our patterns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("open /dev/x: Device or resource busy", "text.busy"),
        ("Resource temporarily unavailable", "text.try_again"),
        ("accept4: too many open files", "text.too_many_files"),
        ("dial unix /run/a.sock: connect: connection refused", "text.no_connection"),
        ("context deadline exceeded", "text.timeout"),
        ("request timed out", "text.timeout"),
        ("fork/exec /usr/bin/x: text file busy", "text.file_busy"),
        ("write /var/x: no space left on device", "text.no_space"),
        ("fork: Cannot allocate memory", "text.no_memory"),
        ("read: Input/output error", "text.io"),
        ("context canceled", "text.cancelled"),
        ("error setting compute mode: In use by another client", "text.busy"),
        ("error creating GPU instance for '1g.20gb': Insufficient Resources", "text.try_again"),
        (
            'Operation cannot be fulfilled on resourceclaims.resource.k8s.io "c": the object has been '
            "modified; please apply your changes to the latest version and try again",
            "text.try_again",
        ),
        ("rpc error: code = Unavailable desc = error reading from server: EOF", "text.try_again"),
        ("the server is currently unable to handle the request", "text.try_again"),
        ("etcdserver: leader changed", "text.try_again"),
        ("error asserting ComputeDomain Ready: current node not ready in ComputeDomain", "text.not_ready"),
        ("dial tcp: lookup kubernetes.default.svc on 10.0.0.10:53: no such host", "text.no_connection"),
        ('Get "https://10.96.0.1:443/apis": unexpected EOF', "text.no_connection"),
        ("http2: client connection lost", "text.no_connection"),
        ("rate: Wait(n=1) would exceed context deadline", "text.timeout"),
        ("prepare dynamic resources: DRA driver gpu.example.com is not registered", "kubelet.not_registered"),
        (
            "ResourceClaim train: DRAOptionalNodeOperations feature gate is disabled on kubelet",
            "kubelet.gate_off",
        ),
        ("claim team-a/train not allocated", "claim.unallocated"),
        ("ResourceClaim train: not allocated", "claim.unallocated"),
        ("claim team-a/train got replaced", "claim.uid_mismatch"),
        ("ResourceClaim train is being unprepared", "text.try_again"),
        ('pod "team-a/p": ResourceClaim not created yet', "text.try_again"),
        ('fetch ResourceClaim train: resourceclaims.resource.k8s.io "train" not found', "claim.not_found"),
        ("pod p (0f3c-1) is not allowed to use ResourceClaim train (0f3c-2)", "claim.not_reserved"),
        (
            "ResourceClaim team-a/train was not created for Pod team-a/p (Pod is not owner)",
            "claim.not_reserved",
        ),
        (
            "old ResourceClaim with same name train and different UID 0f3c-1 still exists (previous pod "
            "force-deleted?!)",
            "claim.uid_mismatch",
        ),
    ],
)
def test_text_is_matched_if_nothing_else_is_known(text: str, code: str) -> None:
    verdict = classify(RuntimeError(text), PrepareContext(ONE))
    assert (verdict.code, verdict.error_class) == (code, ErrorClass.TRANSIENT)
    assert verdict.confidence < 0.5


def test_built_in_patterns_are_all_transient() -> None:
    assert {pattern.error_class for pattern in BUILTIN_PATTERNS} == {ErrorClass.TRANSIENT}


def test_every_built_in_pattern_is_valid_configuration() -> None:
    for pattern in BUILTIN_PATTERNS:
        assert len(pattern.match.pattern) <= PATTERN_CHARS
        assert not pattern.matches("")


# --- patterns of the configuration -------------------------------------------------------------------------

LOCKED = {"match": r"bank \d+ is locked", "code": "fpga.bank_locked", "class": "transient"}


def test_configured_pattern_is_parsed() -> None:
    (pattern,) = parse_patterns([{**LOCKED, "summary": "a bank is locked"}])
    assert pattern == ErrorPattern(
        re.compile(LOCKED["match"]), "fpga.bank_locked", ErrorClass.TRANSIENT, "a bank is locked", 0.5
    )


@pytest.mark.parametrize("error_class", ErrorClass)
def test_configured_pattern_may_name_any_class(error_class: ErrorClass) -> None:
    patterns = parse_patterns([{**LOCKED, "class": str(error_class)}])
    verdict = classify(RuntimeError("bank 3 is locked"), PrepareContext(ONE, patterns=patterns))
    assert (verdict.error_class, verdict.code, verdict.confidence) == (error_class, "fpga.bank_locked", 0.5)
    assert verdict.devices == (ONE.devices[0].ref,)


def test_pattern_blames_only_a_single_device() -> None:
    patterns = parse_patterns([{**LOCKED, "class": "failed-device"}])
    verdict = classify(RuntimeError("bank 3 is locked"), PrepareContext(TWO, patterns=patterns))
    assert (verdict.error_class, verdict.health) == (ErrorClass.TRANSIENT, None)


def test_configured_patterns_come_before_built_in_ones() -> None:
    patterns = parse_patterns([{"match": "deadline", "code": "fpga.slow", "class": "unknown"}])
    assert (
        classify(RuntimeError("deadline exceeded"), PrepareContext(ONE, patterns=patterns)).code
        == "fpga.slow"
    )


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("text", "'text' is not a list of error patterns; begin each with [[prepare.patterns]]"),
        ({"match": "a"},
         "{'match': 'a'} is not a list of error patterns; begin each with [[prepare.patterns]]"),
        (["a"], "pattern 1: 'a' is not a table of match, code, class, summary"),
        ([LOCKED, {**LOCKED, "clas": "x"}], "pattern 2: unknown key 'clas'; did you mean 'class'?"),
        ([{"match": "a", "code": "b"}], "pattern 1: class is missing; each pattern needs match, code and class"),  # noqa: E501
        ([{**LOCKED, "match": 3}], "pattern 1: match: 3 is not a string; put it in quotes"),
        ([{**LOCKED, "code": " "}], "pattern 1: code is empty"),
        ([{**LOCKED, "code": "Bank Locked"}], "pattern 1: code 'Bank Locked' is not a dotted code, such as "
         "fpga.bank_locked"),
        ([{**LOCKED, "class": "transent"}], "pattern 1: class 'transent' is not one of unknown, transient, "
         "bad-config, failed-device, permanent; did you mean 'transient'?"),
        ([{**LOCKED, "match": "(a"}],
         "pattern 1: match '(a' is not a regular expression: missing ), unterminated subpattern at position "
         "0"),
        ([{**LOCKED, "match": "a*"}], "pattern 1: match 'a*' matches every text; make it specific"),
        ([{**LOCKED, "match": "x" * 257}], "pattern 1: match is 257 characters long, limit 256; shorten it"),
        ([LOCKED] * 65, "65 patterns, limit 64; remove some"),
    ],
)  # fmt: skip
def test_invalid_pattern_is_rejected_with_its_number(value: object, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(error)}$"):
        parse_patterns(value)
    assert PATTERNS_MAX == 64


@pytest.mark.parametrize(
    ("match", "reason"),
    [
        (r"(a+)+x", "repeats parentheses"),
        (r"(?:a|aa)*x", "repeats parentheses"),
        (r"((ab?)c){20}", "repeats parentheses"),
        (r"(?P<n>a*){2,}x", "repeats parentheses"),
        (r"x.*y.*z.*", "has 3 repeats such as * and +, limit 2"),
        (r"a?a?a?a?a?aaaaax", "has 5 choices (? and |) within parentheses, limit 4"),
        (r"(a|b)(a|c)(a|d)(a|e)(a|f)", "has 5 choices (? and |) within parentheses, limit 4"),
    ],
)
def test_pattern_with_exponential_search_is_rejected(match: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_patterns([{**LOCKED, "match": match}])


@pytest.mark.parametrize(
    "match",
    [
        r"a.*b.*c",
        r"one|two|three|four|five|six",
        r"\(a+\)+",
        r"[(a+)+]x",
        r"(?i)bank (\d+) is (?:locked|held)",
        r"(abc)+",
    ],
)
def test_pattern_with_bounded_search_is_accepted(match: str) -> None:
    assert parse_patterns([{**LOCKED, "match": match}])[0].match.pattern == match
    assert (OPEN_REPEATS_MAX, CHOICES_MAX) == (2, 4)


def test_worst_accepted_pattern_ends_in_time() -> None:
    """The text is made for the pattern: without limits the search would outlast the test run."""
    (pattern,) = parse_patterns([{**LOCKED, "match": "a*a*b"}])
    assert not pattern.matches("a" * 1_000_000)


def test_only_the_beginning_of_a_text_is_searched() -> None:
    (pattern,) = parse_patterns([LOCKED])
    assert pattern.matches(" " * (SEARCH_CHARS - 20) + "bank 3 is locked")
    assert not pattern.matches(" " * SEARCH_CHARS + "bank 3 is locked")


ENTRIES = st.recursive(
    st.none() | st.booleans() | st.integers() | ANY,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["match", "code", "class", "x"]), inner)
    ),
)


@given(ENTRIES)
def test_any_configuration_value_is_accepted_or_rejected(value: object) -> None:
    with suppress(ValueError, TypeError):
        assert len(parse_patterns(value)) == len(value)  # type: ignore[arg-type]


def test_pattern_whose_meaning_will_change_is_rejected() -> None:
    with warnings.catch_warnings(action="ignore"), pytest.raises(ValueError, match="Possible nested set"):
        parse_patterns([{**LOCKED, "match": "[[:alpha:]]"}])
