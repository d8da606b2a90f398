"""Factors of units of measurement, so that `5 km` is not `5 m` and `500 cm` is `5 m`.

Units are compared if both the answer and the gold have one. A word outside the table is a kind of
its own: `3 apples` is not `3 oranges`, and `25% loss` is not `25% gain`.
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
    ("units", "1", "unit units"),
)
PREFIXED: Final = (
    ("joule", "1", "J joule joules"),
    ("joule", "1602176634/10000000000000000000000000000", "eV electronvolt electronvolts"),
    ("hertz", "1", "Hz hertz"),
    ("pascal", "1", "Pa pascal pascals"),
    ("watt", "1", "W watt watts"),
    ("newton", "1", "N newton newtons"),
    ("volt", "1", "V volt volts"),
    ("ampere", "1", "A amp amps ampere amperes"),
    ("byte", "1", "B byte bytes"),
    ("byte", "1/8", "bit bits"),
)
"""Units with the prefixes of the SI: `kJ`, `megahertz`."""
PREFIXES: Final = (
    ("n nano", "1/1000000000"),
    ("u micro", "1/1000000"),
    ("m milli", "1/1000"),
    ("k kilo", "1000"),
    ("M mega", "1000000"),
    ("G giga", "1000000000"),
    ("T tera", "1000000000000"),
)
UNITS: Final = {
    name: (kind, Fraction(factor)) for kind, factor, names in TABLE for name in names.split()
}
PREFIXED_UNITS: Final = {
    prefix + name: (kind, Fraction(factor) * Fraction(scale))
    for kind, factor, names in PREFIXED
    for prefixes, scale in (("", "1"), *PREFIXES)
    for name in names.split()
    for prefix in (prefixes.split()[len(name) > 2] if prefixes else "",)
}
CASES: Final = {"Kg": "kg", "KG": "kg", "Km": "km", "KM": "km", "Cm": "cm", "CM": "cm"}
SYNONYMS: Final = {
    **dict.fromkeys(("degree", "degrees"), "deg"),
    **dict.fromkeys(("radian", "radians"), "rad"),
    **dict.fromkeys(("kelvin", "kelvins"), "K"),
    "celsius": "C",
    "fahrenheit": "F",
}
SHORT_MAX: Final = 2
"""Maximum letters of an abbreviation, whose case counts: `mW` is not `MW`."""
WITHOUT_MEANING: Final = frozenset(
    ("a", "an", "the", "each", "every", "total", "altogether", "percent", "pct", "percentage")
)
POWERS: Final = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
SHORT: Final = {"mph": "mi/h", "kph": "km/h", "kmph": "km/h"}

PER: Final = re.compile(
    r"(?<![a-zA-Z])(?<!of )(?:an?|every) (?=(?:second|minute|hour|day|week|month|year)(?![a-zA-Z]))"
)
"""The word before the unit in `dollars a day`, which means *per*. `of a day` is a part of one."""
PART: Final = re.compile(
    r"(?P<per>/|per(?![a-zA-Z]))|(?P<name>[^\W\d_]{1,30})(?: ?\^ ?\{? ?(?P<power>-?\d) "
    r"?\}?)?|(?P<other>[^ .{}~-])"
)


@dataclass(frozen=True)
class Measure:
    """A unit as a product of powers: `cm^2` → `Measure({("length", 2)}, Fraction(1, 10_000))`."""

    dimensions: frozenset[tuple[str, int]]
    factor: Fraction
    """The unit in base units."""
    is_known: bool = True
    """Whether all words are in the table; every other word is a dimension of its own."""


def measure_of(unit: str) -> Measure | None:
    """Parse a unit such as `cm^2`, `miles per hour`, `kg m/s^2` or `red apples`; None for none."""
    dimensions: Counter[str] = Counter()
    factor, sign, next_power, is_known = Fraction(1), 1, 1, True
    for part in PART.finditer(PER.sub("per ", SHORT.get(unit.strip().lower(), unit))):
        name = _normal(part["name"] or part["other"] or "")
        if part["per"]:
            sign = -1
        elif name in POWERS:
            next_power = POWERS[name]
        elif name not in WITHOUT_MEANING:
            kind, unit_factor = UNITS.get(name) or PREFIXED_UNITS.get(name) or ("", Fraction(1))
            power = sign * (int(part["power"]) if part["power"] else next_power)
            dimensions[kind or f"'{_singular(name)}'"] += power
            factor *= unit_factor**power
            is_known &= bool(kind)
            next_power = 1
    return Measure(frozenset(dimensions.items()), factor, is_known) if dimensions else None


def is_unit_name(word: str) -> bool:
    """Return whether a word is in the tables of units."""
    name = _normal(word)
    return any(name in table for table in (UNITS, PREFIXED_UNITS, POWERS)) or word in SYNONYMS


def ratio(answer: Measure | None, gold: Measure | None) -> Fraction | None:
    """Return the answer's unit divided by the gold's.

    1 if one of them has no unit, or both are in the table and are of different kinds; None if they
    have different words and one is not in the table.
    """
    if answer is None or gold is None:
        return Fraction(1)
    if answer.dimensions != gold.dimensions:
        return Fraction(1) if answer.is_known and gold.is_known else None
    return answer.factor / gold.factor


def _normal(word: str) -> str:
    word = word.replace("μ", "u").replace("µ", "u")
    word = (
        word if len(word) <= SHORT_MAX or word in UNITS or word in PREFIXED_UNITS else word.lower()
    )
    return SYNONYMS.get(word, CASES.get(word, word))


def _singular(word: str) -> str:
    """Return a word without the ending of its plural: `boxes` and `box` are the same."""
    if len(word) <= SHORT_MAX or word.endswith("ss"):
        return word
    if word.endswith("ies"):
        return word[:-3] + "y"
    return word.removesuffix("s").removesuffix("e")
