"""Does the page of a plan work in a real browser: drawn, without errors, offline, and deaf to what names say?

Needs Chromium. Where there is none these tests are skipped, except under CI (environment variable CI set), where they fail.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess

import pytest
from test_report import hostile_plan, plan_from_json

from moesim import charts, page

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=10000")
MARK = "document.documentElement.dataset.owned='yes'"


@pytest.fixture(scope="module")
def chromium():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None and not os.environ.get("CI"):
        pytest.skip("no chromium on this machine")
    assert found, "CI must have chromium: apt-get install -y chromium"
    return found


def browse(chromium, tmp_path, url, *flags):
    """Standard output, and the page's own console lines from standard error."""
    profile = tmp_path / f"profile{len(list(tmp_path.iterdir()))}"
    done = subprocess.run([chromium, *FLAGS, f"--user-data-dir={profile}", *flags, url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def dom(chromium, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    page.write_html(plan_from_json(), folder / "plan.html")
    return browse(chromium, folder, (folder / "plan.html").as_uri(), "--window-size=1400,2800", "--dump-dom")


def body_of(text: str) -> str:
    """The DOM without its scripts, whose sources contain everything."""
    return re.sub(r"<script.*?</script>", "", text, flags=re.S)


def test_no_console_messages(dom):
    text, console = dom
    assert console == [] and 'data-ready="yes"' in text  # the script ran to its last line


def test_texts_are_there(dom):
    text = body_of(dom[0])
    for said in ("olmo_core3_new", "dp8 ep8 zero1 mb2 1f1b syncfree ov:ep+grad", "54,120", "7 of 7 layouts", "before failures",
                 "tp8 does not divide 4 key-value heads", "Timeline of the winner", "expert GEMM"):
        assert said in text


def test_every_chart_is_drawn(dom):
    text = body_of(dom[0])
    figures = charts.figures(plan_from_json())
    parts = re.split(r'id="box-', text)[1:]
    assert {part.split('"')[0] for part in parts} == set(figures)
    for part in parts:
        data = figures[part.split('"')[0]]["data"]
        assert len(re.findall(r'class="point"', part)) >= sum(len(trace["x"]) for trace in data if trace["type"] == "bar")
        assert "main-svg" in part and all(trace["name"] in part for trace in data)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 500])  # headless Chromium has no narrower window
def test_screenshot_is_not_blank(chromium, tmp_path, width, scheme):
    page.write_html(plan_from_json(), tmp_path / "plan.html")
    (tmp_path / "blank.html").write_text("<!doctype html><meta name='color-scheme' content='light dark'><body></body>")
    sizes = {}
    for name in ("plan", "blank"):
        shot = tmp_path / f"{name}.png"
        browse(chromium, tmp_path, (tmp_path / f"{name}.html").as_uri(), f"--window-size={width},2000", f"--screenshot={shot}",
               f"--blink-settings=preferredColorScheme={int(scheme == 'light')}")
        sizes[name] = shot.stat().st_size
    # One flat colour compresses to almost nothing; text and charts do not.
    assert sizes["plan"] > 10 * sizes["blank"] and sizes["plan"] > 50_000


@pytest.mark.parametrize("width", [1400, 500, 400])
def test_nothing_is_wider_than_the_window(chromium, tmp_path, width):
    page.write_html(plan_from_json(), tmp_path / "plan.html")
    frame = tmp_path / "frame.html"
    frame.write_text(f"""<!doctype html><body><iframe id="f" src="plan.html" style="width:{width}px;height:900px;border:0"></iframe>
<script>addEventListener("message", e => document.body.dataset.width = e.data)</script>""")
    asking = "parent.postMessage(document.documentElement.scrollWidth, '*')"
    text = (tmp_path / "plan.html").read_text()
    (tmp_path / "plan.html").write_text(text.replace("</body>", f"<script>setTimeout(() => {asking}, 1000)</script></body>"))
    seen, _ = browse(chromium, tmp_path, frame.as_uri(), "--window-size=1500,1000", "--dump-dom")
    assert int(re.search(r'data-width="(\d+)"', seen).group(1)) <= width


def test_sorting_and_filter(chromium, tmp_path):
    page.write_html(plan_from_json(), tmp_path / "plan.html")
    acting = """<script>
const heads = [...document.querySelectorAll("#ranked th button")], order = [];
const read = () => order.push([...document.querySelectorAll("#ranked tbody tr")].filter(r => !r.hidden).map(r => r.cells[0].textContent).join(" "));
heads[7].click(); read(); heads[7].click(); read(); heads[1].click(); read();
const box = document.getElementById("filter"); box.value = "ep8 ZERO1"; box.dispatchEvent(new Event("input")); heads[0].click(); read();
document.documentElement.dataset.order = order.join(",");
</script></body>"""
    text = (tmp_path / "plan.html").read_text()
    (tmp_path / "plan.html").write_text(text.replace("</body>", acting))
    seen, console = browse(chromium, tmp_path, (tmp_path / "plan.html").as_uri(), "--dump-dom")
    by_memory, down, by_layout, filtered = re.search(r'data-order="([^"]*)"', seen).group(1).split(",")
    assert console == []
    memory = sorted(enumerate(plan_from_json().candidates, 1), key=lambda item: item[1].peak_bytes)
    assert by_memory == " ".join(str(rank) for rank, _ in memory) and down.split() == by_memory.split()[::-1]
    names = sorted(enumerate(plan_from_json().candidates, 1), key=lambda item: item[1].layout)
    assert by_layout == " ".join(str(rank) for rank, _ in names)
    assert filtered == "1 5" and "2 of 7 layouts" in body_of(seen)


@pytest.mark.parametrize("text", [f"<script>{MARK}</script>", f"<img src=x onerror={MARK}>", f'"><svg onload={MARK}>', f"</script><script>{MARK}</script>",
                                  f"<a href=\"javascript:{MARK}\">x</a>", "<b>bold</b>"])
def test_names_are_inert(chromium, tmp_path, text):
    page.write_html(hostile_plan(plan_from_json(), text), tmp_path / "plan.html")
    seen, console = browse(chromium, tmp_path, (tmp_path / "plan.html").as_uri(), "--dump-dom")
    root = re.search(r"<html[^>]*>", seen).group(0)
    assert console == [] and "data-owned" not in root and 'data-ready="yes"' in root
    body = body_of(seen)
    assert "javascript:" not in "".join(re.findall(r"<a [^>]*>", body)) and "<b>bold" not in body and not re.search(r"font-weight: *bold", body)


def test_nothing_fits_page(chromium, tmp_path):
    page.write_html(dataclasses.replace(plan_from_json(), candidates=(), timeline=()), tmp_path / "plan.html")
    seen, console = browse(chromium, tmp_path, (tmp_path / "plan.html").as_uri(), "--dump-dom")
    assert console == [] and "No layout of this search fits." in seen
