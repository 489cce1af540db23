"""One lock around every building and loading of a transformers model in this process.

While transformers loads a model it replaces methods of its own classes (weight tying, initialization), and puts back
what it found. Two loads that overlap can leave the replacement behind for good: tied weights are then no longer tied,
and a replica that is built after that has other parameters than its peers.
"""

from __future__ import annotations

import threading

BUILDING = threading.RLock()
