"""TLS: whom the server proves itself to, whose certificates it asks for, and files that change."""

import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.http import tls
from api.settings import ApiSettings
from jobs.errors import SettingsError
from tests.support.api_server import running_api
from tests.support.certificates import Certificates, make_certificates
from tests.support.waiting import wait_until


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "tls")


def settings_of(redis_url: str, tmp_path: Path, files: Certificates, **more: object) -> ApiSettings:
    return ApiSettings(
        redis_url=redis_url,
        file_store=str(tmp_path / "store"),
        ssl_certfile=files.certificate,
        ssl_keyfile=files.key,
        **more,  # type: ignore[arg-type]
    )


def status(url: str, context: ssl.SSLContext) -> int:
    return httpx.get(f"{url}/v1/models", verify=context, timeout=60).status_code


def test_a_client_that_trusts_the_authority_is_answered(redis_url: str, tmp_path: Path, files: Certificates) -> None:
    with running_api(settings_of(redis_url, tmp_path, files), scheme="https") as url:
        assert status(url, files.client_context()) == 200
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            status(url, ssl.create_default_context())


def test_versions_before_1_2_are_not_spoken(redis_url: str, tmp_path: Path, files: Certificates) -> None:
    context = tls.server_context(settings_of(redis_url, tmp_path, files))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("required", [1, 2])
def test_clients_may_need_a_certificate(redis_url: str, tmp_path: Path, files: Certificates, required: int) -> None:
    stranger = make_certificates(tmp_path / "stranger")
    wrong = files.client_context()
    wrong.load_cert_chain(stranger.client)
    settings = settings_of(redis_url, tmp_path, files, ssl_ca_certs=files.authority, ssl_cert_reqs=required)
    with running_api(settings, scheme="https") as url:
        assert status(url, files.client_context(with_certificate=True)) == 200
        with pytest.raises(httpx.TransportError):
            status(url, wrong)
        if required == 1:
            assert status(url, files.client_context()) == 200
        else:
            with pytest.raises(httpx.TransportError):
                status(url, files.client_context())


def test_ciphers_are_those_that_are_named(redis_url: str, tmp_path: Path, files: Certificates) -> None:
    cipher = "ECDHE-ECDSA-AES256-GCM-SHA384"
    with running_api(settings_of(redis_url, tmp_path, files, ssl_ciphers=cipher), scheme="https") as url:
        for offered, fits in ((cipher, True), ("ECDHE-ECDSA-AES128-GCM-SHA256", False)):
            context = files.client_context()
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            context.set_ciphers(offered)
            if fits:
                assert status(url, context) == 200
            else:
                with pytest.raises(httpx.ConnectError):
                    status(url, context)


def test_new_certificates_are_taken_while_it_runs(
    redis_url: str, tmp_path: Path, files: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "CHECK_SECONDS", 0.05)
    with running_api(settings_of(redis_url, tmp_path, files, enable_ssl_refresh=True), scheme="https") as url:
        old = files.client_context()
        assert status(url, old) == 200
        Path(files.key).write_text("half a key")  # what is there between two writes ends nothing
        assert status(url, old) == 200
        new = make_certificates(tmp_path / "tls").client_context()
        wait_until(lambda: _is_trusted(url, new), 60, "the new certificate")
        assert not _is_trusted(url, old)


def test_an_authority_that_is_taken_out_is_trusted_no_more(
    redis_url: str, tmp_path: Path, files: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "CHECK_SECONDS", 0.05)
    other = make_certificates(tmp_path / "other")
    authorities = tmp_path / "authorities.pem"
    authorities.write_text(Path(files.authority).read_text() + Path(other.authority).read_text())
    one, another = files.client_context(with_certificate=True), files.client_context()
    another.load_cert_chain(other.client)
    settings = settings_of(
        redis_url, tmp_path, files, ssl_ca_certs=str(authorities), ssl_cert_reqs=2, enable_ssl_refresh=True
    )
    with running_api(settings, scheme="https") as url:
        assert (status(url, one), status(url, another)) == (200, 200)
        authorities.write_text(Path(files.authority).read_text())
        wait_until(lambda: not _is_trusted(url, another), 60, "the other authority to be forgotten")
        assert status(url, one) == 200


def _is_trusted(url: str, context: ssl.SSLContext) -> bool:
    try:
        return status(url, context) == 200
    except httpx.TransportError:  # in TLS 1.3 that of a client is refused after its handshake
        return False


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"ssl_keyfile": "k"}, "give --ssl-certfile"),
        ({"ssl_certfile": "absent", "ssl_keyfile": "k"}, "absent with the key k cannot be used: No such file"),
        ({"ssl_certfile": "{cert}", "ssl_keyfile": "{other}"}, "the key is not that of the certificate"),
        ({"ssl_certfile": "{rubbish}"}, "no PEM file, or one with a password"),
        ({"ssl_certfile": "{cert}", "ssl_keyfile": "{key}", "ssl_ca_certs": "absent"}, "of --ssl-ca-certs cannot be"),
        ({"ssl_certfile": "{cert}", "ssl_keyfile": "{key}", "ssl_cert_reqs": "2"}, "give --ssl-ca-certs"),
        ({"ssl_certfile": "{cert}", "ssl_keyfile": "{key}", "ssl_ciphers": "x"}, "'x' names no cipher"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, files: Certificates, given: dict[str, str], reason: str
) -> None:
    (tmp_path / "rubbish").write_text("rubbish")
    paths = {"cert": files.certificate, "key": files.key, "rubbish": str(tmp_path / "rubbish")}
    other = make_certificates(tmp_path / "other").key
    filled: dict[str, Any] = {name: str(value).format(**paths, other=other) for name, value in given.items()}
    with pytest.raises(SettingsError, match=reason):
        tls.server_context(ApiSettings(**filled))
