"""Drawing the next token: `sampling` says how, and `drawing` does it, equally on any machine for equal logits."""
