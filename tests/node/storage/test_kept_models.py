"""The models of which a client keeps both ends, from the settings of a chat or a gateway."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from support.node_settings import resolve
from swarm_node.events.emitter import Emitter
from swarm_node.settings.config import Config, UsageError
from swarm_node.settings.parsers import HubId, KeptSource, parse_kept, parse_path
from swarm_node.storage.client_models import kept_models
from swarm_node.storage.home import Home
from swarm_protocol.errors import ConfigError


def kept(config: Config, err: io.StringIO | None = None) -> object:
    return kept_models(config, Home(config.home), Emitter(json=False, out=io.StringIO(), err=err or io.StringIO()))


def test_sources_are_directories_or_names_on_a_hub(tmp_path: Path) -> None:
    assert parse_kept(str(tmp_path)) == KeptSource(tmp_path.name, tmp_path)
    assert parse_kept(f"story={tmp_path}") == KeptSource("story", tmp_path)
    assert parse_kept(f"{tmp_path}/a=b/tiny") == KeptSource("tiny", tmp_path / "a=b" / "tiny")
    assert parse_kept("./a=b/tiny").source == parse_path("./a=b/tiny")
    assert parse_kept(f"story={tmp_path}/a=b") == KeptSource("story", tmp_path / "a=b")
    assert parse_kept("someone/tiny@v2") == KeptSource("tiny", HubId("someone/tiny", "v2"))
    for wrong in ("=x", "story=", ""):
        with pytest.raises(ValueError, match="is n"):
            parse_kept(wrong)


def test_settings_become_kept_models_by_name(tmp_path: Path) -> None:
    config = resolve({"home": str(tmp_path), "text_at_home": [str(tmp_path), "b=someone/tiny"], "blocks_at_home": "3"})
    err = io.StringIO()
    found = kept_models(config, Home(config.home), Emitter(json=False, out=io.StringIO(), err=err))
    assert {name: (each.source, each.num_first_blocks) for name, each in found.items()} == {
        tmp_path.name: (tmp_path, 3),
        "b": ("someone/tiny", 3),
    }
    assert {each.cache for each in found.values()} == {config.home / "cache" / "models"}
    found["b"].on_progress(2**20, 2**21)
    assert "1 MiB of 2 MiB of b, to keep at home" in err.getvalue()
    assert "text stays here: servers get activations instead of tokens" in err.getvalue()


def test_contradicting_settings_are_refused(tmp_path: Path) -> None:
    err = io.StringIO()
    assert kept(resolve({"home": str(tmp_path)}), err) == {}
    assert not err.getvalue()
    with pytest.raises(UsageError, match=r"nothing is kept at home, so --blocks-at-home has no effect"):
        kept(resolve({"home": str(tmp_path), "blocks_at_home": "2"}))
    with pytest.raises(ConfigError, match=r"there is no directory .*nowhere to keep story from"):
        kept(resolve({"home": str(tmp_path), "text_at_home": [f"story={tmp_path}/nowhere"]}))
    with pytest.raises(ConfigError, match="kept at home twice"):
        kept(resolve({"home": str(tmp_path), "text_at_home": [f"a={tmp_path}", "a=someone/tiny"]}))
