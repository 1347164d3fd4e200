"""What goes to standard error: a line a message, for people, machines or the journal."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from typing import Any

# sd-daemon(3): the journal takes a priority from the beginning of a line.
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
_SESSION = re.compile(r"\bsession ([A-Za-z0-9_-]{22})\b")
LAYOUT = "%(levelname).1s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One object a line; a session that is named in the message has a member of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        message = record.getMessage()
        value: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if found := _SESSION.search(message):
            value["session"] = found[1]
        if record.exc_info:
            value["trace"] = self.formatException(record.exc_info)
        return json.dumps(value, ensure_ascii=False)


class JournalFormatter(logging.Formatter):
    """Text with its priority before each line; the journal adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        priority = _PRIORITIES.get(record.levelname, 6)
        lines = super().format(record).split("\n")
        return "\n".join(f"<{priority}>{line}" for line in lines)


def formatter(form: str) -> logging.Formatter:
    """The one of a `[log] format`.

    "auto" is for the journal under systemd, else text: who pipes it through tee reads it too.
    """
    if form == "auto":
        form = "journal" if "JOURNAL_STREAM" in os.environ else "text"
    if form == "json":
        return JsonFormatter()
    if form == "journal":
        return JournalFormatter(LAYOUT)
    return logging.Formatter("%(asctime)s.%(msecs)03d " + LAYOUT, datefmt="%H:%M:%S")


def set_up_logging(level: str, form: str = "auto") -> None:
    """Write messages of that level and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _time(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
