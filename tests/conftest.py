from __future__ import annotations

import os

# torch reads it at import, child processes inherit it: for models this small, threads only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# a busy machine is not a bug: examples have no deadline of their own, tests have pytest's timeout
settings.register_profile("swarm", deadline=None)
settings.load_profile("swarm")
