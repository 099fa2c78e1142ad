"""The URL that is called when an alert begins or ends; only whoever knows it may call, so nobody is told of it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from badcjobs.telemetry.alert_hooks import TIMEOUT_S, News

_NO_ANSWER = f"the server did not answer in {TIMEOUT_S:.0f} s"
_TUNNEL = re.compile(r"Tunnel connection failed: (\d+)")


class Webhook:
    """A URL that gets the news as JSON, by POST."""

    name = "webhook"

    def __init__(self, url: str, environ: Mapping[str, str]) -> None:
        self._url = url
        self._proxies = proxies_for(url, environ)
        self._under_way: threading.Thread | None = None

    def tell(self, news: News) -> str | None:
        """Send it, and wait a while for the answer; while one is overdue, nothing else is sent."""
        if self._under_way is not None and self._under_way.is_alive():
            return _NO_ANSWER
        answers: list[str | None] = []
        # In a thread: a name that nobody resolves, or an answer letter by letter, outlasts any time-out of a socket.
        self._under_way = threading.Thread(target=lambda: answers.append(self._send(news)), daemon=True)
        self._under_way.start()
        self._under_way.join(TIMEOUT_S)
        return answers[0] if answers else _NO_ANSWER

    def _send(self, news: News) -> str | None:
        """Return what went wrong: an answer other than 2xx is a failure, and so is one that sends us elsewhere."""
        import urllib.error
        import urllib.request

        class StayHere(urllib.request.HTTPRedirectHandler):
            def redirect_request(self, *_: object) -> None:
                return None  # it would become a GET without our words

        headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "badcjobs"}
        try:
            request = urllib.request.Request(self._url, json.dumps(news).encode(), headers, method="POST")
            opener = urllib.request.build_opener(urllib.request.ProxyHandler(self._proxies), StayHere)
            opener.open(request, timeout=TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            error.close()
            return f"the server answered {error.code}"
        except Exception as error:  # broad: whatever a server and a proxy can do to us, nobody else is to suffer
            return _why_not_reached(error.reason if isinstance(error, urllib.error.URLError) else error)
        return None

    def stop(self) -> None:
        """Let it be: nothing but this process waits for an answer."""


def _why_not_reached(reason: object) -> str:
    """Return why, in words that cannot hold the URL: some exceptions repeat it."""
    if isinstance(reason, TimeoutError):
        return _NO_ANSWER
    if refusal := _TUNNEL.match(str(reason)):
        return f"the proxy answered {refusal[1]}"
    if isinstance(reason, str):
        return "neither the URL nor the proxy for it is of a kind that can be called"
    words = reason.strerror if isinstance(reason, OSError) else None
    return f"the server cannot be reached: {words or type(reason).__name__}"


def proxies_for(url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the proxy to be used for a URL, as http_proxy, https_proxy and no_proxy say, in either case."""
    parts = urlsplit(url)
    proxy = environ.get(f"{parts.scheme}_proxy") or environ.get(f"{parts.scheme}_proxy".upper())
    direct = (environ.get("no_proxy") or environ.get("NO_PROXY") or "").lower().replace(",", " ").split()
    host = f".{(parts.hostname or '').lower()}"
    ends = tuple(f".{name.lstrip('.')}" for name in direct)
    if not proxy or "*" in direct or host.endswith(ends) or f"{host}:{parts.port}".endswith(ends):
        return {}
    return {parts.scheme: proxy}
