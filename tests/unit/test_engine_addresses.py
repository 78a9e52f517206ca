"""Engine URLs: spelling, and DNS names."""

import socket

import pytest

from stream.errors import SettingsError
from workers.engine_api.discovery import merge_dns_answer, normalize_engine_url, resolve_engines


@pytest.mark.parametrize(
    ("text", "known_by"),
    [
        ("http://engine:8000", "http://engine:8000"),
        (" http://Engine:8000/ ", "http://engine:8000"),
        ("https://gate/engines/1/", "https://gate/engines/1"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_spellings_of_an_engines_url_are_normalized(text, known_by):
    assert normalize_engine_url(text) == known_by


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine:8000", "write it as http://HOST:PORT"),
        ("", "write it as http://HOST:PORT"),
        ("http://", "write it as http://HOST:PORT"),
        ("http://a:port", "write it as http://HOST:PORT"),
        ("http://a:0", "port 0"),
        ("http://a b:8000", "write it as http://HOST:PORT"),
        ("ftp://a:8000", "write it as http://HOST:PORT"),
        ("http://a:8000/?x=1", "query"),
        ("http://[::1:8000", "write it as http://HOST:PORT"),
    ],
)
def test_a_malformed_engine_url_is_refused_with_the_key_and_the_remedy(text, words):
    with pytest.raises(SettingsError, match=r"engine\.urls") as caught:
        normalize_engine_url(text, "engine.urls")
    assert words in str(caught.value)


def test_a_url_with_a_password_is_refused_without_showing_it():
    with pytest.raises(SettingsError, match="password") as caught:
        normalize_engine_url("http://me:secret@engine:8000", "engine.urls")
    assert "secret" not in str(caught.value)


def resolving_to(monkeypatch, *addresses: str):
    async def getaddrinfo(host, port, **_):
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
            for each in addresses
        ]

    monkeypatch.setattr("anyio.getaddrinfo", getaddrinfo)


async def test_each_address_of_a_name_is_one_engine_in_a_fixed_order(monkeypatch):
    resolving_to(monkeypatch, "10.0.0.10", "10.0.0.9", "10.0.0.10")
    assert await resolve_engines("http://engines:8000") == ["http://10.0.0.9:8000", "http://10.0.0.10:8000"]
    resolving_to(monkeypatch, "fd00::2", "fd00::1")
    assert await resolve_engines("http://engines:8000") == ["http://[fd00::1]:8000", "http://[fd00::2]:8000"]


async def test_a_machine_with_addresses_of_both_families_is_one_engine(monkeypatch):
    resolving_to(monkeypatch, "::1", "127.0.0.1")
    assert await resolve_engines("http://localhost:8000") == ["http://127.0.0.1:8000"]


async def test_a_real_name_resolves():
    assert await resolve_engines("http://localhost:8123") in (["http://127.0.0.1:8123"], ["http://[::1]:8123"])


def test_an_address_is_dropped_after_three_answers_without_it():
    known = merge_dns_answer({}, ["a", "b"])
    for _ in range(2):
        known = merge_dns_answer(known, ["a"])
        assert set(known) == {"a", "b"}
    assert set(merge_dns_answer(known, ["a", "b"])) == {"a", "b"}
    assert set(merge_dns_answer(known, ["a"])) == {"a"}
