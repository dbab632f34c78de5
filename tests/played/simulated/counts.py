"""What happens on the simulated GPU, counted."""

import threading
from collections import Counter

#: Bytes ``allocated``, copied ``to_host`` and ``to_device``, and ``pinned``: shown to others by
#: their address, so that cuDF never spills them again. How often anything is ``copied_to_host``,
#: or the host ``waits`` for the device, as it does for each such copy.
COUNTS = Counter()

#: Held by all that changes the state of the device.
lock = threading.RLock()


def count(what, by=1):
    with lock:
        COUNTS[what] += by
