"""Assignment of cache pages to sequences. Pure Python: every rank computes the same result.

A page holds the keys and values of `page_size` consecutive tokens of one sequence, in all layers. Memory is therefore
never fragmented, and a sequence occupies no more memory than its tokens need, rounded up to a page (Kwon et al. 2023,
arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence


class PageAllocator:
    """Allocator of the `num_pages` pages of a cache."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))  # the last is taken first
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens of a sequence."""
        return -(-tokens // self.page_size)

    def extend(self, pages: MutableSequence[int], tokens: int) -> bool:
        """Append free pages to a sequence's `pages` until they hold `tokens` tokens in total.

        Return False, and take no pages, if too few are free.
        """
        needed = self.pages_for(tokens) - len(pages)
        if needed > len(self._free):
            return False
        for _ in range(needed):
            page = self._free.pop()
            self._taken.add(page)
            pages.append(page)
        return True

    def release(self, pages: Sequence[int]) -> None:
        """Return pages to the allocator."""
        for page in pages:
            assert page in self._taken, f"page {page} is free already"
            self._taken.remove(page)
            self._free.append(page)
