"""Messages that carry the job's key: what strangers say to a port of the job is told apart, and changes nothing.

Both sides of a connection begin with a random number. Every line after it is an HMAC-SHA256 over both numbers, the line's own
number and its text, then the text, JSON. So no line can be made without the key, and none is good a second time or on another
connection. The key itself is never sent.

    soapjax 2f9c...41
    8a1b...e7 {"rank": 1}
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from typing import Any

from soapjax.errors import Problem, SoapjaxError

KEY_VARIABLE = "SOAPJAX_JOB_KEY"
MAX_LINE_BYTES = 2**22
MAX_STRANGER_BYTES = 2**10  # before the first line that carries the key
_GREETING = b"soapjax "
_NONCE_DIGITS = 32


class StrangerError(ValueError):
    """The other side does not have the job's key."""


def job_key(given: str | None, address: str) -> tuple[bytes, bool]:
    """The key, and whether it is a secret: `given`, else of the environment, else made of the job's address.

    The last keeps other programs and other jobs apart, not somebody who reads this.
    """
    text = given if given is not None else os.environ.get(KEY_VARIABLE)
    if text is not None and len(text) < 16:
        place = "job_key" if given is not None else KEY_VARIABLE
        remedy = 'draw one for every job: python -c "import secrets; print(secrets.token_hex(16))"'
        raise SoapjaxError(Problem(place, f"{len(text)} characters", "16 or more, the same on all processes", remedy))
    return hashlib.sha256(f"soapjax {text if text is not None else address}".encode()).digest(), text is not None


class Session:
    """One side of one connection, without the socket: bytes in, messages out.

    Raises: StrangerError on `receive`, where a line does not carry the key.
    """

    def __init__(self, key: bytes, *, is_caller: bool):
        self._key, self._is_caller = key, is_caller
        self._nonce, self._theirs = secrets.token_hex(_NONCE_DIGITS // 2).encode(), b""
        self._rest, self._num_sent, self.num_received = b"", 0, 0
        self.hello = _GREETING + self._nonce + b"\n"  # to be sent first

    @property
    def can_seal(self) -> bool:
        return bool(self._theirs)

    def seal(self, message: dict[str, Any]) -> bytes:
        text = json.dumps(message, separators=(",", ":")).encode()
        line = self._mac(self._is_caller, self._num_sent, text) + b" " + text + b"\n"
        self._num_sent += 1
        return line

    def receive(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        limit = MAX_LINE_BYTES if self.num_received else MAX_STRANGER_BYTES
        if len(self._rest) > limit:
            raise StrangerError("a line that does not end")
        return [m for line in lines if (m := self._opened(line)) is not None]

    def _opened(self, line: bytes) -> dict[str, Any] | None:
        if not self._theirs:
            nonce = line.removeprefix(_GREETING)
            is_hello = line.startswith(_GREETING) and len(nonce) == _NONCE_DIGITS and nonce.isalnum()
            if not is_hello or nonce == self._nonce:
                raise StrangerError("no greeting")
            self._theirs = nonce
            return None
        mac, _, text = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(not self._is_caller, self.num_received, text)):
            raise StrangerError("a line without the job's key")
        self.num_received += 1
        message = json.loads(text)  # of our own making
        if not isinstance(message, dict):
            raise StrangerError("no message")
        return message

    def _mac(self, is_caller: bool, number: int, text: bytes) -> bytes:
        caller, called = (self._nonce, self._theirs) if self._is_caller else (self._theirs, self._nonce)
        head = b"%s %s %s %d " % (b">" if is_caller else b"<", caller, called, number)
        return hmac.new(self._key, head + text, hashlib.sha256).hexdigest().encode()
