"""The Hugging Face hub, or its cache on this machine where there is no network."""

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

_NOT_HELD = (LocalEntryNotFoundError, OfflineModeIsEnabled)


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Look for the hub's files in its cache alone where its address cannot be found.

    huggingface_hub would ask for each of them five times, with pauses, before it looks there.

    Raises:
        ConnectionError: that is so, and the cache lacks a file.
    """
    host = urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT
    if constants.HF_HUB_OFFLINE or _is_known(host):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except Exception as error:
        if any(isinstance(cause, _NOT_HELD) for cause in _causes(error)):
            raise ConnectionError(
                f"there is no network to {host}, and its files are not in the cache"
            ) from error
        raise
    finally:
        constants.HF_HUB_OFFLINE = False


def _is_known(host: str) -> bool:
    """Return True if a host has an address or a proxy is configured."""
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
