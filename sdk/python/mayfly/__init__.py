"""Functions for Mayfly in Python.

A handler is a function called `handle`. One that takes an event gets the decoded JSON of the request and returns a
value that JSON can represent; one whose parameter is annotated with `Request` (or named `request`) gets the request
and returns a `Response`, a string, bytes or a value for JSON. Both may be `async def`. This module is optional:
exceptions become error answers by themselves (the class's name is the error's type), settings are in `os.environ`,
and `print` and `logging` write to the function's log.

The module also works outside of wasm, so that handlers can be tested like any other function.
"""

from ._http import Headers, HttpError, Request, Response, fetch
from ._log import log

__all__ = ["Error", "Headers", "HttpError", "Request", "Response", "fetch", "log"]


class Error(Exception):
    """An error answer with a type and an HTTP status of the caller's choice (400 to 599)."""

    def __init__(self, error_type: str, message: str = "", status: int = 500) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.status = status
