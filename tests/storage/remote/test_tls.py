"""Shards on one's own https server: certificates are checked, a cut handshake is repeated."""

import datetime
import ipaddress
import socket
import ssl
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from faulty_server import serving
from tars import samples_of, tar, webdataset_samples

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage import open_shard

x509 = pytest.importorskip("cryptography.x509", reason="certificates are made by cryptography")

SHARD = tar({f"{number}.txt": b"text" * 1000 for number in range(20)})


def certificate(folder, host="127.0.0.1", days=1):
    """A file with a key and a certificate of its own authority, which ends after some days."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "own")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - 9 * day)
        .not_valid_after(now + days * day)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), False
        )
        .sign(key, hashes.SHA256())
    )
    pem, unlocked = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, unlocked)
    file = folder / f"{host}{days}.pem"
    file.write_bytes(private + made.public_bytes(pem))
    return str(file)


class Server(ThreadingHTTPServer):
    """Serves over TLS, and ends connections of these numbers instead of a handshake."""

    def __init__(self, file, folder, ended=()):
        super().__init__(
            ("127.0.0.1", 0), lambda *given: SimpleHTTPRequestHandler(*given, directory=folder)
        )
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(file)
        self.ended, self.connections = ended, 0

    def get_request(self):
        connection, address = super().get_request()
        self.connections += 1
        if self.connections in self.ended:
            with connection:
                connection.recv(1000)
                connection.shutdown(socket.SHUT_WR)
            raise OSError("ended")
        return self.context.wrap_socket(connection, server_side=True), address


def read_from(server):
    with serving(server) as url, open_shard(url.replace("http", "https", 1) + "/a.tar") as content:
        return samples_of(content)


@pytest.mark.filterwarnings("ignore:.*with whole files")  # of Python's server
def test_a_certificate_of_ones_own_is_trusted_and_a_cut_handshake_repeated(tmp_path, monkeypatch):
    (tmp_path / "a.tar").write_bytes(SHARD)
    file = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", file)
    assert read_from(Server(file, tmp_path, ended=(1,))) == webdataset_samples(SHARD)
    server = Server(file, tmp_path, ended=range(1000))
    with pytest.raises(ShardError, match=r"cannot be reached: SSLError.*EOF"):
        read_from(server)
    assert server.connections == 3


def test_a_certificate_that_is_none_is_an_error_at_once(tmp_path, monkeypatch):
    good, expired = certificate(tmp_path), certificate(tmp_path, days=-1)
    other = certificate(tmp_path, "127.0.0.2")
    for trusted, shown, said in (
        (good, expired, "self-signed"),
        (expired, expired, "expired"),
        (other, other, "127.0.0.1"),
    ):
        monkeypatch.setenv("SSL_CERT_FILE", trusted)
        server = Server(shown, tmp_path)
        with pytest.raises(ShardError, match=f"certificate verify failed.*{said}"):
            read_from(server)
        assert server.connections == 1
