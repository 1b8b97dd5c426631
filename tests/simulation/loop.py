"""An event loop in simulated time: it never waits, its time advances to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any

from tests.simulation.processes import Killed

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context


class _Selector(selectors.SelectSelector):
    """Instead of waiting, passes the time at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for an event that no timer announces")
        self.now += max(0.0, timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and is in seconds. Call-backs of objects that are `dead` do not run: their process ended."""

    def __init__(self) -> None:
        self._simulated = _Selector()
        self.dead: list[object] = []
        self.rested = asyncio.Event()
        self.killed: Callable[[], None] = lambda: None
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._call, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._call, callback, *args, context=context)

    def _call(self, callback: Callable[..., object], *args: object) -> None:
        owner = getattr(callback, "__self__", None)
        if not any(owner is each for each in self.dead):
            try:
                callback(*args)
            except Killed:
                self.killed()


def simulate(run: Callable[[], object]) -> None:
    """Call `run` in a simulated loop, then let timers run until it has `rested`; raise an exception in any of them."""
    loop = SimulatedLoop()
    failures: list[BaseException] = []

    def failed(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        failures.append(context.get("exception") or RuntimeError(str(context)))  # type: ignore[arg-type]
        loop.stop()

    async def main() -> None:
        run()
        await loop.rested.wait()

    loop.set_exception_handler(failed)
    try:
        task = loop.create_task(main())
        task.add_done_callback(lambda _: loop.stop())
        loop.run_forever()
        if failures:
            raise failures[0]
        task.result()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.close()
