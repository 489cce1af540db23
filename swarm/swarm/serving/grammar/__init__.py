"""Grammars that strangers send: `grammar_worker` compiles them, `grammar_masks` applies them where tokens are drawn."""
