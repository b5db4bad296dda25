"""The instrument: the same model under every norm, in step time, memory and loss curves.

`python -m compare --help` says how it is run.
"""

import os

# Before torch is loaded: threads that spin while they wait make a CPU run many times slower where
# another process has one of the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
