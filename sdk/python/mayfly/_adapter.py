"""Connects a user's handler to wasi:http/incoming-handler.

`load` runs at build time: the module is imported, and the interpreter's state after that is the snapshot that every
instance starts from. `IncomingHandler.handle` runs for each request.
"""

import ast
import importlib
import inspect
import json
import linecache
import os
import re
import sys
import traceback
from typing import Any

import wit_world.exports
from componentize_py_types import Ok
from wit_world.imports import types

from . import _log, _loop, _wasi
from ._http import Headers, Request, Response, encode

# The first frames of a traceback that are not the user's code: this package, the event loop below an async handler.
ADAPTERS = (os.path.dirname(__file__), "/bundled/", "/python/asyncio/")

# The handler, and whether it takes the request.
_handler: Any = None
_takes_request = False
_started = False


def load(module: str, name: str) -> None:
    """Imports the user's module and finds its handler."""
    global _handler, _takes_request
    loaded = importlib.import_module(module)
    _handler = getattr(loaded, name, None)
    if not callable(_handler):
        public = [known for known, value in vars(loaded).items()
                  if inspect.isfunction(value) and value.__module__ == module and not known.startswith("_")]
        known = f"; it has {', '.join(public)}" if public else ""
        raise LookupError(f"{module}.py has no function {name!r}{known}")
    check_parameters(_handler, f"{module}.py", name)
    _takes_request = takes_request(_handler)
    _include_later_imports()


def check_parameters(handler: Any, file: str, name: str) -> None:
    """Raises an error for a handler that cannot be called with one argument, or with none if it has no parameters."""
    signature = inspect.signature(handler)
    if not signature.parameters:
        return
    try:
        signature.bind(None)
    except TypeError as wrong:
        raise TypeError(f"{file}: {name}{signature} is called with one argument, the event or the request: "
                        f"{wrong}") from None


def takes_request(handler: Any) -> bool:
    """Whether the handler's parameter is the request: by its annotation, or else by its name."""
    parameters = list(inspect.signature(handler).parameters.values())
    if not parameters:
        return False
    annotation = parameters[0].annotation
    if annotation is inspect.Parameter.empty:
        return parameters[0].name == "request"
    return annotation is Request or (isinstance(annotation, str) and annotation.split(".")[-1] == "Request")


def _include_later_imports() -> None:
    """Executes now the imports within functions of the user's modules and packages, and those of the modules that this
    loads, because an instance has no files. Keeps the sources, for the lines of tracebacks."""
    seen: dict[int, Any] = {}
    while new := [module for module in list(sys.modules.values()) if id(module) not in seen and _is_users(module)]:
        for module in new:
            seen[id(module)] = module
            lines = linecache.getlines(module.__file__)
            # Without a modification time, linecache does not check the file again.
            linecache.cache[module.__file__] = (len(lines), None, lines, module.__file__)
            for node in ast.walk(ast.parse("".join(lines))):
                _import(node, module.__package__ or "")


def _is_users(module: Any) -> bool:
    """Whether a module is a file of the user or of a package. Each folder of the python path is mounted at /N; the
    standard library is not."""
    file = getattr(module, "__file__", None) or ""
    here = os.path.dirname(os.path.dirname(__file__))
    return file.endswith(".py") and file[1:2].isdigit() and not file.startswith(here)


def _import(node: ast.AST, package: str) -> None:
    """Executes an import statement, without binding its names."""
    try:
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            loaded = importlib.import_module(name, package)
            for alias in node.names:
                # Otherwise it is a module of the package.
                if alias.name != "*" and not hasattr(loaded, alias.name):
                    importlib.import_module(f"{loaded.__name__}.{alias.name}")
    except (Exception, SystemExit):
        # Optional, or of another platform: the import fails when it is executed, as it does elsewhere.
        pass


def _start() -> None:
    """Updates the snapshot's environment and random state, which are those of the build; once per instance."""
    global _started
    _started = True
    os.environ.clear()
    os.environ.update(_wasi.variables())
    if "random" in sys.modules:
        sys.modules["random"].seed()
    _log.install()


def answer(request: Request) -> Response:
    """The response to a request; errors of the handler are responses, too."""
    try:
        if not _takes_request and request.method != "POST":
            return error("MethodNotAllowed", "send the event as JSON by POST", 405, [("allow", "POST")])
        return response_of(invoke(request))
    except BaseException as failed:
        # Also SystemExit, and CancelledError of asyncio: none of them ends the instance.
        return failure(failed)


def invoke(request: Request) -> Any:
    if not inspect.signature(_handler).parameters:
        result = _handler()
    elif _takes_request:
        result = _handler(request)
    else:
        try:
            event = json.loads(request.body) if request.body else {}
        except (ValueError, RecursionError) as wrong:
            return error("BadRequest", f"the event is not JSON: {wrong}", 400)
        result = _handler(event)
    return _loop.run(result) if inspect.isawaitable(result) else result


def response_of(result: Any) -> Response:
    if isinstance(result, Response):
        return result
    if _takes_request and result is None:
        return Response(status=204)
    if _takes_request and isinstance(result, (str, bytes)):
        return Response(result)
    try:
        return Response.of_json(result)
    except (TypeError, ValueError, RecursionError) as wrong:
        return error("InvalidResult", f"the handler's result cannot be written as JSON: {wrong}", 500)


def error(error_type: str, message: str, status: int, headers: Any = None) -> Response:
    return Response.of_json({"errorType": error_type, "errorMessage": message}, status, headers)


def failure(failed: BaseException) -> Response:
    """The response for an exception; its traceback, without frames of the adapter and event loop, goes to the log."""
    frames = failed.__traceback__
    while frames is not None and frames.tb_next and frames.tb_frame.f_code.co_filename.startswith(ADAPTERS):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(failed), failed, frames))
    # The folders of the build are mounted at /0, /1, …
    print(re.sub(r'File "/\d+/', 'File "', text), end="", file=sys.stderr)
    status = getattr(failed, "status", 500)
    if not isinstance(status, int) or not 400 <= status <= 599:
        status = 500
    error_type = getattr(failed, "error_type", None) or type(failed).__name__
    return error(str(error_type), message_of(failed), status)


def message_of(failed: BaseException) -> str:
    try:
        return str(failed)
    except Exception as wrong:
        # The class's own method.
        return f"<{type(failed).__name__} without a message: {type(wrong).__name__} in its __str__>"


class IncomingHandler(wit_world.exports.IncomingHandler):
    """The component's export."""

    def handle(self, request: types.IncomingRequest, response_out: types.ResponseOutparam) -> None:
        if not _started:
            _start()
        response = answer(incoming(request))
        try:
            outgoing = outgoing_of(response)
        except Exception as wrong:
            # An Err of a WIT call has no message.
            text = f"the response's status {response.status!r} or a header is not allowed: {wrong!r}"
            print(text, file=sys.stderr)
            response = error("InvalidResult", text, 500)
            outgoing = outgoing_of(response)
        body = outgoing.body()
        types.ResponseOutparam.set(response_out, Ok(outgoing))
        try:
            _wasi.write(body, response.chunks())
        except Exception:
            # The status is already sent: dropping the unfinished body tells the client that it is incomplete.
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()


def outgoing_of(response: Response) -> types.OutgoingResponse:
    """The response without its body. An invalid status or header raises an exception."""
    outgoing = types.OutgoingResponse(_wasi.fields_of(response.headers.fields))
    outgoing.set_status_code(response.status)
    return outgoing


def incoming(request: types.IncomingRequest) -> Request:
    method = _wasi.method_name(request.method())
    headers = Headers(_wasi.header_list(request.headers()))
    return Request(method, request.path_with_query() or "/", headers, _wasi.read(request.consume()))
