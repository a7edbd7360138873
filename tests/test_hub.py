"""The hub is asked where a network leads to it, and its cache alone where none does."""

import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

import wakeful
from evaluation.models import save_llama
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hub import hub_or_cache
from wakeful.loading.load import Location, _stored_types


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Cut the network: no host has an address. Returns the hosts that were looked up."""
    hosts: list[str] = []

    def unknown(host: str, *_: Any, **__: Any) -> None:
        hosts.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    return hosts


def test_without_a_network_a_name_fails_at_once(looked_up: list[str]) -> None:
    with pytest.raises(WakefulError, match=r"'nobody/none' cannot be loaded as .* there is no net"):
        wakeful.load("nobody/none")
    with pytest.raises(WakefulError, match=r"no network to hub\.example, and its files are not in"):
        Tokenizer.load("hf:nobody/none")
    assert looked_up == ["hub.example"] * 2
    assert not constants.HF_HUB_OFFLINE


def test_without_a_network_the_cache_still_serves(looked_up: list[str], tmp_path: Path) -> None:
    place = tmp_path / "cache" / "models--nobody--tiny"
    save_llama(place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    model = wakeful.load("nobody/tiny")
    assert model.module.config.model_type == "llama"
    assert model.read_tokenizer().vocab_size
    assert set(looked_up) == {"hub.example"}


@pytest.mark.usefixtures("looked_up")
def test_a_name_that_is_not_in_the_cache_has_not_the_weights_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    assert _stored_types(Location("hub", Path("nobody/tiny"), "nobody/tiny")) == (None, {})


@pytest.mark.parametrize("way", ["address", "proxy", "told"])
def test_it_is_left_to_the_hubs_own_code_otherwise(
    way: str, looked_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "address":
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    if way == "proxy":
        monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy:3128"})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", way == "told")
    seen: list[bool] = []
    with hub_or_cache():
        seen.append(constants.HF_HUB_OFFLINE)
    assert seen == [way == "told"]
    with pytest.raises(LocalEntryNotFoundError), hub_or_cache():
        raise LocalEntryNotFoundError("as it came")
    assert (way == "told") == constants.HF_HUB_OFFLINE
    assert not looked_up


def test_other_errors_stay_what_they_are(looked_up: list[str]) -> None:
    with pytest.raises(ValueError, match="damaged"), hub_or_cache():
        raise ValueError("damaged")
    assert not constants.HF_HUB_OFFLINE
