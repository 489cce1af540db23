"""A run file as text: a new one with every setting explained, and edits that leave what people wrote as it is.

Pure functions. An edit looks for whole lines, so it may miss in unusual TOML (a table written inline, a text of several
lines): whoever edits parses the outcome and compares (see `run_file`).
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from swarm_protocol.errors import ConfigError

from swarm.training.run.run_config import CODECS, INNER_OPTIMIZERS, OUTER_OPTIMIZERS, SCHEDULES, SOURCES, RunConfig
from swarm.trust.aggregators import aggregator_names, get_aggregator, parameters_of

_WIDTH = 110
_HEAD = """\
# A run: what is trained, on what, and how. All its members share these settings.
# Every setting is here as it is by default: change what you need. Signing writes down those left out. Then:
#
#     swarm-node run sign {path}
#     swarm-node join --run {path} --peers ADDR

"""

ABOUT: Mapping[str, str] = {
    "name": "Beginning of the run's id. The rest is a digest of all settings, of who signed them, and when.",
    "seed": "Of the model's first weights and of the order of the samples.",
    "outer_steps": "How often the members' work is put together before the run is finished.",
    "interval_steps": "Inner steps that each member takes on its own between two outer steps.",
    "interval_s": "An interval also ends after so many seconds, so that slow members bring what they can; 0: no limit.",
    "fragments": "Each outer step moves one of so many parts of the model, in turn (Streaming DiLoCo); 1: all of it.",
    "overlap_steps": "Inner steps that members take while a round is under way; 0: they wait for it.",
    "mixing": "Share of its own weights that a member keeps when it takes in a result; for overlap_steps.",
    "codec": f"How contributions are sent: {', '.join(CODECS)}.",
    "error_feedback": "Add what the codec loses of a contribution to the next one.",
    "aggregator": f"How contributions are put together: {', '.join(aggregator_names())}.",
    "fallback": "The aggregator of a round with fewer contributions than the one above needs, with its default "
    "parameters.",
    "admission": "The peer ids that may contribute; empty: anyone may.",
    "min_group": "A round needs so many members.",
    "max_group": "A round takes at most so many members.",
    "quorum_grace_s": "Seconds that a round waits at least for more members once min_group are there. It waits for "
    "a quarter of the interval's duration where that is longer, up to 30 s. 0: it waits for nobody.",
    "majority_after_s": "Seconds that a round waits for two thirds of the last step's members. Then a majority of them "
    "is enough; 0: never.",
    "validation_interval": "Outer steps between two measurements of the loss on held-out data; 0: only before the "
    "first and after the last step.",
    "model": "A Hugging Face config: model_type, and any of that type's keys. By default a byte-level Llama of "
    "1.1 million parameters.",
    "model.model_type": "Family of decoders, as in a config.json: llama, qwen3, gpt2, …",
    "model.vocab_size": "Tokens: 256 are the bytes; with a tokenizer, at least as many as it has.",
    "model.hidden_size": "Width of the hidden states.",
    "model.intermediate_size": "Width of each layer's MLP.",
    "model.num_hidden_layers": "Layers.",
    "model.num_attention_heads": "Attention heads, which divide hidden_size.",
    "model.num_key_value_heads": "Heads of keys and values, which divide num_attention_heads.",
    "model.max_position_embeddings": "Longest context, at least data.window_tokens.",
    "model.tie_word_embeddings": "Input and output embeddings are the same weights.",
    "model.bos_token_id": "Token before a document.",
    "model.eos_token_id": "Token that ends a document.",
    "start": "The weights that the run begins with. To train a checkpoint further: run init --start CHECKPOINT.",
    "start.checkpoint": 'OWNER/NAME on the Hugging Face hub, or "local": each member names the directory of its own '
    "copy (join --start); empty: weights drawn from the seed.",
    "start.revision": "Its branch, tag or commit on the hub; run sign puts the commit in its place.",
    "start.digest": "Pins the weights: who has others is refused. Filled in by run sign.",
    "data": "What is trained on.",
    "data.source": f"{', '.join(SOURCES)}: the standard library's source, each member's own files (join --data), or a "
    "data set of the Hugging Face hub.",
    "data.hub_id": 'OWNER/NAME of the data set, with source = "hub".',
    "data.hub_config": "Which of its configurations, if it has several.",
    "data.split": "Which split of it.",
    "data.text_key": "Which column of it, or key of JSON lines, holds the text.",
    "data.revision": "Its branch, tag or commit; run sign puts the commit in its place.",
    "data.tokenizer": '"bytes", OWNER/NAME on the hub, or "local": each member names the directory of its own copy.',
    "data.tokenizer_revision": "The tokenizer's branch, tag or commit on the hub, likewise.",
    "data.digest": "Pins the data: who has other data is refused. Filled in by run sign, if the data is there.",
    "data.window_tokens": "Tokens of one sample.",
    "inner": "The optimizer of each member.",
    "inner.optimizer": f"{' or '.join(INNER_OPTIMIZERS)}: Muon moves the hidden layers' matrices, AdamW the rest.",
    "inner.batch_windows": "Samples of one inner step.",
    "inner.learning_rate": "Its peak.",
    "inner.warmup_steps": "Inner steps over which the learning rate rises.",
    "inner.schedule": f"What then becomes of the learning rate over the run: {', '.join(SCHEDULES)}.",
    "inner.final_ratio": "What is left of it at the end, as a share.",
    "inner.weight_decay": "Decoupled, of matrices alone.",
    "inner.beta1": "AdamW's first moment.",
    "inner.beta2": "AdamW's second moment.",
    "inner.muon_momentum": "Muon's momentum.",
    "inner.clip_norm": "Longest gradient that is taken as it is.",
    "outer": "What is made of the group's mean pseudo-gradient.",
    "outer.optimizer": f"{' or '.join(OUTER_OPTIMIZERS)}: DiLoCo's Nesterov, or the mean as it is.",
    "outer.learning_rate": "Of Nesterov.",
    "outer.momentum": "Of Nesterov. 0.6 suits tens of outer steps, DiLoCo's own 0.9 hundreds.",
    "aggregation": "Parameters of the aggregator, where it has any; those left out get their defaults.",
}
"""Every setting, and every table, in words. A test holds this and `RunConfig` together."""


def template(config: RunConfig, path: str) -> str:
    """`config` as a file to edit, unsigned, for `path`."""
    mapping, defaults = config.to_mapping(), RunConfig(name=config.name).to_mapping()
    # a person who chooses another aggregator would have to take out the parameters of this one
    usual = parameters_of(get_aggregator(config.aggregator, {}))
    mapping["aggregation"] = {key: value for key, value in config.aggregation.items() if value != usual[key]}
    parts = [_HEAD.format(path=path)]
    for key, value in mapping.items():
        if not isinstance(value, Mapping):
            parts.append(_setting(key, key, value, defaults))
    for key, table in mapping.items():
        if isinstance(table, Mapping):
            parts.append(f"\n{_comment(ABOUT[key])}[{key}]\n")
            parts += [_setting(f"{key}.{name}", name, value, defaults[key]) for name, value in table.items()]
    return "".join(parts)


def with_signature(text: str, values: Mapping[str, Any]) -> str:
    """`text` with the table [signature] at its end, in place of an earlier one. Comments stay."""
    kept, inside = list[str](), False
    for line in text.splitlines():
        if header := _table_of(line):
            inside = header == "signature"
        if not (inside and line.strip() and not line.lstrip().startswith("#")):
            kept.append(line)
    body = "\n".join(kept).rstrip()
    return f"{body}\n\n[signature]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items())


def with_value(text: str, table: str, key: str, value: object) -> str:
    """`text` with `key = value` in [table], in place of the line that is there; at the end of `text` without one."""
    lines, at, inside = text.splitlines(), None, False
    for index, line in enumerate(lines):
        if header := _table_of(line):
            inside = header == table
            at = index + 1 if inside else at
        elif inside and re.match(rf"\s*{re.escape(key)}\s*=", line):
            _, _, comment = line.partition("#")
            lines[index] = f"{key} = {toml_value(value)}" + (f"  #{comment}" if comment else "")
            return "\n".join(lines) + "\n"
    if at is None:
        lines += ["", f"[{table}]"]
        at = len(lines)
    lines.insert(at, f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def with_missing(text: str, written: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    """`text`, which says `written`, with all that only `full` has: values at the end of their table, tables at the end
    of `text`."""
    for key, value in full.items():
        if isinstance(value, Mapping):
            given = written.get(key, {})
            missing = {name: each for name, each in value.items() if name not in given}
            if key not in written:
                text = f"{text.rstrip()}\n\n[{key}]\n"
            text = _with_lines(text, key, missing)
        elif key not in written:
            text = _with_lines(text, "", {key: value})
    return text


def _with_lines(text: str, table: str, values: Mapping[str, Any]) -> str:
    """At the end of [table]; before the first table, if that is empty."""
    lines, at, inside = text.splitlines(), 0, not table
    for index, line in enumerate(lines):
        if header := _table_of(line):
            inside = header == table
        if inside and line.strip() and not line.lstrip().startswith("#"):
            at = index + 1
    lines[at:at] = [f"{key} = {toml_value(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def to_toml(mapping: Mapping[str, Any]) -> str:
    """Values first, then a table for each mapping among them, with mappings below that inline. Keys are bare words."""
    lines = [f"{key} = {toml_value(value)}" for key, value in mapping.items() if not isinstance(value, Mapping)]
    for key, table in mapping.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{key}]", *(f"{name} = {toml_value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """Raises ConfigError for what no run can hold."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    raise ConfigError(f"a run cannot hold the value {value!r}", remedy="use text, numbers, lists and tables")


def _text(text: str) -> str:
    # a JSON string is a TOML string, but for DEL, which TOML wants escaped
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _setting(where: str, key: str, value: object, defaults: Mapping[str, Any]) -> str:
    has_default = where != "name" and key in defaults
    default = f" Default: {toml_value(defaults[key])}." if has_default else ""
    about = f"{ABOUT[where]}{default}" if where in ABOUT else ""
    return f"{_comment(about)}{key} = {toml_value(value)}\n"


def _comment(text: str) -> str:
    whole = text.replace("Default: ", "Default:\N{NO-BREAK SPACE}")  # a lone value on a line tells nothing
    lines = textwrap.wrap(whole, _WIDTH - 2)
    return "".join(f"# {line}\n" for line in lines).replace("\N{NO-BREAK SPACE}", " ")


def _table_of(line: str) -> str:
    """The table that begins with this line; empty if none does."""
    match = re.fullmatch(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?", line)
    return match[1].strip("\"'") if match else ""
