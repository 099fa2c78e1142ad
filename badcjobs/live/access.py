"""Who may read the live page: this machine, or a client with the token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.types import Scope


class Guard(NamedTuple):
    """The access rules of one server."""

    token: str | None
    loopback: bool  # bound to an address that only this machine can reach
    port: int

    def check(self, scope: Scope) -> None:
        """Raise HTTPException for a request that is not allowed."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self.loopback and not names_this_machine(host):
            raise HTTPException(403, "open this server as localhost or 127.0.0.1")

        # Browsers let a page of any site open a WebSocket and read it.
        origin = headers.get("origin", f"http://{host}")
        origin_host = origin.partition("://")[2]
        if scope["type"] == "websocket" and origin_host.lower() != host.lower():
            raise HTTPException(403, "a page of another server may not open this WebSocket")

        has_token_in_url = scope["path"] == "/" and b"token=" in scope["query_string"]  # the page checks it
        if has_token_in_url or self.is_authorized(headers):
            return
        message = "token missing or wrong: send Authorization: Bearer TOKEN, or open /?token=TOKEN in a browser"
        raise HTTPException(401, message, {"www-authenticate": 'Bearer realm="badcjobs"'})

    def is_authorized(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request carries the token, in a header or as our cookie."""
        if self.token is None:
            return True
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and is_same_secret(secret.strip(), self.token):
            return True
        cookies = cookie_parser(headers.get("cookie", ""))
        name, _, value = self.cookie.partition(";")[0].partition("=")
        return is_same_secret(cookies.get(name, ""), value)

    @property
    def cookie(self) -> str:
        """The Set-Cookie header for a browser session: not readable by scripts, not sent by other sites.

        Its value is derived from the token. Its name contains the port, because browsers share cookies between the
        ports of a host.
        """
        value = hmac.new((self.token or "").encode(), b"badcjobs cookie", hashlib.sha256).hexdigest()
        return f"badcjobs_{self.port}={value}; HttpOnly; SameSite=Strict; Path=/"


def names_this_machine(host: str) -> bool:
    """Return whether the Host header of a request names this machine, with any port.

    This prevents DNS rebinding: a page of another site can make its own name resolve to 127.0.0.1 and read our
    answers, but it cannot choose the Host header. An SSH tunnel may use another port.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_same_secret(secret: str, expected: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(secret.encode("utf-8", "surrogateescape"), expected.encode())
