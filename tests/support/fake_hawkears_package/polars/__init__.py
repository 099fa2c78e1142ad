"""A library that starts threads as soon as it is imported."""

import threading

_AT_WORK = threading.Thread(target=threading.Event().wait, daemon=True)
_AT_WORK.start()


def thread_pool_size():
    return 1 if _AT_WORK.is_alive() else 0
