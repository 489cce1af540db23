"""What a node was told: `config` declares and resolves the settings, `parsers` turns their text into values."""
