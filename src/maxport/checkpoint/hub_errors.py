"""Hub failures: which to try again, and one clear message for each that stays."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from maxport.errors import MaxportError

T = TypeVar("T")

WAITS = (1.0, 2.0, 4.0)
"""Seconds before the second, third and fourth attempt."""

LONGEST_WAIT = 60.0
"""A `Retry-After` beyond this many seconds is reported instead of waited for."""

_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}


def retrying(
    call: Callable[[], T],
    repo: str,
    revision: str | None,
    file: str | None = None,
    *,
    retried_inside: bool = False,
) -> T:
    """Run a Hub request, again after a transient failure, and explain the failure that stays.

    Transient are timeouts, broken connections and the statuses 408, 429 and 5xx.

    Args:
        call: The request.
        repo: Hub id, for messages.
        revision: What the user asked for, for messages.
        file: File the request is about, for messages.
        retried_inside: huggingface_hub itself retries network failures of this call, and most
            statuses: only statuses are tried again, once.

    Raises:
        MaxportError: The request failed for good.
    """
    import httpx

    waits = WAITS[:1] if retried_inside else WAITS
    for wait_here in (*waits, None):
        try:
            with _quiet:
                return call()
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            cause = _root(error)
            wait = None if wait_here is None else _wait(cause, wait_here, retried_inside)
            if wait is None:
                raise explain(cause, repo, revision, file) from error
            again = f"trying again in {wait:.0f} s"
            print(f"{explain(cause, repo, revision, file).what}; {again}", file=sys.stderr)
            time.sleep(wait)
    raise AssertionError("unreachable: the last attempt returns or raises")


class _Quiet:
    """Keeps huggingface_hub's log lines about failures off the terminal: we print our own.

    Counts its users, for requests run in several threads.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._level = threading.Lock(), 0, logging.NOTSET

    def __enter__(self) -> None:
        logger = logging.getLogger("huggingface_hub")
        with self._lock:
            if self._users == 0:
                self._level = logger.level
                logger.setLevel(logging.CRITICAL)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                logging.getLogger("huggingface_hub").setLevel(self._level)


_quiet = _Quiet()


def _root(error: BaseException) -> BaseException:
    """The failure below huggingface_hub's "not found locally" wrapper."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _wait(error: BaseException, planned: float, retried_inside: bool) -> float | None:
    """Seconds to wait before the next attempt; None if another attempt makes no sense."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return None
    if isinstance(error, HfHubHTTPError):
        if error.response is None or error.response.status_code not in _TRANSIENT_STATUS:
            return None
        asked = error.response.headers.get("Retry-After", "")
        wait = float(asked) if asked.isdigit() else planned
        return wait if wait <= LONGEST_WAIT else None
    transient = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)
    if "Consistency check failed" in str(error):
        return planned
    return planned if isinstance(error, transient) and not retried_inside else None


def explain(
    error: BaseException, repo: str, revision: str | None, file: str | None
) -> MaxportError:
    """The message for a failed Hub request."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    where = repo + (f"@{revision}" if revision else "") + (f"/{file}" if file else "")
    page = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, hub.OfflineModeIsEnabled):
        return MaxportError(
            "the file is not in the local Hub cache and offline mode is on",
            where=where,
            fix="unset HF_HUB_OFFLINE and run again",
        )
    if isinstance(error, hub.LocalEntryNotFoundError):
        return MaxportError(
            "the file could not be got from the Hub and is not in its local cache", where=where
        )
    if isinstance(error, hub.DisabledRepoError):
        return MaxportError("the Hub has disabled access to this model", where=where)
    if isinstance(error, hub.GatedRepoError):
        return MaxportError(
            "the model is gated: the Hub gives its files only to accounts that were granted access",
            where=where,
            fix=f"accept the terms at {page}, then run `hf auth login`",
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return MaxportError(
            f"the model has no revision {revision!r}",
            where=where,
            fix=f"see the branches and tags at {page}/tree/main",
        )
    if isinstance(error, hub.EntryNotFoundError):
        return MaxportError("the model has no such file", where=where, fix=f"see {page}")
    if isinstance(error, hub.RepositoryNotFoundError):
        return _no_such_model(where)
    if isinstance(error, hub.HfHubHTTPError) and error.response is not None:
        sent = error.response.request.headers if error.response.request else {}
        rejected = "Invalid credentials" in error.response.headers.get("X-Error-Message", "")
        with_token = rejected or "authorization" in sent
        return _explain_status(error.response.status_code, where, with_token)
    if isinstance(error, httpx.TooManyRedirects):
        return MaxportError("the Hub redirects in a circle", where=where, fix=_ENDPOINT_FIX)
    if isinstance(error, httpx.TimeoutException):
        return MaxportError(
            "the Hub did not answer in time",
            where=where,
            fix="try again later, or raise HF_HUB_DOWNLOAD_TIMEOUT and HF_HUB_ETAG_TIMEOUT",
        )
    if isinstance(error, httpx.RemoteProtocolError) or "Consistency check" in str(error):
        return MaxportError("the Hub cut the transfer off", where=where, fix=_LATER)
    if isinstance(error, httpx.NetworkError):
        return MaxportError(
            f"the Hub at {constants.ENDPOINT} cannot be reached",
            where=where,
            fix="check the network; HF_HUB_OFFLINE=1 uses what is in the cache",
        )
    if isinstance(error, OSError) and error.strerror:
        return MaxportError(
            f"the Hub's file cannot be stored: {error.strerror}",
            where=f"{where} -> {error.filename or constants.HF_HUB_CACHE}",
            fix="free some space or set HF_HOME to another folder",
        )
    reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
    return MaxportError(
        f"the Hub's answer cannot be used: {reason}", where=where, fix=_ENDPOINT_FIX
    )


_LATER = "try again later"
_ENDPOINT_FIX = "check HF_ENDPOINT and any proxy in between"


def _no_such_model(where: str) -> MaxportError:
    return MaxportError(
        "no such model: neither a local folder nor a Hub id this account can see",
        where=where,
        fix="check the spelling; if the model is private, run `hf auth login`",
    )


def _explain_status(status: int, where: str, with_token: bool) -> MaxportError:
    if status == 401 and not with_token:
        return _no_such_model(where)
    if status == 401:
        return MaxportError(
            "the Hub does not accept the access token",
            where=where,
            fix="run `hf auth login` with a valid token, or unset HF_TOKEN",
        )
    if status == 403:
        return MaxportError(
            "the Hub forbids access with this account's token",
            where=where,
            fix="use a token with read access to this model",
        )
    if status == 404:
        return MaxportError("the Hub has no such model or file", where=where)
    if status == 429:
        return MaxportError(
            "the Hub limits the rate of requests and asks to wait",
            where=where,
            fix="wait a few minutes; `hf auth login` raises the limit",
        )
    if status >= 500:
        return MaxportError(
            f"the Hub has a fault of its own (HTTP {status})", where=where, fix=_LATER
        )
    return MaxportError(f"the Hub refused the request (HTTP {status})", where=where)
