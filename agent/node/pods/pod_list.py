"""The pods of this node, from the kubelet's watch while there is one, else asked for.

For a loop of asyncio's. A watch tells at once that a pod has come, gone or ended.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from agent.model.claim_sources import SourceAnswer
from agent.model.objects import Object
from agent.model.time import Instant
from agent.node.pods.queries import ask_pods
from agent.serve.kubelet.pods_api import SOCKET, PodsWatch
from agent.system.threads.latest import Latest


class PodList:
    """The newest list."""

    def __init__(
        self, kubelet_dir: Path, clock: Callable[[], Instant], on_change: Callable[[], None]
    ) -> None:
        """
        Args:
            kubelet_dir: Where its socket is.
            clock: When a list was true.
            on_change: Called in the loop when a pod has come, gone or got another phase.
        """
        self._kubelet_dir = kubelet_dir
        self._latest: Latest[SourceAnswer[Object]] = Latest()
        self._on_change = on_change
        self._changed = False
        self._watch = PodsWatch(kubelet_dir / SOCKET, self._latest, clock, self._note)
        self._task: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Watches no more."""
        if self._task is not None:
            self._task.cancel()

    async def ask(self) -> SourceAnswer[Object]:
        """All pods, as v1.Pods. What changes from here on is heard of."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch.run())
        self._changed = False
        _, told = self._latest.peek()
        if told is not None and self._watch.is_current:
            return told
        return await ask_pods(self._kubelet_dir)

    def has_changed(self) -> bool:
        """Whether it is another list than when it was last asked for."""
        return self._changed

    def _note(self) -> None:
        self._changed = True
        self._on_change()
