"""Authentication: token, host name, origin and type of body, as pure functions on a request's headers.

A web page that a user of this machine opens can send requests to the loopback. It cannot set `Content-Type:
application/json` without a preflight request (which gets no answer), and cannot omit `Origin` from a POST. After DNS
rebinding (its own name points at 127.0.0.1) it cannot leave that name out of `Host`.
"""

import hmac
import ipaddress
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from rstar_ray.errors import ConfigError

JSON, MSGPACK = "application/json", "application/msgpack"
TYPES = (JSON, MSGPACK, "application/x-msgpack")
_NAME = re.compile(r"[^\s:/@?#\\]+")
_OWN_SITE = ("same-origin", "none")  # of Sec-Fetch-Site: our own page, or the address bar


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status and a text for the user, with the fix."""

    status: int
    text: str


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_names(allowed: Collection[str]) -> frozenset[str]:
    """The host names that requests may use, besides plain addresses. Raises `ConfigError` for anything but a
    host name.
    """
    for name in allowed:
        if not _NAME.fullmatch(name):
            raise ConfigError("--allow-host", f"{name!r} is not a host name", "give a name alone, without a port")
    return frozenset(name.lower().rstrip(".") for name in ("localhost", socket.gethostname(), *allowed))


def refusal(
    method: str,
    path: str,
    headers: Mapping[str, str],
    *,
    token: str,
    names: Collection[str],
    origins: Collection[str] = (),
) -> Refusal | None:
    """Why a request is refused; None if it is accepted. `headers` ignores case, as HTTP does.

    Pages of `origins` ("https://host:port") may send requests too, if they know the token.
    """
    given = headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")
    if token and path != "/ping" and not hmac.compare_digest(given, token.encode()):
        return Refusal(401, "a valid token is required: Authorization: Bearer ...")
    host = headers.get("Host", "")
    if not _is_ours(host, names):
        return Refusal(
            421, f"{host[:100]!r} is not a name of this server; allow it with --allow-host, or use its address"
        )
    origin = headers.get("Origin")
    invited = origin is not None and origin in origins
    if origin is not None and not invited and (origin == "null" or _authority(origin) != host.lower()):
        return Refusal(403, "requests from pages of other sites are refused (Origin)")
    if not invited and headers.get("Sec-Fetch-Site", "none").lower() not in _OWN_SITE:
        return Refusal(403, "requests from pages of other sites are refused (Sec-Fetch-Site)")
    empty = headers.get("Content-Length", "") == "0" and "Transfer-Encoding" not in headers  # refused later
    if method == "POST" and not empty and _kind(headers.get("Content-Type", "")) not in TYPES:
        return Refusal(415, f"Content-Type: send {JSON} or {MSGPACK}")
    return None


def _is_ours(host: str, names: Collection[str]) -> bool:
    """Whether the host is one of `names` or a numeric address, which DNS rebinding cannot use."""
    if not set(host).isdisjoint("@/?#\\"):
        return False  # not only a name and a port
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.rstrip(".") in names
    return True


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()
