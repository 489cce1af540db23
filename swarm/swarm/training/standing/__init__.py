"""The standing of each trainer of a run decides whether it may enter, and how much of a step its work counts for.

A newcomer's credential (an invitation, or the vouches of members) is read into a grant
(`swarm_protocol.run_credentials`). `entrance` has the run's rule for grants, and the `Entry` that the state keeps of
each peer that entered by one. Its `Probation` says for how many outer steps a newcomer counts for less, and which share
of a step and of its seats all newcomers have together. `standings` answers the rest of training. It has the `Register`
that the committed state keeps of members: entries, and the credits for which a proven member is remembered while it is
away. `held_out_scores` scores contributions by the loss on held-out data; a low score may count for less.

Values and pure functions of the committed state, so that every member computes the same.
"""
