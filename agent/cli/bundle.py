"""``drahealth bundle``: writes an archive of what a bug report needs, without secrets.

Passwords, tokens and private keys are replaced in all texts. No file of the agent needs a secret, but a log
line, a configuration file or a text of a driver can contain one.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

from agent.cli.output.json import API_VERSION
from agent.cli.output.terminal import style_of
from agent.cli.output.text import RowText, TextTable, clean, format_bytes, format_count
from agent.cli.subcommand import Subcommand, add_colour, add_settings, config_file_of, flags_of
from agent.config.config import CONFIG_VARIABLE, SETTINGS
from agent.config.files import DEFAULT_FILE, DROP_INS, FILE_BYTES, list_drop_ins
from agent.errors import ConfigError, OutputError, PermissionDeniedError
from agent.model.reading import Absence
from agent.model.time import rfc3339
from agent.system.files import ReadError, read_bounded
from agent.version import VERSION

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

REDACTED: Final = "<redacted>"

_SECRET_WORD: Final = (
    r"(?:token|passw(?:or)?d|passphrase|secret|(?:api|access|private)[_-]?key"
    r"|authorization|credentials?|cookie)"
)
_NAME: Final = rf"(?<![\w.-])[\w.-]{{0,64}}?{_SECRET_WORD}[\w.-]{{0,64}}"
_FLAG_NAME: Final = rf"(?<![\w-])--?[\w-]{{0,64}}?{_SECRET_WORD}[\w-]{{0,64}}"
_QUOTED: Final = r"""(?P<slashes>\\{1,7})".{0,4096}?(?<!\\)(?P=slashes)" | \"{3}(?:[^"\\]|\\.|"(?!""))*\"{3}
    | "(?:[^"\\]|\\.)*" | \'{3}.*?\'{3} | '(?:[^']|\'\')*' | \\{0,7}["'][^\r\n]*"""
"""Pattern of a quoted value; that of the last alternative has no end, as its text is cut."""
_ITEM: Final = r"""\"(?:[^"\\\n]|\\.)*+" | '[^'\n]*+' | [ \t]\#[^\n]*+ | [^]["'{}\\]"""
_NESTED: Final = rf"(?:{_ITEM} | \[(?:{_ITEM}){{0,4096}}+\] | \{{(?:{_ITEM}){{0,4096}}+\}})"
_LIST: Final = rf"""\[{_NESTED}{{0,4096}}+\] | \{{{_NESTED}{{0,4096}}+\}}
    | \[[^\]]{{0,4096}}\] | \{{[^{{}}]{{0,4096}}\}} | [\[{{][^\r\n]*"""
"""Pattern of a list or table, with quoted brackets or one more level; the last alternative has no end."""
_OPENING: Final = re.compile(r"""\\*(?:"{3}|'{3}|["'])""")

_BLOCK: Final = re.compile(
    rf"""^(?P<name>(?P<indent>[ \t]*)(?:-[ \t]+)*["']?{_NAME}["']?[ \t]*:)[ \t\r]*
    (?P<value>(?:[|>][^\n]*)?(?:(?:\n[ \t\r]*(?=\n))*\n(?P=indent)(?:[ \t]+|-[ \t]+)[^\s][^\n]*)+)""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
"""Pattern of a name in YAML with its value on the next lines, which are indented."""
_PRIVATE_KEY: Final = re.compile(
    r"(?P<name>)(?P<value>-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?"
    r"(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z))",
    re.DOTALL,
)
_HEADER: Final = re.compile(
    rf"""(?P<name>\b(?:authorization|cookie):[ \t]*)(?P<value>(?!{REDACTED}|[\s"'\\\[{{])
    (?:=\\*"[^"\\]*\\*"|[^\r\n"'\\])+)""",
    re.IGNORECASE | re.VERBOSE,
)
"""Pattern of an HTTP header whose value is a secret up to the end of the line or of the quotes around it."""
_VALUE: Final = re.compile(
    rf"""(?P<name>{_NAME}(?P<quote>\\{{0,7}}["'])?\s{{0,8}}[:=]{{1,2}}>?\s{{0,8}})(?!\\*["']*{REDACTED})
    (?P<value> {_QUOTED} | {_LIST}
    | (?:bearer|basic|digest)\s+[^\s,;"'\\]+ | [^\s,;\}}\]"'\\]+ )""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
"""Pattern of a name such as ``api-key`` with its value.

It matches in TOML, YAML, JSON, environment variables and headers.
"""
_SECRET_KEY: Final = re.compile(rf"{_NAME}\Z", re.IGNORECASE)
"""Pattern of a key in JSON whose value is a secret."""
_FLAG: Final = re.compile(
    rf"""(?P<name>{_FLAG_NAME}(?:\\{{0,7}}["'])?(?:\s{{0,64}},\s{{0,64}}|\s{{1,64}}(?:-\s{{1,64}})?))
    (?!\\*["']*(?:--|{REDACTED})) (?P<value> {_QUOTED} | [^\s"'\\,\]-][^\s"'\\\]]* )""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
"""Pattern of a flag with its value as the next argument, in a command line or in a list of arguments."""
_SECRET_FLAG: Final = re.compile(rf"{_FLAG_NAME}\Z", re.IGNORECASE)
"""Pattern of an argument in JSON after which the next argument is a secret."""
_SHAPES: Final = (
    re.compile(r"(?P<name>\b(?:bearer|basic)\s+)(?P<value>[\w.~+/=-]{8,})", re.IGNORECASE),
    re.compile(r"(?P<name>\b\w{1,32}://)(?P<value>[^\s/@:\"']{0,256}:[^\s/\"']{1,256})(?=@)"),
    re.compile(rf"(?P<name>\bhttps?://)(?P<value>(?!{REDACTED})[^\s/@:\"']{{1,256}})(?=@)"),
    re.compile(r"(?P<name>)(?P<value>\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"),
    re.compile(r"(?P<name>)(?P<value>\b(?:AKIA|ASIA)[A-Z0-9]{16}\b)"),
    re.compile(r"(?P<name>)(?P<value>\bgh[pousr]_\w{20,})"),
)
"""Patterns of values that are secrets under any name.

They are parts of HTTP headers and URLs, JSON web tokens, and keys of AWS and GitHub.
"""


def redact(text: str) -> tuple[str, int]:
    """Return `text` with each secret replaced by REDACTED, and the number of replaced secrets.

    A valid JSON text stays valid.
    """
    try:
        redacted, count = _redact_json(json.loads(text))
    except (ValueError, RecursionError):
        return _redact_text(text)
    if not count:
        return text, 0
    return json.dumps(redacted, indent=2 if "\n" in text.strip() else None) + "\n", count


def _redact_json(value: Any) -> tuple[Any, int]:
    """Return a parsed JSON value with REDACTED for each secret, and the number of replaced secrets."""
    if isinstance(value, str):
        return _redact_text(value)
    if isinstance(value, list):
        before = [isinstance(part, str) and _SECRET_FLAG.match(part) for part in ("", *value)]
        parts = [
            (REDACTED, 1) if is_flag and not str(part).startswith("--") else _redact_json(part)
            for is_flag, part in zip(before, value, strict=False)
        ]
        return [part for part, _ in parts], sum(count for _, count in parts)
    if not isinstance(value, dict):
        return value, 0
    members: dict[str, Any] = {}
    total = 0
    for key, part in value.items():
        name, in_name = _redact_text(key)
        members[name], count = (REDACTED, 1) if _SECRET_KEY.search(key) else _redact_json(part)
        total += in_name + count
    return members, total


def _redact_text(text: str) -> tuple[str, int]:
    count = 0
    for pattern in (_BLOCK, _PRIVATE_KEY, _HEADER, _VALUE, _FLAG, *_SHAPES):
        text, found = pattern.subn(_without_value, text)
        count += found
    return text, count


def _without_value(found: re.Match[str]) -> str:
    groups = found.groupdict()
    if "indent" in groups:
        return f"{found['name']} {REDACTED}"
    opening = _OPENING.match(found["value"])
    quote = opening[0] if opening else groups.get("quote") or ""
    return f"{found['name']}{quote}{REDACTED}{quote}"


# --- the command -------------------------------------------------------------------------------------------

ENTRY_BYTES: Final = 8 << 20
"""Largest size of a file in the archive [bytes]; of a larger file the rest is left out."""
TIMEOUT_S: Final = 30.0
"""Time after which a command that collects a file is killed [s]."""
LOG_LINES: Final = 5000
"""Number of the newest lines of the agent's log that the archive has."""
UNIT: Final = "drahealth.service"
PACKAGES: Final = (
    "trio", "grpclib", "h2", "betterproto", "msgspec", "cffi", "nvidia-ml-py", "psutil", "pyudev", "pyyaml",
)  # fmt: skip
"""Libraries whose versions the archive has."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="archive to create, - for standard output (default: drahealth-bundle-<time>.tar.gz)",
    )
    parser.add_argument("--list", action="store_true", help="only list the files, and write nothing")
    add_colour(parser)
    add_settings(parser, "--runtime-dir", "--state-dir")


class BundleFile(NamedTuple):
    """File of the archive that ``drahealth bundle`` writes."""

    name: str
    content: str
    """Description of the file's content, for the list of files in the archive."""
    data: bytes
    secrets: int
    """Number of secrets that were left out of the file."""
    remarks: tuple[str, ...]


def main(args: Namespace) -> int:
    from agent.system.output import write_all

    now_s = time.time()
    name = f"drahealth-bundle-{rfc3339(now_s).replace(':', '').replace('-', '')}"
    path = Path(args.file or f"{name}.tar.gz")
    is_stdout = args.file == "-"
    fd = 1 if is_stdout or args.list else _create(path)
    try:
        files = list(collect_files(config_file_of(args), _environment(args)))
        files.insert(0, _manifest(files, now_s))
        _print_list(files, sys.stderr if is_stdout else sys.stdout, args.color)
        if args.list:
            return 0
        archive = _archive(files, name, now_s)
        sys.stdout.flush()
        write_all(fd, "standard output" if is_stdout else f"bundle {path}", archive)
    except BaseException:
        if fd != 1:
            path.unlink(missing_ok=True)  # no part of an archive stays
        raise
    finally:
        if fd != 1:
            os.close(fd)
    if not is_stdout:
        print(f"\nwritten: {path}, {format_bytes(len(archive))}")
    return 0


def _create(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OutputError(f"bundle {path}: cannot be created: {error.strerror}") from None


def _environment(args: Namespace) -> dict[str, str]:
    """Return the environment variables for the commands of the collection.

    They contain the settings from the command line of ``drahealth bundle``.
    """
    flags = {setting.flag: setting.variable for setting in SETTINGS if setting.flag}
    environ = {**os.environ, **{flags[flag]: str(value) for flag, value in flags_of(args).items()}}
    if args.config is not None:
        environ[CONFIG_VARIABLE] = args.config
    return environ


# --- files -------------------------------------------------------------------------------------------------


def collect_files(
    config_file: Path | None, environ: Mapping[str, str], *, timeout_s: float = TIMEOUT_S
) -> Iterator[BundleFile]:
    """Yield the files of the archive. The remarks of a file that cannot be collected state the reason.

    Args:
        config_file: Configuration file; None: the default one, if it exists.
        environ: Environment variables of the commands that collect the files.
        timeout_s: Time after which a command is killed [s].
    """
    yield _file("versions.json", "versions of drahealth, libraries and kernel", _versions())
    yield from configuration_files(config_file)
    collector = _Collector(environ, timeout_s)
    yield collector.collect("status.json", "state of the agent's process", "status", "-o", "json")
    report = collector.collect("report.json", "newest report of the agent", "watch", "--once", "-o", "json")
    if not report.data:
        scan = collector.collect("report.json", "a scan of this node", "scan", "-o", "json")
        report = scan._replace(remarks=(*report.remarks, *scan.remarks))
    yield report
    history = "changes of verdicts and uses of devices"
    yield collector.collect("history.json", history, "history", "-o", "json")
    yield collector.collect(
        "availability.json", "availability of devices", "history", "--summary", "-o", "json"
    )
    yield collector.log()


class _Collector:
    """Runner of the commands whose output becomes files of the archive."""

    def __init__(self, environ: Mapping[str, str], timeout_s: float) -> None:
        self._environ = environ
        self._timeout_s = timeout_s

    def collect(self, name: str, content: str, *argv: str) -> BundleFile:
        """Return the output of the ``drahealth`` command with arguments `argv` as a file of the archive.

        It imports from the paths of this process, so not from the working directory, where others may write.
        """
        paths = list(filter(None, sys.path))
        program = f"import sys; sys.path[:] = {paths}; from agent.__main__ import process; process()"
        return self._run(name, content, [sys.executable, "-P", "-c", program, *argv])

    def log(self) -> BundleFile:
        """Return the newest lines of the agent's log in the journal as a file."""
        content = f"newest {LOG_LINES} lines of the log of {UNIT}"
        program = shutil.which("journalctl", path=self._environ.get("PATH"))
        if program is None:
            return _file("log.txt", content, b"", "there is no journalctl")
        options = ("--no-pager", "--quiet", "--output=short-iso-precise", f"--lines={LOG_LINES}")
        return self._run("log.txt", content, [program, f"--unit={UNIT}", *options])

    def _run(self, name: str, content: str, command: list[str]) -> BundleFile:
        """Run a command with limits on its time and output; return the output as a file of the archive."""
        # in memory: a container may have no writable directory
        with open(os.memfd_create("out"), "w+b") as out, open(os.memfd_create("err"), "w+b") as err:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=dict(self._environ),
                    start_new_session=True,
                    preexec_fn=_limit_output,
                )
            except OSError as error:
                return _file(name, content, b"", f"{command[0]}: {error.strerror}")
            try:
                code = process.wait(self._timeout_s)
                remarks = [f"exit code {code}"] if code else []
            except subprocess.TimeoutExpired:
                remarks = [f"no answer within {self._timeout_s:g} s"]
            finally:
                if process.poll() is None:  # after Ctrl-C, too
                    os.killpg(process.pid, signal.SIGKILL)  # with its children
                    process.wait()
            out.seek(0)
            err.seek(0)
            complaint = err.read(2000).decode(errors="replace").strip()
            return _file(name, content, out.read(), *remarks, *complaint.splitlines()[-3:])


def _limit_output() -> None:
    with suppress(ValueError):  # a lower limit, which only root can raise, stays
        resource.setrlimit(resource.RLIMIT_FSIZE, (ENTRY_BYTES + 1, ENTRY_BYTES + 1))


def _file(name: str, content: str, data: bytes, *remarks: str) -> BundleFile:
    """Return a file of the archive that contains `data` without secrets, cut to ENTRY_BYTES."""
    text, secrets = redact(data[:ENTRY_BYTES].decode(errors="replace"))
    cut = [f"cut after {format_bytes(ENTRY_BYTES)}"] if len(data) > ENTRY_BYTES else []
    safe = [redact(remark) for remark in remarks]
    return BundleFile(
        name,
        content,
        text.encode()[:ENTRY_BYTES],
        secrets + sum(count for _, count in safe),
        (*cut, *(remark for remark, _ in safe)),
    )


def configuration_files(given: Path | None) -> Iterator[BundleFile]:
    """Yield the configuration file and its drop-in files for the archive, even if they are invalid.

    Only the default configuration file has drop-in files. If `given` is None, it is used.
    """
    yield _config_file("config.toml", given or DEFAULT_FILE)
    if given is not None:
        return
    directory = DEFAULT_FILE.parent / DROP_INS
    try:
        paths = list_drop_ins(directory)
    except (ConfigError, PermissionDeniedError) as error:
        yield _file(DROP_INS, f"drop-ins in {directory}", b"", str(error))
        return
    for path in paths:
        yield _config_file(f"{DROP_INS}/{path.name}", path)


def _config_file(name: str, path: Path) -> BundleFile:
    content = f"configuration file {path}"
    try:
        return _file(name, content, read_bounded(path, FILE_BYTES).data)
    except ReadError as error:
        remark = "no such file" if error.absence is Absence.ABSENT else error.reason
        return _file(name, content, b"", remark)


def _versions() -> bytes:
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        system = ""
    kernel = os.uname()
    document = {
        "drahealth": VERSION,
        "python": sys.version,
        "packages": {name: version for name in PACKAGES if (version := _package_version(name))},
        "system": system,
        "kernel": f"{kernel.sysname} {kernel.release} {kernel.version} {kernel.machine}",
        "user": os.geteuid(),
    }
    return json.dumps(document, indent=2).encode() + b"\n"


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _manifest(files: list[BundleFile], now_s: float) -> BundleFile:
    document = {
        "apiVersion": API_VERSION,
        "at": rfc3339(now_s),
        "files": [
            {
                "name": file.name,
                "content": file.content,
                "bytes": len(file.data),
                "redacted": file.secrets,
                "remarks": list(file.remarks),
            }
            for file in files
        ],
    }
    return _file("manifest.json", "this list", json.dumps(document, indent=2).encode() + b"\n")


# --- output ------------------------------------------------------------------------------------------------


def _print_list(files: list[BundleFile], stream: TextIO, colour: str) -> None:
    style = style_of(stream, colour, os.environ)
    table = TextTable("FILE", "SIZE", "CONTENT", text_below=True)
    for file in files:
        secrets = [f"{format_count(file.secrets, 'secret')} left out"] if file.secrets else []
        remarks = [RowText(clean(remark), hanging=2) for remark in (*secrets, *file.remarks)]
        table.add(file.name, format_bytes(len(file.data)), clean(file.content), text=remarks)
    stream.write("\n".join(table.lines(style)) + "\n")


def _archive(files: list[BundleFile], directory: str, now_s: float) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for file in files:
            entry = tarfile.TarInfo(f"{directory}/{file.name}")
            entry.size, entry.mtime, entry.mode = len(file.data), int(now_s), 0o600
            tar.addfile(entry, io.BytesIO(file.data))
    return archive.getvalue()


VERB = Subcommand(
    name="bundle",
    summary="write an archive of what a bug report needs, without secrets",
    description=(
        "Collects configuration, status, newest report or a scan, history, versions and the newest lines of "
        "the log, lists them, and writes them to a .tar.gz that only this user can read. Passwords, tokens "
        "and private keys are replaced; names of nodes, pods and devices are not. What cannot be collected "
        "is listed with its reason. Exits with 0 if the archive was written, 74 if it could not be."
    ),
    examples=(
        ("drahealth bundle", "an archive in the working directory"),
        ("drahealth bundle --list", "the files that the archive would have"),
    ),
    add_arguments=add_arguments,
    main=main,
)
