"""The JSON API over an example swarm: every route, what it refuses and how, and downloads that stay in their folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from support.dashboard_source import ExampleSource
from support.dashboard_swarms import example_source
from swarm_node.dashboard import app as dashboard_app
from swarm_node.dashboard.app import combined, create_dashboard
from swarm_node.dashboard.checkpoints import checkpoint_files
from swarm_node.dashboard.history.reader import MAX_STEPS
from swarm_node.dashboard.run_views import PHASES
from swarm_node.dashboard.views import ModelDetail, NodeDetail, NodeView, Overview, RunDetail, Series, StepView
from swarm_node.formatting import MAX_SHOWN_CHARS, shown
from swarm_node.http.addresses import caller_of

RUN = "story-0123456789ab"


@pytest.fixture(scope="module")
def source() -> ExampleSource:
    return example_source(30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder as a home exports it: checkpoints of a run beside its model, and files that must not be shown."""
    (tmp_path / "secret").write_bytes(b"key")
    model = tmp_path / "checkpoints" / RUN / RUN
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(bytes(range(256)))
    (model / "config.json").write_text("{}")
    (model / ".hidden").write_text("x")
    (model / "link").symlink_to(tmp_path / "secret")
    (model / "folder").mkdir()
    (tmp_path / "checkpoints" / "plain").mkdir()
    (tmp_path / "checkpoints" / "plain" / "a b.bin").write_text("plain")
    (tmp_path / "checkpoints" / "elsewhere").symlink_to(tmp_path)
    return tmp_path / "checkpoints"


@asynccontextmanager
async def visiting(source: ExampleSource, folder: Path | None = None) -> AsyncIterator[httpx.AsyncClient]:
    app = create_dashboard(source, checkpoints=folder)
    transport = httpx.ASGITransport(app, client=("203.0.113.9", 1), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://swarm.test") as client:
        yield client


def get(source: ExampleSource, *paths: str, folder: Path | None = None, **headers: str) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        async with visiting(source, folder) as client:
            return [await client.get(path, headers=headers) for path in paths]

    return asyncio.run(main())


def test_head_is_answered_as_get_but_for_the_stream_of_events(source: ExampleSource, folder: Path) -> None:
    model, run, peer = (next(iter(each)) for each in (source.model_details, source.run_details, source.node_details))
    views = ["overview", f"models/{model}", f"runs/{run}", "nodes", f"nodes/{peer}", "openapi.json"]
    paths = [*views, f"series?name={next(iter(source.all_series))}", f"checkpoints/{RUN}/config.json"]

    async def main() -> None:
        async with visiting(source, folder) as client:
            for path in paths:
                assert (await client.head(f"/api/v1/{path}")).status_code == 200
            assert (await client.head("/api/v1/nodes/nobody")).status_code == 404
            assert (await client.head("/api/v1/events")).status_code == 404

    asyncio.run(main())


def test_api_returns_the_views_unchanged(source: ExampleSource) -> None:
    model, run, peer = (next(iter(each)) for each in (source.model_details, source.run_details, source.node_details))
    series = next(iter(source.all_series))
    answers = get(
        source,
        "/api/v1/overview",
        f"/api/v1/models/{quote(model, safe='')}",
        f"/api/v1/models/{model}",
        f"/api/v1/runs/{quote(run, safe='')}",
        f"/api/v1/nodes/{peer}",
        f"/api/v1/series?name={quote(series, safe='')}&hours=24",
    )
    kinds = (Overview, ModelDetail, ModelDetail, RunDetail, NodeDetail, Series)
    wanted = (
        source.overview(),
        source.model_details[model],
        source.model_details[model],
        source.run_details[run],
        source.node_details[peer],
        source.all_series[series],
    )
    for answer, kind, view in zip(answers, kinds, wanted, strict=True):
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert kind.model_validate_json(answer.content) == view


def test_answer_about_a_long_run_of_many_members_is_bounded(source: ExampleSource) -> None:
    detail = next(iter(source.run_details.values()))
    steps = tuple(
        StepView(
            outer_step=number,
            at=1_750_000_000.123456 + number,
            loss=2.123456789012345,
            digest="0123456789abcdef" * 4,
            num_members=64,
            num_tokens=64 * 131_072,
            seconds=211.123456789,
            phases_s=dict.fromkeys(PHASES, 1.123456789012345),
            bytes_per_parameter=1.0412345678901234,
        )
        for number in range(MAX_STEPS)
    )
    members = tuple(detail.contributors[0].model_copy(update={"peer_id": f"peer {number}"}) for number in range(64))
    whole = detail.model_copy(update={"steps": steps, "contributors": members})
    source.run_details["long"] = whole
    try:
        [answer, described] = get(source, "/api/v1/runs/long", "/api/v1/openapi.json")
    finally:
        del source.run_details["long"]
    assert len(answer.json()["steps"]) == 500
    assert len(answer.content) < 300_000
    step = described.json()["components"]["schemas"]["StepView"]
    assert "num_members" in step["required"]
    assert "group" not in step["properties"]


def test_nodes_come_in_pages_and_by_state(source: ExampleSource) -> None:
    everyone, some, last, gone = get(
        source,
        "/api/v1/nodes",
        "/api/v1/nodes?limit=7",
        "/api/v1/nodes?limit=7&offset=28",
        "/api/v1/nodes?state=gone",
    )
    nodes = source.nodes()
    assert [NodeView(**each) for each in everyone.json()] == list(nodes)
    assert [each["peer_id"] for each in some.json()] == [node.peer_id for node in nodes[:7]]
    assert len(last.json()) == 2
    assert len(gone.json()) == sum(node.state == "gone" for node in nodes)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/models/nobody's", 404),
        ("/api/v1/runs/none", 404),
        ("/api/v1/nodes/12D3KooWnobody", 404),
        ("/api/v1/series?name=made-up", 404),
        ("/api/v1/nothing", 404),
        ("/api/v1/nodes?limit=5001", 400),
        ("/api/v1/nodes?limit=0", 400),
        ("/api/v1/nodes?limit=many", 400),
        ("/api/v1/nodes?offset=-1", 400),
        ("/api/v1/nodes?state=odd", 400),
        ("/api/v1/series", 400),
        ("/api/v1/series?name=nodes&hours=721", 400),
        ("/api/v1/series?name=nodes&hours=nan", 400),
        (f"/api/v1/series?name={'x' * 10_000}", 400),
        (f"/api/v1/models/{'x' * 10_000}", 400),
        ("/api/v1/models/%E2%80%AE%00%1B%5B31m<script>", 404),
    ],
)
def test_refusals_are_json_in_words(source: ExampleSource, path: str, status: int) -> None:
    [answer] = get(source, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"].isprintable()
    assert 0 < len(error["message"]) < 500
    assert error["remedy"]
    assert error["code"] == ("not_found" if status == 404 else "invalid_value")
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ("nodes?limit=many", "limit", "it is 'many', and not an integer"),
        ("nodes?limit=0", "limit", "it must be at least 1"),
        ("nodes?state=odd", "state", "it is 'odd', and not 'alive', 'leaving' or 'gone'"),
        ("series", "name", "it is missing"),
        ("series?name=nodes&hours=x", "hours", "it is 'x', and not a number"),
        ("series?name=nodes&hours=721", "hours", "it must be at most 720"),
    ],
)
def test_wrong_parameter_is_named_with_its_error(source: ExampleSource, query: str, param: str, message: str) -> None:
    [answer] = get(source, f"/api/v1/{query}")
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param}: {message}")


def test_unknown_path_is_a_page_for_a_browser_and_json_for_a_program(source: ExampleSource) -> None:
    async def main() -> None:
        async with visiting(source) as client:
            page = await client.get("/nothing/here", headers={"accept": "text/html,*/*;q=0.8"})
            assert page.status_code == 404
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert "This page is not here" in page.text
            answer = await client.get("/nothing/here")
            assert answer.status_code == 404
            assert "/nothing/here" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_nothing_can_be_changed(source: ExampleSource) -> None:
    async def main() -> None:
        async with visiting(source) as client:
            for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE"):
                answer = await client.request(method, "/api/v1/overview", content=b"x" * 10_000)
                assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
                assert "error" in answer.json()

    asyncio.run(main())


def test_openapi_describes_every_route(source: ExampleSource) -> None:
    [answer] = get(source, "/api/v1/openapi.json")
    described = answer.json()
    assert set(described["paths"]) == {
        "/api/v1/overview",
        "/api/v1/models/{name}",
        "/api/v1/runs/{run}",
        "/api/v1/nodes",
        "/api/v1/nodes/{peer_id}",
        "/api/v1/series",
        "/api/v1/events",
        "/api/v1/checkpoints/{run}/{name}",
    }
    ok = described["paths"]["/api/v1/overview"]["get"]["responses"]["200"]["content"]["application/json"]
    assert ok["schema"]["$ref"].endswith("/Overview")
    assert "ErrorBody" in described["components"]["schemas"]
    assert "422" not in described["paths"]["/api/v1/series"]["get"]["responses"]


def test_bug_in_a_view_is_a_500_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    source = example_source(0)
    monkeypatch.setattr(source, "overview", lambda: 1 / 0)
    [answer] = get(source, "/api/v1/overview")
    assert answer.status_code == 500
    said = {"message": "the dashboard failed to answer", "remedy": "its log says why"}
    assert answer.json() == {"error": {**said, "type": "server_error", "param": None, "code": None}}


def test_address_that_asks_too_often_is_refused_with_a_retry_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_app, "REQUESTS_PER_MIN", 5)
    answers = get(example_source(0), *["/api/v1/overview"] * 6)
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert "5 requests per minute" in answers[-1].json()["error"]["message"]
    assert int(answers[-1].headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("client", "address"), [("203.0.113.9", "203.0.113.9"), ("2001:db8::1:2:3:4", "2001:db8::/64"), ("", "")]
)
def test_visitor_is_identified_by_address_and_not_by_headers(client: str, address: str) -> None:
    """`tests/node/http/test_addresses.py` shows which proxies are trusted, also from a private network."""
    headers = [(b"x-forwarded-for", b"198.51.100.1")]
    assert caller_of({"type": "http", "client": (client, 1), "headers": headers}) == address


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoint_lists_plain_files_that_can_be_downloaded(source: ExampleSource, folder: Path) -> None:
    files = checkpoint_files(folder, RUN)
    assert [(file.name, file.num_bytes) for file in files] == [("config.json", 2), ("model.safetensors", 256)]
    [plain] = checkpoint_files(folder, "plain")
    assert plain.url == "/api/v1/checkpoints/plain/a%20b.bin"
    whole, blank = get(source, files[1].url, plain.url, folder=folder)
    assert whole.content == bytes(range(256))
    assert "attachment" in whole.headers["content-disposition"]
    assert blank.text == "plain"
    [part] = get(source, files[1].url, folder=folder, range="bytes=10-19")
    assert (part.status_code, part.content) == (206, bytes(range(10, 20)))


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "..%2Fsecret",
        "%2e%2e/secret",
        f"{RUN}/link",
        f"{RUN}/.hidden",
        f"{RUN}/folder",
        f"{RUN}/..%2F..%2F..%2Fsecret",
        f"{RUN}/%2Fetc%2Fpasswd",
        "elsewhere/secret",
        "./plain",
        "plain/a%00b",
        f"{RUN}/config.json%00",
    ],
)
def test_nothing_outside_the_list_can_be_downloaded(source: ExampleSource, folder: Path, path: str) -> None:
    [answer] = get(source, f"/api/v1/checkpoints/{path}", folder=folder)
    assert answer.status_code == 404
    assert answer.content != b"key"
    assert "error" in answer.json()


def test_no_folder_means_no_downloads(source: ExampleSource, tmp_path: Path) -> None:
    [answer] = get(source, f"/api/v1/checkpoints/{RUN}/config.json")
    assert answer.status_code == 404
    assert checkpoint_files(tmp_path / "missing", RUN) == ()


# --- beside a gateway -------------------------------------------------------------------------------------------------


def test_page_for_questions_is_only_beside_a_gateway(source: ExampleSource) -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(create_dashboard(source), client=("203.0.113.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://swarm.test") as client:
            asked = (await client.get("/try")).json()["error"]
            assert asked["remedy"] == "only the dashboard of a gateway has this page: swarm-node gateway"

    asyncio.run(main())


def test_gateway_answers_its_own_paths_beside_the_dashboard(source: ExampleSource) -> None:
    paths = ("/v1/models", "/health", "/metrics", "/openapi.json")
    gateway = Starlette(routes=[Route(path, PlainTextResponse("the gateway's")) for path in paths])
    gateway.router.default = PlainTextResponse("the gateway's")
    app = combined(gateway, create_dashboard(source, has_chat=True))

    async def main() -> None:
        transport = httpx.ASGITransport(app, client=("203.0.113.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://swarm.test") as client:
            for path in ("/v1/models", "/v1", "/health", "/metrics", "/openapi.json"):
                assert (await client.get(path)).text == "the gateway's"
            for path in ("/", "/api/v1/overview", "/v10", "/nodes"):
                answer = await client.get(path)
                assert answer.text != "the gateway's"
            lost = (await client.get("/v2/models")).json()["error"]
            assert (
                lost["remedy"] == "/api/v1/openapi.json lists the dashboard's routes, and /openapi.json the gateway's"
            )
            # the gateway answers a program whose base URL lacks /v1, and a visitor is shown a page
            assert (await client.post("/models", headers={"accept": "*/*"})).text == "the gateway's"
            assert (await client.get("/models", headers={"accept": "text/html,*/*"})).headers["location"] == "/#models"
            # the dashboard is read-only: another method is a program's, whose base URL is wrong
            assert (await client.post("/api/v1/chat/completions")).text == "the gateway's"

    asyncio.run(main())


# --- text -------------------------------------------------------------------------------------------------------------


def test_shown_is_one_bounded_printable_line() -> None:
    assert shown("a\u202eb\x00\x1b[31m\nc") == "a b [31m c"
    assert shown("<b>") == "<b>"
    assert shown("\u200b\u2066 ") == "—"
    assert len(shown("x" * 10_000)) == MAX_SHOWN_CHARS
    assert shown("x" * 10_000).endswith("…")
    assert json.loads(json.dumps(shown("\ud800x"))) == "x"
