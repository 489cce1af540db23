"""Grammars that strangers send: `grammar_worker` compiles them, and `grammar_masks` provides the masks for draws."""
