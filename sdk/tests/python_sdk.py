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


class Requests(unittest.TestCase):
    def test_the_target_is_a_path_also_if_it_begins_with_two_slashes(self):
        for url, path, query in [
            ("/a/b?c=d&e", "/a/b", {"c": "d", "e": ""}),
            ("//admin/secret?x=1", "//admin/secret", {"x": "1"}),
            # urlsplit rejects it as an address.
            ("//[", "//[", {}),
            ("/a?b=c?d#e", "/a", {"b": "c?d"}),
            ("http://example.com/x?y=z", "/x", {"y": "z"}),
            ("http://example.com", "/", {}),
        ]:
            request = Request("GET", url)
            self.assertEqual((request.path, request.query), (path, query), url)

    def test_a_deeply_nested_event_is_a_bad_request(self):
        response, _ = answer(lambda event: event, b"[" * 200_000)
        self.assertEqual((response.status, response.json()["errorType"]), (400, "BadRequest"))


class Responses(unittest.TestCase):
    def test_one_object_of_headers_serves_many_responses(self):
        headers = Headers([("x-a", "1"), ("x-a", "2")])
        text = Response("text", headers=headers)
        value = Response.of_json({}, headers=headers)
        self.assertEqual(headers.fields, [("x-a", "1"), ("x-a", "2")])
        self.assertEqual((text.headers["content-type"], value.headers["content-type"]),
                         ("text/plain; charset=utf-8", "application/json"))
        self.assertEqual(value.headers.list("x-a"), ["1", "2"])

    def test_a_body_of_another_type_is_an_error_of_the_handler(self):
        for body in [{"a": 1}, 7, None]:
            def handle(request, body=body):
                return Response(body)
            response, errors = answer(handle)
            self.assertEqual((response.status, response.json()["errorType"]), (500, "TypeError"))
            self.assertIn("of_json", response.json()["errorMessage"])
            self.assertIn("TypeError", errors)

    def test_chunks_may_be_text(self):
        self.assertEqual(Response(f"{n}é" for n in range(2)).body, "0é1é".encode())
        listed = Response([b"a", "b"])
        self.assertEqual((list(listed.chunks()), list(listed.chunks())), ([b"a", b"b"], [b"a", b"b"]))

    def test_half_a_surrogate_pair_is_returned_as_it_was_received(self):
        event = json.dumps({"text": HALF + "é"}).encode()
        response, _ = answer(lambda event: event, event)
        self.assertEqual((response.status, response.json()), (200, {"text": HALF + "é"}))

    def test_values_that_json_cannot_represent_are_named(self):
        def generate(event):
            yield 1
        cyclic = []
        cyclic.append(cyclic)
        for handler in [generate, lambda event: {1}, lambda event: float("nan"), lambda event: cyclic,
                        lambda event: {(1, 2): 3}, lambda event: b"bytes"]:
            response, _ = answer(handler)
            self.assertEqual((response.status, response.json()["errorType"]), (500, "InvalidResult"))


class Failures(unittest.TestCase):
    def test_a_message_that_is_not_unicode_is_sent(self):
        def handle(event):
            raise ValueError(HALF)
        response, _ = answer(handle)
        self.assertEqual((response.status, response.json()),
                         (500, {"errorType": "ValueError", "errorMessage": HALF}))

    def test_a_message_that_cannot_be_made_is_replaced(self):
        class Broken(Exception):
            def __str__(self):
                raise KeyError("x")

        def handle(event):
            raise Broken
        response, _ = answer(handle)
        self.assertEqual(response.status, 500)
        self.assertIn("KeyError in its __str__", response.json()["errorMessage"])

    def test_causes_are_in_the_log(self):
        def handle(event):
            try:
                {}["name"]
            except KeyError as missing:
                raise RuntimeError("no name") from missing
        _, errors = answer(handle)
        self.assertIn("KeyError: 'name'", errors)
        self.assertIn("RuntimeError: no name", errors)

    def test_a_request_that_cannot_be_sent_is_described(self):
        for url, headers in [("http://example.com/a b", None), ("http://example.com/", {"Host": "other"})]:
            with self.assertRaisesRegex(ValueError, "is not allowed"):
                fetch(url, headers=headers)
        with self.assertRaisesRegex(LookupError, "the request is valid"):
            fetch("http://example.com/")


class Handlers(unittest.TestCase):
    def load(self, source, name="handle"):
        with tempfile.TemporaryDirectory() as folder:
            module = f"module_{abs(hash(source))}"
            with open(os.path.join(folder, f"{module}.py"), "w", encoding="utf-8") as file:
                file.write(source)
            sys.path.insert(0, folder)
            try:
                _adapter.load(module, name)
            finally:
                sys.path.remove(folder)
        return _adapter._takes_request

    def test_handlers_of_every_form_are_found(self):
        for source, takes_request in [
            ("def handle(): return 1", False),
            ("async def handle(event): return event", False),
            ("def handle(event, context=None): return event", False),
            ("def handle(*arguments): return arguments", False),
            ("def handle(request): return ''", True),
            ("class Handler:\n    def __call__(self, event): return event\nhandle = Handler()", False),
            ("class Handler:\n    async def run(self, request): return ''\nhandle = Handler().run", True),
            ("import functools\ndef any(kind, event): return event\nhandle = functools.partial(any, 1)", False),
            ("import functools\ndef same(f):\n    @functools.wraps(f)\n    def inner(*a, **k): return f(*a, **k)\n"
             "    return inner\n@same\ndef handle(request): return ''", True),
            ("from mayfly import Request\ndef handle(r: 'Request'): return ''", True),
        ]:
            self.assertEqual(self.load(source), takes_request, source)

    def test_a_handler_that_cannot_be_called_is_an_error_of_the_build(self):
        for source, expected in [
            ("def handle(event, context): return event", r"handle\(event, context\) is called with one argument"),
            ("def handle(*, event): return event", r"handle\(\*, event\) is called with one argument"),
        ]:
            with self.assertRaisesRegex(TypeError, expected):
                self.load(source)


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


class Logs(unittest.TestCase):
    def written(self, write):
        out, errors = io.StringIO(), io.StringIO()
        log = logging.getLogger("test")
        log.propagate, log.handlers = False, [_log.JsonHandler()]
        log.setLevel(logging.DEBUG)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            write(log)
        return out.getvalue(), errors.getvalue()

    def test_a_record_that_cannot_be_written_raises_nothing(self):
        cyclic = {}
        cyclic["self"] = cyclic
        for write in [lambda log: log.info("%d", "text"), lambda log: log.info("x", extra={"a": cyclic}),
                      lambda log: log.info("x", extra={"a": {(1, 2): 3}})]:
            out, errors = self.written(write)
            self.assertEqual(out, "")
            self.assertIn("Logging error", errors)

    def test_half_a_surrogate_pair_is_written(self):
        class Strict(io.StringIO):
            def write(self, text):
                text.encode()
                return super().write(text)

        out = Strict()
        with contextlib.redirect_stdout(out):
            _log.JsonHandler().emit(logging.makeLogRecord({"msg": HALF, "levelno": logging.INFO, "levelname": "INFO"}))
        self.assertEqual(json.loads(out.getvalue())["message"], HALF)

    def test_the_level_of_the_module_is_kept_unless_a_setting_replaces_it(self):
        root = logging.getLogger()
        before = root.level, root.handlers
        try:
            for own, setting, expected in [(logging.WARNING, None, logging.INFO), (logging.DEBUG, None, logging.DEBUG),
                                           (logging.DEBUG, "error", logging.ERROR)]:
                root.setLevel(own)
                os.environ.pop("MAYFLY_LOG", None)
                if setting:
                    os.environ["MAYFLY_LOG"] = setting
                _log.install()
                self.assertEqual(root.level, expected)
        finally:
            os.environ.pop("MAYFLY_LOG", None)
            root.level, root.handlers = before


if __name__ == "__main__":
    unittest.main()
