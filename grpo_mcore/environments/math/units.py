r"""Units behind a number in an answer (or, of money, before it): their spellings, and the number without them."""

import functools
import re
from collections import Counter
from fractions import Fraction
from typing import Any

# A unit a column, with its equal spellings. Words of three letters or more have a plural with s, too.
_SPELLINGS = """
mm millimeter millimetre | cm cms centimeter centimetre | dm decimeter decimetre | m meter metre | in inch inches
km kms kilometer kilometre | ft foot feet | yd yds yard | mi mile | acre | ha hectare | mg milligram | t tonne ton
g gm gram gramme | kg kgs kilogram kilo | lb lbs pound | oz ounce | ml mL milliliter millilitre | L l liter litre
gal gallon | ms millisecond | s sec second | min minute | h hr hrs hour | day | week | month | yr yrs year | rad radian
degree deg | °C Celsius celsius | °F Fahrenheit fahrenheit | K Kelvin kelvin | cent ¢ | $ \\$ dollar USD usd | £ GBP
€ euro EUR | ¥ yen JPY yuan RMB 元 | ₹ rupee INR Rs Rs. | % \\% percent percentage pct | N newton | W watt
J joule | kJ kilojoule | kW kilowatt | V volt | A amp ampere | Hz hertz | Pa pascal | mol mole
mpg | rpm | kPa | C coulomb | T tesla | eV | MeV | nm nanometer | atm | ohm Ω \\Omega
毫米=mm 厘米=cm см=cm 分米=dm 米=m м=m 千米=km 公里=km км=km 克=g 千克=kg 公斤=kg 吨=t 毫升=ml 升=L 秒=s 分钟=min 小时=h
kph=km/h mph=mi/h 度=degree 平方厘米=cm^2 平方米=m^2 平方千米=km^2 立方厘米=cm^3 立方米=m^3
"""
OTHER_SCRIPTS = r"\u0400-\u06ff\u0900-\u1fff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"


def _units() -> dict[str, str]:
    units = {}
    for names in re.split(r"[|\n]", _SPELLINGS):
        for name in names.split():
            spelling, _, other = name.partition("=")
            unit = units[spelling] = other or names.split()[0]
            if re.fullmatch("[a-zA-Z]{3,}", spelling):
                units.setdefault(spelling + "s", unit)
    return units


_UNIT_OF = _units()
_WORD = "|".join(sorted(map(re.escape, _UNIT_OF), key=len, reverse=True))
_TIMES = r"\s*(?:/|\bper\b|\\cdot|\*)[\s(]*|(?:[\s~]|\\[,;:! ])+"
_FACTOR = rf"({_WORD})(?![a-zA-Z])(?:\s*\^\s*\{{?\s*(-?\d)\s*\}}?)?"
_FACTORS = re.compile(rf"({_TIMES})?{_FACTOR}")
_UNIT = re.compile(
    rf"(?P<number>.*?(?:[\d)}}\].]|\\[a-z]+))(?P<space>(?:[\s~-]|\\[,;:! ])*)"
    rf"(?P<shape>(?:sq\.?|square|cubic|cu\.?)\s+)?(?P<unit>{_FACTOR}(?:(?:{_TIMES}){_FACTOR})*)\)?",
    re.DOTALL,
)
_PART = rf"(\d+(?:\.\d+)?)[\s~-]*({_WORD})"
COMPOUND = rf"(?<![\w.,/]){_PART}(?:,?[\s~]+(?:and[\s~]+)?{_PART})+(?![\w^/])"
_MONEY = re.compile(r"(-?)\s*(\\?\$|[€£¥₹]|Rs\.?|USD|EUR|GBP)\s*(?=-?[\d.])")
_DEGREE = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:([CF])\b)?|\s*\\degree(?![a-zA-Z])|\s*°(?![CF])")


def as_one_unit(match: re.Match[str]) -> str:
    """Return a match of COMPOUND in its last unit: 150 min of "2 hours and 30 minutes"."""
    parts = [(Fraction(number), _UNIT_OF[unit]) for number, unit in re.findall(_PART, match[0])]
    ratios = [ratio(unit, parts[-1][1]) for _, unit in parts]
    if None in ratios or ratios != sorted({*ratios}, reverse=True):
        return match[0]
    return f"{sum(number * factor for (number, _), factor in zip(parts, ratios, strict=True))} {parts[-1][1]}"


@functools.cache
def ratio(unit: str, other: str) -> Any:
    """Return how many of the other unit one unit is, in sympy's numbers; None where no number relates them."""
    import sympy
    from sympy.physics import units

    known = vars(units) | {  # what sympy lacks, or has as something else
        "degree": sympy.pi / 180, "rad": sympy.S.One, "in": units.inch, "min": units.minute, "lb": units.pound,
        "oz": units.pound / 16, "gal": 4 * units.quart, "week": 7 * units.day, "yr": 12 * sympy.Symbol("month"),
        "cent": sympy.Symbol("$") / 100, "kJ": 1000 * units.J, "kW": 1000 * units.W,
    }  # fmt: skip
    powers = Counter(_factors(unit))
    powers.subtract(_factors(other))
    quotient = sympy.Mul(*(known.get(name, sympy.Symbol(name)) ** power for name, power in powers.items()))
    value = units.convert_to(quotient, [units.kg, units.m, units.s, units.A, units.K, units.mol])
    return value if value.is_number else None


def split_unit(text: str) -> tuple[str, str | None]:
    """Return the text without its unit, and the unit; None where it has none."""
    text = text.strip().rstrip(".").strip()
    if (money := _MONEY.match(text)) is not None:
        return money[1] + split_unit(text[money.end() :])[0], _UNIT_OF[money[2]]
    plain = re.sub(r"\\(?:text|mathrm|textrm|mbox|operatorname|rm)\s*\{([^{}]*)\}", r" \1 ", text)
    plain = _DEGREE.sub(lambda match: f" °{match[1]}" if match[1] else " degree", plain).replace("$", "").strip()
    # One letter alone may be a variable: it is a unit only behind a number and a space.
    if (match := _UNIT.fullmatch(plain)) and (match["space"] or not re.fullmatch("[a-zA-Z]", match["unit"])):
        powers, sign, shape = Counter[str](), 1, {"s": 2, "c": 3}.get((match["shape"] or " ")[0], 1)
        for times, name, exponent in _FACTORS.findall(match["unit"]):
            sign = -1 if "/" in times or "per" in times else sign
            power, shape = sign * shape * int(exponent or 1), 1
            powers.update({part: power * number for part, number in _factors(_UNIT_OF[name]).items()})
        parts = sorted(powers.items(), key=lambda item: (-item[1], item[0]))
        unit = "".join(f"{'*/'[power < 0]}{name}^{abs(power)}".removesuffix("^1") for name, power in parts if power)
        return match["number"].strip().replace(" degree", ""), unit.lstrip("*")
    return text, None


def _factors(unit: str) -> dict[str, int]:
    """Return the powers in a unit as `split_unit` returns it: {"m": 1, "s": -2} of "m/s^2"."""
    parts = re.findall(r"([*/]?)([^*/^]+)(?:\^(\d))?", unit)
    return {name: -int(power or 1) if mark == "/" else int(power or 1) for mark, name, power in parts}
