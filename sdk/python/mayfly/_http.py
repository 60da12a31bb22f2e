"""Requests, responses and the outbound client."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

try:
    from . import _wasi
except ImportError:  # Outside of wasm: handlers under test.
    _wasi = None


class Headers(Mapping[str, str]):
    """Header fields by case-insensitive name. `list` gives every value of a field that is repeated."""

    def __init__(self, fields: Mapping[str, str] | Iterable[tuple[str, str]] | None = None) -> None:
        if isinstance(fields, Headers):
            # A repeated field has several values.
            items = fields.fields
        else:
            items = fields.items() if isinstance(fields, Mapping) else fields or ()
        self.fields: list[tuple[str, str]] = [(str(name), str(value)) for name, value in items]

    def list(self, name: str) -> "list[str]":
        return [value for known, value in self.fields if known.lower() == name.lower()]

    def __getitem__(self, name: str) -> str:
        for value in self.list(name):
            return value
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self.list(name))

    def __iter__(self) -> Iterator[str]:
        return iter({name.lower(): None for name, _ in self.fields})

    def __len__(self) -> int:
        return len({name.lower() for name, _ in self.fields})

    def __repr__(self) -> str:
        return f"Headers({self.fields!r})"


class Request:
    """A request that the function answers.

    `body` reads the body to its end; `chunks` yields it as it is received, once. `query` has the first value of each
    parameter, `query_list` every one.
    """

    def __init__(self, method: str = "GET", url: str = "/", headers: Any = None,
                 body: bytes | str | Iterable[bytes] = b"") -> None:
        self.method = method.upper()
        self.url = url
        self.path, query = _path_and_query(url)
        self.query_list: list[tuple[str, str]] = parse_qsl(query, keep_blank_values=True)
        self.query: dict[str, str] = {}
        for name, value in self.query_list:
            self.query.setdefault(name, value)
        self.headers = Headers(headers)
        self._source = _chunks(body)
        self._body: bytes | None = None

    @property
    def body(self) -> bytes:
        if self._body is None:
            self._body = b"".join(self._source)
        return self._body

    def chunks(self) -> Iterator[bytes]:
        return iter((self._body,)) if self._body is not None else iter(self._source)

    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class Response:
    """A response: of this function, or of a server that `fetch` called.

    `body` may be bytes, text, or an iterable of bytes or text, which is streamed; `of_json` takes any other value.
    """

    def __init__(self, body: bytes | str | Iterable[bytes] = b"", status: int = 200, headers: Any = None) -> None:
        self.status = status
        # A copy: the type is added to it, and one object may be used for many responses.
        self.headers = Headers(headers)
        if isinstance(body, str) and "content-type" not in self.headers:
            self.headers.fields.append(("content-type", "text/plain; charset=utf-8"))
        self._source = _chunks(body)
        self._body: bytes | None = None

    @staticmethod
    def of_json(value: Any, status: int = 200, headers: Any = None) -> "Response":
        """A response with this value as its JSON body."""
        response = Response(encode(value), status, headers)
        if "content-type" not in response.headers:
            response.headers.fields.append(("content-type", "application/json"))
        return response

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def body(self) -> bytes:
        if self._body is None:
            self._body = b"".join(self._source)
        return self._body

    def chunks(self) -> Iterator[bytes]:
        return iter((self._body,)) if self._body is not None else iter(self._source)

    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class HttpError(Exception):
    """A failed outbound request. `error_type` is the reason: Denied (not in the function's `egress`),
    Unreachable, Timeout, Tls, Protocol."""

    status = 502

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


def fetch(url: str, method: str = "GET", headers: Any = None, body: bytes | str | Iterable[bytes] = b"",
          timeout: float | None = None) -> Response:
    """Sends a request and returns the answer, whatever its status. `timeout` is in seconds, to the answer's first
    byte and between any two."""
    fields = Headers(headers)
    if _wasi is not None:
        return _wasi.fetch(url, method.upper(), fields, _chunks(body), timeout)
    return _fetch_natively(url, method.upper(), fields, b"".join(_chunks(body)), timeout)


def encode(value: Any) -> bytes:
    """JSON in UTF-8. NaN and infinities are rejected, because JSON has none."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        # A half of a surrogate pair, which JSON's escapes can represent and UTF-8 cannot.
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _path_and_query(url: str) -> tuple[str, str]:
    """The path and the query of a URL, or of a request's target, which begins with its path: there, two slashes are not
    followed by a host."""
    if not url.startswith("/"):
        parts = urlsplit(url)
        return parts.path or "/", parts.query
    path, _, query = url.partition("#")[0].partition("?")
    return path, query


def _chunks(body: Any) -> Iterable[bytes]:
    if isinstance(body, str):
        return (body.encode(),)
    if isinstance(body, (bytes, bytearray, memoryview)):
        return (bytes(body),)
    if isinstance(body, Mapping) or not isinstance(body, Iterable):
        raise TypeError(f"a body is bytes, text or an iterable of them, not {type(body).__name__}: "
                        "json.dumps makes text of a value, Response.of_json a response")
    chunks = (chunk.encode() if isinstance(chunk, str) else chunk for chunk in body)
    return tuple(chunks) if isinstance(body, (list, tuple)) else chunks


def _fetch_natively(url: str, method: str, headers: Headers, body: bytes, timeout: float | None) -> Response:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, data=body or None, method=method, headers=dict(headers.fields))
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return Response(answer.read(), answer.status, list(answer.headers.items()))
    except urllib.error.HTTPError as answer:
        return Response(answer.read(), answer.code, list(answer.headers.items()))
    except TimeoutError as error:
        raise HttpError("Timeout", str(error)) from error
    except OSError as error:
        raise HttpError("Unreachable", str(error)) from error
