"""Proxies with TLS in front of a service: a small one, nginx and Caddy as the docs have them."""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

NAME = "train.localhost"
PAGE = Path(__file__).parents[2] / "docs" / "service.md"
#: What a proxy keeps to itself.
_HOP = ("connection", "transfer-encoding", "keep-alive")


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of `NAME` that nobody else has signed, and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


@contextmanager
def small(
    folder: Path, port: int, upstream: int, *, keeps_host: bool, path: str = ""
) -> Iterator[None]:
    """A proxy of this process.

    keeps_host   False: it asks by the service's address, as nginx does where it is told nothing
    path         below which the service is found
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            headers |= {"X-Forwarded-Proto": "https", "X-Forwarded-Host": self.headers["Host"]}
            headers["X-Forwarded-For"] = self.client_address[0]
            if not keeps_host:
                headers["Host"] = f"127.0.0.1:{upstream}"
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            there = http.client.HTTPConnection("127.0.0.1", upstream)
            there.request(self.command, self.path.removeprefix(path), body or None, headers)
            answer = there.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            try:
                while piece := answer.read1():
                    self.wfile.write(piece)
            except OSError:
                pass  # The browser has closed a stream.
            there.close()

        do_POST = do_PUT = do_GET  # noqa: N815  (http.server calls them so)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate(folder))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def nginx(folder: Path, port: int, upstream: int) -> Iterator[None]:
    """nginx with the example of the docs, its name, port and certificate ours."""
    cert, key = certificate(folder)
    server = (
        example("nginx")
        .replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
        .replace("train.example.com;", f"{NAME};")
        .replace("/etc/ssl/train.example.com.pem", str(cert))
        .replace("/etc/ssl/train.example.com.key", str(key))
        .replace(":8642", f":{upstream}")
    )
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\nuser root;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}{server}\n}}\n"
    )
    with started("nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder), port=port):
        yield


@contextmanager
def caddy(folder: Path, port: int, upstream: int) -> Iterator[None]:
    """Caddy with the example of the docs, its name, port and certificate ours."""
    cert, key = certificate(folder)
    server = (
        example("caddyfile")
        .replace("train.example.com {", f"{NAME}:{port} {{\n    tls {cert} {key}")
        .replace(":8642", f":{upstream}")
    )
    (folder / "Caddyfile").write_text(f"{{\n    admin off\n    auto_https off\n}}\n{server}")
    config = str(folder / "Caddyfile")
    with started("caddy", "run", "--adapter", "caddyfile", "--config", config, port=port):
        yield


def example(language: str) -> str:
    """The first example of a language on the page of the service."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@contextmanager
def started(program: str, *words: str, port: int) -> Iterator[None]:
    """A program that listens on a port; skipped where there is none."""
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if path is None:
        pytest.skip(f"there is no {program}")
    process = subprocess.Popen([path, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 600
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, process.stdout.read().decode()
            assert time.monotonic() < end
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()
