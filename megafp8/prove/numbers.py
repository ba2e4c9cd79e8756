"""Small numbers in proportion to large ones: equal, larger and divisible where those are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping


def in_proportion(values: Collection[int], units: Mapping[int, int], least: int) -> dict[int, int]:
    """By value, a small number instead of it; 1 stays 1.

    Of two values the larger one has the larger number, and a value is a multiple of another one if and only if its
    number is. That of a value is at least `least` and a multiple of its entry in `units`. Where no number can keep a
    value from being a multiple of another one, since units make it so, it is one. A value whose number would be larger
    than itself stays.
    """
    small = {value: 1 for value in values if value == 1}
    for value in sorted({*values} - {1}):
        unit = units.get(value, 1)
        factors = math.lcm(unit, *(number for other, number in small.items() if value % other == 0))
        above = max([least - 1, *small.values()])
        multiples = range((above // factors + 1) * factors, (above + 64 * factors) + 1, factors)
        others = [number for other, number in small.items() if value % other]
        number = next((n for n in multiples if all(n % other for other in others)), multiples[0])
        small[value] = min(value, number)
    return small
