"""Tests of the Python SDK outside of wasm, with stand-ins for the modules that componentize-py generates.

Run by the tests of platform/cli, or by hand: python3 sdk/tests/python_sdk.py
"""

import asyncio
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import types
import unittest

SDK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python")
sys.path.insert(0, SDK)


class Err(Exception):
    """The error of a WIT call: a value without a message."""

    def __init__(self, value=None):
        super().__init__(value)
        self.value = value


def stand_in(name, **values):
    module = types.ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module
    return module


class Fields:
    @staticmethod
    def from_list(fields):
        if any(name.lower() == "host" for name, _ in fields):
            raise Err()
        return Fields()


class OutgoingRequest:
    def __init__(self, fields):
        pass

    def set_method(self, method):
        pass

    set_scheme = set_authority = set_method

    def set_path_with_query(self, path):
        if " " in path:
            raise Err()
        raise LookupError("the request is valid")


class Clock:
    """A clock that is set forward by waiting."""

    now_ns = 0
    # Pollables that were not dropped.
    open = 0


class Pollable:
    def __init__(self, duration_ns):
        self.due = Clock.now_ns + duration_ns
        Clock.open += 1

    def ready(self):
        return self.due <= Clock.now_ns

    def __exit__(self, *_):
        Clock.open -= 1


def wait(pollables):
    Clock.now_ns = max(Clock.now_ns, min(pollable.due for pollable in pollables))
    return [index for index, pollable in enumerate(pollables) if pollable.ready()]


class PollLoop(asyncio.AbstractEventLoop):
    """The parts of the toolchain's loop that the SDK keeps."""

    def __init__(self):
        self.wakers, self.handles, self.running = [], [], False

    def get_debug(self):
        return False

    def is_running(self):
        return self.running

    def is_closed(self):
        return not self.running

    def call_soon(self, callback, *args, context=None):
        handle = asyncio.Handle(callback, args, self, context)
        self.handles.append(handle)
        return handle

    def create_future(self):
        return asyncio.Future(loop=self)


METHODS = ("Get", "Head", "Post", "Put", "Delete", "Connect", "Options", "Trace", "Patch", "Other")
wit_types = stand_in(
    "wit_world.imports.types", Fields=Fields, OutgoingRequest=OutgoingRequest, IncomingRequest=object,
    ResponseOutparam=object, OutgoingResponse=object, IncomingBody=object, OutgoingBody=object,
    Scheme_Http=object, Scheme_Https=object, **{f"Method_{name}": type(name, (), {}) for name in METHODS})
OTHERS = ("environment", "monotonic_clock", "outgoing_handler", "poll")
others = {name: stand_in(f"wit_world.imports.{name}") for name in OTHERS}
others["environment"].get_environment = lambda: []
others["monotonic_clock"].now = lambda: Clock.now_ns
others["monotonic_clock"].subscribe_duration = Pollable
others["poll"].poll = wait
stand_in("wit_world.imports.streams", StreamError_Closed=type("StreamError_Closed", (), {}))
stand_in("wit_world.imports", types=wit_types, **others)
stand_in("wit_world.exports", IncomingHandler=object)
stand_in("wit_world", exports=sys.modules["wit_world.exports"], imports=sys.modules["wit_world.imports"])
stand_in("componentize_py_types", Err=Err, Ok=object)
stand_in("poll_loop", PollLoop=PollLoop)

from mayfly import Headers, Request, Response, _adapter, _log, fetch  # noqa: E402

HALF = "\ud800"


def answer(handler, body=b"", method="POST", url="/"):
    """The response of a handler, and what was written to stderr."""
    _adapter._handler = handler
    _adapter._takes_request = _adapter.takes_request(handler)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        response = _adapter.answer(Request(method, url, None, body))
    return response, errors.getvalue()


class AsyncHandlers(unittest.TestCase):
    def seconds(self, handler):
        """The result of a handler, and the seconds that it took."""
        began = Clock.now_ns
        response, errors = answer(handler, b"7")
        self.assertEqual(Clock.open, 0, "pollables are left open")
        self.assertIsNone(asyncio._get_running_loop())
        return response.json(), (Clock.now_ns - began) / 1e9, errors

    def test_an_instance_with_an_async_call_is_awaited(self):
        class Handler:
            async def __call__(self, event):
                return {"got": event}
        self.assertEqual(self.seconds(Handler())[:2], ({"got": 7}, 0))

    def test_sleeps_take_their_time(self):
        async def handle(event):
            await asyncio.gather(asyncio.sleep(1), asyncio.sleep(2))
            await asyncio.sleep(1)
            return event
        self.assertEqual(self.seconds(handle)[:2], (7, 3))

    def test_a_timeout_that_is_not_reached_takes_no_time(self):
        async def handle(event):
            await asyncio.wait_for(asyncio.sleep(1), 30)
            return await asyncio.wait_for(asyncio.create_task(asyncio.sleep(0, event)), 30)
        self.assertEqual(self.seconds(handle)[:2], (7, 1))

    def test_a_timeout_that_is_reached_ends_the_wait(self):
        async def handle(event):
            try:
                await asyncio.wait_for(asyncio.sleep(30), 2)
            except TimeoutError:
                return "late"
        self.assertEqual(self.seconds(handle)[:2], ("late", 2))

    def test_tasks_that_are_left_behind_are_cancelled(self):
        ended = []

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        async def handle(event):
            kept = asyncio.create_task(work(), name="work")
            await asyncio.sleep(0)
            return kept.get_name()
        self.assertEqual(self.seconds(handle)[:2], ("work", 0))
        self.assertEqual(ended, [True])

    def test_a_task_that_ignores_its_cancellation_does_not_hide_the_result(self):
        async def stubborn():
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass

        async def handle(event):
            kept.append(asyncio.create_task(stubborn()))
            await asyncio.sleep(0)
            return event
        kept = []
        self.assertEqual(self.seconds(handle)[:2], (7, 0))

    def test_an_exit_of_a_task_is_an_error(self):
        async def handle(event):
            raise SystemExit(3)
        self.assertEqual(self.seconds(handle)[0], {"errorType": "SystemExit", "errorMessage": "3"})

    def test_a_task_that_only_yields_does_not_stop_the_clock(self):
        async def handle(event):
            turns = 0
            loop = asyncio.get_running_loop()
            until = loop.call_later(1, lambda: None)
            while loop.time() < until.when():
                turns += 1
                # Time passes while code runs.
                Clock.now_ns += 10**8
                await asyncio.sleep(0)
            return turns
        self.assertEqual(self.seconds(handle)[0], 10)

    def test_a_timer_may_set_another(self):
        async def handle(event):
            loop, done = asyncio.get_running_loop(), asyncio.Event()
            loop.call_later(1, loop.call_later, 1, done.set)
            await done.wait()
            return event
        self.assertEqual(self.seconds(handle)[:2], (7, 2))

    def test_a_wait_without_an_end_is_an_error(self):
        async def handle(event):
            await asyncio.Event().wait()
        result, _, _ = self.seconds(handle)
        self.assertEqual(result["errorType"], "RuntimeError")
        self.assertIn("never happens", result["errorMessage"])

    def test_an_error_of_a_task_is_in_the_log(self):
        async def broken():
            raise KeyError("lost")

        async def handle(event):
            asyncio.create_task(broken())
            await asyncio.sleep(0)
            return event
        log = logging.getLogger("asyncio")
        with self.assertLogs(log, "ERROR") as logged:
            self.assertEqual(self.seconds(handle)[0], 7)
            import gc
            gc.collect()
        self.assertIn("KeyError: 'lost'", "".join(logged.output))

    def test_functions_for_threads_run_at_once(self):
        async def handle(event):
            return await asyncio.to_thread(lambda: event + 1)
        self.assertEqual(self.seconds(handle)[:2], (8, 0))

    def test_a_handler_may_run_coroutines_itself(self):
        async def main(event):
            await asyncio.sleep(1)
            return event

        def handle(event):
            return asyncio.run(main(event))
        self.assertEqual(self.seconds(handle)[:2], (7, 1))


if __name__ == "__main__":
    unittest.main()
