"""A child process ends with the process that started it, even when that one is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_CHECK_S = 1.0


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Call first thing in the child. Linux delivers `signum` at the parent's death; elsewhere a thread looks every
    second whether the child has been handed to another parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum))
    else:
        threading.Thread(target=_watch, args=(parent, signum), daemon=True, name="lifeline").start()
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signum)


def _watch(parent: int, signum: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_S)
    os.kill(os.getpid(), signum)
