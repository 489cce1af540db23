"""The settings of a node: `config` declares and resolves them, `parsers` turns their text into values."""
