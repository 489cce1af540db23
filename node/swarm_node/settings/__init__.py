"""The settings of a node: `config` declares them, `config_sources` resolves them, and `parsers` turns text into
values."""
