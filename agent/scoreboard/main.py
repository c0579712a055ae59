"""Scores of the agent and of other detectors on labelled incidents.

Exit status of ``python -m agent.scoreboard``: 0; 1 if the incidents are missing or invalid, or a file cannot
be written; 2 for invalid options; 74 if the output could not be written, 141 if its reader closed it, 130
after Ctrl-C.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Final

from agent.errors import OutputError, OutputPipeClosed, ProbeError
from agent.scoreboard.detectors import load_detectors
from agent.scoreboard.incidents import CorpusError, CorpusSplit, find_corpus, load_incidents, select_split
from agent.scoreboard.report import (
    build_scoreboard,
    encode_json,
    format_markdown,
    format_misses,
    format_text,
    run_own,
)
from agent.system.output import print_last_error
from agent.version import VERSION

UNREAD: Final = 128 + signal.SIGPIPE
ALL: Final = "all"


def main() -> int:
    """Parse the command line, replay the incidents, and print the scores; return the exit status."""
    try:
        args = _parse_arguments()
        corpus = find_corpus()
        incidents, others = load_incidents(corpus), load_detectors(corpus)
        if args.write:
            _write_file(args.write)  # an unusable path fails before the slow replay
            _write_file(args.write, format_markdown(incidents, run_own(incidents), VERSION, others))
            return 0
        split = None if args.split == ALL else CorpusSplit(args.split)
        findings = run_own(select_split(incidents, split))
        board = build_scoreboard(incidents, split, findings, VERSION, others)
        print(encode_json(board) if args.json else format_text(board), end="\n" if args.json else "")
        if args.misses:
            print("\n" + format_misses((*board.scores, board.nvml)), end="")
    except (CorpusError, ProbeError, OSError) as error:
        print_last_error(f"python -m agent.scoreboard: {error}")
        return 1
    except OutputPipeClosed:
        return UNREAD
    except OutputError as error:
        print_last_error(f"python -m agent.scoreboard: {error}")
        return os.EX_IOERR
    return 0


def _write_file(path: Path, text: str = "") -> None:
    """Replace the content of a file by a text; an empty text only checks that the file can be written."""
    try:
        with path.open("w" if text else "a") as file:
            file.write(text)
    except OSError as error:
        raise CorpusError(f"file {path}: cannot be written: {error.strerror}") from None


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m agent.scoreboard", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--split",
        choices=[*CorpusSplit, ALL],
        default=ALL,
        help="part of the incidents: open (rules may be written from them), held-out, or all (default)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--misses", action="store_true", help="print also what each detector missed, and its false alarms"
    )
    form.add_argument(
        "--write", type=Path, metavar="FILE.md", help="write the scores as a page: docs/scoreboard.md"
    )
    args = parser.parse_args()
    if args.write and args.split != ALL:
        parser.error("--write has all incidents: it cannot be combined with --split")
    return args
