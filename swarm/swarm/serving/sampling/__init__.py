"""Drawing the next token: `sampling` has the parameters, and `drawing` draws, equally on all machines for equal
logits."""
