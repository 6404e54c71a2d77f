"""Who may read the page: whoever has the token, from this machine or through `ssh -L`, and no other web page.

The address that the command prints holds the token. It is exchanged for a cookie, so that it does not stay in the address bar.
"""

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost", "[::1]")  # another name in the Host header is DNS rebinding
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token
        self._cookie = f"kestrel_view_{secrets.token_hex(4)}"  # cookies are shared by all ports, so each page has its own name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "http":
            await (self._refusal(scope) or self._app)(scope, receive, send_with_headers)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to whoever may not read, or who came with the token in the address. None for all others."""
        headers = Headers(scope=scope)
        if headers.get("host", "").rpartition(":")[0] not in HOSTS and headers.get("host") not in HOSTS:
            return PlainTextResponse(f"open the page as http://{HOSTS[0]}:PORT", status_code=421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page only reads", status_code=405)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and given and self._is_token(given):
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return answer
        if not self._is_token(_cookie(headers, self._cookie)):
            return PlainTextResponse("open the address that launch.view printed: it holds the token", status_code=403)
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _cookie(headers: Headers, name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return found.value if found else ""
