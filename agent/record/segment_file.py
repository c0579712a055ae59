"""Files of a record, called segments: each has frames of compressed events, with a checksum per frame.

A file that ends within a frame, after a crash or on a full disk, is readable up to its last complete frame.
All frames of a file are one zstd stream, flushed after each frame, so that equal parts of events cost little.
"""

import errno
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from agent.engine.step import EngineState
from agent.errors import ConfigError, ProbeError
from agent.model.snapshot import Snapshot
from agent.record.events import (
    CLASSES,
    RecordedInputs,
    RecordedStep,
    SegmentDecoder,
    SegmentEncoder,
    SegmentHead,
)
from agent.record.value_codec import CodecError, ValueEncoder
from agent.system.files import CheckedDirectory, is_current_file, open_input, own_file_problem

T = TypeVar("T")
MAGIC: Final = b"DRAHREC1"
SUFFIX: Final = ".drahrec"
_NAME: Final = re.compile(r"record-(\d{8})\.drahrec")
_FRAME: Final = struct.Struct("<III")
"""Layout of a frame's head: size, size before compression, and CRC-32 of the compressed data."""
FRAME_MAX: Final = 16 << 20
"""Largest size of a frame before compression [bytes]; a damaged one takes up to 1 GiB of memory."""
FRAME_GOAL: Final = 1 << 20
"""Size before compression beyond which no further evaluation is written to a frame [bytes]."""
LEVEL: Final = 6
WINDOW_LOG: Final = 20
"""Binary logarithm of the zstd window's size: 1 MiB finds equal objects in earlier events."""
MODE: Final = 0o600
"""Permissions of segment files: only the agent's user may read them, since they have names of pods."""

INVALID_DATA: Final = (
    CodecError, ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError, struct.error,
)  # fmt: skip
"""Errors of the decoder, and of evaluations, for data that another program wrote, or that are damaged."""


class SegmentProblem(NamedTuple):
    """Damage in a segment (file of a record): the place from which it cannot be used, and the reason."""

    path: "RecordPath"
    offset: int
    """Offset of the first byte that cannot be read."""
    size: int
    """Size of the segment's file [bytes]."""
    reason: str
    evaluation: int = 0
    """Number of the first evaluation that is not valid, from 1; 0: a part of the file cannot be read."""

    def __str__(self) -> str:
        if self.evaluation:
            return f"{self.path}: not usable from evaluation {self.evaluation} on: {self.reason}"
        return f"{self.path}: not readable from byte {self.offset} of {self.size} on: {self.reason}"


def import_zstandard() -> Any:
    """Import the package zstandard and return it.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        import zstandard
    except ImportError:
        raise ConfigError("records need the package zstandard; install drahealth[record]") from None
    return zstandard


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of the segment with a number, in the directory of a record."""
    return directory / f"record-{number:08d}{SUFFIX}"


def segment_number(path: "RecordPath") -> int | None:
    """Return the number in the name of a segment's file; None: the file has another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def segment_paths(directory: Path) -> list[Path]:
    """Return the files of a record's segments, the oldest first. Raises OSError."""
    found = {number: path for path in directory.iterdir() if (number := segment_number(path)) is not None}
    return [found[number] for number in sorted(found)]


class UrlPath(NamedTuple):
    """Segment or directory of a record at a URL that fsspec can read, such as ``s3://fleet/node-a``.

    It has the part of Path's interface that reading a record needs.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the URL between slashes, without a query."""
        return tuple(self.url.partition("?")[0].rstrip("/").split("/"))

    @property
    def name(self) -> str:
        """Last part of the URL, without a query."""
        return self.parts[-1]

    @property
    def parent(self) -> "UrlPath":
        """URL of the directory."""
        return UrlPath("/".join(self.parts[:-1]))

    @contextmanager
    def open(self, mode: str = "rb") -> Iterator[Any]:
        """Open the file. Blocks on the network.

        Raises:
            OSError: The file cannot be opened or, within the context, read.
            ConfigError: fsspec, or its library for the URL, is not installed.
        """
        with self._file_system() as (files, path), files.open(path, mode) as file:
            yield file

    def stat(self) -> os.stat_result:
        """Return a file status in which only the size is valid. Raises the errors of :meth:`open`."""
        with self._file_system() as (files, path):
            return os.stat_result((0, 0, 0, 0, 0, 0, files.size(path) or 0, 0, 0, 0))

    def children(self) -> list["UrlPath"]:
        """Return the entries of the directory, or the matches of a URL with ``*``.

        Raises the errors of :meth:`open`.
        """
        with self._file_system() as (files, path):
            if "*" in self.url:
                return [UrlPath(files.unstrip_protocol(found)) for found in sorted(files.glob(path))]
            names = (found.rstrip("/").rpartition("/")[2] for found in files.ls(path, detail=False))
            return [UrlPath("/".join((*self.parts, name))) for name in sorted(names)]

    @contextmanager
    def _file_system(self) -> Iterator[tuple[Any, str]]:
        """Yield fsspec's file system and the path in it; convert fsspec's errors to those of :meth:`open`."""
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ConfigError(
                f"record {self}: URLs need the package fsspec; install drahealth[fleet-replay]"
            ) from None
        try:
            files = url_to_fs(self.url)
        except ImportError as error:  # fsspec's text names the library to install
            raise ConfigError(f"record {self}: {error}") from None
        except Exception as error:  # an unknown protocol, or settings that its library refuses
            raise ConfigError(f"record {self}: {error}; name a URL that fsspec can read") from None
        try:
            yield files
        except (CodecError, ConfigError, SegmentDamaged):
            raise
        except FileNotFoundError:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
        except Exception as error:  # each of fsspec's libraries has exceptions of its own
            text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
            raise OSError(errno.EIO, text) from None


RecordPath = Path | UrlPath
"""Path of a segment, in a file system or at a URL."""


def parse_record_path(text: str) -> RecordPath:
    """Return the path or URL that a command-line argument names."""
    return UrlPath(text) if "://" in text else Path(text)


def url_segments(urls: Iterable[UrlPath], problems: list[str]) -> Iterator[UrlPath]:
    """Yield the segments at URLs of segments, of directories, or with ``*``. Blocks on the network.

    A URL that ends in ``.drahrec`` is a segment and any other one a directory: object stores have no entry
    for a directory that would show what a URL is. ``problems`` receives texts about unreadable URLs.

    Raises:
        ConfigError: fsspec has no library for a URL.
    """
    for url in urls:
        if "*" not in url.url and url.name.endswith(SUFFIX):
            yield url
            continue
        try:
            found = url.children()
        except OSError as error:
            problems.append(f"record {url}: cannot be read: {error.strerror}")
            continue
        if "*" in url.url and found:
            yield from url_segments(found, problems)
        elif segments := [child for child in found if segment_number(child) is not None]:
            yield from segments
        else:
            problems.append(
                f"record {url}: the URL has no segment file, record-*.drahrec; name the directory of a record"
            )


class SegmentWriter:
    """Writer of one segment's file, which it creates. Not thread-safe."""

    def __init__(self, path: Path, head: SegmentHead, state: EngineState) -> None:
        """Create the file and write its head. Blocks on the disk.

        Raises:
            OSError: The file already exists, or cannot be written. An incomplete file is removed.
        """
        self.path = path
        self.size = 0
        zstandard = import_zstandard()
        parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, window_log=WINDOW_LOG)
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        self._flush_mode = zstandard.COMPRESSOBJ_FLUSH_BLOCK
        self._packer = msgspec.msgpack.Encoder()
        self._encoder = SegmentEncoder(ValueEncoder(CLASSES))
        with CheckedDirectory(path.parent) as directory:
            self._fd = directory.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
        try:
            self._write(MAGIC + self._frame([self._encoder.begin(head, state)]))
            self._head_size = self.size
        except BaseException:
            self.remove()
            raise

    @property
    def is_empty(self) -> bool:
        """True: the segment's file has a head only, no evaluation."""
        return self.size == self._head_size

    def is_in_place(self) -> bool:
        """Return whether the segment's path still names the file that is open.

        Blocks on the disk. Raises OSError.
        """
        return is_current_file(self._fd, self.path)

    def append(self, steps: Sequence[RecordedStep]) -> int:
        """Append recorded evaluations as one frame, and return how many. Blocks on the disk.

        Large evaluations (FRAME_GOAL) are not all appended; the caller appends the others with further calls.

        Raises:
            OSError: The frame could not be written; the file ends before it and takes no further frame.
        """
        events: list[msgspec.Raw] = []
        size = 0
        for step in steps:
            events.append(msgspec.Raw(self._packer.encode(self._encoder.event(step))))
            size += memoryview(events[-1]).nbytes
            if size > FRAME_GOAL:
                break
        self._write(self._frame(events))
        return len(events)

    def remove(self) -> None:
        """Close the segment's file and remove it; a file that cannot be removed is left."""
        with suppress(OSError), CheckedDirectory(self.path.parent) as directory:
            if directory.is_current_file(self._fd, self.path.name):
                directory.unlink(self.path.name)
        self.close()

    def close(self) -> None:
        """Close the segment's file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _frame(self, events: list[Any]) -> bytes:
        data = self._packer.encode(events)
        packed: bytes = self._compressor.compress(data) + self._compressor.flush(self._flush_mode)
        return _FRAME.pack(len(packed), len(data), zlib.crc32(packed)) + packed

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            os.ftruncate(self._fd, self.size)  # the part of the frame that was written
            raise
        self.size += len(data)


class SegmentReader:
    """Reader of one segment's file.

    The file may come from anywhere: sizes are checked before memory is used, and only values of known classes
    are created.
    """

    def __init__(self, path: RecordPath) -> None:
        """Open the segment's file and read its head. Blocks on the disk or the network.

        Raises:
            ProbeError: The file cannot be read, or has no valid head.
            ConfigError: A library that reads it is not installed.
        """
        self.path = path
        self.problem: SegmentProblem | None = None
        """Damage at which the read of the file ended; None: none was found so far."""
        self._evaluation = 0  # number of the evaluation that was read last
        self._frames = _frames(path)
        try:
            self._decoder = SegmentDecoder(next(self._frames, [None])[0])
        except INVALID_DATA as error:
            raise ProbeError(f"record file {path}: {error}") from None
        except SegmentDamaged as damage:
            raise ProbeError(f"record file {damage.problem}") from None
        except OSError as error:
            raise ProbeError(f"record file {path}: cannot be read: {error.strerror}") from None
        self.head = self._decoder.head

    def state(self) -> tuple[EngineState, str]:
        """Return the engine's state before the first evaluation: the recorded one, and an empty text.

        If the recorded state cannot be read, return a new state with the recorded settings, and the reason.

        Raises:
            ProbeError: The recorded settings cannot be read either.
        """
        try:
            return self._decoder.state(), ""
        except INVALID_DATA as error:
            reason = str(error)
        try:
            return EngineState(self._decoder.settings()), reason
        except INVALID_DATA as error:
            raise ProbeError(f"record file {self.path}: {error}") from None

    @property
    def field_names(self) -> Callable[[type], tuple[str, ...]]:
        """Function that returns the names of the recorded fields of a class."""
        return self._decoder.field_names

    def steps(self) -> Iterator[RecordedStep]:
        """Yield the recorded evaluations up to the end of the file or the first damage.

        After damage, :attr:`problem` describes it.
        """
        return self.until_invalid(
            RecordedStep(self.snapshot(step.difference), *step[1:]) for step in self.inputs()
        )

    def inputs(self) -> Iterator[RecordedInputs]:
        """Yield the recorded evaluations as :meth:`steps`, without decoding their snapshots.

        Raises INVALID_DATA, which :meth:`until_invalid` handles.
        """
        try:
            for events in self._frames:
                for event in events:
                    self._evaluation += 1
                    yield self._decoder.inputs(event)
        except SegmentDamaged as damage:
            self.problem = damage.problem
        except OSError as error:
            self.problem = SegmentProblem(self.path, 0, 0, error.strerror or str(error))

    @property
    def snapshot(self) -> Callable[[Any], Snapshot]:
        """Function that returns the next snapshot: the one that it returned last, changed by a difference.

        It raises INVALID_DATA.
        """
        return self._decoder.snapshot

    def until_invalid(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield evaluations up to the first one that is not valid, which :attr:`problem` then describes."""
        try:
            yield from steps
        except INVALID_DATA as error:
            reason = str(error) if isinstance(error, CodecError) else f"{type(error).__name__}: {error}"
            self.problem = SegmentProblem(self.path, 0, 0, reason, self._evaluation)


class SegmentDamaged(Exception):
    """A frame of a segment's file is incomplete or corrupt."""

    def __init__(self, path: RecordPath, offset: int, reason: str) -> None:
        self.problem = SegmentProblem(path, offset, path.stat().st_size, reason)
        super().__init__(str(self.problem))


def _frames(path: RecordPath) -> Iterator[list[Any]]:
    """Yield the decompressed events of each frame in a segment's file.

    Raises SegmentDamaged, CodecError and OSError.
    """
    zstandard = import_zstandard()
    fed = _Feeder()
    stream = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG).stream_reader(fed)
    decoder = msgspec.msgpack.Decoder()
    with path.open() if isinstance(path, UrlPath) else open(path, "rb", opener=open_input) as file:
        for offset, raw_size, packed in _packed_frames(path, file):
            fed.data = packed
            try:
                data = stream.read(raw_size)
                events = decoder.decode(data)
            except (zstandard.ZstdError, msgspec.DecodeError, RecursionError, _FeederEmpty) as error:
                raise SegmentDamaged(path, offset, f"a frame cannot be decompressed: {error}") from None
            if not isinstance(events, list):
                raise SegmentDamaged(path, offset, "a frame does not contain a list of events")
            yield events


def _packed_frames(path: RecordPath, file: Any) -> Iterator[tuple[int, int, bytes]]:
    """Yield offset, unpacked size and compressed content of each frame in a segment's file.

    Raises SegmentDamaged, CodecError and OSError.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise CodecError("the file is not a drahealth record")
    offset = len(MAGIC)
    while head := file.read(_FRAME.size):
        if len(head) < _FRAME.size:
            raise SegmentDamaged(path, offset, "the last frame is incomplete")
        size, raw_size, checksum = _FRAME.unpack(head)
        if max(size, raw_size) > FRAME_MAX:
            raise SegmentDamaged(path, offset, f"a frame has {max(size, raw_size)} bytes, limit {FRAME_MAX}")
        packed = file.read(size)
        if len(packed) < size:
            raise SegmentDamaged(path, offset, "the last frame is incomplete")
        if not size or zlib.crc32(packed) != checksum:  # after a loss of power a file may end in zeros
            raise SegmentDamaged(path, offset, "the checksum of a frame is wrong")
        yield offset, raw_size, packed
        offset += _FRAME.size + size


def cut_torn_tail(directory: CheckedDirectory, path: Path) -> SegmentProblem | None:
    """Cut a segment's file in a directory after its last complete frame. Blocks on the disk.

    Returns the damage that was found; None: the file was complete.

    Raises:
        OSError: The file cannot be read or cut; ELOOP: it is a symbolic link; EPERM: it may be another
            program's.
    """
    with open(directory.open(path.name, os.O_RDWR | os.O_NONBLOCK), "rb") as file:
        if problem := own_file_problem(file.fileno()):
            raise OSError(errno.EPERM, f"{path.name} {problem}")
        try:
            for _ in _packed_frames(path, file):
                pass
        except SegmentDamaged as damage:
            os.ftruncate(file.fileno(), damage.problem.offset)
            return damage.problem
        except CodecError as error:
            return SegmentProblem(path, 0, os.fstat(file.fileno()).st_size, str(error))
    return None


class _FeederEmpty(Exception):
    """A frame ended before the decompressor had all data that it needs."""


class _Feeder:
    """File-like object from which the zstd decompressor reads the data of one frame at a time."""

    def __init__(self) -> None:
        self.data = b""

    def read(self, _size: int) -> bytes:
        """Return the data of the current frame. Raises _FeederEmpty if an earlier call returned them."""
        if not self.data:
            raise _FeederEmpty("the compressed data end too early")
        data, self.data = self.data, b""
        return data
