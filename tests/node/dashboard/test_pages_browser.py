"""Every page in a real browser: empty, small, with 1,000 nodes, and with hostile names."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from urllib.parse import quote

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from node.gateway.scripted_client import ScriptedClient, ScriptedGeneration, ScriptedModel
from playwright.sync_api import Browser, Page, expect
from support.dashboard_browser import CHROMIUM, DESKTOP, PHONE, Served, browsing, complaints
from support.dashboard_source import ExampleSource
from support.dashboard_swarms import example_source
from swarm.client.request import GenerationRequest
from swarm.serving.session.trace import HopTrace, Replay, Trace
from swarm_node.dashboard import wording
from swarm_node.dashboard.app import combined, create_dashboard
from swarm_node.gateway.app import create_app

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs a browser: {CHROMIUM} is not there")

MAX_PAGE_BYTES = 500_000
MAX_FIRST_PAINT_MS = 1_000
SWARMS = {"empty": (0, False), "small": (7, False), "large": (1000, False), "hostile": (14, True)}
EVERYWHERE = ("/", "/nodes", "/glossary", "/try")
VIOLATIONS = {"resultTypes": ["violations"]}
"""Options of axe: it describes no element that breaks no rule, which takes it a third of its time."""
WEIGHT = "performance.getEntriesByType('{}').reduce((sum, one) => sum + one.decodedBodySize, 0)"
GONE = "the connection to the gateway failed; try again"
Swarms = dict[str, tuple[ExampleSource, Served]]


class TracedClient(ScriptedClient):
    """Answers with the script over two hops, the second of which replaced a lost server."""

    def answer(self, request: GenerationRequest) -> ScriptedGeneration:
        self.asked.append(request)
        return TracedGeneration(self, self.script)


class TracedGeneration(ScriptedGeneration):
    def trace(self) -> dict[str, object]:
        hops = [
            HopTrace(peer_id="gone-peer", start=12, end=36, num_steps=2, compute_ms=60, is_replaced=True),
            HopTrace(peer_id="peer-of-<b>birch", start=12, end=36, num_steps=3, compute_ms=90, queue_ms=0, wire_ms=27),
            HopTrace(peer_id="peer-of-cedar", start=0, end=12, num_steps=3, compute_ms=30, queue_ms=3, wire_ms=60),
        ]
        lost = Replay(
            lost_peer="gone-peer", start=12, end=36, reason="timeout", new_peers=("peer-of-<b>birch",), num_tokens=9
        )
        times = {"opening_ms": 12.0, "first_token_ms": 80.0, "total_ms": 260.0, "num_tokens": self.yielded}
        return Trace(model="any", hops=hops, replays=[lost], **times).to_dict()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def swarms() -> Iterator[Swarms]:
    served: Swarms = {}
    for name, (num_nodes, hostile) in SWARMS.items():
        source = example_source(num_nodes, hostile=hostile)
        models = [ScriptedModel(name=model.name) for model in source.overview().models]
        gateway = create_app(TracedClient(served=models))
        served[name] = source, Served(combined(gateway, create_dashboard(source, has_chat=True)))
    yield served
    for _, server in served.values():
        server.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport=DESKTOP, permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(120_000)
    yield context.new_page()
    context.close()


def paths_of(source: ExampleSource) -> list[str]:
    """Return the paths of a run, a node, and all models, which differ in health."""
    overview = source.overview()
    models = [f"/models/{quote(model.name, safe='')}" for model in overview.models]
    runs = [f"/runs/{run.run}" for run in overview.runs[:1]]
    nodes = [f"/nodes/{node.peer_id}" for node in source.nodes()[:1]]
    return [*EVERYWHERE, *models, *runs, *nodes]


@pytest.mark.parametrize("swarm", SWARMS)
def test_every_page_logs_nothing_and_is_accessible_narrow_and_light(
    browser: Browser, swarms: Swarms, swarm: str
) -> None:
    """Axe would take seconds for a page of a thousand rows, which are like those of a small swarm."""
    source, served = swarms[swarm]
    context = browser.new_context(viewport=PHONE, color_scheme="dark" if swarm in {"small", "empty"} else "light")
    page = context.new_page()
    heard = complaints(page)
    for path in paths_of(source):
        page.goto(served.url + path)
        expect(page.locator("#live-state")).to_have_text("Live")
        assert page.locator("h1").count() == 1
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"{path} scrolls sideways: {width}"
        if swarm != "large":
            found = Axe().run(page, options=VIOLATIONS)
            assert found.violations_count == 0, f"{path}: {found.generate_report()}"
        weight = page.evaluate(f"{WEIGHT.format('navigation')} + {WEIGHT.format('resource')}")
        assert 8_000 < weight < MAX_PAGE_BYTES, f"{path} weighs {weight:,} bytes"
    assert not heard
    context.close()


ROWS_OF_NUMBERS = """Array.from(document.querySelectorAll("td.num"), cell => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return new Set(Array.from(range.getClientRects(), box => Math.round(box.bottom))).size;
})"""


def test_rows_have_one_line_on_a_phone(browser: Browser, swarms: Swarms) -> None:
    source, served = swarms["small"]
    context = browser.new_context(viewport=PHONE)
    page = context.new_page()
    page.goto(f"{served.url}/runs/{quote(source.overview().runs[0].run)}")
    lines = page.evaluate(ROWS_OF_NUMBERS)
    page.goto(f"{served.url}/nodes")
    heights = page.evaluate("() => [...document.querySelectorAll('tbody tr')].map(row => row.offsetHeight)")
    context.close()
    assert len(lines) > 20
    assert max(lines) == 1
    assert len(heights) > 5
    assert max(heights) < 50, "rows of nodes must have one line"


def test_a_table_of_nodes_shows_all_columns_on_a_desk_and_on_paper(browser: Browser, swarms: Swarms) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    page = context.new_page()
    page.goto(f"{swarms['large'][1].url}/nodes")
    width = "(box => box.scrollWidth - box.clientWidth)(document.querySelector('.scroll'))"
    assert page.evaluate(width) == 0
    heights = page.evaluate("() => [...document.querySelectorAll('tbody tr')].map(row => row.offsetHeight)")
    assert max(heights) < 70, "a row must have two lines at most"
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 between a browser's usual margins
    page.emulate_media(media="print")
    assert page.evaluate(width) == 0
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 38, 34)", "paper is white"
    context.close()


def test_pages_on_a_desk_in_the_light_are_accessible_too(page: Page, swarms: Swarms) -> None:
    source, served = swarms["small"]
    for path in paths_of(source):
        page.goto(served.url + path)
        found = Axe().run(page, options=VIOLATIONS)
        assert found.violations_count == 0, f"{path}: {found.generate_report()}"


FIRST_PAINT = """() => new Promise(resolve => new PerformanceObserver(list => {
    for (const entry of list.getEntriesByName("first-contentful-paint")) resolve(entry.startTime);
}).observe({type: "paint", buffered: true}))"""


@pytest.mark.parametrize("path", ["/", "/nodes"])
def test_pages_of_a_thousand_nodes_paint_within_a_second(page: Page, swarms: Swarms, path: str) -> None:
    painted: list[float] = []
    while not painted or (min(painted) >= MAX_FIRST_PAINT_MS and len(painted) < 5):
        page.goto(swarms["large"][1].url + path)
        painted.append(page.evaluate(FIRST_PAINT))
    assert min(painted) < MAX_FIRST_PAINT_MS, "not even the best of five, since others use this machine too"


def test_hostile_names_are_shown_as_text(page: Page, swarms: Swarms) -> None:
    source, served = swarms["hostile"]
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog opened: {dialog.message}"))
    for path in paths_of(source):
        page.goto(served.url + path)
        assert "Swarm" in page.title()
        assert page.locator("main script, main img, main [onerror], main a[href^='javascript:']").count() == 0
        shown = page.locator("main").inner_text()
        assert not {"\u202e", "\u2066", "\x07", "\x1b", "\x00"} & set(shown)
        assert "W" * 300 not in shown
    page.goto(f"{served.url}/nodes?q=%22%3E%3Cscript%3Ealert(1)%3C/script%3E")
    assert page.locator("#q").input_value() == '"><script>alert(1)</script>'
    assert "No node matches" in page.locator("main").inner_text()
    page.goto(served.url)
    assert "<script>document.title='owned'</script>" in page.locator("main").inner_text()


AFTER_A_FETCH_MS = 3_000
"""A page fetches itself again two seconds after the last time at the earliest."""


def test_a_change_arrives_without_disturbing_the_visitor(page: Page, swarms: Swarms) -> None:
    source, served = swarms["small"]
    before = source.overview()
    heard = complaints(page)
    page.clock.install()
    page.goto(f"{served.url}{paths_of(source)[len(EVERYWHERE)]}")
    expect(page.locator("#live-state")).to_have_text("Live")
    page.locator("summary").first.click()
    page.locator("#map ~ .scroll").focus()
    page.evaluate("document.querySelector('tbody tr').before = 'the same row'")
    detail = source.model_details[before.models[0].name]
    model = detail.model.model_copy(update={"words": "Something has changed."})
    source.model_details[model.name] = detail.model_copy(update={"model": model, "servers": detail.servers[1:]})
    page.clock.fast_forward(AFTER_A_FETCH_MS)
    source.change()
    expect(page.locator("main .lead.strong")).to_have_text("Something has changed.")
    assert page.locator("details").first.get_attribute("open") is not None
    assert page.evaluate("document.activeElement.className") == "card scroll"
    assert page.locator("tbody tr").count() == len(detail.servers) - 1
    source.model_details[model.name] = detail
    page.clock.fast_forward(AFTER_A_FETCH_MS)
    source.change()
    expect(page.locator("tbody tr")).to_have_count(len(detail.servers))
    assert not heard


def test_a_lost_connection_is_reported_and_restored(page: Page, swarms: Swarms) -> None:
    source, served = swarms["empty"]
    source.change()
    page.clock.install()
    page.goto(served.url)
    expect(page.locator("#live-state")).to_have_text("Live")
    served.stop()
    expect(page.locator("#live-state")).to_have_text("Connection lost, trying again")
    expect(page.locator("#main")).to_have_css("filter", "grayscale(1)")
    page.clock.fast_forward(2_000)
    expect(page.locator("#live-age")).to_have_text(re.compile(r"^([2-9]|\d\d) s ago$"))
    served.start()
    page.clock.fast_forward(20_000)
    expect(page.locator("#live-state")).to_have_text("Live")
    expect(page.locator("#main")).to_have_css("filter", "none")
    page.clock.fast_forward(AFTER_A_FETCH_MS)
    source.change(stale="the network gives no answer")
    expect(page.locator(".notice")).to_contain_text("the network gives no answer")
    page.clock.fast_forward(AFTER_A_FETCH_MS)
    source.change(stale=None)
    expect(page.locator(".notice")).to_have_count(0)


SILENT_STREAMS = """
    let isFirst = true;
    window.EventSource = class {
        addEventListener(kind, listener) {
            if (kind === "heartbeat" && isFirst) { isFirst = false; setTimeout(listener); }
        }
        close() {}
    };
"""
"""Streams that stay open and say nothing, but for one heartbeat of the first."""


def test_a_stream_that_falls_silent_is_not_shown_as_live(page: Page, swarms: Swarms) -> None:
    page.clock.install()
    page.add_init_script(SILENT_STREAMS)
    page.goto(swarms["empty"][1].url)
    expect(page.locator("#live-state")).to_have_text("Live")
    page.clock.fast_forward(26_000)
    expect(page.locator("#live-state")).to_have_text("Connection lost, trying again", timeout=5_000)


SHOWING = """
    let isHidden = true;
    const opened = [];
    Object.defineProperty(Document.prototype, "hidden", { get: () => isHidden });
    window.EventSource = class extends EventSource {
        constructor(...given) {
            super(...given);
            opened.push(this);
        }
    };
    window.numOpen = () => opened.filter((one) => one.readyState !== EventSource.CLOSED).length;
    window.show = (isShown) => {
        isHidden = !isShown;
        document.dispatchEvent(new Event("visibilitychange"));
    };
"""


def test_a_page_has_one_stream_while_it_is_visible_and_none_otherwise(page: Page, swarms: Swarms) -> None:
    page.add_init_script(SHOWING)
    page.goto(swarms["small"][1].url)
    expect(page.locator("#live-state")).to_have_text("Paused")
    assert page.evaluate("numOpen()") == 0, "it was opened behind another page"
    page.evaluate("show(true)")
    expect(page.locator("#live-state")).to_have_text("Live")
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true})); show(true)")
    assert page.evaluate("numOpen()") == 1, "it was restored from the browser's cache"
    page.evaluate("show(false)")
    assert page.evaluate("numOpen()") == 0
    expect(page.locator("#live-state")).to_have_text("Paused")


def test_page_shows_the_age_of_views_until_they_change(page: Page, swarms: Swarms) -> None:
    source, served = swarms["small"]
    fresh = source.shown
    source.shown = fresh.model_copy(update={"at": time.time() - 75})
    page.goto(served.url)
    expect(page.locator("#live-state")).to_have_text("Live")
    expect(page.locator("#live-age")).to_have_text(re.compile(r"^(7[5-9]|8\d) s ago$"))
    source.change()
    expect(page.locator("#live-age")).to_have_text(re.compile(r"^(just now|\d s ago)$"))


def test_the_keyboard_reaches_the_content_and_copies_the_command(page: Page, swarms: Swarms) -> None:
    source, served = swarms["small"]
    page.goto(served.url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("button.copy").first).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == source.overview().join_command


def test_pages_are_complete_without_scripts(browser: Browser, swarms: Swarms) -> None:
    source, served = swarms["small"]
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(served.url)
    shown = page.locator("body").inner_text()
    assert source.overview().join_command in shown
    assert "Snapshot · updated" in shown
    assert page.locator("button.copy:visible").count() == 0
    page.goto(f"{served.url}/runs/{source.overview().runs[0].run}")
    assert page.locator("#loss ~ .card svg path.line").count() == 2
    context.close()


def test_blocks_that_no_server_has_are_drawn_in_their_places(page: Page) -> None:
    """Reads the picture's pixels, since a column's style may be drawn elsewhere than the column is."""
    from matplotlib.image import imread  # noqa: PLC0415 - no other test needs it

    source = example_source(12)
    [(name, detail)] = source.model_details.items()
    model = detail.model.model_copy(update={"num_blocks": 9, "missing": ((5, 9),), "health": "incomplete"})
    replicas = (2,) * 5 + (0,) * 4
    source.model_details[name] = detail.model_copy(
        update={"model": model, "replicas": replicas, "servers": (), "chains": ()}
    )
    served = Served(create_dashboard(source))
    try:
        page.goto(f"{served.url}/models/{quote(name, safe='')}")
        chart = page.locator(".plot.columns svg")
        rgb_YX = imread(io.BytesIO(chart.screenshot()))[..., :3]
    finally:
        served.close()
    paper, row = rgb_YX[rgb_YX.shape[0] // 2, 0], rgb_YX[rgb_YX.shape[0] // 2]
    width = len(row) / 9
    for block, num_servers in enumerate(replicas):
        red, green, _ = row[round((block + 0.5) * width)]
        assert (red > green) == (num_servers == 0), f"block {block}"
        # there is paper between two columns
        edge = row[max(0, round(block * width) - 1)]
        assert edge == pytest.approx(paper, abs=0.02), f"before block {block}"
        inside = row[round((block + 0.12) * width) : round((block + 0.88) * width)]
        assert np.ptp(inside, axis=0).max() < 0.02, f"block {block} is of one colour"


def test_a_prompt_is_answered_and_its_path_is_drawn(
    page: Page, swarms: Swarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, served = swarms["small"]
    for name, detail in source.model_details.items():
        known = detail.servers[0].model_copy(update={"peer_id": "peer-of-cedar", "name": "<i>cedar …JoWQrV1z"})
        monkeypatch.setitem(source.model_details, name, detail.model_copy(update={"servers": (known,)}))
    heard = complaints(page)
    page.goto(f"{served.url}/try")
    for mode in ("chat", "complete"):
        page.locator("#mode").select_option(mode)
        page.locator("#question").fill("Say hello")
        page.locator("#send").click()
        expect(page.locator("#progress")).to_contain_text("Done in")
        assert page.locator("#answer").inner_text() == "hello!"
        rows = page.locator("#trace tbody tr")
        expect(rows).to_have_count(2)
        assert page.locator("#trace .lead").inner_text().startswith("3 tokens over 2 hops")
        # two tokens in the 180 ms after the first
        assert page.locator("#trace .lead").inner_text().endswith(", 11.1 tokens per second after the first.")
        times = ["1", "ms", "10", "ms", "20", "ms", "31", "ms"]
        assert rows.nth(0).inner_text().split() == ["<i>cedar", "…JoWQrV1z", "0:12", *times]
        assert rows.nth(0).locator("th .nowrap").inner_text() == "…JoWQrV1z", "it must not be broken over two lines"
        ends = [_ends(page, i) for i in range(2)]
        assert ends[0][1] == pytest.approx(ends[1][0]), "the second hop must begin where the first ends"
        assert ends[1][1] == pytest.approx(100)
    assert "Blocks 12:36: …one-peer was lost (timeout), …<b>birch took over" in page.locator("#trace").inner_text()
    found = Axe().run(page, options=VIOLATIONS)
    assert found.violations_count == 0, found.generate_report()
    assert not heard


def _ends(page: Page, row: int) -> tuple[float, float]:
    """Return where a hop's bar begins and ends, in hundredths."""
    fills = page.locator("#trace tbody tr").nth(row).locator("rect.fill")
    first, last = fills.first, fills.last
    end = float(last.get_attribute("x") or 0) + float(last.get_attribute("width") or 0)
    return float(first.get_attribute("x") or 0), end


@pytest.mark.parametrize(
    ("platform", "is_phone", "shown"),
    [("Linux x86_64", False, "Ctrl-Enter sends"), ("MacIntel", False, "⌘-Enter sends"), ("Linux armv81", True, "")],
)
def test_the_key_that_sends_is_named_as_on_the_visitor_s_machine(
    browser: Browser, swarms: Swarms, platform: str, is_phone: bool, shown: str
) -> None:
    context = browser.new_context(is_mobile=is_phone, has_touch=is_phone)
    page = context.new_page()
    page.add_init_script(f"Object.defineProperty(navigator, 'platform', {{get: () => '{platform}'}})")
    page.goto(f"{swarms['small'][1].url}/try")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#shortcut")).to_have_text(shown)
    context.close()


def test_a_refusal_of_the_gateway_is_shown_in_its_words(page: Page, swarms: Swarms) -> None:
    _, served = swarms["small"]
    page.goto(f"{served.url}/try")
    page.evaluate("document.querySelector('#model option').value = 'nobody-has-this'")
    page.locator("#question").fill("Say hello")
    page.locator("#send").click()
    expect(page.locator("#progress")).to_contain_text("the model 'nobody-has-this' is not served here")
    assert page.locator("#send").is_enabled()


def test_a_gateway_that_is_gone_is_told_in_plain_words(page: Page, swarms: Swarms) -> None:
    page.goto(f"{swarms['small'][1].url}/try")
    page.locator("#question").fill("Say hello")
    page.route("**/v1/traces/**", lambda route: route.abort())
    page.locator("#send").click()
    expect(page.locator("#trace")).to_have_text(f"The trace could not be read: {GONE}")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.locator("#send").click()
    expect(page.locator("#progress")).to_have_text(GONE)


def test_a_refusal_does_not_show_the_path_of_the_answer_before(page: Page, swarms: Swarms) -> None:
    page.goto(f"{swarms['small'][1].url}/try")
    page.locator("#question").fill("Say hello")
    page.locator("#send").click()
    expect(page.locator("#trace tbody tr")).to_have_count(2)
    page.evaluate("document.querySelector('#model option').value = 'nobody-has-this'")
    page.locator("#send").click()
    expect(page.locator("#progress")).to_contain_text("is not served here")
    expect(page.locator("#trace")).to_contain_text("After an answer, this shows")


def test_a_path_over_one_hop_is_written_in_the_singular(page: Page, swarms: Swarms) -> None:
    page.goto(f"{swarms['small'][1].url}/try")
    trace = {"num_tokens": 1, "hops": [{"peer_id": "a" * 9, "start": 0, "end": 6, "ms_per_step": 3}]}
    script = (
        "trace => import('/static/waterfall.js').then(one => one.showTrace(document.querySelector('#trace'), trace))"
    )
    page.evaluate(script, trace)
    assert page.locator("#trace .lead").inner_text().startswith("1 token over 1 hop: ")


def test_the_page_writes_durations_as_the_server_does(page: Page, swarms: Swarms) -> None:
    values = [0, 0.0004, 0.0123, 0.32, 0.9994, 0.99951, 1, 4.26, 9.96, 12.4, 99.4, 99.6, 211, 599.4, 599.6, 3569, 3571]
    values += [5000, 7200, 7261, 100_000, 172_799, 172_801, 1e7]
    page.goto(f"{swarms['empty'][1].url}/")
    script = "values => import('/static/wording.js').then(one => values.map(v => [one.duration(v), one.ago(v)]))"
    written = page.evaluate(script, values)
    assert written == [[wording.duration(value), wording.ago(value)] for value in values]
