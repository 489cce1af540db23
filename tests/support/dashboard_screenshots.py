"""Pictures of the dashboard over an example swarm.

`PYTHONPATH=tests python -m support.dashboard_screenshots docs/screenshots` writes the README's three; with `--all`,
before or after the folder, every page of every example, light and dark, on a desk and on a phone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Browser, expect
from support.dashboard_browser import PHONE, Served, browsing
from support.dashboard_source import ExampleSource
from support.dashboard_swarms import example_source
from swarm_node.dashboard.app import create_dashboard

README = (("overview", "light", 885), ("model", "light", 1_225), ("run", "dark", 1_150))
WIDTH = 1_180


def pages_of(source: ExampleSource) -> dict[str, str]:
    overview = source.overview()
    pages = {"overview": "/", "nodes": "/nodes", "try": "/try"}
    for model in overview.models[:1]:
        pages["model"] = f"/models/{quote(model.name, safe='')}"
    for run in overview.runs[:1]:
        pages["run"] = f"/runs/{run.run}"
    for node in source.nodes()[:1]:
        pages["node"] = f"/nodes/{node.peer_id}"
    return pages


def shoot(browser: Browser, url: str, file: Path, *, scheme: str, size: dict[str, int], whole: bool) -> None:
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#live-state")).to_have_text("Live")
    page.screenshot(path=file, full_page=whole)
    context.close()


def main(folder: Path, *, everything: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    swarms = {"empty": example_source(0), "small": example_source(12), "large": example_source(1000)}
    swarms["hostile"] = example_source(14, hostile=True)
    with browsing() as browser:
        for name, source in swarms.items():
            served = Served(create_dashboard(source, has_chat=True))
            pages = pages_of(source)
            source.change()
            if everything:
                for page, path in pages.items():
                    for scheme in ("light", "dark"):
                        for kind, size in (("desk", {"width": WIDTH, "height": 900}), ("phone", PHONE)):
                            file = folder / f"{name}-{page}-{scheme}-{kind}.png"
                            shoot(browser, served.url + path, file, scheme=scheme, size=size, whole=True)
            elif name == "small":
                for page, scheme, height in README:
                    file, size = folder / f"{page}.png", {"width": WIDTH, "height": height}
                    shoot(browser, served.url + pages[page], file, scheme=scheme, size=size, whole=False)
            served.close()


if __name__ == "__main__":
    (given,) = [argument for argument in sys.argv[1:] if argument != "--all"]
    main(Path(given), everything="--all" in sys.argv)
