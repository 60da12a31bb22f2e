"""The event loop of async handlers: the toolchain's, which waits for wasi:io/poll, with timers. Only importable inside a
component."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from poll_loop import PollLoop
from wit_world.imports import monotonic_clock, poll


class _Timer:
    """A waker of the event loop: runs the callback unless it was cancelled."""

    def __init__(self, handle: asyncio.TimerHandle) -> None:
        self.handle = handle

    def done(self) -> bool:
        return self.handle.cancelled()

    def set_result(self, _: None) -> None:
        self.handle._run()


class EventLoop(PollLoop):
    """The toolchain's loop waits for the next timer even if a task can run or the handler has returned, and loses wakers
    that are added while it wakes others. It lacks what the standard library needs to run a coroutine to its end."""

    def run_until_complete(self, future: Any) -> Any:
        future = asyncio.ensure_future(future, loop=self)
        asyncio._set_running_loop(self)
        self.running = True
        try:
            while self.running and not future.done():
                self._run_handles()
                if self.running and not future.done():
                    self._wake(can_wait=not self.handles)
        except BaseException:
            if future.done() and not future.cancelled():
                # Read, so that the task does not report it a second time.
                future.exception()
            raise
        finally:
            self.running = False
            asyncio._set_running_loop(None)
        return future.result()

    def _run_handles(self) -> None:
        handles, self.handles = self.handles, []
        for handle in handles:
            if not handle.cancelled():
                handle._run()

    def _wake(self, can_wait: bool) -> None:
        """Wakes everything whose time or data has come; waits for the first, if nothing can run before."""
        for pollable, waker in self.wakers:
            if waker.done():
                pollable.__exit__(None, None, None)
        wakers = [(pollable, waker) for pollable, waker in self.wakers if not waker.done()]
        self.wakers = wakers
        pollables = [pollable for pollable, _ in wakers]
        if not can_wait:
            ready = {index for index, pollable in enumerate(pollables) if pollable.ready()}
        elif pollables:
            ready = set(poll.poll(pollables))
        else:
            raise RuntimeError("the handler waits for something that never happens")
        # Replaced before the callbacks, which may add others.
        self.wakers = [waker for index, waker in enumerate(wakers) if index not in ready]
        for index in sorted(ready):
            pollable, waker = wakers[index]
            pollable.__exit__(None, None, None)
            if not waker.done():
                waker.set_result(None)

    def close(self) -> None:
        self.running = False
        for pollable, _ in self.wakers:
            pollable.__exit__(None, None, None)
        self.wakers, self.handles = [], []

    def time(self) -> float:
        return monotonic_clock.now() / 1e9

    def call_later(self, delay: float, callback: Callable, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.time() + delay, callback, args, self, context)
        self.wakers.append((monotonic_clock.subscribe_duration(max(0, int(delay * 1e9))), _Timer(handle)))
        return handle

    def call_at(self, when: float, callback: Callable, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        # Removed before the next wait.
        pass

    def create_task(self, coroutine: Any, **options: Any) -> asyncio.Task:
        return asyncio.Task(coroutine, loop=self, **options)

    def run_in_executor(self, executor: Any, function: Callable, *args: Any) -> asyncio.Future:
        """Runs the function at once, because there are no threads: it blocks the other tasks."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as failed:
            future.set_exception(failed)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        failed = context.get("exception")
        details = (type(failed), failed, failed.__traceback__) if failed is not None else None
        logging.getLogger("asyncio").error(context.get("message", "an unhandled error"), exc_info=details)

    def set_debug(self, enabled: bool) -> None:
        pass

    async def shutdown_asyncgens(self) -> None:
        pass

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        pass


# asyncio.run in a handler that is not async itself: the standard loop needs sockets.
asyncio.new_event_loop = asyncio.events.new_event_loop = EventLoop


def run(awaitable: Any) -> Any:
    """The result of an awaitable. Tasks that it leaves behind are cancelled, as in asyncio.run."""
    loop = EventLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(awaitable)
    finally:
        try:
            asyncio.runners._cancel_all_tasks(loop)
        except RuntimeError:
            # A task that ignores its cancellation and waits on: it ends with the loop.
            pass
        finally:
            loop.close()
