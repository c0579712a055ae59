"""``drahealth new-driver``: writes a directory with a small driver, its tests, image and manifests."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Final

from agent.cli.subcommand import Subcommand
from agent.errors import ConfigError, UsageError
from agent.version import VERSION

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

LANGUAGES: Final = ("python", "go")
GO_MODULE: Final = "v0.2.0"
"""Version of the Go module that a driver in Go requires; the repository has the tag ``go/v0.2.0``."""
LABEL_LENGTH: Final = 48
"""Largest length of the label that begins the names of devices and objects, themselves DNS labels."""
SUFFIX: Final = ".template"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("driver", metavar="NAME", help="driver's name, a domain of yours: card.example.com")
    parser.add_argument(
        "--language", choices=LANGUAGES, default="python", help="language of the driver (default: python)"
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        type=Path,
        help="directory to create (default: the name's first label and -driver, in the current directory)",
    )


def main(args: Namespace) -> int:
    from agent.config.values import check_driver_name

    try:
        check_driver_name(args.driver)
    except ValueError as error:
        raise UsageError(f"argument NAME: {error}") from None
    label = args.driver.partition(".")[0][:LABEL_LENGTH].rstrip("-")
    directory = args.directory or Path(f"{label}-driver")
    files = driver_files(args.driver, label, args.language)
    try:
        directory.mkdir(parents=True)
        try:
            for name, text in files.items():
                (directory / name).write_text(text)
        except BaseException:
            rmtree(directory, ignore_errors=True)
            raise
    except FileExistsError:
        raise UsageError(
            f"directory {directory}: exists already; choose another one with --directory"
        ) from None
    except OSError as error:
        raise ConfigError(f"{error.filename or directory}: cannot be created: {error.strerror}") from None
    print(f"{directory}/: {', '.join(sorted(files))}; README.md describes the next steps")
    return 0


def driver_files(driver: str, label: str, language: str) -> dict[str, str]:
    """Return the files of the new driver: text of each file by its name.

    Args:
        driver: Name of the driver.
        label: First DNS label of the driver's name. Names of devices and Kubernetes objects begin with it.
        language: One of :data:`LANGUAGES`.
    """
    code = ("" if label[0].isalpha() else "d") + label.replace("-", "_")  # finding codes begin with a letter
    values = {
        "@DRIVER@": driver,
        "@LABEL@": label,
        "@CODE@": code,
        "@VARIABLE@": code.upper(),
        "@VERSION@": VERSION,
        "@GO_MODULE@": GO_MODULE,
    }
    files = {}
    for template in (resources.files(__package__) / language).iterdir():
        text = template.read_text()
        for mark, value in values.items():
            text = text.replace(mark, value)
        files[template.name.removesuffix(SUFFIX)] = text
    return files


VERB: Final = Subcommand(
    name="new-driver",
    summary="write a new DRA driver with its tests, image and manifests",
    description=(
        "Writes a directory with a DRA driver that works, in Python or Go: its tests, which include "
        "drahealth conform, a Containerfile and Kubernetes manifests. Its devices are placeholders to be "
        "replaced. Nothing that exists is changed."
    ),
    examples=(
        ("drahealth new-driver card.example.com", "a driver in Python, in card-driver/"),
        ("drahealth new-driver card.example.com --language go", "a driver in Go"),
    ),
    add_arguments=add_arguments,
    main=main,
)
