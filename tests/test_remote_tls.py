"""Rewards over https: a service is trusted by its certificate alone, and a proxy is used where one is set."""

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_service import Answer, Asked, fake_service
from flowcredit.errors import InputError
from flowcredit.rewards import load_reward

HEALTH = {"protocol": "flowcredit-reward/1", "name": "red", "version": "1"}

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key, made for this run of the tests."""
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "certificate.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    )
    files = ["-keyout", str(key), "-out", str(made)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return made, key


def respond(asked: Asked) -> Any:
    return HEALTH if asked.method == "GET" else {"scores": [0.5] * len(asked.body["prompts"])}


def test_a_certificate_is_refused_unless_its_authority_is_given(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    monkeypatch.setenv("TOKEN", "secret")
    with fake_service(respond, context) as fake:
        options = {"url": fake.url, "backoff": 0.001, "token_env": "TOKEN"}
        with pytest.raises(InputError, match=r"https://127\..*/health: .*certificate.*SSL_CERT_FILE"):
            load_reward("http", options, "cpu")
        assert not fake.asked, "the token must not reach a service that is not trusted"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        reward: Any = load_reward("http", options, "cpu")
        assert reward(images=torch.zeros(2, 3, 4, 4), prompts=["a", "b"]).tolist() == [0.5, 0.5]
        assert all(asked.headers["Authorization"] == "Bearer secret" for asked in fake.asked)


def test_a_certificate_for_another_host_is_refused(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with fake_service(respond, context) as fake:
        url = fake.url.replace("127.0.0.1", "localhost")
        with pytest.raises(InputError, match=r"/health: .*certificate"):
            load_reward("http", {"url": url}, "cpu")


def test_services_elsewhere_are_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_service(respond) as proxy:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", proxy.url)
        load_reward("http", {"url": "http://scores.invalid:8000"}, "cpu")
        assert [asked.path for asked in proxy.asked] == ["http://scores.invalid:8000/health"]
        monkeypatch.setenv("no_proxy", "scores.invalid")
        with pytest.raises(InputError, match=r"http://scores\.invalid:8000/health: the connection failed"):
            load_reward("http", {"url": "http://scores.invalid:8000"}, "cpu")
        with fake_service(lambda asked: Answer(b"", status=404)) as here:
            monkeypatch.delenv("no_proxy")
            with pytest.raises(InputError, match="404"):
                load_reward("http", {"url": here.url}, "cpu")
            assert len(here.asked) == 1, "this machine is asked directly"
        assert len(proxy.asked) == 1
