"""A service behind a proxy with TLS: its API, its streams, and the buttons of its page."""

from __future__ import annotations

import json
import socket
import ssl
from contextlib import contextmanager
from functools import partial

import httpx
import pytest

from tests.inspect.html_page.conftest import browser  # noqa: F401  (a fixture)
from tests.server import proxies
from tests.server.conftest import as_scheduled, job_file, listen

PROXIES = {
    "one that keeps the host": partial(proxies.small, keeps_host=True),
    "one that does not": partial(proxies.small, keeps_host=False),
    "one that serves it below a path": partial(proxies.small, keeps_host=True, path="/train"),
    "nginx": proxies.nginx,
    "caddy": proxies.caddy,
}


@contextmanager
def behind(it, proxy, folder):
    """The public address of a service behind a proxy."""
    # Held until the service has a port, so that it gets another one.
    with socket.create_server(("127.0.0.1", 0)) as free:
        public = free.getsockname()[1]
        path = getattr(PROXIES[proxy], "keywords", {}).get("path", "")
        address = f"https://{proxies.NAME}:{public}{path}"
        server, url, thread = listen(it.service, public_url=address)
    try:
        with PROXIES[proxy](folder, public, int(url.rpartition(":")[2])):
            yield address
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The proxy's name leads here; browsers know that of all names below localhost."""
    look_up = socket.getaddrinfo

    def getaddrinfo(host, *more, **options):
        here = host in (proxies.NAME, proxies.NAME.encode())
        return look_up("127.0.0.1" if here else host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture
def it(asked):
    """A service of which alice has jobs a and b."""
    it = asked()
    it.add("alice")
    it.submit(job_file("a", "b"), user="alice")
    as_scheduled(it.folder, [("alice.a",)])
    it.refresh()
    return it


def client(it, address, folder, **headers):
    trusted = ssl.create_default_context(cafile=folder / "cert.pem")
    headers = {"Authorization": f"Bearer {it.tokens['alice']}"} | headers
    return httpx.Client(base_url=address, headers=headers, verify=trusted, timeout=300)


@pytest.mark.parametrize("proxy", PROXIES)
def test_a_page_of_the_public_address_may_ask_and_no_other(it, tmp_path, proxy):
    """By the name that the browser knows; uploads, streams and probes pass."""
    with behind(it, proxy, tmp_path) as address:
        origin = address.removesuffix("/train")
        with client(it, address, tmp_path, Origin=origin) as own:
            assert own.post("/api/v1/jobs/b/pause").json()["state"] == "paused"
            assert own.get("/readyz").json() == {"status": "ok"}
            assert own.put(f"/api/v1/files/{'0' * 64}", content=b"x" * 300_000).status_code == 422
            with own.stream("GET", "/api/v1/stream") as stream:
                kind, data = (line for line, _ in zip(stream.iter_lines(), range(2), strict=False))
        for strange in ("https://evil.example", origin.replace("https", "http"), "null"):
            with client(it, address, tmp_path, Origin=strange) as other:
                assert other.post("/api/v1/jobs/b/resume").status_code == 403

    assert kind == "event: jobs"
    assert [job["name"] for job in json.loads(data[6:])] == ["alice.a", "alice.b"]


@pytest.mark.slow
@pytest.mark.parametrize("proxy", PROXIES)
def test_the_buttons_of_the_page_work_behind_a_proxy(it, tmp_path, proxy, browser):  # noqa: F811
    """With a token, in Chromium; what happens comes by the stream."""
    with behind(it, proxy, tmp_path) as address:
        page = browser.new_page(ignore_https_errors=True)
        page.set_default_timeout(300_000)
        page.goto(f"{address}/")
        page.locator("#token").fill(it.tokens["alice"])
        page.keyboard.press("Enter")
        page.locator("tbody tr[data-job='alice.b']").click()
        page.locator("button[data-verb=pause]").click()
        page.locator("button[data-verb=resume]").wait_for()
        page.close()

    assert [job.wanted for job in it.service.store.jobs()] == ["run", "pause"]
