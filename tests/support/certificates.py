"""Certificates of an authority that exists for one test."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """PEM files of a server and a client, and of the authority that both come from."""

    authority: str
    certificate: str
    key: str
    client: str  # certificate and key in one file

    def client_context(self, with_certificate: bool = False) -> ssl.SSLContext:
        """What a client needs that trusts the authority."""
        context = ssl.create_default_context(cafile=self.authority)
        if with_certificate:
            context.load_cert_chain(self.client)
        return context


def make_certificates(folder: Path) -> Certificates:
    """Write the files of a new authority into `folder`, over those of another one."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Certificates(*(str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem", "client.pem")))
    authority = trustme.CA()
    server, client = authority.issue_cert("localhost", "127.0.0.1"), authority.issue_cert("client.example")
    authority.cert_pem.write_to_path(files.authority)
    server.private_key_pem.write_to_path(files.key)
    server.cert_chain_pems[0].write_to_path(files.certificate)
    client.private_key_and_cert_chain_pem.write_to_path(files.client)
    return files
