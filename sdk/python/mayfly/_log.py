"""The standard `logging` module, written as one JSON object per line.

`debug` and `info` go to stdout, `warning` and above to stderr. The setting MAYFLY_LOG (debug, info, warn, error or off)
sets the lowest level that is written; without it, the level that the module gave the root logger, or else info.
"""

import json
import logging
import os
import sys
import traceback

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR,
          "off": logging.CRITICAL + 1}
NAMES = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warn", logging.ERROR: "error",
         logging.CRITICAL: "error"}
# Attributes of every record; all others are from `extra=` and become fields of the line.
STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

log = logging.getLogger("mayfly")


class JsonHandler(logging.Handler):
    """Writes each record as a line of JSON. One that cannot be written is reported on stderr, and raises nothing in the
    code that logs."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(record)
        except Exception:
            self.handleError(record)

    def write(self, record: logging.LogRecord) -> None:
        line = {"level": NAMES.get(record.levelno, record.levelname.lower()), "message": record.getMessage()}
        line.update((name, value) for name, value in vars(record).items() if name not in STANDARD)
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        try:
            print(json.dumps(line, ensure_ascii=False, default=str), file=stream)
        except UnicodeEncodeError:
            # A half of a surrogate pair.
            print(json.dumps(line, default=str), file=stream)


def install() -> None:
    """Makes every logger write lines of JSON. Called once per instance, when the environment is known."""
    root = logging.getLogger()
    if not any(isinstance(handler, JsonHandler) for handler in root.handlers):
        root.handlers[:] = [JsonHandler()]
    level = LEVELS.get(os.environ.get("MAYFLY_LOG", ""))
    if level is not None:
        root.setLevel(level)
    elif root.level == logging.WARNING:
        # The default of Python.
        root.setLevel(logging.INFO)
