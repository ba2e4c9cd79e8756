"""Small numbers that preserve how large numbers relate: equality, order and divisibility."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping


def in_proportion(values: Collection[int], units: Mapping[int, int], least: int) -> dict[int, int]:
    """Return a small number for each value; 1 stays 1.

    A larger value gets a larger number, and a value is a multiple of another value if and only if its number is. Each
    number is at least `least` and a multiple of the value's entry in `units`. If the units force a number to be a
    multiple of another one, it is a multiple although the values are not. A value stays unchanged if its number would
    be larger.
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
