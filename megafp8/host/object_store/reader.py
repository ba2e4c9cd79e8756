"""Reader of an object at arbitrary positions, without a copy on disk."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from megafp8.host.object_store.path import ObjectPath

PAGE_BYTES = 1 << 20
REQUEST_BYTES = 1 << 25
_PAGES = 8
_REQUESTS = 8


class ObjectReader:
    """Object that is read by ranges. Short reads use pages of 1 MiB, and the latest eight pages are kept.

    It is a context manager like a file, but there is nothing to close. The object must not change while it is read.
    """

    def __init__(self, path: ObjectPath) -> None:
        self.path = path
        self._pages: OrderedDict[int, bytes] = OrderedDict()
        self._held = (0, b"")

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def hold(self, start: int, length: int) -> None:
        """Read `length` bytes from `start` in one request, and serve reads within them from memory."""
        self._held = (start, self.path.read_range(start, start + length))

    def read_some(self, start: int, view: memoryview) -> int:
        """Fill the beginning of `view` with bytes from `start`, and return their number; 0 at the end of the object."""
        first, content_held = self._held
        if first <= start and start + len(view) <= first + len(content_held):
            view[:] = memoryview(content_held)[start - first : start - first + len(view)]
            return len(view)
        if len(view) >= PAGE_BYTES:
            content = self.path.read_range(start, start + min(len(view), REQUEST_BYTES))
        else:
            number, skip = divmod(start, PAGE_BYTES)
            content = self._page(number)[skip : skip + len(view)]
        view[: len(content)] = content
        return len(content)

    def blocks(self, start: int, size: int) -> Iterator[bytes]:
        """Yield the bytes `[start, start + size)` in order, with several concurrent requests."""
        end, pending = start + size, deque[Future[bytes]]()
        with ThreadPoolExecutor(_REQUESTS) as executor:
            try:
                for low in range(start, end, REQUEST_BYTES):
                    pending.append(executor.submit(self.path.read_range, low, min(end, low + REQUEST_BYTES)))
                    if len(pending) == _REQUESTS:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def _page(self, number: int) -> bytes:
        if number not in self._pages:
            self._pages[number] = self.path.read_range(number * PAGE_BYTES, (number + 1) * PAGE_BYTES)
            if len(self._pages) > _PAGES:
                self._pages.popitem(last=False)
        self._pages.move_to_end(number)
        return self._pages[number]
