"""Application of the HTTP server (Starlette): its routes, and the probes of an orchestrator.

An endpoint runs in the server's event loop and does not block; a file is read in a thread.

The module also has the endpoints of the HTML page: the page, its files, and the events that make a browser
reload it.

Jinja2 escapes every text, and the Content-Security-Policy allows only the page's own scripts and
styles. An event holds only the number of a report: a browser that does not read costs a few bytes, and loads
the newest page later. The page of a report is rendered once for all browsers.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agent.config.config import Config
from agent.errors import DrahealthError
from agent.health.availability_statistics import ObservedTimeAxis, verdict_spans
from agent.health.verdict import vital_stall_error
from agent.http.agent_view import AgentView
from agent.http.metrics import HttpConnectionCounts, MetricsRenderer
from agent.http.page_content import STRIP_STEPS, History, PageInput, first_of_part, page_content
from agent.model.history import ClockReading
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.sources.gpu_os_facts import read_boot_id
from agent.store.history_file import read_verdicts
from agent.store.state_files import UnusableFile
from agent.system.threads.worker_threads import call_in_thread
from agent.system.timing import read_boot_clock

ASSETS: Final = Path(__file__).parent / "assets"
STREAMS_MAX: Final = 32
"""Largest number of open event streams; a browser without a stream loads the page every half minute."""
EVENT_PAUSE_S: Final = 1.0
"""Shortest time between two events of one stream [s]."""
COMMENT_S: Final = 15.0
"""Time without a report after which a stream gets a comment, so that a closed connection is noticed [s]."""
HISTORY_S: Final = 30.0
"""Time for which a read of the verdict history is used for further pages [s]."""
READ_WAIT_S: Final = 2.0
"""Longest time that a page waits for a read of the verdict history [s]; then it shows the last read."""
PAGES_MAX: Final = 32
"""Largest number of rendered pages of one report that are kept, by first device: those of 6,400 devices."""
WAITING_MAX: Final = 32
"""Largest number of pages that requests wait for; requests for others are answered with 503."""
RETRY_S: Final = 5
"""Time after which a client may ask again for a page that was refused [s]."""
FIRST_REPORT_S: Final = 120.0
"""Time after the start in which the first report must come [s]; the chart's startup probe lasts as long."""

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_MEDIA_TYPES: Final[Mapping[str, str]] = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


class PageEndpoints:
    """HTTP endpoints of the agent's HTML page: page, style, script, icon and event stream."""

    def __init__(self, view: AgentView, clock: Callable[[], Instant], turns: "RenderTurns") -> None:
        self._view = view
        self._clock = clock
        self._turns = turns
        self._history = HistoryReader(view.history_file, view.config, clock)
        environment = Environment(
            loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        self._template = environment.get_template("page.html.j2")
        self._rendered: tuple[int, dict[int, bytes]] = (0, {})
        self._files = {name: (ASSETS / name).read_bytes() for name in _MEDIA_TYPES}
        self._streams = 0
        self._waiting = Counter[int]()
        """Number of requests that wait for each page, by its first device."""

    @property
    def routes(self) -> list[Route]:
        """Routes of the HTML page, its event stream and its files."""
        files = [Route(f"/{name}", partial(self._file, name)) for name in self._files]
        return [Route("/", self._show), Route("/events", self._events), *files]

    async def _file(self, name: str, request: Request) -> Response:
        return Response(self._files[name], media_type=_MEDIA_TYPES[name], headers=HEADERS)

    async def _show(self, request: Request) -> Response:
        """Answer with the page of the newest report; before the first one, with a 503 page that states so."""
        version, report = self._view.latest.peek()
        if report is None:
            text = self._template.render(page=None, version=0)
            return Response(text, 503, media_type="text/html", headers=HEADERS)
        first = first_of_part(_number(request.query_params.get("first", "0")), len(report.devices))
        staleness = self._view.staleness_error(self._clock())
        if staleness or self._rendered[0] != version:
            self._rendered = version, {}
        pages = self._rendered[1]
        if (page := pages.get(first)) is None:
            if first not in self._waiting and len(self._waiting) >= WAITING_MAX:
                refusal = f"requests wait for {WAITING_MAX} other pages, the limit\n"
                return PlainTextResponse(refusal, 503, headers={**HEADERS, "Retry-After": str(RETRY_S)})
            self._waiting[first] += 1
            try:
                history = await self._history.read()
                async with self._turns.turn():
                    if (page := pages.get(first)) is None:
                        page = self._render(report, first, version, staleness, history)
                        while len(pages) >= PAGES_MAX:
                            pages.pop(next(iter(pages)))
                        pages[first] = page
            finally:
                self._waiting[first] -= 1
                self._waiting += Counter()  # without the pages that no request waits for
        return PartedResponse(page, media_type="text/html", headers=HEADERS)

    def _render(self, report: Report, first: int, version: int, staleness: str, history: History) -> bytes:
        """Return one part of the page as HTML; see page_content() for `first`."""
        given = PageInput(
            report=report,
            now=self._clock(),
            pods=snapshot.pods if (snapshot := self._view.snapshot()) else None,
            consumers=self._view.consumers(),
            drivers=frozenset(self._view.config().drivers),
            history=history,
            status=self._view.status(),
        )
        content = page_content(given, first)
        return self._template.render(
            page=content, version=version, staleness=staleness, steps=STRIP_STEPS
        ).encode()

    async def _events(self, request: Request) -> Response:
        """Answer with a stream of server-sent events: the number of each report, at most one per second."""
        if request.method == "HEAD":  # a stream has no end
            return Response(media_type="text/event-stream", headers=HEADERS)
        if self._streams >= STREAMS_MAX:
            refusal = f"{STREAMS_MAX} event streams are open, the limit\n"
            return PlainTextResponse(refusal, 503, headers=HEADERS)
        return StreamingResponse(self._event_texts(), media_type="text/event-stream", headers=HEADERS)

    async def _event_texts(self) -> AsyncIterator[str]:
        version = 0
        self._streams += 1
        try:
            while True:
                try:
                    async with asyncio.timeout(COMMENT_S):
                        version, _ = await self._view.latest.wait_newer(version)
                except TimeoutError:
                    yield ": no new report\n\n"
                    continue
                yield f"id: {version}\ndata: {version}\n\n"
                await asyncio.sleep(EVENT_PAUSE_S)
        finally:
            self._streams -= 1


class HistoryReader:
    """Reader of the recorded health of devices for the page; the result of a read is used for HISTORY_S."""

    def __init__(self, path: Path, config: Callable[[], Config], clock: Callable[[], Instant]) -> None:
        self._path = path
        self._config = config
        self._clock = clock
        self._reading: asyncio.Task[None] | None = None
        self._newest: History | None = None
        self._until_s = 0.0

    async def read(self) -> History:
        """Return the recorded health of devices up to now. Waits up to READ_WAIT_S.

        The result is at most HISTORY_S old, or older if the disk hangs.
        """
        if self._reading is None and time.monotonic() >= self._until_s:
            self._reading = asyncio.get_running_loop().create_task(self._refresh())
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=READ_WAIT_S)
        return self._newest or self._no_history("its file is still being read")

    async def _refresh(self) -> None:
        try:
            self._newest = await call_in_thread(self._read, "dh-page-history")
            self._until_s = time.monotonic() + HISTORY_S
        except (RuntimeError, MemoryError) as error:  # the kernel started no thread; read by the next request
            self._newest = self._newest or self._no_history(str(error) or "out of memory")
        finally:
            self._reading = None

    def _read(self) -> History:
        """Read the recorded health of devices from its file. Blocks on the disk."""
        if not self._config().history_rows:
            return self._no_history("the configuration keeps no history")
        try:
            stored = read_verdicts(self._path)
        except UnusableFile as error:
            return self._no_history(f"history file {self._path}: {error}")
        except (DrahealthError, OSError) as error:
            return self._no_history(str(error))
        timeline = ObservedTimeAxis(stored.periods, self._now())
        return History(timeline, verdict_spans(stored, timeline))

    def _no_history(self, problem: str) -> History:
        return History(ObservedTimeAxis((), self._now()), {}, problem)

    def _now(self) -> ClockReading:
        boot_id = read_boot_id(self._config().procfs_root)
        return ClockReading(self._clock().wall_s, read_boot_clock(), boot_id)


def _number(text: str) -> int:
    """Return the number in a query parameter; 0 for a text that is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


# --- the application ---------------------------------------------------------------------------------------

PART_BYTES: Final = 32 << 10
"""Size of the parts in which metrics, a report or a page are sent [bytes]."""


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
    turns = RenderTurns()
    probes, reports = ProbeEndpoints(view, clock), ReportEndpoint(view, turns)
    metrics = MetricsEndpoint(MetricsRenderer(view, clock, server), turns)
    return Starlette(
        routes=[
            Route("/healthz", probes.alive),
            Route("/readyz", probes.ready),
            Route("/api/v1/report", reports.show),
            Route("/metrics", metrics.show),
            *PageEndpoints(view, clock, RenderTurns()).routes,  # no scrape waits for pages
        ]
    )


class ProbeEndpoints:
    """Endpoints ``/healthz`` (the agent works) and ``/readyz`` (the agent has a report)."""

    def __init__(self, view: AgentView, clock: Callable[[], Instant]) -> None:
        self._view = view
        self._clock = clock
        self._start_ns = clock().mono_ns

    async def alive(self, request: Request) -> Response:
        """Answer ``/healthz``: 503 if the agent must be restarted, for the reasons of systemd's watchdog.

        Faults of devices, and stalls of sources that are not vital, do not matter.
        """
        return _probe_result(self._problem())

    async def ready(self, request: Request) -> Response:
        """Answer ``/readyz``: 503 before the first complete report, and while ``/healthz`` answers 503."""
        if self._view.report() is None:
            return _probe_result("the first pass over the node has not finished")
        return _probe_result(self._problem())

    def _problem(self) -> str:
        """Return an error text if the agent must be restarted; else an empty text."""
        now, report = self._clock(), self._view.report()
        if report is not None:
            return self._view.staleness_error(now) or vital_stall_error(report.sources, report.at)
        age_s = (now.mono_ns - self._start_ns) / NS
        if age_s <= FIRST_REPORT_S:
            return ""
        return f"no health report {age_s:.0f} s after the start, limit {FIRST_REPORT_S:g} s"


def _probe_result(problem: str) -> Response:
    return PlainTextResponse(f"{problem or 'ok'}\n", 503 if problem else 200)


class RenderTurns:
    """Turns of requests for documents that are expensive to render: one document is rendered at a time, and
    other requests, such as probes, are answered for as long in between."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """Begin without a waiting request; `clock` returns the CPU time of the thread [s]."""
        self._clock = clock
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, which is the time in a ``with`` block."""
        async with self._lock:
            begin_s = self._clock()
            yield
            await asyncio.sleep(self._clock() - begin_s)


class MetricsEndpoint:
    """Endpoint ``/metrics``."""

    def __init__(self, renderer: MetricsRenderer, turns: RenderTurns) -> None:
        self._renderer = renderer
        self._turns = turns

    async def show(self, request: Request) -> Response:
        """Answer with the metrics in the text format that the client's header ``Accept`` asks for."""
        async with self._turns.turn():
            text, content_type = self._renderer.render(request.headers.get("accept", ""))
        return PartedResponse(text, headers={"content-type": content_type})


class PartedResponse(Response):
    """HTTP response that is sent in parts of PART_BYTES.

    Many clients share one text: only the part that is being sent is copied for a slow client.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        document = memoryview(self.body)
        for begin in range(0, len(document), PART_BYTES):
            part = document[begin : begin + PART_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class ReportEndpoint:
    """Endpoint ``/api/v1/report``: the newest report as JSON, encoded once for all clients."""

    def __init__(self, view: AgentView, turns: RenderTurns) -> None:
        self._view = view
        self._turns = turns
        self._encoded = (0, b"")

    async def show(self, request: Request) -> Response:
        """Answer ``/api/v1/report`` with the newest report; 503 before the first one."""
        version, report = self._view.latest.peek()
        if report is None:
            return _probe_result("the first pass over the node has not finished")
        async with self._turns.turn():
            if self._encoded[0] < version:
                self._encoded = version, msgspec.json.encode(self._view.encode_report(report))
            text = self._encoded[1]
        return PartedResponse(text, media_type="application/json")
