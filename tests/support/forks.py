"""What a fork of the test's process finds."""

import os
import signal
import traceback
import warnings


def in_fork(answer, seconds=60):
    """The number that a function answers in a fork; negative if it took longer than ``seconds``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that run meanwhile
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            os._exit(int(answer()))
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
