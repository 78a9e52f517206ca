"""Messages show a server's URL without its secrets."""

import pytest

from stream.connection.address import RedisAddress, has_secret, redact_url
from stream.errors import ServerError


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/3", "redis://host:6379/3"),
        ("redis://:hush@host:6379/3", "redis://host:6379/3"),
        ("redis://user:hush@host", "redis://host"),
        ("rediss://user:hush@host:6380?ssl_ca_certs=ca.pem", "rediss://host:6380"),
        ("unix://user:hush@/tmp/r.sock?password=hush", "unix:///tmp/r.sock"),
        ("unix:///tmp/r.sock", "unix:///tmp/r.sock"),
        ("redis://host?password=hush", "redis://host"),
        ("redis://[::1]:6379", "redis://[::1]:6379"),
        # unescaped passwords, as people write them
        ("redis://:hu@sh@host", "redis://host"),
        ("redis://:hu/sh@host", "redis://..."),
        ("redis://:12/sh@host", "redis://..."),
        ("redis://:hu?sh@host", "redis://..."),
        ("redis://:12?sh@host", "redis://..."),
        ("redis://user:12#sh@host", "redis://..."),
        ("redis://:hu[sh@host", "redis://..."),
        ("hush@host:6379", "the URL"),
    ],
)
def test_the_display_url_has_neither_user_nor_password(url, shown):
    assert redact_url(url) == shown


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("", False),
        ("unix:///tmp/r.sock", False),
        ("rediss://host?ssl_ca_certs=ca.pem", False),
        ("redis://:hush@host", True),
        ("unix:///tmp/r.sock?password=hush", True),
        ("rediss://host?ssl_keyfile=k&ssl_password=hush", True),
        ("redis://:12/sh@host", True),
        ("redis://:hu?sh@host", True),
        ("redis://:hu[sh@host", True),
    ],
)
def test_a_url_that_may_have_a_password_counts_as_having_one(url, secret):
    assert has_secret(url) is secret


@pytest.mark.parametrize("url", ["hush@host", "http://:hush@host", "redis://:hu/sh@host", "redis://:hu[sh@host"])
def test_an_invalid_url_is_an_error_without_secrets(url):
    with pytest.raises(ServerError, match="is not a Redis URL") as caught:
        RedisAddress(url)
    assert "hu" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("redis+sentinel://:hush@host:26379/mymaster", "name the master itself"),
        ("redis+cluster://:hush@host:7000", "name one node"),
        ("redis://:hush@one:7000,two:7001", "name one node"),
        ("host:6379", "write redis://"),
    ],
)
def test_an_address_of_several_servers_is_refused_with_the_one_to_name(url, remedy):
    with pytest.raises(ServerError, match=remedy) as caught:
        RedisAddress(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://host?max_conections=3", "max_conections"),
        ("redis://host?ssl_ca_certs=ca.pem", "need rediss://"),
        ("rediss://host?ssl_cert_reqs=maybe", "maybe"),
    ],
)
async def test_an_unknown_option_is_named(url, why):
    with pytest.raises(ServerError, match=why):
        await RedisAddress(url).prepare()


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
async def test_a_missing_or_invalid_tls_file_is_an_error_that_names_the_options(option, tmp_path):
    (tmp_path / "no.pem").write_text("not a certificate")
    for name in ("no.pem", "missing.pem"):
        with pytest.raises(ServerError, match=f"cannot be used.*{option}"):
            await RedisAddress(f"rediss://host?{option}={tmp_path / name}").prepare()


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("redis:host", "redis://HOST:PORT"),
        ("redis:/host:6379", "redis://HOST:PORT"),
        ("redis://host:0", "0 is no port"),
        ("redis://host/prod", "number of a database"),
        ("redis://host/1/2", "number of a database"),
        ("redis://host/-1", "number of a database"),
        ("redis://:12/hush@host", "number of a database"),
        ("redis://host#hush", "%23"),
        ("unix://tmp/r.sock", "three slashes"),
        ("unix://r.sock", "three slashes"),
        ("unix://", "three slashes"),
    ],
)
def test_a_url_of_which_a_part_would_be_left_out_is_refused(url, remedy):
    with pytest.raises(ServerError, match="is not a Redis URL") as caught:
        RedisAddress(url)
    assert remedy in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://host//", "redis://[::1]:6379/3/", "unix://user:hush@/tmp/a%20b.sock?db=2"])
def test_other_forms_of_a_url_are_accepted(url):
    RedisAddress(url)


async def test_the_number_of_connections_may_be_limited():
    client = RedisAddress("redis://host?max_connections=5").client()
    assert client.connection_pool.max_connections == 5
