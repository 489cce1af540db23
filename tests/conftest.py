from __future__ import annotations

import os
import signal

# a shell ignores Ctrl-C for what it starts in the background, and what the tests start would inherit that
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch reads it at import, child processes inherit it: for models this small, threads only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# a busy machine is not a bug: examples have no deadline of their own, tests have pytest's timeout
settings.register_profile("swarm", deadline=None)
settings.load_profile("swarm")
