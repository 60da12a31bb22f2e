"""wasi:http and the environment for the rest of this package. Only importable inside a component."""

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from componentize_py_types import Err, Ok
from wit_world.imports import environment, outgoing_handler, types
from wit_world.imports.streams import StreamError_Closed

# The maximum size of one read or write: blocking-write-and-flush accepts 4096 bytes.
READ_BYTES_MAX = 64 * 1024
WRITE_BYTES_MAX = 4096

METHODS = {"GET": types.Method_Get, "HEAD": types.Method_Head, "POST": types.Method_Post, "PUT": types.Method_Put,
           "DELETE": types.Method_Delete, "CONNECT": types.Method_Connect, "OPTIONS": types.Method_Options,
           "TRACE": types.Method_Trace, "PATCH": types.Method_Patch}


def method_name(method: Any) -> str:
    for name, kind in METHODS.items():
        if isinstance(method, kind):
            return name
    return method.value


def header_list(fields: types.Fields) -> list[tuple[str, str]]:
    # Values are bytes; ISO-8859-1 maps each to one character and back.
    return [(name, value.decode("latin-1")) for name, value in fields.entries()]


def fields_of(headers: Iterable[tuple[str, str]]) -> types.Fields:
    return types.Fields.from_list([(name, value.encode("latin-1")) for name, value in headers])


def read(consumed: types.IncomingBody) -> Iterator[bytes]:
    """The chunks of a body, as they are received."""
    with consumed.stream() as stream:
        while True:
            try:
                chunk = stream.blocking_read(READ_BYTES_MAX)
            except Err as error:
                if isinstance(error.value, StreamError_Closed):
                    break
                raise ConnectionError("the body was aborted: " + error.value.value.to_debug_string()) from None
            if chunk:
                yield chunk
    types.IncomingBody.finish(consumed)


def write(body: types.OutgoingBody, chunks: Iterable[bytes]) -> None:
    """Sends each chunk at once, and ends the body. Dropping an unfinished body aborts the message."""
    with body.write() as stream:
        for chunk in chunks:
            view = memoryview(chunk)
            for at in range(0, len(view), WRITE_BYTES_MAX):
                try:
                    stream.blocking_write_and_flush(bytes(view[at : at + WRITE_BYTES_MAX]))
                except Err as error:
                    raise ConnectionError("the client went away") from error
    types.OutgoingBody.finish(body, None)


def fetch(url: str, method: str, headers: Any, body: Iterable[bytes], timeout: float | None) -> Any:
    from ._http import Headers, HttpError, Response

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{url!r} is not an http or https URL")
    try:
        request = types.OutgoingRequest(fields_of(headers.fields))
        request.set_method(METHODS[method]() if method in METHODS else types.Method_Other(method))
        request.set_scheme(types.Scheme_Https() if parts.scheme == "https" else types.Scheme_Http())
        request.set_authority(parts.netloc.rpartition("@")[2])
        request.set_path_with_query((parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
    except Err:
        # It has no message.
        raise ValueError(f"the method {method}, the URL {url!r} or one of the headers "
                         f"{[name for name, _ in headers.fields]} is not allowed") from None
    options = None
    if timeout is not None:
        options = types.RequestOptions()
        nanoseconds = int(timeout * 1e9)
        options.set_connect_timeout(nanoseconds)
        options.set_first_byte_timeout(nanoseconds)
        options.set_between_bytes_timeout(nanoseconds)
    outgoing = request.body()
    try:
        future = outgoing_handler.handle(request, options)
        write(outgoing, body)
        with future.subscribe() as answered:
            answered.block()
        result = future.get()
        if isinstance(result.value, Err):
            raise result.value
        answer = result.value.value
    except Err as error:
        raise HttpError(*explained(error.value, url)) from None
    return Response(read(answer.consume()), answer.status(), Headers(header_list(answer.headers())))


def explained(code: Any, url: str) -> tuple[str, str]:
    """An error's type and message."""
    name = type(code).__name__.removeprefix("ErrorCode_")
    detail = getattr(code, "value", None)
    text = f"{url}: {name}" + (f": {detail}" if detail else "")
    if name == "HttpRequestDenied":
        return "Denied", f"{url} is not in the function's egress; add it to spec.egress, or deploy with --egress"
    if name.endswith("Timeout"):
        return "Timeout", text
    if name.startswith("Tls"):
        return "Tls", text
    if name.startswith(("Dns", "Destination", "Connection")):
        return "Unreachable", text
    return "Protocol", text


def variables() -> list[tuple[str, str]]:
    return environment.get_environment()
