"""Writes the help of one command. Many options are listed in sections, in the order in which a new user needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typer.core import TyperArgument, TyperCommand

MAX_UNDIVIDED = 15
"""Maximum number of options in one list."""

SECTIONS: Mapping[str, Sequence[str]] = {
    "Network": ("peers", "invite", "network_id", "name"),
    "Work": ("run", "invitation", "then_serve", "model", "manifest", "take"),
    "HTTP server": ("host", "port", "allowed_hosts", "trusted_proxies", "dashboard", "history", "checkpoints"),
    "Access to the API": ("api_keys", "open_to_all", "requests_per_min", "tokens_per_min", "allowed_origins"),
    "Models": ("pin_model", "publisher", "spot_check", "text_at_home", "blocks_at_home"),
    "Limits and hardware": (
        *("hours", "monthly_traffic", "max_upload", "max_download", "max_memory", "max_blocks"),
        *("device", "threads", "probe"),
    ),
    "Serving a model": ("dtype", "blocks"),
    "Training a run": (
        *("data", "tokenizer", "start", "devices", "micro_batch", "autocast", "checkpoint_activations", "compile"),
        *("tensorboard", "keep_checkpoints", "keep_every"),
    ),
    "Connections": ("listen", "announce", "mdns", "relay", "relay_rate"),
}
"""The settings of each section. All other options come last."""


class HelpfulCommand(TyperCommand):
    """Shows arguments as the list of commands names them. They are hidden from typer's own help, which would add the
    names of its types and take all for optional."""

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """The name of each argument, in brackets if it is optional, and its help text."""
        return [(str(each.metavar), str(each.help)) for each in self.params if isinstance(each, TyperArgument)]

    def collect_usage_pieces(self, _ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(name for name, _ in self.arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        divided = divide(self.get_params(ctx))
        rows = {title: [each.get_help_record(ctx) for each in options] for title, options in divided.items()}
        for title, named in {"Arguments": self.arguments, **rows}.items():
            if named:
                with formatter.section(title):
                    formatter.write_dl(named)


def divide(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the options among a command's parameters, by the title of their section, in the order of the help."""
    left = {each.name: each for each in parameters if not isinstance(each, TyperArgument)}
    if len(left) <= MAX_UNDIVIDED:
        return {"Options": list(left.values())}
    found = {title: [left.pop(name) for name in names if name in left] for title, names in SECTIONS.items()}
    return {title: options for title, options in {**found, "Other options": list(left.values())}.items() if options}
