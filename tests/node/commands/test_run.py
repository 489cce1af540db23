"""`swarm-node run init`, `sign` and `show`: their output, and their messages about mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.local_data_hub import DATA_SET, TOKENIZER, local_data_hub
from support.local_hub import COMMIT, MODEL, local_hub
from support.text_models import byte_tokenizer
from support.tiny_models import FAMILIES, write_model
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_cost import PARAMETER_BYTES, PROGRAM_BYTES
from swarm.training.run.run_file import load_checked_run, read_config, write_run
from swarm.training.run.run_model import initial_theta, module_run
from swarm.training.state.replica_state import genesis_digest
from swarm_node import cli
from swarm_node.events import emitter
from swarm_protocol.identity import Identity

TINY = """\
name = "tiny"
model = {model_type = "gpt2", vocab_size = 256, n_embd = 8, n_layer = 1, n_head = 1, n_positions = 128}
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))


@pytest.fixture
def author() -> Identity:
    Path("home").mkdir()
    identity = Identity.generate()
    identity.save(Path("home", "identity.key"))
    return identity


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [problem for event in found for problem in emitter.problems(event)] == []
    return found


def test_init_names_the_run_after_its_file_and_overwrites_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["run", "init", "story.toml", "--json"]) == 0
    assert [event["event"] for event in events(capsys)] == ["run_written"]
    assert cli.run(["run", "init"]) == 0
    assert cli.run(["run", "init", "No Name.toml"]) == 0
    names = [Path(path).read_text().split('name = "')[1].split('"')[0] for path in ("story.toml", "run.toml")]
    assert names == ["story", "my-run"]
    before = Path("run.toml").read_text()
    assert cli.run(["run", "init"]) == 1
    assert "run.toml exists already" in capsys.readouterr().err
    assert Path("run.toml").read_text() == before


def test_sign_pins_the_data_and_show_says_what_it_costs(author: Identity, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(f"# mine\n{TINY}")
    assert cli.run(["run", "sign", "--json"]) == 0
    [signed] = events(capsys)
    run = load_checked_run(Path("run.toml"))
    assert (signed["signed_by"], signed["run"]) == (author.peer_id, run.run_id)
    assert signed["data_digest"] == run.config.data.digest != ""
    assert signed["group_tokens"] == [2 * 10240, 16 * 8 * 10240]
    assert signed["memory_bytes"] == PROGRAM_BYTES + PARAMETER_BYTES * int(str(signed["parameters"]))
    assert Path("run.toml").read_text().startswith("# mine\n")
    assert cli.run(["run", "show"]) == 0
    lines = capsys.readouterr().out
    assert "signature  valid: " + author.peer_id in lines
    assert "\nmemory     500 MiB " in lines
    assert cli.run(["run", "sign", "--unpinned", "--json"]) == 0
    Path("run.toml").write_text(Path("run.toml").read_text().replace("tiny", "tidy"))
    capsys.readouterr()
    assert cli.run(["run", "show", "--json"]) == 1
    [shown] = events(capsys)
    assert (shown["run"], shown["name"], shown["signed_by"]) == (None, "tidy", None)
    assert "not what its author signed" in str(shown["problem"])
    assert cli.run(["run", "show"]) == 1
    assert "→ sign it with your key: swarm-node run sign run.toml" in capsys.readouterr().err


def test_sign_with_an_own_key_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    Identity.generate().save(Path("me.key"))
    Path("run.toml").write_text(f'{TINY}[data]\nsource = "files"\n')
    before = Path("run.toml").read_text()
    assert cli.run(["run", "sign", "--identity", "me.key", "--json"]) == 1
    [error] = events(capsys)
    assert "the data (files) is not pinned" in str(error["message"])
    assert error["remedy"] == "sign with --data PATH to pin it, or with --unpinned if that is what you want"
    assert Path("run.toml").read_text() == before
    assert cli.run(["run", "sign", "--identity", "me.key", "--unpinned"]) == 0
    assert load_checked_run(Path("run.toml")).peer_id == Identity.load(Path("me.key")).peer_id


def test_sign_names_all_that_is_lacking_at_once(author: Identity, capsys: pytest.CaptureFixture[str]) -> None:
    data = '[data]\nsource = "files"\ntokenizer = "local"\n[start]\ncheckpoint = "local"\n'
    Path("run.toml").write_text(TINY + data)
    assert cli.run(["run", "sign", "--json"]) == 1
    [error] = events(capsys)
    assert str(error["remedy"]).startswith("sign with --data PATH and --tokenizer PATH and --start DIR to pin it, or")


def test_sign_again_without_the_data_keeps_its_pin_and_says_so(
    author: Identity, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text(f'{TINY}[data]\nsource = "files"\ndigest = "{"ab" * 32}"\n')
    assert cli.run(["run", "sign", "--json"]) == 0
    warning, _ = events(capsys)
    assert "was not read: it stays pinned to abababababab" in str(warning["message"])
    assert load_checked_run(Path("run.toml")).config.data.digest == "ab" * 32


def test_sign_unpinned_removes_an_earlier_pin(author: Identity, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(f'{TINY}[data]\nsource = "files"\ndigest = "{"ab" * 32}"\n')
    assert cli.run(["run", "sign", "--unpinned", "--pin"]) == cli.EXIT_USAGE
    assert "--pin and --unpinned contradict each other" in capsys.readouterr().err
    assert cli.run(["run", "sign", "--unpinned"]) == 0
    assert load_checked_run(Path("run.toml")).config.data.digest == ""
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "run.toml is signed; to train it: swarm-node join --run run.toml --peers ADDR --data PATH"


def test_sign_again_with_other_data_pins_that(author: Identity, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(f'{TINY}[data]\nsource = "files"\n')
    digests = []
    for text in ("one " * 2000, "two " * 2000):
        Path("mine.txt").write_text(text)
        assert cli.run(["run", "sign", "--data", "mine.txt"]) == 0
        digests.append(load_checked_run(Path("run.toml")).config.data.digest)
    assert len(set(digests)) == 2
    Path("mine.txt").unlink()
    assert cli.run(["run", "sign", "--data", "mine.txt"]) != 0
    assert "mine.txt" in capsys.readouterr().err


def test_sign_takes_a_tokenizer_s_directory_or_its_file(author: Identity) -> None:
    Path("run.toml").write_text(f'{TINY}[data]\nsource = "files"\ntokenizer = "local"\n')
    Path("mine.txt").write_text("one two " * 1000)
    byte_tokenizer().save_pretrained("words")
    digests = []
    for tokenizer in ("words", "words/tokenizer.json"):
        assert cli.run(["run", "sign", "--data", "mine.txt", "--tokenizer", tokenizer]) == 0
        digests.append(load_checked_run(Path("run.toml")).config.data.digest)
    assert digests[0] == digests[1] != ""


def test_show_of_a_module_s_run_names_no_data_and_no_optimizer_of_the_file_s(
    author: Identity, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(name="own", outer_steps=1, interval_steps=1, probation_steps=1)
    run = module_run(config, torch.nn.Linear(2, 1), num_samples=100)
    write_run(Path("run.toml"), run, author)
    assert cli.run(["run", "show"]) == 0
    out = capsys.readouterr().out
    assert "data       read by the author's own module" in out
    assert "training   1 outer step of 1 inner step; " in out
    assert "count fully after 1 outer step; " in out
    assert "samples    4 for each member" in out
    assert "python-stdlib" not in out
    assert "adamw" not in out


def test_sign_of_settings_that_do_not_fit_says_which(author: Identity, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text('name = "x"\n[model]\nmodel_type = "llama"\nhidden_size = 33\n')
    assert cli.run(["run", "sign"]) == 1
    assert "error: transformers refuses [model]: The hidden size (33) is not a multiple" in capsys.readouterr().err


def test_sign_reports_each_impossible_value_in_a_line(author: Identity, capsys: pytest.CaptureFixture[str]) -> None:
    text = f'{TINY}codec = "int9"\nouter_steps = 0\n[inner]\nbeta1 = 2\n'
    Path("run.toml").write_text(text)
    assert cli.run(["run", "sign"]) == 1
    loading, *err = capsys.readouterr().err.splitlines()
    assert loading.startswith("loading torch"), "a command that takes seconds says so"
    assert [line.split(" = ")[0].strip() for line in err[:3]] == ["outer_steps", "codec", "inner.beta1"]
    assert err[3:] == [
        "error: run.toml cannot be signed: 3 settings are invalid",
        "  → correct the problems listed above",
    ]
    assert Path("run.toml").read_text() == text


def test_sign_reports_impossible_values_and_contradictions_together(
    author: Identity, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = 'codec = "int3"\nmin_group = 20\noverlap_steps = 99\naggregator = "trimmed_mean"\n'
    Path("run.toml").write_text(f"{TINY}{settings}[aggregation]\ntrim = 0.5\n")
    assert cli.run(["run", "sign"]) == 1
    _loading, *err = capsys.readouterr().err.splitlines()
    assert [line.split()[0].rstrip(":") for line in err[:-2]] == ["codec", "max_group", "overlap_steps", "aggregation"]


def test_sign_warns_of_settings_that_cannot_lose_a_member(author: Identity, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(f"min_group = 3\nmax_group = 3\n{TINY}")
    assert cli.run(["run", "sign"]) == 0
    err = capsys.readouterr().err
    assert "warning: a round needs 3 members (min_group), and max_group allows no more" in err
    assert "→ raise max_group" in err


def test_sign_says_which_run_the_file_was_until_now(author: Identity, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(TINY)
    assert cli.run(["run", "sign"]) == 0
    assert "until now" not in capsys.readouterr().err
    text = Path("run.toml").read_text()
    Path("run.toml").write_text(text.replace("max_group = 16", "max_group = 8"))
    assert cli.run(["run", "sign"]) == 0
    assert "until now" not in capsys.readouterr().err, "the changed text is no longer a run's file"
    before = load_checked_run(Path("run.toml")).run_id
    author.generate().save(Path("other.key"))
    assert cli.run(["run", "sign", "--identity", "other.key"]) == 0
    assert f"the run's id was {before} until now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "run.toml cannot be read"),
        ("name = ", "run.toml is not valid TOML"),
        ('name = "x"\ncodek = 1\n', "the run has an unknown key 'codek'"),
        ('name = "x"\n[model]\nmodel_type = "lama"\n', '[model] model_type = "lama" is not known'),
    ],
    ids=["missing", "broken", "unknown key", "unknown model"],
)
def test_sign_of_a_file_that_is_no_run_fails_with_one_line_and_a_remedy(
    text: str | None, complaint: str, author: Identity, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path("run.toml").write_text(text)
    assert cli.run(["run", "sign"]) == 1
    *loading, error, remedy = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {complaint}")
    assert remedy.startswith("  → ")
    assert len(loading) == (text is not None)


def test_sign_without_an_identity_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["run", "init"]) == 0
    assert cli.run(["run", "sign"]) == 1
    assert "swarm-node identity --new --home" in capsys.readouterr().err


def test_watch_needs_a_peer_and_a_signed_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Path("run.toml").write_text(TINY)
    assert cli.run(["run", "watch"]) == cli.EXIT_USAGE
    assert "no peer is named" in capsys.readouterr().err
    addr = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    assert cli.run(["run", "watch", "--peers", addr]) == 1
    assert "run.toml is not signed\n  → sign it first: swarm-node run sign run.toml" in capsys.readouterr().err


def test_template_defaults_equal_those_of_a_run() -> None:
    assert cli.run(["run", "init", "story.toml", "--json"]) == 0
    Identity.generate().save(Path("me.key"))
    assert cli.run(["run", "sign", "story.toml", "--identity", "me.key", "--unpinned"]) == 0
    signed, default = load_checked_run(Path("story.toml")).config, RunConfig(name="story")
    assert signed.start.genesis == genesis_digest(initial_theta(default), default)
    assert replace(signed, start=replace(signed.start, genesis="")) == default


def test_run_that_starts_from_a_checkpoint_is_made_signed_and_shown(
    author: Identity, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(Path("base"), FAMILIES["llama-tied"]())
    assert cli.run(["run", "init", "further.toml", "--start", "base"]) == 0
    assert cli.run(["run", "sign", "further.toml", "--unpinned", "--json"]) == 1
    assert "sign with --start DIR to pin it" in str(events(capsys)[-1]["remedy"])
    signing = ["run", "sign", "further.toml", "--unpinned", "--start", "base", "--json"]
    assert cli.run(signing) == 0
    [signed] = events(capsys)
    run = load_checked_run(Path("further.toml"))
    assert (run.config.start.checkpoint, run.config.data.tokenizer) == ("local", "local")
    assert signed["start_digest"] == run.config.start.digest != ""
    assert cli.run(["run", "show", "further.toml"]) == 0
    assert f"start      each member's own copy of a checkpoint, pinned to {run.config.start.digest[:12]}" in (
        capsys.readouterr().out
    )
    assert cli.run(["run", "sign", "further.toml", "--unpinned", "--json"]) == 0
    warning, _ = events(capsys)
    assert "the checkpoint was not read: it stays pinned" in str(warning["message"])
    text = Path("further.toml").read_text()
    Path("further.toml").write_text(text.replace("rms_norm_eps = 1e-06", "rms_norm_eps = 0.01"))
    assert cli.run(signing) == 0
    warning, _ = events(capsys)
    assert "differs from the checkpoint in rms_norm_eps" in str(warning["message"])


def test_init_from_a_checkpoint_of_the_hub_names_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_model(Path("base"), FAMILIES["gpt2"]())
    with local_hub(base, tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert cli.run(["run", "init", "--start", MODEL]) == 0
    config = read_config(Path("run.toml"))
    assert (config.start.checkpoint, config.start.revision, config.data.tokenizer) == (MODEL, COMMIT, MODEL)
    assert config.model["model_type"] == "gpt2"


def test_sign_of_data_on_the_hub_pins_its_commits_without_a_download(
    author: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("datasets", "models"):
        (tmp_path / "hub" / kind).mkdir(parents=True)
    Path("run.toml").write_text(
        f'{TINY}[data]\nsource = "hub"\nhub_id = "{DATA_SET}"\nrevision = "main"\n'
        f'tokenizer = "{TOKENIZER}"\ndigest = "{"ab" * 32}"\n'
    )
    with local_data_hub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert cli.run(["run", "sign", "--json"]) == 0
        assert not any("resolve" in path for path in hub.asked)
    warning, signed = events(capsys)
    assert "the data's digest is removed" in str(warning["message"])
    data = load_checked_run(Path("run.toml")).config.data
    assert (data.revision, data.tokenizer_revision, data.digest) == (COMMIT, COMMIT, "")
    assert signed["data_revision"] == COMMIT
    # a commit names its content, so the hub is not asked again
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert cli.run(["run", "sign"]) == 0
    assert f"{DATA_SET} (train) through the tokenizer {TOKENIZER}, pinned to commit {COMMIT[:12]}" in (
        capsys.readouterr().out
    )
    assert cli.run(["run", "sign", "--unpinned"]) == 0
    data = load_checked_run(Path("run.toml")).config.data
    assert (data.revision, data.tokenizer_revision) == ("", "")
    capsys.readouterr()
    assert cli.run(["run", "sign"]) == 1
    assert "cannot be downloaded from the hub" in capsys.readouterr().err


def test_sign_of_a_commit_keeps_the_digest_of_its_tokens_and_says_so(
    author: Identity, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text(
        f'{TINY}[data]\nsource = "hub"\nhub_id = "{DATA_SET}"\nrevision = "{COMMIT}"\ndigest = "{"ab" * 32}"\n'
    )
    assert cli.run(["run", "sign", "--json"]) == 0
    warning, _ = events(capsys)
    assert "was not read: it stays pinned to abababababab" in str(warning["message"])
    assert load_checked_run(Path("run.toml")).config.data.digest == "ab" * 32
