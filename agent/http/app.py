"""Application of the HTTP server (Starlette): its routes, and the probes of an orchestrator.

An endpoint runs in the server's event loop and does not block; a file is read in a thread.
"""

from collections.abc import Callable
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agent.http.agent_view import AgentView
from agent.http.metrics import HttpConnectionCounts, MetricsRenderer
from agent.http.page import PageEndpoints
from agent.model.time import Instant

PART_BYTES: Final = 32 << 10
"""Size of the parts in which a metrics or report document is sent [bytes]."""


def create_app(
    view: AgentView,
    *,
    clock: Callable[[], Instant],
    server: Callable[[], HttpConnectionCounts] = HttpConnectionCounts,
) -> Starlette:
    """Return the HTTP application of an agent: probes, report, metrics and page.

    Args:
        server: Returns the counts of the HTTP server's connections.
    """
    probes, reports = ProbeEndpoints(view, clock), ReportEndpoint(view)
    metrics = MetricsEndpoint(MetricsRenderer(view, clock, server))
    return Starlette(
        routes=[
            Route("/healthz", probes.alive),
            Route("/readyz", probes.ready),
            Route("/api/v1/report", reports.show),
            Route("/metrics", metrics.show),
            *PageEndpoints(view, clock).routes,
        ]
    )


class ProbeEndpoints:
    """Endpoints ``/healthz`` and ``/readyz``: whether the agent works, and whether it has a report."""

    def __init__(self, view: AgentView, clock: Callable[[], Instant]) -> None:
        self._view = view
        self._clock = clock

    async def alive(self, request: Request) -> Response:
        """Answer ``/healthz``: 200 while reports come in time, or before the first one; else 503.

        Faults of devices do not matter.
        """
        return _probe_result(self._view.silence(self._clock()))

    async def ready(self, request: Request) -> Response:
        """Answer ``/readyz``: 200 after the first complete report, while reports come in time; else 503."""
        if self._view.report() is None:
            return _probe_result("the first pass over the node has not finished")
        return _probe_result(self._view.silence(self._clock()))


def _probe_result(problem: str) -> Response:
    return PlainTextResponse(f"{problem or 'ok'}\n", 503 if problem else 200)


class MetricsEndpoint:
    """Endpoint ``/metrics``."""

    def __init__(self, renderer: MetricsRenderer) -> None:
        self._renderer = renderer

    async def show(self, request: Request) -> Response:
        """Answer with the metrics in the text format that the client's header ``Accept`` asks for."""
        text, content_type = self._renderer.render(request.headers.get("accept", ""))
        return PartedResponse(text, headers={"content-type": content_type})


class PartedResponse(Response):
    """HTTP response that is sent in parts of PART_BYTES.

    Many clients share one text: only the part that is being sent is copied for a slow client.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for begin in range(0, len(self.body), PART_BYTES):
            part = bytes(self.body[begin : begin + PART_BYTES])
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class ReportEndpoint:
    """Endpoint ``/api/v1/report``: the newest report as JSON, encoded once for all clients."""

    def __init__(self, view: AgentView) -> None:
        self._view = view
        self._encoded = (0, b"")

    async def show(self, request: Request) -> Response:
        """Answer ``/api/v1/report`` with the newest report; 503 before the first one."""
        version, report = self._view.latest.peek()
        if report is None:
            return _probe_result("the first pass over the node has not finished")
        if self._encoded[0] != version:
            self._encoded = version, msgspec.json.encode(self._view.documents.report(report))
        return PartedResponse(self._encoded[1], media_type="application/json")
