from __future__ import annotations

from hypothesis import settings

# a busy machine is not a bug: examples have no deadline of their own, tests have pytest's timeout
settings.register_profile("swarm", deadline=None)
settings.load_profile("swarm")
