"""Factors of units of measurement, so that `5 km` is not `5 m` and `500 cm` is `5 m`.

Units are compared only if both the answer and the gold have a unit of this table. Every other unit
is dropped (`units.py`).
"""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

TABLE: Final = (
    ("length", "1/1000000000", "nm nanometer nanometers"),
    ("length", "1/1000000", "um micrometer micrometers"),
    ("length", "1/1000", "mm millimeter millimeters millimetre millimetres"),
    ("length", "1/100", "cm centimeter centimeters centimetre centimetres"),
    ("length", "1/10", "dm decimeter decimeters"),
    ("length", "1", "m meter meters metre metres"),
    ("length", "1000", "km kilometer kilometers kilometre kilometres"),
    ("length", "127/5000", "in inch inches"),
    ("length", "381/1250", "ft foot feet"),
    ("length", "1143/1250", "yd yard yards"),
    ("length", "201168/125", "mi mile miles"),
    ("mass", "1/1000", "mg milligram milligrams"),
    ("mass", "1", "g gram grams"),
    ("mass", "1000", "kg kilogram kilograms"),
    ("mass", "45359237/1600000", "oz ounce ounces"),
    ("mass", "45359237/100000", "lb lbs pound pounds"),
    ("time", "1/1000", "ms millisecond milliseconds"),
    ("time", "1", "s sec secs second seconds"),
    ("time", "60", "min mins minute minutes"),
    ("time", "3600", "h hr hrs hour hours"),
    ("time", "86400", "day days"),
    ("time", "604800", "week weeks"),
    ("months", "1", "month months"),
    ("months", "12", "yr yrs year years"),
    ("volume", "1/1000", "ml mL milliliter milliliters millilitre millilitres"),
    ("volume", "1/100", "cl cL centiliter centiliters"),
    ("volume", "1/10", "dl dL deciliter deciliters"),
    ("volume", "1", "l L liter liters litre litres"),
    ("money", "1", "cent cents"),
    ("money", "100", "dollar dollars USD"),
)
UNITS: Final = {
    name: (kind, Fraction(factor)) for kind, factor, names in TABLE for name in names.split()
}
POWERS: Final = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
SHORT: Final = {"mph": "mi/h", "kph": "km/h", "kmph": "km/h"}

PART: Final = re.compile(
    r"(?P<per>/|per(?![a-zA-Z]))|(?P<name>[a-zA-Z]{1,20})(?: ?\^ ?\{? ?(?P<power>-?\d) "
    r"?\}?)?|(?P<other>[^ .{}~])"
)


@dataclass(frozen=True)
class Measure:
    """A unit as a product of powers: `cm^2` → `Measure({("length", 2)}, Fraction(1, 10_000))`."""

    dimensions: frozenset[tuple[str, int]]
    factor: Fraction
    """The unit in base units."""


def measure_of(unit: str) -> Measure | None:
    """Parse a unit such as `cm^2`, `miles per hour` or `kg m/s^2`; None for an unknown word."""
    dimensions: Counter[str] = Counter()
    factor, sign, next_power = Fraction(1), 1, 1
    for part in PART.finditer(SHORT.get(unit.strip(), unit)):
        if part["per"]:
            sign = -1
        elif part["name"] in POWERS:
            next_power = POWERS[part["name"]]
        elif part["name"] in UNITS:
            kind, unit_factor = UNITS[part["name"]]
            power = sign * (int(part["power"]) if part["power"] else next_power)
            dimensions[kind] += power
            factor *= unit_factor**power
            next_power = 1
        else:
            return None
    return Measure(frozenset(dimensions.items()), factor) if dimensions else None


def ratio(answer: Measure | None, gold: Measure | None) -> Fraction:
    """Return the answer's unit divided by the gold's; 1 if they cannot be compared."""
    if answer is None or gold is None or answer.dimensions != gold.dimensions:
        return Fraction(1)
    return answer.factor / gold.factor
