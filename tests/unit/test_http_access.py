"""Which requests a server answers, by where it listens."""

import pytest
from aiohttp.test_utils import make_mocked_request

from workers.engine_api.http_access import AccessRules, is_same_origin
from workers.settings import EngineSettings


@pytest.mark.parametrize(
    ("headers", "same"),
    [
        ({}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "http://localhost:7077", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": "http://localhost:7078"}, False),
        ({"Origin": "http://localhost:7077"}, True),
        ({"Origin": "http://localhost:7077", "Sec-Fetch-Site": "same-origin"}, True),
    ],
)
def test_a_post_is_of_this_servers_own_page_if_its_origin_is(headers, same):
    request = make_mocked_request("POST", "/", headers={"Host": "localhost:7077", **headers})
    assert is_same_origin(request) is same


def refused(rules: AccessRules, host: str) -> bool:
    request = make_mocked_request("GET", "/health", headers={"Host": host})
    return rules.find_refusal(request) is not None


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000"])
def test_a_server_of_this_machine_alone_is_asked_by_loopback_names(host):
    assert not refused(AccessRules(host="127.0.0.1"), host)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "0.0.0.0:8000", "10.0.0.7", "engine", "a.local", "localhost.evil.example", "[::1"]
)
def test_a_server_of_this_machine_alone_is_not_asked_by_other_names(host):
    assert refused(AccessRules(host="127.0.0.1"), host)


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.7:8000",  # a pod, as kubelet and Prometheus ask it
        "[fd00::7]:8000",
        "engine:8000",  # a service of compose, or of the same namespace
        "engine-0.engine.training.svc:8000",
        "engine.training.svc.cluster.local",
        "ip-10-0-0-7.ec2.internal:8000",
        "trainer.lan",
        "gpu17.hpc.example.edu:8000",  # the host that it was started with
        "engines.example.org",  # named in engine.urls
        "localhost:8000",  # a forwarded port
    ],
)
def test_a_server_of_several_machines_is_asked_by_addresses_private_names_and_its_own(host):
    engines = EngineSettings(urls=("http://engines.example.org:8000", "dns+http://10.0.0.9:8000"))
    assert not refused(AccessRules(host="gpu17.hpc.example.edu", names=engines.hosts), host)


@pytest.mark.parametrize("host", ["evil.example", "10.0.0.7.evil.example:8000", "gpu18.hpc.example.edu", ""])
def test_a_server_of_several_machines_is_not_asked_by_names_that_anybody_can_buy(host):
    assert refused(AccessRules(host="gpu17.hpc.example.edu"), host)
    assert refused(AccessRules(host="0.0.0.0"), host)


def test_the_machines_own_name_will_do(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "GPU17.hpc.example.edu")
    assert not refused(AccessRules(host="0.0.0.0"), "gpu17.hpc.example.edu:8000")
    assert refused(AccessRules(host="127.0.0.1"), "gpu17.hpc.example.edu:8000")


def test_behind_a_token_any_name_will_do_but_no_page_of_another_site():
    rules = AccessRules(host="0.0.0.0", has_token=True)
    assert not refused(rules, "runs.example.org")
    request = make_mocked_request("GET", "/", headers={"Host": "runs.example.org", "Origin": "https://evil.example"})
    assert rules.find_refusal(request) is not None


def test_the_refusal_of_a_name_says_which_names_there_are():
    request = make_mocked_request("GET", "/", headers={"Host": "evil.example:8000"})
    local, shared = (AccessRules(host=host).find_refusal(request) for host in ("127.0.0.1", "0.0.0.0"))
    assert local is not None
    assert "'evil.example:8000' is not a name of this server: ask it as localhost or 127.0.0.1" in local.why
    assert shared is not None
    assert "ask it as an IP address, or start it with that name as its host" in shared.why
