"""The pages over HTTP: complete, bounded, and closed to anything else."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from support.dashboard_source import ExampleSource
from support.dashboard_swarms import example_source
from swarm.network.traffic import PATH_KINDS
from swarm_node.dashboard import pages, wording
from swarm_node.dashboard.views import NodeDetail, NodeView
from swarm_node.dashboard.wording import clock
from swarm_node.formatting import path_counts, plural, whole_mebibytes
from swarm_protocol.records import PathKind

MAX_HTML_BYTES = 250_000


def opened(source: ExampleSource, *, has_chat: bool = False) -> TestClient:
    app = FastAPI()
    app.include_router(pages.router(source, has_chat))
    return TestClient(app, raise_server_exceptions=True)


@pytest.fixture(scope="module")
def source() -> ExampleSource:
    return example_source(1000)


@pytest.fixture(scope="module")
def client(source: ExampleSource) -> Iterator[TestClient]:
    with opened(source) as client:
        yield client


def rows(html: str) -> list[str]:
    return re.findall(r'<tr data-key="([^"]+)"', html)


def test_pages_allow_nothing_but_their_own_files(client: TestClient) -> None:
    for path in ("/", "/nodes", "/models/nobody", "/static/live.js"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        if path != "/static/live.js":
            assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=\"/static/)", answer.text)


def test_json_link_of_each_page_leads_to_what_the_page_shows(client: TestClient, source: ExampleSource) -> None:
    overview, node = source.overview(), source.nodes()[0]
    details = [f"/models/{quote(overview.models[0].name, safe='')}", f"/runs/{overview.runs[0].run}"]
    for path in ("/nodes", f"/nodes/{node.peer_id}", *details):
        assert f'<a href="/api/v1{path}">JSON</a>' in client.get(path).text
    for path in ("/", "/models/nobody"):
        assert '<a href="/api/v1/overview">JSON</a>' in client.get(path).text


@pytest.mark.parametrize(
    "path", ["/models/nobody", "/runs/nothing", "/nodes/nowhere", "/models/%00%0a", "/static/x.js"]
)
def test_unknown_run_node_or_model_is_a_page_that_says_so(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "is not here" in answer.text
    assert 'href="/"' in answer.text


@pytest.mark.parametrize("end", ["%09", "%0d"])
def test_visitor_of_an_unknown_address_does_not_hide_a_page_from_others(end: str) -> None:
    source = example_source(8)
    run = source.overview().runs[0].run
    with opened(source) as client:
        for _ in range(3):  # pages are kept for a second, which may end between two requests
            assert client.get(f"/runs/{run}{end}").status_code == 404
            assert client.get(f"/runs/{run}").status_code == 200


@pytest.mark.parametrize(
    "path", ["/static/../pages.py", "/static/%2e%2e/pages.py", "/static/..%2fviews.py", "/static/"]
)
def test_no_path_reaches_outside_the_static_folder(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "import" not in answer.text


def test_pages_say_what_was_not_observed_yet() -> None:
    source = example_source(8)
    since = source.overview().at - 60
    unseen = {"turnover_since": since, "first_token_p50_s": None, "first_token_p95_s": None}
    source.change(**unseen)
    with opened(source) as client:
        html = client.get("/").text
        assert f"since {clock(since)}, when this history begins" in html
        assert "no gateway has reported this lately" in html
        model = source.overview().models[0]
        assert f"at block {model.weakest_block}" in client.get(f"/models/{quote(model.name)}").text


def test_overview_without_a_history_does_not_say_that_one_grows() -> None:
    source = example_source(8)
    source.all_series.clear()
    with opened(source) as client:
        assert "It grows while this dashboard runs" in client.get("/").text
        source.change(stale="the history cannot be used")
        html = client.get("/").text
    assert "Some figures are old or missing.</strong> the history cannot be used" in html
    assert "No history can be shown now" in html
    assert "It grows" not in html


def test_overview_without_a_history_counts_nobody_who_came_and_went() -> None:
    source = example_source(8)
    source.change(joins_24h=None, leaves_24h=None, happenings=())
    with opened(source) as client:
        html = client.get("/").text
    assert "No history can be shown now" in html
    assert "Nothing yet" not in html
    assert "the history cannot be read now" in html
    assert "this history begins" not in html


@pytest.mark.parametrize(("num_validated", "said"), [(1, "The loss on held-out"), (2, "Dashed: the loss on held-out")])
def test_legend_names_a_dashed_line_only_where_one_is_drawn(num_validated: int, said: str) -> None:
    source = example_source(8)
    run = source.overview().runs[0].run
    detail = source.run_details[run]
    last = len(detail.steps) - num_validated
    steps = [
        each.model_copy(update={"validation_loss": 2.0 if i >= last else None}) for i, each in enumerate(detail.steps)
    ]
    source.run_details[run] = detail.model_copy(update={"steps": tuple(steps)})
    with opened(source) as client:
        html = client.get(f"/runs/{quote(run)}").text
    assert said in html
    assert ("line beside" in html) is (num_validated > 1)


def test_try_it_is_there_only_beside_a_gateway(source: ExampleSource) -> None:
    assert opened(source).get("/try").status_code == 404
    assert 'href="/try"' not in opened(source).get("/").text
    there = opened(source, has_chat=True)
    assert there.get("/try").status_code == 200
    assert 'href="/try"' in there.get("/").text


def test_try_page_says_why_no_model_can_answer() -> None:
    assert "None is served." in opened(example_source(0), has_chat=True).get("/try").text
    source = example_source(12)
    models = [model.model_copy(update={"health": "incomplete"}) for model in source.overview().models]
    source.change(models=models)
    assert "Blocks of each model have no server." in opened(source, has_chat=True).get("/try").text


def test_a_thousand_nodes_come_in_pages_that_miss_none(client: TestClient, source: ExampleSource) -> None:
    found: list[str] = []
    for number in range(1, 21):
        answer = client.get("/nodes", params={"page": number})
        assert len(answer.content) < MAX_HTML_BYTES
        found += rows(answer.text)
    assert sorted(found) == sorted(node.peer_id for node in source.nodes())
    assert 'rel="next"' not in answer.text
    assert "951–1,000 of 1,000" in answer.text


@pytest.mark.parametrize("asked", ["0", "-1", "99999", "9" * 400, "x", "٣", ""])
def test_a_page_number_out_of_range_gives_the_nearest_page(client: TestClient, asked: str) -> None:
    answer = client.get("/nodes", params={"page": asked})
    assert answer.status_code == 200
    assert len(rows(answer.text)) == 50


def test_nodes_are_found_by_name_and_filtered_by_state(client: TestClient, source: ExampleSource) -> None:
    some = source.nodes()[123]
    assert some.peer_id in rows(client.get("/nodes", params={"q": some.name.upper(), "sort": "speed"}).text)
    leaving = {node.peer_id for node in source.nodes() if node.state == "leaving"}
    assert set(rows(client.get("/nodes", params={"state": "leaving"}).text)) == leaving
    both = client.get("/nodes", params={"state": "leaving", "reach": "relay", "page": "1"}).text
    assert set(rows(both)) == {
        node.peer_id for node in source.nodes() if (node.state, node.reachability) == ("leaving", "relay")
    }
    fastest = rows(client.get("/nodes", params={"sort": "speed"}).text)[0]
    assert source.node_details[fastest].node.decode_tokens_per_s == 78.0


def test_number_of_listed_nodes_is_divided_by_state_if_some_are_not_alive() -> None:
    source = example_source(3)
    with opened(source) as client:
        assert '<h2 id="found">3 nodes</h2>' in client.get("/nodes").text
    for state, node in zip(("leaving", "gone"), source.nodes(), strict=False):
        detail = source.node_details[node.peer_id]
        source.node_details[node.peer_id] = detail.model_copy(update={"node": node.model_copy(update={"state": state})})
    with opened(source) as client:
        assert '<h2 id="found">3 nodes: 1 alive, 1 leaving, 1 gone</h2>' in client.get("/nodes").text
        assert '<h2 id="found">1 node found</h2>' in client.get("/nodes", params={"state": "gone"}).text


def test_axis_of_blocks_ends_with_the_last_block() -> None:
    source = example_source(12)
    for num_blocks, shown in ((6, "0 1 2 3 4 5"), (36, "0 9 18 26 35")):
        name, detail = next(iter(source.model_details.items()))
        few = detail.model.model_copy(update={"num_blocks": num_blocks})
        source.model_details[name] = detail.model_copy(update={"model": few, "replicas": (2,) * num_blocks})
        with opened(source) as client:
            text = client.get(f"/models/{quote(name, safe='')}").text
        axis = text.partition('<div class="x-labels')[2].partition("</div>")[0]
        assert " ".join(re.findall(r"<span>(\d+)</span>", axis)) == shown


def test_run_explains_its_words_as_the_glossary_does(client: TestClient, source: ExampleSource) -> None:
    text = client.get(f"/runs/{source.overview().runs[0].run}").text
    words = re.findall(
        r"<dt>([\w ]+)</dt><dd>([^<]+)</dd>", text.partition('<dl class="words">')[2].partition("</dl>")[0]
    )
    assert [word for word, _ in words] == ["Endorsement", "Proved step", "Probation", "To count fully"]
    glossary = (Path(__file__).parents[3] / "docs" / "glossary.md").read_text()
    for word in ("endorsement", "probation"):
        (meaning,) = [line.split(" | ")[1] for line in glossary.splitlines() if line.startswith(f"| {word} |")]
        explained = unescape(dict(words)[word.capitalize()]).casefold()
        assert explained.startswith(meaning.partition(";")[0].casefold())


def test_visitors_find_the_glossary_on_every_page_and_its_terms_as_in_the_documentation(client: TestClient) -> None:
    assert '<a href="/glossary">' in client.get("/").text
    text = client.get("/glossary").text
    words = {word.casefold(): unescape(meaning) for word, meaning in re.findall(r"<dt>(.+)</dt><dd>(.+)\.</dd>", text)}
    assert {"volunteer", "block", "run", "outer step", "digest", "relay"} <= words.keys()
    documented = (Path(__file__).parents[3] / "docs" / "glossary.md").read_text().casefold()
    for word in ("volunteer", "seed", "gateway", "run", "author", "endorsement", "probation"):
        assert f"| {word} | {words[word].casefold()}" in documented


def test_end_of_a_peer_id_in_a_name_is_not_broken_over_two_lines() -> None:
    source = example_source(1)
    [node] = source.nodes()
    named = node.model_copy(update={"name": "vm …JoWQrV1z"})
    source.node_details[node.peer_id] = source.node_details[node.peer_id].model_copy(update={"node": named})
    with opened(source) as client:
        assert '<bdi>vm <span class="nowrap">…JoWQrV1z</span></bdi>' in client.get("/nodes").text


def test_a_node_shows_the_path_from_here_and_its_own_counts(client: TestClient, source: ExampleSource) -> None:
    shown = {kind: _reached(source, kind) for kind in PATH_KINDS}
    for kind, node in shown.items():
        assert node.from_here is not None
        text = client.get(f"/nodes/{node.peer_id}").text
        assert f"{kind}, " in text
        assert f"{whole_mebibytes(node.from_here.sent_bytes)} sent, " in text
        assert node.paths is not None
        assert f"{plural(sum(node.paths.values()), 'peer')}: {path_counts(node.paths)}" in text
    text = client.get("/nodes", params={"q": shown["punched"].name}).text
    assert re.search(r">here: punched(, [\d.]+ ms)?</span></td>", text)
    apart = next(node for node in source.nodes() if node.from_here is None and node.paths is None)
    text = client.get(f"/nodes/{apart.peer_id}").text
    assert "<dd>none now</dd>" in text
    assert re.search(r"All connections</dt><dd><span class=\"none\">", text)
    assert f"counted at each end: {path_counts(source.overview().paths)}." in client.get("/").text


def test_a_node_shows_its_protocol_version_if_its_record_says_it(client: TestClient, source: ExampleSource) -> None:
    peer_id, detail = next(iter(source.node_details.items()))
    assert "<bdi>0.1.0</bdi>, protocol 7</dd>" in client.get(f"/nodes/{peer_id}").text
    silent = detail.model_copy(update={"node": detail.node.model_copy(update={"protocol_version": 0})})
    with opened(ExampleSource(source.shown, node_details={peer_id: silent})) as other:
        assert "<bdi>0.1.0</bdi></dd>" in other.get(f"/nodes/{peer_id}").text


def test_the_page_of_the_dashboard_s_own_node_says_that_it_is_its_own() -> None:
    source = example_source(1)
    [node] = source.nodes()
    own = node.model_copy(update={"from_here": None, "is_observer": True})
    source.node_details[node.peer_id] = source.node_details[node.peer_id].model_copy(update={"node": own})
    with opened(source) as client:
        assert "<dd>this is the dashboard's node itself</dd>" in client.get(f"/nodes/{node.peer_id}").text


@pytest.mark.parametrize("address", ["/models", "/models/", "/runs", "/runs/"])
def test_the_address_of_all_models_or_runs_leads_to_their_section_of_the_overview(
    client: TestClient, address: str
) -> None:
    answer = client.get(address, headers={"accept": "text/html"}, follow_redirects=False)
    section = address.strip("/")
    assert (answer.status_code, answer.headers["location"]) == (307, f"/#{section}")
    assert f'id="{section}"' in client.get("/").text
    assert client.get(address, headers={"accept": "application/json"}).status_code == 404


def test_an_address_without_a_page_is_reported_as_such(client: TestClient) -> None:
    assert "No page has this address." in client.get("/checkpoints", headers={"accept": "text/html"}).text
    assert "No page has this address." not in client.get("/nodes/nobody", headers={"accept": "text/html"}).text


def _reached(source: ExampleSource, kind: PathKind) -> NodeView:
    return next(node for node in source.nodes() if node.paths and node.from_here and node.from_here.kind == kind)


def test_the_next_page_keeps_the_filter_and_bounds_what_it_repeats(client: TestClient) -> None:
    answer = client.get("/nodes", params={"q": "nvidia", "reach": "public", "junk": "x" * 5_000})
    following = re.search(r'href="([^"]+)" rel="next"', answer.text)
    assert following is not None
    assert "q=nvidia" in following[1]
    assert "reach=public" in following[1]
    assert "page=2" in following[1]
    assert len(following[1]) < 300


def test_a_run_shows_its_steps_refusals_contributors_and_files(client: TestClient, source: ExampleSource) -> None:
    detail = source.run_details[source.overview().runs[0].run]
    text = client.get(f"/runs/{detail.run.run}").text
    assert f"{detail.run.num_agreeing} of {detail.run.num_at_step}" in text
    assert detail.run.digest in text
    assert "41 times the group&#39;s median" in text
    assert "An entry accuses nobody" in text
    assert "it signed a wrong result of part 1" in text
    assert "for good" in text
    assert detail.contributors[0].peer_id in text
    assert detail.checkpoint[0].url in text
    assert "1–15 of 118" in text
    older = client.get(f"/runs/{detail.run.run}", params={"steps": "2"}).text
    assert "103" in rows(older)
    assert "118" not in rows(older)


def test_contributors_say_since_when_they_are_counted(client: TestClient, source: ExampleSource) -> None:
    detail = source.run_details[source.overview().runs[0].run]
    text = client.get(f"/runs/{detail.run.run}").text
    first = detail.steps[0]
    assert "that this dashboard has seen, from step " + str(first.outer_step) in text
    assert clock(first.at) in text
    assert "Seen for" in text
    assert "Up for" not in text
    assert "Each member of a step counts for an equal part of its tokens" in text
    unseen = detail.model_copy(update={"steps": (), "run": detail.run.model_copy(update={"run": "unseen"})})
    source.run_details["unseen"] = unseen
    try:
        text = opened(source).get("/runs/unseen").text
    finally:
        del source.run_details["unseen"]
    assert "which may have trained for longer" in text


def test_chain_says_how_much_of_its_time_is_not_measured(client: TestClient, source: ExampleSource) -> None:
    name, detail = next((name, each) for name, each in source.model_details.items() if each.chains)
    assert "nobody has measured" not in client.get(f"/models/{name}").text
    chain = detail.chains[0].model_copy(update={"ms_per_token": 51.7, "assumed_ms": 50.0})
    source.model_details[name] = detail.model_copy(update={"chains": (chain,)})
    try:
        text = opened(source).get(f"/models/{name}").text
    finally:
        source.model_details[name] = detail
    assert "51.7 ms per token</strong>, 50 ms of it assumed for links that nobody has measured" in text


def test_an_open_run_prints_the_line_that_joins_it(source: ExampleSource) -> None:
    detail = source.run_details[source.overview().runs[0].run]

    def text_with(**changes: object) -> str:
        source.run_details["other"] = detail.model_copy(update={"run": detail.run.model_copy(update=changes)})
        try:
            return opened(source).get("/runs/other").text
        finally:
            del source.run_details["other"]

    line = f"{source.overview().join_command} --run {detail.run.run}"
    assert line in text_with(state="training")
    assert line in text_with(state="waiting")
    assert "--invitation" not in text_with(state="training")
    assert f"{line} --invitation FILE" in text_with(state="training", needs_invitation=True)
    assert " --run " not in text_with(state="finished")
    assert " --run " not in text_with(run="story;reboot-0123456789ab"), "nothing that a shell would act on"


def test_model_page_names_the_publisher_or_says_that_there_is_none(source: ExampleSource) -> None:
    name = source.overview().models[0].name
    detail = source.model_details[name]

    def text_with(**changed: object) -> str:
        source.model_details[name] = detail.model_copy(update={"model": detail.model.model_copy(update=changed)})
        try:
            return opened(source).get(f"/models/{quote(name, safe='')}").text
        finally:
            source.model_details[name] = detail

    assert "Published by <code>12D3KooWxyz</code>" in text_with(publisher="12D3KooWxyz", manifest="ab" * 32)
    assert "but this dashboard has not received it yet" in text_with(publisher=None, manifest="ab" * 32)
    assert "Unpublished: nobody has signed" in text_with(publisher=None, manifest=None)


def test_other_weights_under_a_name_are_shown_with_a_remedy(client: TestClient, source: ExampleSource) -> None:
    model = source.overview().models[0]
    text = client.get(f"/models/{quote(model.name, safe='')}").text
    assert "Different weights are served under this name." in text
    assert f"<code>{model.other_revisions[0].revision}</code>: 2 servers, incomplete" in text
    assert "MODEL@REVISION" in text
    assert "2 revisions under this name" in client.get("/").text


def test_unreachable_server_is_marked() -> None:
    source = example_source(12)
    ((name, detail),) = source.model_details.items()
    first, *others = detail.servers
    lost = first.model_copy(update={"unreachable": True})
    source.model_details[name] = detail.model_copy(update={"servers": (lost, *others)})
    with opened(source) as client:
        html = client.get(f"/models/{quote(name, safe='')}").text
    assert html.count(">unreachable</span>") == 1
    assert "a request of this page's gateway failed there" in html


def test_convicted_server_is_marked_with_what_it_signed(client: TestClient, source: ExampleSource) -> None:
    name, detail = next(iter(source.model_details.items()))
    html = client.get(f"/models/{quote(name, safe='')}").text
    listed = {server.peer_id: server for server in detail.servers}
    convicted = [server for peer_id in rows(html) if (server := listed.get(peer_id)) and server.convicted]
    assert convicted
    assert html.count(f"{convicted[0].convicted}; clients do not use it") == len(convicted) < len(rows(html))


def test_a_run_that_only_the_history_knows_says_when_it_was_last_seen(source: ExampleSource) -> None:
    detail = next(iter(source.run_details.values()))
    at = source.overview().at - 7200
    run = detail.run.model_copy(update={"state": "gone", "words": "Not seen since then.", "remembered": at})
    source.run_details["old"] = detail.model_copy(update={"run": run})
    try:
        text = opened(source).get("/runs/old").text
    finally:
        del source.run_details["old"]
    assert "Not seen since then." in text
    assert "Last seen" in text
    assert "Projected end" not in text


def test_a_url_that_could_run_a_script_is_no_link(source: ExampleSource) -> None:
    detail = source.run_details[source.overview().runs[0].run]
    harmful = detail.checkpoint[0].model_copy(update={"url": "javascript:alert(1)"})
    mine = example_source(14)
    mine.run_details[detail.run.run] = detail.model_copy(update={"checkpoint": (harmful,)})
    answer = opened(mine).get(f"/runs/{detail.run.run}")
    assert answer.status_code == 200
    assert "javascript:" not in answer.text


def test_models_say_in_words_which_blocks_no_server_has(client: TestClient, source: ExampleSource) -> None:
    for model in source.overview().models:
        text = client.get(f"/models/{model.name}").text
        assert model.words in text
        assert f">{model.health}</span>" in text
    assert {model.health for model in source.overview().models} == {"whole", "thin", "incomplete"}
    assert "block 79: nobody" in client.get(f"/models/{source.overview().models[1].name}").text


def test_an_overview_of_a_swarm_that_only_trains_tells_what_it_trains() -> None:
    source = example_source(12)
    source.change(tokens_per_s=None, training_tokens_per_s=8300.0)
    text = " ".join(re.sub(r"<[^>]+>", " ", opened(source).get("/").text).split())
    assert "Tokens answered – not known per second, over all models" in text
    assert f"Tokens trained {wording.number(8300.0)} per second, over all runs" in text


def test_an_empty_swarm_says_what_to_do_next() -> None:
    source = example_source(0)
    client = opened(source)
    for path in ("/", "/nodes"):
        assert source.overview().join_command in client.get(path).text
    text = client.get("/").text
    assert "No volunteer is here yet" in text
    assert "--model OWNER/NAME" in text
    assert "swarm-node run init" in text


def test_join_command_with_an_address_of_this_machine_says_so() -> None:
    source, told = example_source(7), "This address works only on the machine that serves this page."
    assert told not in opened(source).get("/").text
    source.change(join_command="swarm-node join --peers /ip4/127.0.0.1/tcp/4001/p2p/12D3KooW")
    assert told in opened(source).get("/").text


def test_outdated_views_say_how_old_they_are_and_why() -> None:
    source = example_source(7, now=lambda: 0.0)
    source.shown = source.shown.model_copy(update={"stale": "no <b>peer</b> answers"})
    text = opened(source).get("/").text
    assert "no &lt;b&gt;peer&lt;/b&gt; answers" in text
    assert re.search(r"updated <span[^>]*>\d+ days ago", text)


def test_pages_and_files_are_compressed_for_browsers_that_support_it(client: TestClient) -> None:
    packed = client.get("/nodes", headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(packed.content) / 3
    plain = client.get("/nodes", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert len(plain.content) == int(plain.headers["content-length"])


def test_simultaneous_visitors_cost_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    source = example_source(7)
    asked: list[float] = []
    original = source.series

    async def counted(name: str, hours: float) -> object:
        asked.append(hours)
        return await original(name, hours)

    monkeypatch.setattr(source, "series", counted)
    monkeypatch.setattr(pages, "time", SimpleNamespace(monotonic=lambda: 100.0, time=time.time))
    client = opened(source)
    for _ in range(20):
        client.get("/")
    assert len(asked) == 2, "tokens answered and trained"
    source.change(num_volunteers=8)
    assert "8 volunteers are here" in client.get("/").text
    assert len(asked) == 4


class SlowSource(ExampleSource):
    """A source whose history does not answer for one node before `answers` is set."""

    def hold_up(self, peer: str) -> None:
        self.slow, self.num_asked = peer, 0
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def node(self, peer_id: str) -> NodeDetail | None:
        if peer_id == self.slow:
            self.num_asked += 1
            self.asked.set()
            await self.answers.wait()
        return await super().node(peer_id)


def test_a_slow_page_delays_no_other_and_is_made_once_for_all() -> None:
    example = example_source(7)
    source = SlowSource(example.shown, node_details=example.node_details)
    slow, other = list(source.node_details)[:2]
    app = FastAPI()
    app.include_router(pages.router(source))

    async def visit() -> None:
        source.hold_up(slow)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://swarm.test") as client:
            waiting = [asyncio.create_task(client.get(f"/nodes/{slow}")) for _ in range(5)]
            async with asyncio.timeout(60):
                await source.asked.wait()
                assert (await client.get(f"/nodes/{other}")).status_code == 200
                waiting[0].cancel()
                assert not any(task.done() for task in waiting[1:])
                source.answers.set()
                answers = await asyncio.gather(*waiting[1:])
        assert [answer.status_code for answer in answers] == [200] * 4
        assert source.num_asked == 2, "by the visitor that left, and by the next one"

    with pytest.MonkeyPatch.context() as patch:
        # all within the page's second
        patch.setattr(pages, "time", SimpleNamespace(monotonic=lambda: 1.0, time=time.time))
        asyncio.run(visit())


def test_node_that_is_gone_is_neither_up_nor_at_work() -> None:
    source = example_source(8)
    peer_id = next(node.peer_id for node in source.nodes() if node.models or node.runs)
    detail = source.node_details[peer_id]
    gone = detail.node.model_copy(update={"state": "gone", "from_here": None})
    source.node_details[peer_id] = detail.model_copy(update={"node": gone})
    with opened(source) as client:
        text = client.get("/nodes", params={"state": "gone", "q": gone.name}).text
    row = re.findall(r"<td[^>]*>(.*?)</td>", text.partition("<tbody>")[2], re.DOTALL)
    does, up_for = row[-3:-1]
    assert does == up_for == wording.UNKNOWN


def test_node_that_has_finished_a_run_does_not_train_it() -> None:
    source = example_source(8)
    run = source.overview().runs[0]
    trainer = next(node for node in source.nodes() if run.run in node.runs)
    assert "trains" in wording.doing(trainer)
    assert "trains" not in wording.doing(trainer, trainer.runs)
    source.change(runs=tuple(each.model_copy(update={"state": "finished"}) for each in source.overview().runs))
    with opened(source) as client:
        text = client.get("/nodes").text
    assert not re.search(r">(serves and )?trains<", text)


def run_page(**changes: Any) -> str:
    """Return the page of a run whose view has these `changes`."""
    source = example_source(8)
    run = source.overview().runs[0].run
    detail = source.run_details[run]
    source.run_details[run] = detail.model_copy(update={"run": detail.run.model_copy(update=changes)})
    with opened(source) as client:
        return client.get(f"/runs/{run}").text


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("training", "after a few more steps"),
        ("waiting", "not while it waits"),
        ("gone", "nobody trains it any more"),
    ],
)
def test_end_of_a_run_is_projected_only_while_it_trains(state: str, said: str) -> None:
    assert said in run_page(state=state, projected_end=None)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("training", "Members report other outer steps than 9, the newest whose proof is here. Its group agreed"),
        ("finished", "No member is at outer step 9 any more. Its group agreed"),
    ],
)
def test_run_whose_members_are_elsewhere_says_so_without_alarm_while_it_trains(state: str, said: str) -> None:
    assert said in run_page(state=state, outer_step=9, num_at_step=0, num_agreeing=0)


def test_table_of_nodes_says_from_where_a_node_is_reached_as_its_filter_does() -> None:
    """Visitors read "this machine" as their own."""
    source = example_source(8)
    for peer_id, detail in source.node_details.items():
        node = detail.node.model_copy(update={"reachability": "this machine only", "state": "alive"})
        source.node_details[peer_id] = detail.model_copy(update={"node": node})
    with opened(source) as client:
        text = client.get("/nodes").text
    assert text.count(">from its own machine only<") == len(source.nodes()) + 1, "each row, and the filter"


def test_node_that_has_a_break_says_when_it_lends_again(source: ExampleSource, client: TestClient) -> None:
    some = next(node for node in source.nodes() if node.state == "alive")
    paused = some.model_copy(update={"pause": "hours", "lends_again_at": 1795557600.0})
    assert wording.doing(paused) == "lends again on 24 Nov 22:00 UTC"
    assert wording.doing(paused.model_copy(update={"lends_again_at": 1e300})).startswith("lends again on ")
    assert wording.doing(paused.model_copy(update={"lends_again_at": None})) == "lends again later"
    assert wording.doing(paused.model_copy(update={"pause": "", "role": "", "models": (), "runs": ()})) == "watches"
    breaks = source.overview().model_copy(update={"num_paused": 2, "lends_again_at": 1795557600.0})
    assert wording.situation(breaks).endswith("2 lend nothing now. The first lends again on 24 Nov 22:00 UTC.")
    detail = source.node_details[some.peer_id]
    source.node_details[some.peer_id] = detail.model_copy(update={"node": paused})
    text = opened(source).get(f"/nodes/{some.peer_id}").text  # not from the client, which keeps a page for a second
    assert "It lends nothing now: it is outside its lending hours. It lends again on 24 Nov 22:00 UTC." in text
    source.node_details[some.peer_id] = detail
    other = next(node for node in source.nodes() if node.state == "alive" and node.peer_id != some.peer_id)
    assert "It lends nothing now" not in client.get(f"/nodes/{other.peer_id}").text


def test_sentence_about_a_node_reads_from_the_left_whatever_its_name(source: ExampleSource) -> None:
    before = source.overview().happenings
    words = "\u0645\u0631\u062d\u0628\u0627 joined"  # an Arabic name, by which a browser would set the direction
    source.change(happenings=(before[0].model_copy(update={"words": words}),))
    assert f'<bdi dir="ltr">{words}</bdi>' in opened(source).get("/").text
    source.change(happenings=before)


def test_run_names_its_slow_links(source: ExampleSource) -> None:
    run_id = source.overview().runs[0].run
    detail = source.run_details[run_id]
    slow = detail.run.model_copy(update={"slow_links": ("<b>attic</b> sends 7.2 times slower",)})
    source.run_details[run_id] = detail.model_copy(update={"run": slow})
    text = opened(source).get(f"/runs/{run_id}").text
    assert "Slow link: <bdi>&lt;b&gt;attic&lt;/b&gt; sends 7.2 times slower</bdi>." in text
    source.run_details[run_id] = detail


def test_a_run_says_what_its_author_has_endorsed_and_how_many_are_on_probation(source: ExampleSource) -> None:
    run_id = source.overview().runs[0].run
    detail = source.run_details[run_id]

    def text_with(**changes: object) -> str:
        source.run_details[run_id] = detail.model_copy(update={"run": detail.run.model_copy(update=changes)})
        try:
            return opened(source).get(f"/runs/{run_id}").text
        finally:
            source.run_details[run_id] = detail

    text = text_with(endorsed_step=1200, num_on_probation=1, num_trainers=5)
    assert "The author has endorsed outer step 1,200, where newcomers begin." in text
    assert "1 of the 5 members that took part in the newest proved step was on probation." in text
    text = text_with(endorsed_step=0, num_on_probation=0, num_trainers=5)
    assert "This dashboard has not seen an endorsement by the author yet." in text
    assert "0 of the 5 members that took part in the newest proved step were on probation." in text
    assert "Admission: anyone may join; who was invited." in text_with(entrance="anyone may join; who was invited")
    assert "Admission" not in text_with(entrance=None)
    text = text_with(endorsed_step=None, num_on_probation=None, num_trainers=None)
    assert "ndorse" not in text, "an unknown value is not denied"
    assert "on probation" not in text
