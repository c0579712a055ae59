"""Each check of tools/plain_words.py: a planted violation fails it, a clean sample passes."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import plain_words
import pytest
from plain_words import CHECKS, Docstring, Finding, Repository, Result, is_fragment, main, subject_faults

CLEAN = '''
"""Devices of a node."""


class Device:
    """Device with its name."""

    name = "a device without findings"  # as the driver declares it
    """Name of the device."""
'''
CHECK = {check.name: check for check in CHECKS}

Plant = Callable[..., Repository]


@pytest.fixture(autouse=True)
def _no_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the tables of this repository's exceptions: a sample has none of their lines."""
    monkeypatch.setattr(plain_words, "ALLOWED", ())
    monkeypatch.setattr(plain_words, "SHARED_NAMES", {})


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Make a checkout of a clean module and the files that a test names by path."""

    def files(texts: dict[str, str] | None = None, **options: tuple[str, ...]) -> Repository:
        for path, text in {"agent/__init__.py": "", "agent/device.py": CLEAN, **(texts or {})}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return Repository(tmp_path, **options)

    return files


def run(name: str, repository: Repository) -> Result:
    """Run one check."""
    return CHECK[name].run(repository)


def passes(name: str, repository: Repository) -> bool:
    """Return whether one check passes."""
    return plain_words.passes(CHECK[name], run(name, repository))


@pytest.mark.parametrize("name", CHECK)
def test_clean_sample_passes_each_check(plant: Plant, name: str) -> None:
    assert passes(name, plant())


# --- banned words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("agent/a.py", "# nobody reads this"),
        ("agent/a.py", '"""Told."""'),
        ("agent/a.py", 'x = "the driver said so"'),
        ("agent/a.py", 'x = f"{x} {y} was told"'),
        ("agent/a.py", 'x = "first line\\ntold twice"'),
        ("agent/a.py", "# the first\n# look at it"),
        ("agent/a.py", "# between two looks"),
        ("agent/a.py", "# see `Node.look`"),
        ("agent/a.py", "# it stands\n# still"),
        ("agent/a.py", "told = 1"),
        ("agent/a.py", "self.was_told = 1"),
        ("agent/a.py", "class LastLook: pass"),
        ("agent/a.py", "def read(looked_ns): pass"),
        ("agent/a.py", "import os as twin"),
        ("agent/a.py", "match x:\n    case [*heard]: pass"),
        ("tests/test_a.py", "def test_it_is_told(): pass"),
        ("tests/test_nobody.py", ""),
        ("native/src/a.c", "/* the caller\n * tells it */"),
        ("native/src/a.c", 'log("told twice");'),
        ("examples/go-driver/a.go", "x := 1 // made anew"),
        ("proto/drahealth/v1/a.proto", "// hurts\n"),
        ("docs/a.md", "A daemon beside the driver."),
        ("README.md", "As fast as ever."),
        ("Makefile", "# for whoever builds it"),
        ("docs/a.md", "The agent recognises its behaviour."),
        ("go/a.go", "// after an uninitialised read"),
    ],
)
def test_banned_word_fails(plant: Plant, path: str, text: str) -> None:
    assert run("words", plant({path: text})).value == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("agent/a.py", "# the table looks up a name; look for it at the second lookup"),
        ("agent/a.py", "# files that look like that; one looks at the other; the kubelet says so"),
        ("agent/a.py", 'x = "told"'),
        ("agent/a.py", 'x = b"as the kernel told us"'),
        ("agent/a.py", 'x = f"{told} devices"'),
        ("agent/a.py", "x.told()"),
        ("agent/a.py", "def look_up(outlook, intelligence): pass"),
        ("agent/a.py", 'x = "irq 16: nobody cared"  # verbatim'),
        ("agent/a.py", 'x = """\nirq 16: nobody cared\n"""  # verbatim'),
        ("native/src/a.c", "int told;"),
        ("native/src/a.c", "/* irq 16: nobody cared */ // verbatim"),
        ("examples/go-driver/a.pb.go", "// nobody edits this"),
        ("agent/serve/grpc/gen/a.py", "# nobody edits this"),
        ("tests/data/a.md", "nobody edits this"),
    ],
)
def test_allowed_text_passes(plant: Plant, path: str, text: str) -> None:
    assert passes("words", plant({path: text}))


def test_banned_word_in_block_is_reported_with_its_line(plant: Plant) -> None:
    repository = plant({"agent/a.py": '"""Reader.\n\nReads the first\nlook of it, told twice.\n"""\n'})
    text = "look of it, told twice."
    assert run("words", repository).findings == [
        Finding("agent/a.py", 4, f"[first look] {text}"),
        Finding("agent/a.py", 4, f"[told] {text}"),
    ]


def test_name_is_reported_once_for_each_function(plant: Plant) -> None:
    text = "def a():\n    told = 1\n    told = 2\n\ndef b():\n    told = 3\n"
    assert [finding.line for finding in run("words", plant({"agent/a.py": text})).findings] == [2, 6]


def test_exception_that_matches_no_line_fails(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = plant({"agent/a.py": "# nobody cared"})
    monkeypatch.setattr(plain_words, "ALLOWED", (("agent/a.py", "nobody cared", "kernel text"),))
    assert passes("words", repository)
    monkeypatch.setattr(plain_words, "ALLOWED", (("agent/device.py", "no such text", "kernel text"),))
    assert not passes("words", repository)


# --- docstrings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Of the process.",
        "Whose devices.",
        "Likewise.",
        "By NUMA node.",
        "At start.",
        "What the file holds.",
        "It is closed.",
        "...and why.",
        "One of them.",
        "All that is known.",
        "The same for pools.",
        "Empty if unset.",
        "Args:\n    x: A number.",
        "None: no such device.",
        "Whether it is closed.",
        "",
    ],
)
def test_fragment_is_recognized(text: str) -> None:
    assert is_fragment(Docstring(text, 1, is_value=False))


@pytest.mark.parametrize(
    "text",
    [
        "Return the CPUs that should be online, by NUMA node.",
        "Background writer of the prepare ledger.",
        "The node's name.",
        "One GPU.",
        "All sources of the configuration.",
        "Asks the kubelet.",
        "Issue of a claim.",
        "Like run(), but quiet.",
    ],
)
def test_sentence_is_no_fragment(text: str) -> None:
    assert not is_fragment(Docstring(text, 1, is_value=False))


def test_whether_may_begin_a_property_only(plant: Plant) -> None:
    text = '''
class Device:
    """Device."""

    open: bool
    """Whether the device is open."""

    @property
    def closed(self):
        """Whether the device is closed."""

    def is_closed(self):
        """Whether the device is closed."""
'''
    assert [finding.line for finding in run("docstrings", plant({"agent/a.py": text})).findings] == [13]


def test_fifty_fragments_fail(plant: Plant) -> None:
    text = 'a = 1\n"""Of the node."""\n'
    assert passes("docstrings", plant({"agent/a.py": text * 49}))
    assert not passes("docstrings", plant({"agent/a.py": text * 50}))


# --- structure --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "class Device: pass",
        "Device = int | str",
        "Device: TypeAlias = int",
        "class _Device: pass",
        "if x:\n    class Device: pass",
    ],
)
def test_type_name_of_two_modules_fails_unless_listed(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    repository = plant({"agent/a.py": text})
    assert not passes("types", repository)
    monkeypatch.setattr(plain_words, "SHARED_NAMES", {"Device": "a protocol and its implementation"})
    assert passes("types", repository)
    monkeypatch.setattr(plain_words, "SHARED_NAMES", {"Device": "a reason", "Pool": "a reason"})
    assert not passes("types", repository)


@pytest.mark.parametrize(
    "text",
    [
        "Device = device.Device",
        'Device = TypeVar("Device")',
        "DEVICE = 1",
        "def f():\n    class Device: pass",
    ],
)
def test_type_name_is_not_defined_by_text(plant: Plant, text: str) -> None:
    assert passes("types", plant({"agent/a.py": text}))


def test_eleven_shared_type_names_fail(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"Type{letter}" for letter in "ABCDEFGHIJK"]
    text = "\n".join(f"class {name}: pass" for name in names)
    monkeypatch.setattr(plain_words, "SHARED_NAMES", dict.fromkeys(names, "a reason"))
    assert not passes("types", plant({"agent/a.py": text, "agent/b.py": text}))


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("import agent.b", "from agent import a"),
        ("from .b import x", "from . import a"),
        (
            "if TYPE_CHECKING:\n    from agent.b import x",
            "try:\n    import agent.a\nexcept ImportError: pass",
        ),
    ],
)
def test_import_circle_fails(plant: Plant, first: str, other: str) -> None:
    assert run("imports", plant({"agent/a.py": first, "agent/b.py": other})).findings == [
        Finding("agent", 0, "circle: agent.a, agent.b")
    ]


def test_circle_of_three_with_local_import_fails_its_own_check(plant: Plant) -> None:
    repository = plant(
        {
            "agent/a.py": "import agent.b\nimport agent.device",
            "agent/b.py": "from agent import c",
            "agent/c.py": "def f():\n    import agent.a",
        }
    )
    assert passes("imports", repository)
    assert [finding.text for finding in run("local-imports", repository).findings] == [
        "circle: agent.a, agent.b, agent.c"
    ]


def test_sizes_over_budget_fail(plant: Plant) -> None:
    for name in ("small-modules", "modules"):
        empty = {f"agent/m{number}.py": "" for number in range(CHECK[name].limit + 1)}
        assert not passes(name, plant(empty))
    assert not passes("lines", plant({"agent/long.py": "\n" * (CHECK["lines"].limit + 1)}))


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [
        ("predicates", "agent/a.py", "def is_old(age):\n    return age or None\n"),
        ("predicates", "agent/a.py", "class A:\n    def _has_error(self) -> str: ...\n"),
        ("predicates", "agent/a.py", "async def may_write() -> bool: ...\n"),
        ("results", "agent/a.py", 'def stop() -> bool:\n    """Stop the thread."""\n'),
        ("helpers", "tests/test_a.py", "def written(): ...\n"),
        ("helpers", "tests/samples.py", "class A:\n    async def _sleeping(self): ...\n"),
        ("helpers", "tests/samples.py", 'def write():\n    """A file that is written."""\n'),
        ("ones", "agent/a.py", "x = [one for one in y]\n"),
        ("ones", "tests/test_a.py", "def call(one): ...\n"),
        ("test-names", "tests/test_a.py", f"def test_{'a' * 66}(): ...\n"),
        ("test-names", "native/tests/test_a.c", f"static void test_{'a' * 66}(void)\n"),
        ("test-names", "go/a_test.go", f"func Test{'A' * 67}(t *testing.T) {{\n"),
    ],
)
def test_name_or_docstring_of_a_function_that_misleads_fails(
    plant: Plant, name: str, path: str, text: str
) -> None:
    assert not passes(name, plant({path: text}))


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [
        ("predicates", "agent/a.py", "def is_old(age) -> bool | None: ...\n"),
        ("predicates", "agent/a.py", "def island() -> str: ...\n"),
        ("results", "agent/a.py", 'def stop() -> bool:\n    """Stop it. Returns False on timeout."""\n'),
        ("results", "agent/a.py", "def differs(self) -> bool: ...\n"),
        ("helpers", "tests/test_a.py", "@pytest.fixture\ndef written(): ...\n"),
        ("helpers", "tests/samples.py", "class A:\n    @property\n    def ended(self): ...\n"),
        ("helpers", "tests/samples.py", "def finding(): ...\ndef written_file(): ...\ndef speed(): ...\n"),
        ("helpers", "agent/a.py", "def written(): ...\n"),
        ("ones", "agent/a.py", "def is_one(none):\n    return none == 'one'\n"),
        ("test-names", "tests/test_a.py", f"def test_{'a' * 65}(): ...\n"),
    ],
)
def test_function_name_of_the_form_passes(plant: Plant, name: str, path: str, text: str) -> None:
    assert passes(name, plant({path: text}))


@pytest.mark.parametrize(
    ("path", "text", "is_good"),
    [
        ("docs/a.md", "a " * 66, False),
        ("README.md", "* " + "a" * 129, False),
        ("docs/a.md", "a " * 65, True),
        ("docs/a.md", "| " + "a" * 200, True),
        ("docs/a.md", "```\n" + "a " * 66 + "\n```\n", True),
        ("docs/checks.md", "a " * 66, True),
    ],
)
def test_long_line_of_a_page_fails(plant: Plant, path: str, text: str, is_good: bool) -> None:
    assert passes("pages", plant({path: text})) == is_good


@pytest.mark.parametrize("status", [0, 1])
def test_c_calls_takes_the_status_of_the_program(plant: Plant, status: int) -> None:
    repository = plant({"tools/c_call_cycles.py": f"print('a.c calls b.c'); raise SystemExit({status})"})
    assert passes("c-calls", repository) == (status == 0)


# --- commits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "subject",
    [
        "engine: reuse unchanged kernel-log state between evaluations",
        "bench: refresh docs/performance.md (2-core VM, 2026-11-22)",
        "agent, tests: address review findings",
        ".ci: pass the version to the wheel",
        "docs: focus on drivers",
    ],
)
def test_commit_subject_of_the_form_passes(subject: str) -> None:
    assert not [*subject_faults(subject)]


@pytest.mark.parametrize(
    "subject",
    [
        "Measured anew",
        "engine: reuses state",
        "engine: reused state",
        "engine: reusing state",
        "engine: Reuse state",
        "engine: reuse",
        "Engine: reuse state",
        "engine: reuse what was told",
        "engine: reuse " + "x" * 59,
        "",
    ],
)
def test_commit_subject_without_the_form_fails(subject: str) -> None:
    assert [*subject_faults(subject)]


@pytest.fixture
def git(tmp_path: Path) -> Callable[..., str]:
    """Run git in the checkout, without the developer's configuration."""

    def call(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return call


def test_commits_after_the_first_checked_are_checked(
    plant: Plant, git: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = plant()
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "A subject without the form")
    assert run("commits", repository).skipped
    monkeypatch.setattr(plain_words, "FIRST_CHECKED", git("rev-parse", "HEAD"))
    git("commit", "-q", "--allow-empty", "-m", "agent: add a device")
    assert run("commits", repository).value == 0
    git("commit", "-q", "--allow-empty", "-m", "Adds a device")
    assert [finding.text.split(":")[0] for finding in run("commits", repository).findings] == [
        "Adds a device"
    ]
    assert not passes("commits", plant(commits="HEAD~1..HEAD"))
    assert passes("commits", plant(commits="HEAD~2..HEAD~1"))
    assert not passes("commits", plant(commits="no-such..HEAD"))


# --- command ----------------------------------------------------------------------------------------------


def test_command_lists_findings_and_exits_with_1(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(plant({"agent/a.py": "\n# nobody reads this"}).root)
    assert main(["--root", root, "--list", "words"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "agent/a.py:2: [nobody] # nobody reads this",
        "FAIL words: banned words: 1 (limit 0)",
    ]
    assert [line.split()[1].rstrip(":") for line in lines[1:]] == [check.name for check in CHECKS]


def test_command_restricts_words_to_paths(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(plant({"agent/a.py": "# nobody reads this"}).root)
    assert main(["--root", root, "agent/device.py", "--list"]) == 0
    assert main(["--root", root, "--list", "agent/a.py"]) == 1
    assert "agent/a.py:1: [nobody]" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--root", root, "agent/missing.py"])


def test_command_counts_by_directory(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(plant({"agent/cli/a.py": '"""Of nobody."""\n'}).root)
    assert main(["--root", root, "--by-directory"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{1:6} {1:11}  {'agent/cli':28} nobody 1",
        f"{1:6} {1:11}  sum",
    ]
