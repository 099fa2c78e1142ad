"""Who may ask: the token, the name of the host, and the headers that keep other pages away. Pure."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

# The page, its script and its style come from here and talk to nobody else.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules of one server."""

    token: str | None
    loopback: bool  # bound to an address that only this machine reaches
    port: int

    def knows_host(self, header: str | None) -> bool:
        """Whether somebody asked for us by a name of this machine.

        A page from elsewhere can make its own name point to 127.0.0.1 and then read what we say. It cannot choose what
        the browser writes into the header Host. Another port is fine: that is how a tunnel looks.
        """
        if not self.loopback:
            return True
        name = host_name(header or "")
        return name in _LOCAL_NAMES or _is_loopback(name)

    def lets_in(self, headers: Mapping[str, str]) -> bool:
        """Whether a request carries the token, as a header or as our cookie."""
        if self.token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_token(given.strip()):
            return True
        return _same(_cookies(headers.get("cookie", "")).get(self.cookie_name, ""), self._cookie_value)

    def is_token(self, given: str) -> bool:
        """Compare in a time that says nothing about how much of it was right."""
        return self.token is not None and _same(given, self.token)

    @property
    def cookie_name(self) -> str:
        """A name of its own for each port: browsers share cookies between the ports of a host."""
        return f"badcjobs_{self.port}"

    @property
    def cookie(self) -> str:
        """The header that lets a browser in until it is closed; no script can read it, no other site can send it."""
        return f"{self.cookie_name}={self._cookie_value}; HttpOnly; SameSite=Strict; Path=/"

    @property
    def _cookie_value(self) -> str:
        """Something that only who has the token can make, but not the token itself."""
        return hmac.new((self.token or "").encode(), b"badcjobs cookie", hashlib.sha256).hexdigest()


def host_name(header: str) -> str:
    """Return the name in a Host header, without its port."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].strip() if text.count(":") == 1 else text


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _cookies(header: str) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())
