"""Tests that a signed run file is read as it was written, and that any other file is refused."""

from __future__ import annotations

import errno
import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import (
    inspect_run,
    load_checked_run,
    new_run_file,
    read_config,
    sign_file,
    sign_run,
    template,
    with_signature,
    with_value,
    write_run,
)
from swarm.training.run.run_tables import DEFAULT_MODEL, InnerConfig
from swarm.training.run.settings import ImpossibleRun
from swarm.training.run.signed_run import (
    ABOUT,
    LATER_SETTINGS,
    MAX_RUN_FILE_BYTES,
    SignedRun,
    from_mapping,
    parse_signed_run,
    sign_mapping,
    to_mapping,
    without_signature,
)
from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.identity import Identity
from swarm_protocol.toml_text import to_toml

AUTHOR = Identity(bytes(32))


@pytest.fixture
def run_path(tmp_path: Path, tiny_run: RunConfig) -> Path:
    path = tmp_path / "run.toml"
    write_run(path, tiny_run, AUTHOR, issued_at=1_700_000_000)
    return path


def test_load_run_gives_the_run_that_was_written(run_path: Path, tiny_run: RunConfig) -> None:
    run = load_checked_run(run_path)
    assert run == sign_run(tiny_run, AUTHOR, issued_at=1_700_000_000)
    assert run.config == tiny_run
    assert run.peer_id == AUTHOR.peer_id


def test_load_run_gives_the_default_run_that_was_written(tmp_path: Path) -> None:
    written = write_run(tmp_path / "run.toml", RunConfig(name="default"), AUTHOR)
    assert load_checked_run(tmp_path / "run.toml") == written


def test_write_run_leaves_no_other_file(run_path: Path) -> None:
    assert [path.name for path in run_path.parent.iterdir()] == ["run.toml"]


def test_write_run_leaves_no_file_when_it_fails(tmp_path: Path, tiny_run: RunConfig) -> None:
    (tmp_path / "run.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_run(tmp_path / "run.toml", tiny_run, AUTHOR)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize("word", ["a", '"a"', "'a'", "a "], ids=["bare", "quoted", "literal", "spaced"])
@pytest.mark.parametrize("around", ["{} = 1", "[{}]", "x = {{{} = 1}}"], ids=["key", "table", "inline"])
def test_load_run_refuses_a_key_of_many_words_before_parsing(tmp_path: Path, word: str, around: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(around.format(".".join([word] * (40_000 // (len(word) + 1)))))
    started = time.process_time()
    with pytest.raises(ConfigError, match="dotted key"):
        load_checked_run(path)
    assert time.process_time() - started < 0.5, "the file was parsed, which takes 42 s"


@pytest.mark.parametrize("text", ["a" * 60_000, "'\"" * 30_000, "a " * 30_000, "a" + " " * 60_000])
def test_load_run_refuses_noise_quickly(tmp_path: Path, text: str) -> None:
    """The search for long keys must be quick, too."""
    path = tmp_path / "run.toml"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_checked_run(path)
    assert time.process_time() - started < 0.5


def test_run_id_differs_when_content_signer_or_time_differ(tiny_run: RunConfig) -> None:
    runs = [
        sign_run(tiny_run, AUTHOR, issued_at=1),
        sign_run(tiny_run, AUTHOR, issued_at=2),
        sign_run(tiny_run, Identity(bytes([1]) * 32), issued_at=1),
        sign_run(replace(tiny_run, seed=8), AUTHOR, issued_at=1),
    ]
    assert len({run.run_id for run in runs}) == len(runs)
    assert all(re.fullmatch(r"tiny-[0-9a-f]{12}", run.run_id) for run in runs)


SIGNED_BY_THE_FIRST_VERSION = """\
name = "old"
seed = 0
outer_steps = 40
interval_steps = 20
interval_s = 5
fragments = 1
overlap_steps = 0
mixing = 0.0
codec = "int8"
error_feedback = false
aggregator = "mean"
admission = []
min_group = 2
max_group = 16
quorum_grace_s = 2.0

[model]
model_type = "gpt2"
vocab_size = 256
n_embd = 8
n_layer = 1
n_head = 1
n_positions = 128

[data]
source = "python-stdlib"
hub_id = ""
hub_config = ""
split = "train"
text_key = "text"
tokenizer = "bytes"
digest = ""
window_tokens = 128

[inner]
optimizer = "adamw"
batch_windows = 4
learning_rate = 0.003
warmup_steps = 20
schedule = "constant"
final_ratio = 0.1
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
muon_momentum = 0.95
clip_norm = 1.0

[outer]
optimizer = "nesterov"
learning_rate = 0.7
momentum = 0.6

[aggregation]

[signature]
peer_id = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
issued_at = 1700000000
signature = "SKGTgFvpwWBJYL4ISn9aQMzLSlAwhHmlrWQ0jfBfmC6o+D/72DguOUl2qilxKMyOuS6NcdGu7wkZ79RiTr9SBQ=="
"""


def test_run_that_an_earlier_version_signed_keeps_its_signature_and_id(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text(SIGNED_BY_THE_FIRST_VERSION)
    assert load_checked_run(path).run_id == "old-95bb68dbc73e"


def test_settings_that_old_files_lack_have_their_former_meaning() -> None:
    """Later defaults must not change old runs. A run without an aggregator used the mean."""
    assert LATER_SETTINGS.keys() <= ABOUT.keys()
    config = to_mapping(load_signed(SIGNED_BY_THE_FIRST_VERSION.replace("old", "run").encode()).config)
    for setting, implied in LATER_SETTINGS.items():
        table, _, key = setting.rpartition(".")
        assert (config[table] if table else config)[key] == implied
    assert load_signed(b'name = "run"\n').config.aggregator == "mean"


def load_signed(text: bytes) -> SignedRun:
    """Return a run that holds exactly these settings, signed by the author of the tests."""
    mapping = without_signature(tomllib.loads(text.decode()))
    return parse_signed_run(sign_mapping(RunConfig(name="run"), mapping, AUTHOR, 1_700_000_000).text.encode(), "here")


def test_load_run_ignores_spacing_order_and_comments(run_path: Path, tiny_run: RunConfig) -> None:
    lines = run_path.read_text().splitlines()
    head, rest = lines[: lines.index("")], lines[lines.index("") :]
    run_path.write_text("# mine\n" + "\n".join(line.replace(" = ", "   =  ") for line in reversed(head) if line))
    with run_path.open("a") as file:
        file.write("\n" + "\n".join(rest))
    assert load_checked_run(run_path).config == tiny_run


def test_load_run_raises_integrity_error_when_any_value_is_changed(run_path: Path) -> None:
    text = run_path.read_text()
    content = text[: text.index("[signature]")]
    changes = [match.span() for match in re.finditer(r"(?<== )[0-9.]+$", content, re.MULTILINE)]
    assert len(changes) > 15
    for start, stop in changes:
        value = text[start:stop]
        changed = value.replace(value[-1], "5" if value[-1] != "5" else "6")
        run_path.write_text(text[:start] + changed + text[stop:])
        with pytest.raises(IntegrityError, match="not what its author signed"):
            load_checked_run(run_path)


def test_load_run_raises_integrity_error_when_a_value_is_added_or_removed(run_path: Path) -> None:
    text = run_path.read_text()
    for changed in ("more = 1\n" + text, text.replace("seed = 7\n", ""), text.replace('codec = "int8"\n', "")):
        run_path.write_text(changed)
        with pytest.raises(IntegrityError):
            load_checked_run(run_path)


def test_load_run_raises_integrity_error_for_another_signer_or_time(run_path: Path) -> None:
    text = run_path.read_text()
    other = Identity(bytes([1]) * 32).peer_id
    for changed in (text.replace(AUTHOR.peer_id, other), text.replace("1700000000", "1700000001")):
        run_path.write_text(changed)
        with pytest.raises(IntegrityError):
            load_checked_run(run_path)


@pytest.mark.parametrize("line", ["peer_id", "issued_at", "signature ="])
def test_load_run_raises_integrity_error_for_an_incomplete_signature(run_path: Path, line: str) -> None:
    lines = run_path.read_text().splitlines()
    run_path.write_text("\n".join(each for each in lines if not each.startswith(line)))
    with pytest.raises(IntegrityError, match="incomplete or malformed"):
        load_checked_run(run_path)


def test_load_run_raises_integrity_error_when_the_signature_is_not_base64(run_path: Path) -> None:
    run_path.write_text(re.sub(r'signature = ".*"', 'signature = "??"', run_path.read_text()))
    with pytest.raises(IntegrityError, match="incomplete or malformed"):
        load_checked_run(run_path)


def test_load_run_raises_integrity_error_for_an_invalid_peer_id(run_path: Path) -> None:
    run_path.write_text(run_path.read_text().replace(AUTHOR.peer_id, "me"))
    with pytest.raises(IntegrityError):
        load_checked_run(run_path)


def test_load_run_refuses_an_unsigned_file_and_read_config_accepts_it(run_path: Path, tiny_run: RunConfig) -> None:
    text = run_path.read_text()
    run_path.write_text(text[: text.index("[signature]")])
    with pytest.raises(ConfigError, match="not signed"):
        load_checked_run(run_path)
    assert read_config(run_path) == tiny_run


@pytest.mark.parametrize("added", [{"codecs": "int4"}, {"data": {"splits": "all"}}])
def test_load_run_says_that_a_signed_run_with_an_unknown_key_is_of_a_newer_version(
    tmp_path: Path, tiny_run: RunConfig, added: dict[str, Any]
) -> None:
    newer = sign_mapping(tiny_run, {**to_mapping(tiny_run), **added}, AUTHOR, 1_750_000_000)
    (tmp_path / "run.toml").write_text(newer.text)
    with pytest.raises(ConfigError, match=r"was signed by a newer version of Swarm: .* unknown key") as caught:
        load_checked_run(tmp_path / "run.toml")
    assert caught.value.remedy == "update this node"


def test_load_run_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: no such file"):
        load_checked_run(tmp_path / "none.toml")


def test_load_run_refuses_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_checked_run(tmp_path)


@pytest.mark.parametrize(
    "data", [b"name = ", b"[[[", *(b"a = " + each for each in (b"[" * 5000, b"1" * 5000, b"0x" + b"f" * 5000))]
)
def test_load_run_refuses_a_file_that_is_not_toml(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_checked_run(path)


def test_load_run_refuses_a_huge_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"#" * (MAX_RUN_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="too large"):
        load_checked_run(path)


@pytest.mark.parametrize("value", ["nan", "inf", "2020-01-01"])
def test_load_run_refuses_a_value_that_cannot_be_signed(run_path: Path, value: str) -> None:
    run_path.write_text(f"when = {value}\n" + run_path.read_text())
    with pytest.raises(ConfigError, match="cannot hold this"):
        load_checked_run(run_path)


def test_write_run_refuses_none_which_no_file_can_hold(tmp_path: Path, tiny_run: RunConfig) -> None:
    run = replace(tiny_run, model={**tiny_run.model, "head_dim": None})
    with pytest.raises(ConfigError, match="is not valid TOML"):
        write_run(tmp_path / "run.toml", run, AUTHOR)


def test_write_run_refuses_a_path_in_a_missing_folder(tmp_path: Path, tiny_run: RunConfig) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_run(tmp_path / "none" / "run.toml", tiny_run, AUTHOR)


def test_sign_run_refuses_discounts_without_scores_and_load_run_still_reads_a_signed_one(
    tmp_path: Path, tiny_run: RunConfig
) -> None:
    silent = replace(tiny_run, held_out_scores=0, discount_low_scores=True)
    with pytest.raises(ConfigError, match="measures no scores") as raised:
        sign_run(silent, AUTHOR, issued_at=1)
    assert raised.value.remedy == "use discount_low_scores = false, or held_out_scores = 1 or more"
    new_run_file(tmp_path / "run.toml", silent)
    with pytest.raises(ConfigError, match="measures no scores"):
        sign_file(tmp_path / "run.toml", AUTHOR)
    sign_run(replace(silent, discount_low_scores=False), AUTHOR, issued_at=1)
    (tmp_path / "old.toml").write_text(sign_mapping(silent, to_mapping(silent), AUTHOR, 1).text)
    assert load_checked_run(tmp_path / "old.toml").config == silent


@pytest.mark.parametrize(
    "unused",
    [{"attention_dropout": 2}, {"model_type": "mixtral", "router_jitter_noise": 0.1}],
    ids=lambda keys: [*keys][-1],
)
def test_sign_run_refuses_a_setting_of_the_model_that_training_ignores(
    tmp_path: Path, tiny_run: RunConfig, unused: dict[str, Any]
) -> None:
    run = replace(tiny_run, model={**tiny_run.model, **unused})
    name = [*unused][-1]
    with pytest.raises(ConfigError, match=rf"\[model\] {name} = {unused[name]} does nothing"):
        sign_run(run, AUTHOR, issued_at=1)
    sign_run(replace(run, model={**run.model, name: 0.0}), AUTHOR, issued_at=1)
    (tmp_path / "old.toml").write_text(sign_mapping(run, to_mapping(run), AUTHOR, 1).text)
    assert load_checked_run(tmp_path / "old.toml").config == run


def test_sign_run_refuses_a_model_that_cannot_be_built(tiny_run: RunConfig) -> None:
    with pytest.raises(ConfigError, match="no model_type"):
        sign_run(replace(tiny_run, model={}), AUTHOR, issued_at=1)


toml_scalars = (
    st.booleans()
    | st.integers(-(1 << 62), 1 << 62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
)


def toml_groups(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
    return st.lists(items, max_size=3) | st.dictionaries(keys, items, max_size=3)


toml_values = toml_scalars | toml_groups(toml_scalars | toml_groups(toml_scalars))


@given(table=st.dictionaries(st.sampled_from("abcdef"), toml_values))
def test_to_toml_writes_tables_that_are_read_back_equal(table: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml({"name": "x", "table": table})) == {"name": "x", "table": table}


@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_load_run_of_any_bytes_raises_a_typed_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    path.write_bytes(data)
    with pytest.raises((ConfigError, IntegrityError)):
        load_checked_run(path)


def test_sign_file_keeps_the_text_and_comments_of_the_author(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    new_run_file(path, RunConfig(name="story"))
    edited = path.read_text().replace("outer_steps = 40", "outer_steps = 3  # enough for a try")
    path.write_text(edited)
    run = sign_file(path, AUTHOR, pins={("data", "digest"): "ab" * 32})
    assert load_checked_run(path) == run
    assert (run.config.outer_steps, run.config.data.digest) == (3, "ab" * 32)
    text = path.read_text()
    assert text.startswith(edited[: edited.index("# Digest of the data")])
    assert [each.name for each in tmp_path.iterdir()] == ["run.toml"]
    path.write_text(text.replace("outer_steps = 3", "outer_steps = 4"))
    with pytest.raises(IntegrityError, match="not what its author signed"):
        load_checked_run(path)
    assert sign_file(path, AUTHOR).config.outer_steps == 4
    assert path.read_text().count("[signature]") == 1


def test_sign_file_writes_settings_that_the_author_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.toml"
    head = '# mine\nname = "few"  # so it is\nmin_group = 5\naggregator = "trimmed_mean"\n'
    path.write_text(f"{head}\n[inner]\nbatch_windows = 2  # small\n\n# no tables follow\n")
    run = sign_file(path, AUTHOR)
    assert run == load_checked_run(path)
    assert run.config == RunConfig(
        name="few", min_group=5, aggregator="trimmed_mean", inner=InnerConfig(batch_windows=2)
    )
    text = path.read_text()
    assert text.startswith(head)
    assert "[inner]\nbatch_windows = 2  # small\n" in text
    written = tomllib.loads(text)
    del written["signature"]
    assert written == to_mapping(run.config)
    # a later version with other defaults still reads the same run
    monkeypatch.setattr(InnerConfig.__init__, "__kwdefaults__", {**InnerConfig.__init__.__kwdefaults__, "beta2": 0.5})
    assert load_checked_run(path).run_id == run.run_id
    assert InnerConfig().beta2 == 0.5


def test_sign_file_changes_only_the_signature_when_it_is_called_again(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "few"\n')
    sign_file(path, AUTHOR, issued_at=7)
    before = path.read_text()
    sign_file(path, AUTHOR, issued_at=7)
    assert path.read_text() == before


@pytest.mark.parametrize("data_digest", ["", "ab" * 32], ids=["signature", "digest"])
def test_sign_file_refuses_a_file_that_it_cannot_edit_by_lines_and_leaves_it_unchanged(
    tmp_path: Path, data_digest: str
) -> None:
    path = tmp_path / "run.toml"
    text = 'name = "few"\n' + ("data = {}\n" if data_digest else "signature = {}\n")
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot be signed in place"):
        sign_file(path, AUTHOR, pins={("data", "digest"): data_digest})
    assert path.read_text() == text


def test_sign_file_names_each_impossible_value(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "few"\nouter_steps = 0\ncodec = "int9"\n[inner]\nbeta1 = 2\n')
    with pytest.raises(ImpossibleRun) as caught:
        sign_file(path, AUTHOR)
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == ["outer_steps", "codec", "inner.beta1"]


def test_wrong_values_of_a_strangers_file_have_no_terminal_codes(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "\\u001b[31m \\u009b31m \\u202e \\U000e0041"\n')
    with pytest.raises(ConfigError) as error:
        inspect_run(path)
    assert '"\\u001b[31m \\u009b31m \\u202e \\U000e0041"' in error.value.message
    assert error.value.message.isprintable()


def test_new_run_file_does_not_overwrite_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        new_run_file(path, RunConfig(name="x"))
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be written"):
        new_run_file(tmp_path / "none" / "run.toml", RunConfig(name="x"))


def test_new_run_file_leaves_no_file_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_space(_partial: Path, _place: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "run.toml"
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", without_space)
        with pytest.raises(ConfigError, match="cannot be written: no space left") as refused:
            new_run_file(path, RunConfig(name="x"))
    assert refused.value.remedy == "free space there"
    assert not [*tmp_path.iterdir()]
    new_run_file(path, RunConfig(name="x"))


def test_inspect_run_says_whether_the_signature_holds(run_path: Path) -> None:
    assert inspect_run(run_path).run == load_checked_run(run_path)
    text = run_path.read_text()
    run_path.write_text(text.replace("outer_steps = 3", "outer_steps = 4"))
    found = inspect_run(run_path)
    assert (found.run, found.config.outer_steps) == (None, 4)
    assert "not what its author signed" in found.problem
    run_path.write_text(text[: text.index("[signature]")])
    assert inspect_run(run_path).problem == "it is not signed"


CONFIG = RunConfig(name="story")
SIGNATURE = {"peer_id": "me", "issued_at": 7, "signature": "abc="}


def settings() -> set[str]:
    mapping = to_mapping(CONFIG) | {"aggregation": {}}  # each aggregator has its own parameters
    inner = {f"{key}.{name}" for key, table in mapping.items() if isinstance(table, Mapping) for name in table}
    return set(mapping) | inner


def test_about_explains_exactly_the_settings_that_exist() -> None:
    assert settings() == set(ABOUT)
    assert {f"model.{key}" for key in DEFAULT_MODEL} <= set(ABOUT)


def test_template_has_every_setting_with_a_comment_above_it() -> None:
    text = template(CONFIG, "story.toml")
    assert from_mapping(tomllib.loads(text)) == CONFIG
    lines = text.splitlines()
    bare = [line for before, line in zip(["", *lines], lines, strict=False) if "=" in line and line[0] not in "#["]
    unexplained = [line for line in bare if not lines[lines.index(line) - 1].startswith("# ")]
    assert (len(bare), unexplained) == (len(settings()) - 6, [])
    assert max(map(len, lines)) <= 110
    assert "Default: 40." in text


def test_template_has_only_aggregator_parameters_that_differ_from_defaults() -> None:
    config = RunConfig(name="story", aggregator="trimmed_mean", aggregation={"trim": 0.3})
    assert tomllib.loads(template(config, "story.toml"))["aggregation"] == {"trim": 0.3}
    assert tomllib.loads(template(CONFIG, "story.toml"))["aggregation"] == {}


def test_with_signature_keeps_comments_and_replaces_an_earlier_signature() -> None:
    text = "# mine\nname = 'x'  # a name\n[signature]  # old\n# kept\npeer_id = 'you'\n\n[data]\nsplit = 'train'\n"
    signed = with_signature(text, SIGNATURE)
    assert tomllib.loads(signed) == {"name": "x", "data": {"split": "train"}, "signature": SIGNATURE}
    assert [line for line in ("# mine", "# a name", "# kept") if line not in signed] == []
    assert with_signature(signed, SIGNATURE) == signed


def test_with_value_changes_one_line() -> None:
    text = "[data]\ndigest = ''  # pinned\nsplit = 'a'\n[inner]\ndigest = ''\n"
    outcome = "[data]\ndigest = \"d\"  # pinned\nsplit = 'a'\n[inner]\ndigest = ''\n"
    assert with_value(text, "data", "digest", "d") == outcome


def test_template_is_read_back_for_every_name() -> None:
    for name in ("a", "my-run.2", "x" * 64):
        assert re.search(f'^name = "{re.escape(name)}"$', template(RunConfig(name=name), "p"), re.M)
