"""Prometheus as a process that scrapes given targets, and its query API. Debian's package is enough."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlencode

import pytest
from http_client import get
from patience import PATIENCE_S
from reserved_ports import reserved_port
from wire.serving import eventually

INTERVAL: Final = "1s"


def need(program: str) -> str:
    """Return the path of a program, or skip the test."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


class Prometheus:
    """Prometheus server that scrapes targets every second, with its data in a directory."""

    def __init__(
        self,
        directory: Path,
        targets: Sequence[str],
        *,
        rule_files: Sequence[Path] = (),
        scrape: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the server.

        Args:
            directory: Directory of its files.
            targets: Addresses, ``127.0.0.1:14680``.
            rule_files: Files of rules, evaluated every second.
            scrape: Further keys of the scrape configuration.
        """
        program = need("prometheus")
        job = {
            "job_name": "drahealth",
            "scrape_interval": INTERVAL,
            "static_configs": [{"targets": list(targets)}],
            **(scrape or {}),
        }
        config = {
            "global": {"evaluation_interval": INTERVAL},
            "rule_files": [str(path) for path in rule_files],
            "scrape_configs": [job],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._log = directory / "prometheus.log"
        with ExitStack() as started:
            port = started.enter_context(reserved_port())
            self.address = ("127.0.0.1", port)
            log = started.enter_context(self._log.open("wb"))
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            started.callback(self._process.wait)
            started.callback(self._process.kill)
            eventually(self._is_ready, "prometheus is ready")
            self._open = started.pop_all()

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with suppress(OSError):
            return get(self.address, "/-/ready").status == 200
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query: series with ``metric`` and ``value``."""
        answer = json.loads(get(self.address, "/api/v1/query?" + urlencode({"query": expression})).text)
        assert answer["status"] == "success", (expression, answer)
        found = answer["data"]["result"]
        return found if answer["data"]["resultType"] == "vector" else [{"metric": {}, "value": found}]

    def wait_for(self, expression: str, timeout_s: float = PATIENCE_S) -> list[dict[str, Any]]:
        """Return the result of a query once it has a series; fail at the timeout [s]."""
        found: list[dict[str, Any]] = []

        def is_found() -> bool:
            found[:] = self.query(expression)
            return bool(found)

        eventually(is_found, expression, timeout_s)
        return found

    def get(self, path: str) -> Any:
        """Return the data of another endpoint of the API."""
        return json.loads(get(self.address, path).text)["data"]
