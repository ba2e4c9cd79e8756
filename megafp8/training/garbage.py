"""Python's garbage collector, at moments that all ranks share.

Left to itself the collector runs when a rank has made enough objects. It then looks at every object there is, several
hundred thousand once torch is imported, which takes a tenth of a second or more; each rank does so at a moment of its
own, and all others wait for it in their next collective. So automatic collection is off while a run trains, what was
there before is set aside (`gc.freeze`), and every rank collects the rest after the same steps.

What it gives up: objects in reference cycles live for up to that many steps. What a step makes on the device is not in
cycles, and is freed as ever.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collected_after_steps(interval: int) -> Iterator[Callable[[int], None]]:
    """Within, garbage is collected by what is given, called after each step with its number, every `interval` steps.

    0 leaves it to Python.
    """

    def after_step(step: int) -> None:
        if interval and step % interval == 0:
            gc.collect()

    if not interval or not gc.isenabled():
        yield after_step
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield after_step
    finally:
        gc.enable()
        gc.unfreeze()
