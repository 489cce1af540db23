"""Handles what convicts a member of a lie: evidence, its checks, the validation of intervals, and the bans that
follow."""
