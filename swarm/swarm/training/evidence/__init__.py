"""Evidence that convicts a member of a lie: its checks, the validation of intervals, and the resulting bans."""
