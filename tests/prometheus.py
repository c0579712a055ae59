"""Prometheus as a process that scrapes given targets, and its query API. Debian's package is enough."""

import json
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlencode

import pytest
from http_client import get
from wire.serving import eventually

PORTS: Final = range(21_000, 21_400)
"""Ports below the kernel's range for clients; a server takes the first free one."""
INTERVAL: Final = "1s"


def need(program: str) -> str:
    """Return the path of a program, or skip the test."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


def free_ports() -> list[int]:
    """Return ports on which no process listens now."""

    def is_free(port: int) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
        return True

    return [port for port in PORTS if is_free(port)]


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
        self._data = str(directory / "data")
        for port in free_ports():
            self.address = ("127.0.0.1", port)
            with (directory / "prometheus.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        program,
                        f"--config.file={directory / 'prometheus.yml'}",
                        f"--storage.tsdb.path={self._data}",
                        f"--web.listen-address=127.0.0.1:{port}",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            eventually(self._is_ready_or_ended, "prometheus is ready")
            if self._process.poll() is None:
                return
            text = (directory / "prometheus.log").read_text()
            assert "address already in use" in text, text
        raise AssertionError("no free port for Prometheus")

    def _is_ready_or_ended(self) -> bool:
        if self._process.poll() is not None:
            return True
        try:
            if get(self.address, "/-/ready").status != 200:
                return False
            # the port may be that of another test's server, until this one has noticed and ended
            return bool(self.get("/api/v1/status/flags")["storage.tsdb.path"] == self._data)
        except OSError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query: series with ``metric`` and ``value``."""
        answer = json.loads(get(self.address, "/api/v1/query?" + urlencode({"query": expression})).text)
        assert answer["status"] == "success", (expression, answer)
        found = answer["data"]["result"]
        return found if answer["data"]["resultType"] == "vector" else [{"metric": {}, "value": found}]

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of a query once it has a series."""
        found: list[dict[str, Any]] = []

        def is_found() -> bool:
            found[:] = self.query(expression)
            return bool(found)

        eventually(is_found, expression)
        return found

    def get(self, path: str) -> Any:
        """Return the data of another endpoint of the API."""
        return json.loads(get(self.address, path).text)["data"]
