"""The monitor's page: who may read it, that nothing can be injected, and that a real Chromium draws it."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_studies import study

from oelm.errors import MachineError
from oelm.study.rows import expand
from oelm.study.web import Monitor
from oelm.train.folder import RunFolder


EVIL = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"


def begun(runs: Path, error: str = "") -> Path:
    one = expand(study())[0]
    place = runs / "small" / one.id
    with RunFolder(place, one.run) as home:
        home.open_metrics(0)
        for step in range(1, 60):
            home.log({"step": step, "kind": "train", "loss": 7.0 / step, "tokens_per_s": 5000.0, "seconds": step * 2.0})
            if step % 20 == 0:
                home.log({"step": step, "kind": "eval", "split": "validation", "loss": 6.0 / step, "perplexity": 9.25})
        home.beat(step=59, total=100)
    if error:
        failed = runs / "small" / "failed-00000000"
        failed.mkdir()
        (failed / "result.json").write_text(json.dumps({"schema": 1, "status": "failed", "error": error, "run": {}}))
    return place


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Monitor]:
    begun(tmp_path, EVIL)
    monitor = Monitor(tmp_path)
    thread = threading.Thread(target=monitor.serve)
    thread.start()
    yield monitor
    monitor.close()
    thread.join()


def ask(page: Monitor, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_the_page_and_its_data_need_the_token(page: Monitor) -> None:
    for path in ("/", "/data.json", "/?token=", "/?token=wrong", "/?token=%C3%BF"):
        status, _, body = ask(page, path)
        assert status == 403
        assert page.token.encode() not in body
    status, headers, body = ask(page, f"/?token={page.token}")
    assert status == 200
    assert b"OELM runs" in body
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert json.loads(ask(page, f"/data.json?token={page.token}")[2])["states"] == {"running": 1, "failed": 1}


def test_other_hosts_names_are_refused(page: Monitor) -> None:
    for host in ("evil.example", f"evil.example:{page.port}", "127.0.0.1", ""):
        assert ask(page, f"/data.json?token={page.token}", Host=host)[0] == 421
    assert ask(page, f"/data.json?token={page.token}", Host=f"localhost:{page.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_it_can_only_be_read(page: Monitor, method: str) -> None:
    assert ask(page, f"/data.json?token={page.token}", method)[0] == 501


def test_head_has_no_body_and_unknown_paths_are_not_found(page: Monitor) -> None:
    status, headers, body = ask(page, f"/?token={page.token}", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000
    for path in ("/../../etc/passwd", "/%2e%2e/x", "/runs/small"):
        assert ask(page, f"{path}?token={page.token}")[0] == 404


def test_every_answer_has_its_own_nonce(page: Monitor) -> None:
    first, second = (ask(page, f"/?token={page.token}")[1]["Content-Security-Policy"] for _ in range(2))
    assert first != second


def test_a_port_in_use_is_said(page: Monitor, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be used"):
        Monitor(tmp_path, port=page.port)


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_chromium_draws_it(page: Monitor, browser: Any, width: int, scheme: str) -> None:
    view = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    problems: list[str] = []
    view.on("pageerror", lambda error: problems.append(str(error)))
    view.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    view.goto(page.url)
    view.wait_for_selector("li svg path.eval")
    text = view.inner_text("body")
    assert "step 59 of 100" in text
    assert "perplexity 9.25" in text
    assert EVIL in text  # shown as it is, not run
    assert view.title() == "OELM runs"
    assert view.locator("img").count() == 0
    assert view.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    back = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(13, 17, 23)" if scheme == "dark" else "rgb(255, 255, 255)")
    colour = view.evaluate("getComputedStyle(document.querySelector('.state')).color")
    assert colour == ("rgb(68, 147, 248)" if scheme == "dark" else "rgb(9, 105, 218)")
    assert problems == []
    view.close()


@pytest.mark.browser
@pytest.mark.slow
def test_the_page_follows_the_run_and_says_when_the_monitor_is_gone(tmp_path: Path, browser: Any) -> None:
    place = begun(tmp_path)
    monitor = Monitor(tmp_path)
    thread = threading.Thread(target=monitor.serve)
    thread.start()
    view = browser.new_page()
    view.goto(monitor.url)
    view.wait_for_selector("text=step 59 of 100")
    with (place / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 88, "kind": "train", "loss": 0.125}) + "\n")
    view.wait_for_selector("text=step 88 of 100")
    monitor.close()
    thread.join()
    view.wait_for_selector("#when.lost", timeout=20_000)
    view.close()
