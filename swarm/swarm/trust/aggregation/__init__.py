"""How an owner combines the members' contributions: mean, trimmed, clipped, by distance."""
