"""Checks of names, prose and structure that ``make lint`` runs; CHECKS lists them with their limits.

    python tools/plain_words.py                    # all checks, over the repository
    python tools/plain_words.py agent/cli --list   # words and docstrings of some paths, with each finding
    python tools/plain_words.py --list types       # all checks, with the findings of one
    python tools/plain_words.py --by-directory     # counts of words and docstrings for each directory

A line that quotes the kernel, NVML or Kubernetes is skipped if it ends with the comment ``verbatim``.
"""

import argparse
import ast
import gc
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, TypeGuard

# --- tables ---------------------------------------------------------------------------------------------

DEFAULT_PATHS: Final = (
    "agent", "go", "tests", "examples", "benchmarks", "native", "docs", "deploy", "tools", "proto/drahealth",
    "setup_build.py", "Makefile", "pyproject.toml", "requirements", ".ci",
)  # fmt: skip
"""Files and directories that are searched for banned words, with the Markdown files of the top directory."""

SKIPPED_PATHS: Final = (
    "agent/serve/grpc/gen/",
    "native/build/",
    "native/fuzz/corpus/",
    "tests/data/",
    "tests/test_plain_words.py",
)
"""Generated files, build outputs, recorded data, and the test that plants banned words."""

FIRST_CHECKED: Final = "771dc4bc27057845a71a589a3abffc1644916776"
"""Commit whose successors must have subjects in the form `<package>: <imperative> <object>`."""


def word_set(text: str) -> frozenset[str]:
    """Return the words of a table that is written as text."""
    return frozenset(text.split())


BANNED: Final = word_set(
    """
    anew anybody beside besides desk desks everybody heard hurt hurts mended nobody said scribe scribes
    somebody tell telling tells told twin twins whoever
    """  # verbatim
)
"""Words that appear in no name and no prose."""

BANNED_IN_NAMES: Final = BANNED | word_set("look looked looks saying sayings teller tellers")  # verbatim
"""Parts that no Python name has; ``look_up`` is allowed."""

GAP: Final = r"[\s\"'#*/]+"
"""Regular expression for what separates two words of prose, also across lines and adjacent literals."""

BANNED_PHRASES: Final = (
    rf"as{GAP}ever",
    rf"what{GAP}is{GAP}so",
    rf"(?:stand|stands|stood|standing){GAP}still",
)
"""Regular expressions of phrases that appear in no prose."""

OTHER_SPELLINGS: Final = (
    r"behaviors?",
    r"\w*(?:character|custom|final|initial|normal|optim|organ|recogn|serial|summar|synchron)is(?:e[drs]?|ing|ation)",
)
"""Regular expressions of spellings that appear in no prose but commit subjects: it has -our and -ize."""

BEFORE_NOUN: Final = word_set(
    """
    a an another any bad each earlier every first former good its last late later new next no one our per
    previous quiet same second single the third this whole
    """
)
"""Words after which "look" is a noun."""

BEFORE_PLURAL: Final = word_set(
    """
    all bad between both consecutive earlier few four further good its later many more number of quiet several
    some successive the these those three two
    """
)
"""Words after which "looks" is a plural, unless a word of AFTER_VERB follows."""

AFTER_VERB: Final = word_set("after alike as for into like up")

ALLOWED: Final[tuple[tuple[str, str, str], ...]] = (
    ("CHANGELOG.md", "`Monitor.desk`", "lists old names"),  # verbatim
    ("CHANGELOG.md", "`Monitor.tell`", "lists old names"),  # verbatim
    ("CHANGELOG.md", "`desk.judge`", "lists old names"),  # verbatim
    ("CHANGELOG.md", "classified(desk_or_monitor)", "lists old names"),  # verbatim
    ("CHANGELOG.md", "`TaintPolicy.tell_unknown`", "lists old names"),  # verbatim
    ("docs/configuration.md", "tell-unknown = true", "a configuration key, which stays"),  # verbatim
    ("docs/taints.md", "`tell-unknown` |", "a configuration key, which stays"),  # verbatim
)
"""Exceptions that can carry no ``verbatim`` mark: path, text of the line, reason."""

OPENERS: Final = word_set(
    """
    after again also and anybody args: as at because before but by else everybody for from how if in it its
    likewise never nobody none not of off on only or out over per raises: returns: same since so somebody than
    that their then there these they those to under unless until up what when where which while who whoever
    whom whose why with within without yields:
    """  # verbatim
)
"""First words that make a docstring a fragment, in lower case."""

OPENING_PHRASES: Final = re.compile(
    r"the same\b"
    r"|(?:one|all|both|each|every|any|some|much|most)(?:[.,:;]|$"
    r"| (?:of (?:them|it|those|these|which|whom)|that|who|whom|which|whose|is|are|has|have|one|as|for|to|by"
    r"|in|at|with|without|from|more|else)\b)"
    r"|(?:empty|unset|zero|0|-1)(?:[:;,]| (?:if|while|when|unless|in|for|of|where|before|after)\b)"
    r"|\W*\.\.\.",
    re.IGNORECASE,
)
"""Beginnings of several words that make a docstring a fragment."""

SHARED_NAMES: Final[dict[str, str]] = {}
"""Type names that more than one module of agent/ defines, each with its reason."""

NO_IMPERATIVES: Final = re.compile(r".*(?:ed|ing|s)")
"""Endings of words that are no imperative."""

IMPERATIVES: Final = word_set(
    """
    access address alias assess bias bring bypass compress cross discuss dismiss embed express feed focus
    guess miss need pass ping press process ring seed shed speed suppress
    """
)
"""Imperatives that have such an ending."""

PREDICATE: Final = re.compile(r"_*(?:is|has|can|may|are|was|must|should|needs)_")
"""Beginning of the name of a function that answers yes or no."""

VALUE_NAME: Final = re.compile(
    r"_*(?:(?!degraded|embed|feed|need|seed|speed)[a-z]+ed|(?!(?:find|head|read|sett)ing|string|thing|ring|ping)[a-z]+ing"
    r"|begun|bound|chosen|given|gone|held|hidden|kept|known|laid|lost|made|seen|sent|shown|taken|written)"
)
"""Name of one word that reads like a value: a participle."""

DESCRIBES_VALUE: Final = re.compile(r"(?:An?|The|No|Returns|Yields) ")
"""Beginning of the docstring of a function that has no imperative."""

GENERATED_PAGES: Final = (
    "docs/checks.md",
    "docs/performance.md",
    "docs/reliability.md",
    "docs/scoreboard.md",
)

PAGE_LINE_LENGTH: Final = 130

TEST_NAME: Final = re.compile(r"^(?:\s*(?:async )?def|static void|func) ((?:test_|Test)\w+)\(", re.MULTILINE)
"""Definition of a test in Python, C or Go."""

TEST_NAME_LENGTH: Final = 70

FENCED: Final = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
"""Block of code in Markdown."""

SUBJECT: Final = re.compile(r"[a-z.][\w./-]*(?:, [a-z.][\w./-]*)*: (\S+) \S.*")
"""Form of a commit subject."""

SUBJECT_LENGTH: Final = 72

# --- what checks read and return --------------------------------------------------------------------------


class Finding(NamedTuple):
    """Place in a file that breaks a rule."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"


@dataclass
class Result:
    """Outcome of one check."""

    value: int
    findings: list[Finding] = field(default_factory=list)
    faults: int = 0
    """Number of findings that fail the check at any value."""
    note: str = ""
    skipped: bool = False


class Source:
    """One file of the repository, parsed at most once."""

    def __init__(self, root: Path, path: Path) -> None:
        self.file = path
        self.path = path.relative_to(root).as_posix()

    @cached_property
    def text(self) -> str:
        return self.file.read_text(encoding="utf-8", errors="replace")

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def is_generated(self) -> bool:
        """Whether the file is the output of a generator, by its name or one of its first lines."""
        head = "\n".join(self.lines[:5])
        return self.path.endswith(".pb.go") or "DO NOT EDIT" in head


@dataclass
class Repository:
    """Checkout that is checked, and the paths to which word checks are restricted."""

    root: Path
    paths: tuple[str, ...] = ()
    commits: str = ""
    _sources: dict[Path, Source] = field(default_factory=dict)

    def files(self, paths: Iterable[str]) -> Iterator[Source]:
        """Yield the hand-written text files of `paths`, each once, in order of their names."""
        found: set[Path] = set()
        for name in paths:
            path = self.root / name
            found.update(path.rglob("*") if path.is_dir() else [path])
        for path in sorted(found):
            relative = path.relative_to(self.root).as_posix()
            is_text = (
                path.suffix in PROSE_OF
                or path.name in PROSE_OF
                or relative.startswith((".ci/", "requirements/"))
            )
            skipped = relative.startswith(SKIPPED_PATHS)
            if is_text and not skipped and "__pycache__" not in path.parts and path.is_file():
                source = self._sources.setdefault(path, Source(self.root, path))
                if not source.is_generated:
                    yield source

    def prose_files(self) -> Iterator[Source]:
        """Yield the files that are searched for banned words."""
        top = (path.name for path in self.root.glob("*.md"))
        return self.files(self.paths or (*DEFAULT_PATHS, *top))

    def docstring_files(self) -> Iterator[Source]:
        """Yield the Python files whose docstrings are checked."""
        return (source for source in self.files(self.paths or ("agent",)) if source.file.suffix == ".py")

    @cached_property
    def modules(self) -> dict[str, Source]:
        """Hand-written modules of agent/, by dotted name."""
        found = {}
        for source in self.files(["agent"]):
            if source.file.suffix == ".py":
                parts = source.path.removesuffix(".py").split("/")
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = source
        return found


# --- banned words -----------------------------------------------------------------------------------------

BANNED_TEXT: Final = re.compile(
    rf"\b(?:{'|'.join(sorted(BANNED))}|{'|'.join(BANNED_PHRASES)})\b", re.IGNORECASE
)
OTHER_SPELLING: Final = re.compile(rf"\b(?:{'|'.join(OTHER_SPELLINGS)})\b", re.IGNORECASE)
NOUN_OR_VERB: Final = re.compile(r"\b(looks?)\b", re.IGNORECASE)
WORD_BEFORE: Final = re.compile(rf"([\w']+){GAP}\Z")
WORD_AFTER: Final = re.compile(rf"{GAP}(\w+)")
QUOTED: Final = re.compile(r"`[\w.]*\Z")
"""Beginning of a name in back quotes."""
NAME_PARTS: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
VERBATIM: Final = re.compile(r"\bverbatim\W*$")
BRACES: Final = re.compile(r"\{[^{}]*\}")
C_TOKENS: Final = re.compile(
    r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|`[^`]*`", re.DOTALL
)
STRING_PREFIX: Final = re.compile(r"[a-zA-Z]*")
FSTRING_MIDDLE: Final[int] = getattr(tokenize, "FSTRING_MIDDLE", -1)


def hidden(text: str) -> str:
    """Return as many characters as `text` has, with its line breaks, that no pattern matches."""
    return re.sub(r"\S", "\0", text)


def unescaped(text: str) -> str:
    """Return `text` with blanks for escape sequences of white space; the length stays."""
    return re.sub(r"\\[nrt]", "  ", text)


def python_prose(text: str) -> str:
    """Return `text` with all hidden but comments, docstrings and literals that contain a space.

    The mark ``verbatim`` after a literal of several lines hides all of it.
    """
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    parts, end = [], 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            shown = ""
            if token.type == tokenize.COMMENT:
                shown = token.string
            elif token.type in (tokenize.STRING, FSTRING_MIDDLE):
                shown = literal_prose(token.string, plain=token.type == FSTRING_MIDDLE)
            if shown and not (token.start[0] < token.end[0] and VERBATIM.search(lines[token.end[0] - 1])):
                begin = starts[token.start[0] - 1] + token.start[1]
                parts += [hidden(text[end:begin]), shown]
                end = begin + len(shown)
    except (tokenize.TokenError, IndentationError):
        pass  # the rest is no Python; mypy and ruff report that
    return "".join([*parts, hidden(text[end:])])


def literal_prose(literal: str, plain: bool) -> str:
    """Return a string literal without its expressions; empty if it is no prose. `plain`: it has no quotes."""
    prefix = "" if plain else STRING_PREFIX.match(literal)[0].lower()  # type: ignore[index] # matches anything
    body = literal[len(prefix) :]
    if "b" in prefix or not (" " in body or body.startswith(('"""', "'''"))):
        return ""
    if "f" in prefix:
        literal = BRACES.sub(lambda match: hidden(match[0]), literal)
    return literal if "r" in prefix else unescaped(literal)


def c_prose(text: str) -> str:
    """Return C, Go or proto text with all hidden but comments and literals that contain a space."""
    parts, end = [], 0
    for token in C_TOKENS.finditer(text):
        if token[0].startswith("/") or " " in token[0]:
            parts += [hidden(text[end : token.start()]), unescaped(token[0])]
            end = token.end()
    return "".join([*parts, hidden(text[end:])])


def all_prose(text: str) -> str:
    """Return `text` as it is: all of it is prose."""
    return text


PROSE_OF: Final[dict[str, Callable[[str], str]]] = {
    ".py": python_prose, ".pyi": python_prose,
    ".c": c_prose, ".h": c_prose, ".go": c_prose, ".proto": c_prose,
    ".md": all_prose, ".toml": all_prose, ".service": all_prose, ".yaml": all_prose, ".sh": all_prose,
    "Makefile": all_prose,
}  # fmt: skip
"""Function that finds the prose in a file, by suffix or name."""


def banned_places(text: str) -> list[tuple[int, str]]:
    """Return the end and the text of each banned word or phrase of a text, in order."""
    found = [(match.end(), " ".join(re.split(GAP, match[0]))) for match in BANNED_TEXT.finditer(text)]
    for match in NOUN_OR_VERB.finditer(text):
        begin, end = match.span()
        preceding = text[max(0, begin - 80) : begin]
        before = WORD_BEFORE.search(preceding)
        after = WORD_AFTER.match(text, end)
        if QUOTED.search(preceding):
            found.append((end, match[0]))
        elif before and is_noun(before[1].lower(), match[0].lower(), after[1].lower() if after else ""):
            found.append((end, f"{before[1]} {match[0]}"))
    return sorted(found)


def is_noun(before: str, word: str, after: str) -> bool:
    """Return whether `word`, "look" or "looks", is a noun, by the words before and after."""
    if word == "look":
        return (before in BEFORE_NOUN or before.endswith("'s")) and after != "up"
    return (before in BEFORE_PLURAL or before.isdigit()) and after not in AFTER_VERB


def words_in_prose(source: Source) -> Iterator[Finding]:
    """Yield each banned word or phrase in the prose of a file."""
    if not banned_places(unescaped(source.text)) and not OTHER_SPELLING.search(source.text):
        return  # cheaper than to find the prose
    find = PROSE_OF.get(source.file.suffix) or PROSE_OF.get(source.file.name, all_prose)
    prose = find(source.text)
    line = position = 0
    spellings = [(match.end(), match[0]) for match in OTHER_SPELLING.finditer(prose)]
    for end, words in sorted(banned_places(prose) + spellings):
        line += prose.count("\n", position, end)
        position = end
        text = source.lines[line]
        if not VERBATIM.search(text) and not is_allowed(source.path, text):
            yield Finding(source.path, line + 1, f"[{words}] {text.strip()}")


def is_allowed(path: str, text: str) -> bool:
    """Return whether ALLOWED has an exception for a line."""
    return any(path == allowed and part in text for allowed, part, _ in ALLOWED)


@cache
def banned_part(name: str) -> str:
    """Return the banned word that a name has as a part, in lower case, or an empty string."""
    parts: list[str] = [part.lower() for part in NAME_PARTS.findall(name)]
    for part, following in zip(parts, [*parts[1:], ""], strict=False):
        if part in BANNED_IN_NAMES and (part, following) != ("look", "up"):
            return part
    return ""


def defined_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node itself defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case (
            ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store())
        ):
            yield name
        case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            yield name


def words_in_names(source: Source) -> Iterator[Finding]:
    """Yield each banned word in the names that a Python file defines, once for each function and name."""
    text = source.text.lower()
    if not any(word in text for word in BANNED_IN_NAMES):
        return  # cheaper than to parse
    seen: set[tuple[ast.AST, str]] = set()
    pending: list[tuple[ast.AST, ast.AST]] = [(source.tree, source.tree)]
    while pending:
        node, scope = pending.pop()
        for name in defined_names(node):
            word = banned_part(name)
            if word and (scope, name) not in seen:
                seen.add((scope, name))
                line: int = getattr(node, "lineno", 0)
                if not VERBATIM.search(source.lines[line - 1]) and not is_allowed(source.path, name):
                    yield Finding(source.path, line, f"[{word}] name {name}")
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else scope
        pending.extend((child, inner) for child in reversed(list(ast.iter_child_nodes(node))))


def words(source: Source) -> list[Finding]:
    """Return the banned words of a file: in its prose, its Python names and its own name."""
    found = list(words_in_prose(source))
    if source.file.suffix in (".py", ".pyi"):
        found += words_in_names(source)
    if word := banned_part(source.file.stem):
        found.append(Finding(source.path, 0, f"[{word}] file name"))
    return sorted(found)


def check_words(repository: Repository) -> Result:
    """Count banned words in names, comments, docstrings, literals and documents."""
    sources = list(repository.prose_files())
    findings = [finding for source in sources for finding in words(source)]
    unused = []
    if not repository.paths:
        texts = {source.path: source.text for source in sources}
        unused = [
            Finding(path, 0, f"ALLOWED text {part!r} not found")
            for path, part, _ in ALLOWED
            if part not in texts.get(path, "")
        ]
    return Result(len(findings), findings + unused, len(unused))


# --- docstrings -------------------------------------------------------------------------------------------


class Docstring(NamedTuple):
    """Docstring and what it describes."""

    text: str
    line: int
    is_value: bool
    """Whether it describes an attribute or a property, so that it may begin with Whether."""


def docstrings(tree: ast.Module) -> Iterator[Docstring]:
    """Yield the docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for previous, statement in zip([None, *body], body, strict=False):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                    if previous is None and documented:
                        yield Docstring(text, line, is_property(node))
                    elif isinstance(previous, ast.Assign | ast.AnnAssign):
                        yield Docstring(text, line, True)


def is_property(node: ast.AST) -> bool:
    """Return whether a node is the getter of a property."""
    decorators = getattr(node, "decorator_list", ())
    return any("property" in ast.unparse(decorator) for decorator in decorators)


def is_fragment(docstring: Docstring) -> bool:
    """Return whether a docstring begins with a fragment, by its first words."""
    text = " ".join(docstring.text.split())
    first = text.split(" ", 1)[0].lower()
    if first not in OPENERS:
        first = first.strip(".,:;!?()\"'")
    return (
        not first
        or first in OPENERS
        or (first == "whether" and not docstring.is_value)
        or OPENING_PHRASES.match(text) is not None
    )


def fragments(source: Source) -> Iterator[Finding]:
    """Yield the docstrings of a file that begin with a fragment."""
    for docstring in docstrings(source.tree):
        if is_fragment(docstring):
            yield Finding(source.path, docstring.line, docstring.text.strip().split("\n")[0])


def check_docstrings(repository: Repository) -> Result:
    """Count docstrings that begin with a fragment."""
    sources = list(repository.docstring_files())
    findings = [finding for source in sources for finding in fragments(source)]
    count = sum(1 for source in sources for _ in docstrings(source.tree))
    return Result(len(findings), findings, note=f"of {count} docstrings")


# --- names of functions -----------------------------------------------------------------------------------


def functions(repository: Repository) -> Iterator[tuple[Source, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions of agent/, each with its file."""
    for source in repository.modules.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield source, node


def check_predicates(repository: Repository) -> Result:
    """Count functions of agent/ that are named like predicates, and are async or return something else."""
    findings = [
        Finding(source.path, node.lineno, f"{node.name}() is async or returns no bool")
        for source, node in functions(repository)
        if PREDICATE.match(node.name)
        if isinstance(node, ast.AsyncFunctionDef)
        or node.returns is None
        or "bool" not in ast.unparse(node.returns)
    ]
    return Result(len(findings), findings)


def check_results(repository: Repository) -> Result:
    """Count functions of agent/ whose docstring leaves out what their bool means."""
    findings = [
        Finding(source.path, node.lineno, f"{node.name}() returns a bool, its docstring does not say when")
        for source, node in functions(repository)
        if not PREDICATE.match(node.name)
        if node.returns is not None and ast.unparse(node.returns) == "bool"
        if not re.search(
            r"\b(?:returns?|whether|true|false)\b", ast.get_docstring(node) or "true", re.IGNORECASE
        )
    ]
    return Result(len(findings), findings)


def check_test_names(repository: Repository) -> Result:
    """Count tests whose name has more than TEST_NAME_LENGTH characters."""
    findings = [
        Finding(source.path, source.text.count("\n", 0, match.start(1)) + 1, f"{match[1]}: {len(match[1])}")
        for source in repository.files(("tests", "native/tests", "go"))
        for match in TEST_NAME.finditer(source.text)
        if len(match[1]) > TEST_NAME_LENGTH
    ]
    return Result(len(findings), findings)


def is_helper(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return whether a node of a test file is a function that tests call: no test, fixture or property."""
    return (
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("test_")
        and not any(re.search("property|fixture", ast.unparse(item)) for item in node.decorator_list)
    )


def check_helpers(repository: Repository) -> Result:
    """Count helpers of tests whose name or docstring reads like a value instead of an action."""
    findings = [
        Finding(source.path, node.lineno, f"{node.name}(): {fault}")
        for source in repository.files(["tests"])
        if source.file.suffix == ".py"
        for node in ast.walk(source.tree)
        if is_helper(node)
        for fault in helper_faults(node)
    ]
    return Result(len(findings), findings)


def helper_faults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield what is wrong with the name and the docstring of a helper."""
    if VALUE_NAME.fullmatch(node.name):
        yield "the name is a participle; use a verb and an object"
    if DESCRIBES_VALUE.match(ast.get_docstring(node) or ""):
        yield "the docstring does not begin with an imperative"


def check_ones(repository: Repository) -> Result:
    """Count variables called `one`, once for each file and line."""
    findings = {
        Finding(source.path, getattr(node, "lineno", 0), "variable one; name it by what it is")
        for source in repository.files(["agent", "drahealth", "tests", "tools", "benchmarks", "examples"])
        if source.file.suffix == ".py" and re.search(r"\bone\b", source.text)
        for node in ast.walk(source.tree)
        if "one" in defined_names(node)
    }
    return Result(len(findings), sorted(findings))


def check_pages(repository: Repository) -> Result:
    """Count long lines of pages that are written by hand, without tables and code."""
    findings = [
        Finding(source.path, number, f"{len(line)} characters")
        for source in repository.files(["docs", "ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"])
        if source.file.suffix == ".md" and source.path not in GENERATED_PAGES
        for number, line in enumerate(FENCED.sub(lambda match: hidden(match[0]), source.text).split("\n"), 1)
        if len(line) > PAGE_LINE_LENGTH and "\0" not in line and not line.lstrip().startswith("|")
    ]
    return Result(len(findings), findings)


# --- type names -------------------------------------------------------------------------------------------


def module_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, without those of classes."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from module_statements(getattr(statement, name, []))
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from module_statements(handler.body)


def defined_types(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the classes and type aliases that a module defines, with their lines."""
    for statement in module_statements(tree.body):
        match statement:
            case ast.ClassDef(name=name, lineno=line):
                yield name, line
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value, lineno=line)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value, lineno=line)
            ) if re.fullmatch(r"_?[A-Z]+[a-z]\w*", name) and makes_type(name, value):
                yield name, line
            case _ if type(statement).__name__ == "TypeAlias":  # the type statement of Python 3.12
                yield ast.unparse(statement).split()[1].split("[")[0], statement.lineno


def makes_type(name: str, value: ast.expr) -> bool:
    """Return whether `name = value` defines a type: neither a type variable nor another module's type."""
    match value:
        case ast.Call(func=ast.Name(id=function) | ast.Attribute(attr=function)):
            return function not in ("TypeVar", "ParamSpec", "TypeVarTuple")
        case ast.Name(id=other) | ast.Attribute(attr=other):
            return other != name
    return True


def check_types(repository: Repository) -> Result:
    """Count type names that several modules define, less leading underscores. SHARED_NAMES must name them."""
    places: dict[str, list[Finding]] = defaultdict(list)
    for source in repository.modules.values():
        for name, line in dict(defined_types(source.tree)).items():
            places[name.lstrip("_")].append(Finding(source.path, line, f"type {name}"))
    shared = {name: found for name, found in places.items() if len({place.path for place in found}) > 1}
    unlisted = [place for name in sorted(shared) if name not in SHARED_NAMES for place in shared[name]]
    gone = [
        Finding("SHARED_NAMES", 0, f"{name} is not shared") for name in SHARED_NAMES if name not in shared
    ]
    listed = [place for name in sorted(shared) if name in SHARED_NAMES for place in shared[name]]
    note = f"of {len(places)}; {len(shared.keys() - SHARED_NAMES)} not in SHARED_NAMES"
    return Result(len(shared), unlisted + gone + listed, len(unlisted) + len(gone), note)


# --- imports ----------------------------------------------------------------------------------------------

Graph: TypeAlias = dict[str, set[str]]


def imported_modules(node: ast.AST, module: str, is_package: bool, modules: Iterable[str]) -> Iterator[str]:
    """Yield the modules of `modules` that an import statement names."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module.split(".")[
                : None if is_package and node.level == 1 else -(node.level - is_package)
            ]
            base = ".".join([*package, *([base] if base else [])])
        inner = [f"{base}.{alias.name}" for alias in node.names]
        names = [name if name in modules else base for name in inner]
    yield from (name for name in names if name in modules and name != module)


def import_graph(modules: dict[str, Source], local: bool) -> Graph:
    """Return the modules that each module imports. `local`: include imports in functions."""
    graph: Graph = {}
    for module, source in modules.items():
        is_package = source.file.name == "__init__.py"
        graph[module] = set()
        pending: list[ast.AST] = [source.tree]
        while pending:
            node = pending.pop()
            graph[module].update(imported_modules(node, module, is_package, modules.keys()))
            if local or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                pending.extend(
                    child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)
                )
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one module, each sorted (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for start in sorted(graph):
        if start in index:
            continue
        index[start] = lowest[start] = len(index)
        stack.append(start)
        work = [(start, iter(sorted(graph[start])))]
        while work:
            node, following = work[-1]
            for target in following:
                if target not in index:
                    index[target] = lowest[target] = len(index)
                    stack.append(target)
                    work.append((target, iter(sorted(graph[target]))))
                    break
                if target in stack:
                    lowest[node] = min(lowest[node], index[target])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[node])
                if lowest[node] == index[node]:
                    position = stack.index(node)
                    if len(stack) - position > 1:
                        found.append(sorted(stack[position:]))
                    del stack[position:]
    return found


def circles_of(repository: Repository, local: bool) -> Result:
    """Return the number of import circles in agent/. `local`: include imports in functions."""
    found = circles(import_graph(repository.modules, local))
    return Result(len(found), [Finding("agent", 0, "circle: " + ", ".join(circle)) for circle in found])


def check_imports(repository: Repository) -> Result:
    """Count circles of module-level and TYPE_CHECKING imports."""
    return circles_of(repository, local=False)


def check_local_imports(repository: Repository) -> Result:
    """Count circles of all imports, with those in functions."""
    return circles_of(repository, local=True)


# --- sizes ------------------------------------------------------------------------------------------------

SMALL_MODULE_LINES: Final = 100


def module_sizes(repository: Repository) -> list[Finding]:
    """Return the hand-written modules of agent/ and their lines. An `__init__` is no module here."""
    return [
        Finding(source.path, 0, f"{len(source.text.splitlines())} lines")
        for source in repository.modules.values()
        if source.file.name != "__init__.py"
    ]


def lines_of(size: Finding) -> int:
    """Return the number of lines in a finding of module_sizes."""
    return int(size.text.split()[0])


def check_modules(repository: Repository) -> Result:
    """Count the hand-written modules of agent/."""
    sizes = module_sizes(repository)
    return Result(len(sizes), sizes)


def check_small_modules(repository: Repository) -> Result:
    """Count the hand-written modules of agent/ under 100 lines."""
    small = [size for size in module_sizes(repository) if lines_of(size) < SMALL_MODULE_LINES]
    return Result(len(small), sorted(small, key=lines_of))


def check_lines(repository: Repository) -> Result:
    """Count the hand-written lines of agent/, with those of `__init__`."""
    sizes = module_sizes(repository)
    count = sum(len(source.text.splitlines()) for source in repository.modules.values())
    return Result(count, sorted(sizes, key=lines_of, reverse=True))


# --- commits and C ----------------------------------------------------------------------------------------


def git(root: Path, *arguments: str) -> str | None:
    """Return what a git command prints; None if it fails or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def subject_faults(subject: str) -> Iterator[str]:
    """Yield what is wrong with a commit subject."""
    if len(subject) > SUBJECT_LENGTH:
        yield f"{len(subject)} characters, limit {SUBJECT_LENGTH}"
    for _, words in banned_places(subject):
        yield f"banned: {words}"
    form = SUBJECT.fullmatch(subject)
    if not form:
        yield "not `<package>: <imperative> <object>`"
    elif not form[1].islower() or (NO_IMPERATIVES.fullmatch(form[1]) and form[1] not in IMPERATIVES):
        yield f"no imperative in lower case: {form[1]}"


def check_commits(repository: Repository) -> Result:
    """Count commits whose subject breaks the form. Skipped if the history lacks FIRST_CHECKED."""
    root = repository.root
    top = git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return Result(0, note="no git history here", skipped=True)
    span = repository.commits or f"{FIRST_CHECKED}..HEAD"
    if not repository.commits and git(root, "merge-base", "--is-ancestor", FIRST_CHECKED, "HEAD") is None:
        return Result(
            0, note=f"commit {FIRST_CHECKED[:7]} is not in this history, which may be shallow", skipped=True
        )
    log = git(root, "rev-list", "--no-merges", "--no-commit-header", "--format=%h %s", span, "--")
    if log is None:
        return Result(1, [Finding(span, 0, "no such range of commits")], 1)
    commits = [line.split(" ", 1) for line in log.splitlines()]
    findings = [
        Finding(commit, 0, f"{subject}: {'; '.join(faults)}")
        for commit, subject in commits
        if (faults := [*subject_faults(subject)])
    ]
    return Result(len(findings), findings, note=f"of {len(commits)}")


def check_c_calls(repository: Repository) -> Result:
    """Run tools/c_call_cycles.py, which exits with 1 if calls between C files form a cycle."""
    program = repository.root / "tools" / "c_call_cycles.py"
    if not program.exists():
        return Result(0, note="no tools/c_call_cycles.py", skipped=True)
    done = subprocess.run(
        [sys.executable, program], cwd=repository.root, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    findings = [Finding("native", 0, line) for line in lines] if done.returncode else []
    return Result(done.returncode, findings, note=lines[-1] if lines else "")


# --- table and command ------------------------------------------------------------------------------------


class Check(NamedTuple):
    """Check with the largest value that passes."""

    name: str
    title: str
    limit: int
    run: Callable[[Repository], Result]
    takes_paths: bool = False


CHECKS: Final = (
    Check("words", "banned words", 0, check_words, takes_paths=True),
    Check("docstrings", "docstrings that begin with a fragment", 49, check_docstrings, takes_paths=True),
    Check("predicates", "predicates that are async or return no bool", 0, check_predicates),
    Check("results", "bool results without an explanation", 0, check_results),
    Check("test-names", f"test names over {TEST_NAME_LENGTH} characters", 0, check_test_names),
    Check("helpers", "helpers of tests that read like values", 0, check_helpers),
    Check("ones", "variables called one", 0, check_ones),
    Check("pages", f"lines of pages over {PAGE_LINE_LENGTH} characters", 0, check_pages),
    Check("types", "type names in several modules", 10, check_types),
    Check("commits", "commit subjects without the form", 0, check_commits),
    Check("imports", "import circles", 0, check_imports),
    Check("local-imports", "import circles with imports in functions", 0, check_local_imports),
    Check("c-calls", "C call cycles (exit status)", 0, check_c_calls),
    Check("modules", "modules of agent/", 320, check_modules),
    Check("small-modules", "modules under 100 lines", 40, check_small_modules),
    Check("lines", "lines of agent/", 103_100, check_lines),
)


def passes(check: Check, result: Result) -> bool:
    """Return whether a result is within the check's limit and has no fault."""
    return result.value <= check.limit and not result.faults


def report(check: Check, result: Result) -> str:
    """Return the line about one check."""
    note = f"; {result.note}" if result.note else ""
    if result.skipped:
        return f"skip {check.name}: {result.note}"
    status = "ok  " if passes(check, result) else "FAIL"
    return f"{status} {check.name}: {check.title}: {result.value} (limit {check.limit}){note}"


def directory_of(path: str) -> str:
    """Return the directory that a file counts for: two levels of some of the directories, else one."""
    parts = path.split("/")
    depth = 2 if parts[0] in ("agent", "go", "native", "examples") else 1
    return "/".join(parts[: min(depth, len(parts) - 1)]) or "(top)"


def by_directory(repository: Repository) -> Iterator[str]:
    """Yield a table of banned words and fragments for each directory, with the three commonest words."""
    found = check_words(repository).findings
    word_counts = Counter(directory_of(finding.path) for finding in found)
    fragment_counts = Counter(directory_of(finding.path) for finding in check_docstrings(repository).findings)
    yield f"{'words':>6} {'docstrings':>11}  directory"
    for directory in sorted(word_counts | fragment_counts):
        common = Counter(
            finding.text[1:].split("]")[0].lower()
            for finding in found
            if directory_of(finding.path) == directory
        ).most_common(3)
        details = ", ".join(f"{word} {count}" for word, count in common)
        yield f"{word_counts[directory]:6} {fragment_counts[directory]:11}  {directory:28} {details}".rstrip()
    yield f"{word_counts.total():6} {fragment_counts.total():11}  sum"


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 1 if a check fails."""
    parser = argparse.ArgumentParser(description="Check names, prose and structure of this repository.")
    parser.add_argument("paths", nargs="*", help="check words and docstrings of these paths only")
    parser.add_argument(
        "--list", nargs="?", const="all", metavar="CHECK", help="print the findings, of all checks or one"
    )
    parser.add_argument(
        "--commits", default="", metavar="RANGE", help=f"commits to check; else {FIRST_CHECKED[:7]}..HEAD"
    )
    parser.add_argument(
        "--by-directory", action="store_true", help="print counts for each directory and no checks"
    )
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parent.parent, help="another checkout to check"
    )
    options = parser.parse_args(arguments)

    gc.disable()  # syntax trees have no cycles worth finding; this halves the time
    root, paths, listed = options.root.resolve(), options.paths, options.list
    if listed and listed not in ("all", *(check.name for check in CHECKS)):
        paths, listed = [*paths, listed], "all"  # --list PATH
    for path in paths:
        if not (root / path).exists():
            parser.error(f"{path}: no such file or directory in {root}")
    inside = tuple((root / path).resolve().relative_to(root).as_posix() for path in paths)
    repository = Repository(root, inside, options.commits)
    if options.by_directory:
        print("\n".join(by_directory(repository)))
        return 0

    failed = False
    for check in CHECKS:
        if paths and not check.takes_paths:
            continue
        result = check.run(repository)
        failed |= not passes(check, result)
        if listed in ("all", check.name):
            print("".join(f"{finding}\n" for finding in result.findings), end="")
        print(report(check, result))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
