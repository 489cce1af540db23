"""Drawing the next token, equal on any machine for equal logits and seed."""
