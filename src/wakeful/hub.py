"""The Hugging Face hub, or its cache on this machine where there is no network."""

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

_NOT_IN_CACHE = (LocalEntryNotFoundError, OfflineModeIsEnabled)
"""Errors of huggingface_hub for a file that is not in the cache."""


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Inside the context, make huggingface_hub look for files in its cache alone if there is no
    network.

    By itself it would ask the hub for each file five times, with pauses, before it looks there.

    Raises:
        ConnectionError: there is no network, and the cache lacks a file.
    """
    host = urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT
    if constants.HF_HUB_OFFLINE or _has_address(host):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except Exception as error:
        if any(isinstance(cause, _NOT_IN_CACHE) for cause in _causes(error)):
            raise ConnectionError(
                f"there is no network to {host}, and its files are not in the cache"
            ) from error
        raise
    finally:
        constants.HF_HUB_OFFLINE = False


def _has_address(host: str) -> bool:
    """Return True if a host's address is found, or a proxy is configured, which finds it."""
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that led to it, the last first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
