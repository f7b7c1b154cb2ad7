r"""Units behind a number in an answer (or, of money, before it): their spellings, and the number without them."""

import itertools
import re

# A unit a column: its spellings are equal to each other, two units never are. Words of three letters or more have a
# plural with s, too.
_SPELLINGS = """
mm millimeter millimetre | cm cms centimeter centimetre | dm decimeter decimetre | m meter metre | in inch inches
km kms kilometer kilometre | ft foot feet | yd yds yard | mi mile | acre | ha hectare | mg milligram | t tonne ton
g gm gram gramme | kg kgs kilogram kilo | lb lbs pound | oz ounce | ml mL milliliter millilitre | L l liter litre
gal gallon | ms millisecond | s sec second | min minute | h hr hrs hour | day | week | month | yr yrs year | rad radian
degree deg | °C Celsius celsius | °F Fahrenheit fahrenheit | K Kelvin kelvin | cent ¢ | $ \\$ dollar USD usd | £ GBP
€ euro EUR | ¥ yen JPY yuan RMB 元 | ₹ rupee INR Rs Rs. | % \\% percent percentage pct | mph | N newton | W watt
J joule | kJ kilojoule | kW kilowatt | V volt | A amp ampere | Hz hertz | Pa pascal | mol mole
mpg | rpm | kPa | C coulomb | T tesla | eV | MeV | nm nanometer | atm
毫米=mm 厘米=cm см=cm 分米=dm 米=m м=m 千米=km 公里=km км=km 克=g 千克=kg 公斤=kg 吨=t 毫升=ml 升=L 秒=s 分钟=min 小时=h
kph=km/h 度=degree 平方厘米=cm^2 平方米=m^2 平方千米=km^2 立方厘米=cm^3 立方米=m^3
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
_POWER = r"(?:\s*\^\s*\{?\s*(-?\d)\s*\}?)?"
_UNIT = re.compile(
    rf"(?P<number>.*(?:[\d)}}\].]|\\[a-z]+))(?P<space>(?:[\s~-]|\\[,;:! ])*)(?P<shape>(?:sq\.?|square|cubic|cu\.?)\s+)?"
    rf"(?P<unit>{_WORD})(?![a-zA-Z]){_POWER}(?:\s*(?:/|\bper\b|\\cdot|\*|\s)\s*(?P<second>{_WORD})(?![a-zA-Z]){_POWER})?",
    re.DOTALL,
)
_ORDERS = [part.split() for part in "yr month week day h min s|mi yd ft in|km m cm mm|lb oz|kg g mg|L ml".split("|")]
_PART = rf"(\d+(?:\.\d+)?)[\s~-]*({_WORD})"
_COMPOUND = re.compile(rf"(?<![\w.,/]){_PART}(?:,?[\s~]+(?:and[\s~]+)?{_PART})+(?![\w^/])")
_MONEY = re.compile(r"(-?)\s*(\\?\$|[€£¥₹]|Rs\.?|USD|EUR|GBP)\s*(?=-?[\d.])")
_DEGREE = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:([CF])\b)?|\s*\\degree(?![a-zA-Z])|\s*°(?![CF])")


def with_compounds(text: str) -> str:
    """Return a text with each quantity of several units as one word: 2~h~30~min of "2 hours and 30 minutes"."""
    return _COMPOUND.sub(_compound, text)


def _compound(match: re.Match[str]) -> str:
    parts = [(number, _UNIT_OF[unit]) for number, unit in re.findall(_PART, match[0])]
    units = [unit for _, unit in parts]
    is_one = any([unit for unit in order if unit in units] == units for order in _ORDERS)
    return "~".join(itertools.chain(*parts)) if is_one else match[0]


def split_unit(text: str) -> tuple[str, str | None]:
    """Return the text without its unit, and the unit; None where it has none."""
    text = text.strip().rstrip(".").strip()
    if (money := _MONEY.match(text)) is not None:
        return money[1] + split_unit(text[money.end() :])[0], _UNIT_OF[money[2]]
    plain = re.sub(r"\\(?:text|mathrm|textrm|mbox|operatorname|rm)\s*\{([^{}]*)\}", r" \1 ", text)
    plain = _DEGREE.sub(lambda match: f" °{match[1]}" if match[1] else " degree", plain).replace("$", "").strip()
    if (match := _UNIT.fullmatch(plain)) is not None:
        number, unit = match["number"], _UNIT_OF[match["unit"]]
        # One letter alone may be a variable: it is a unit only behind a number and a space.
        is_a_letter = re.fullmatch("[a-zA-Z]", match["unit"]) and match["second"] is None
        if match["space"] or not is_a_letter:
            shape = (match["shape"] or "")[:1]
            power = {"s": "2", "c": "3"}.get(shape, match[5])
            unit += f"^{power}" if power not in (None, "1") else ""
            if match["second"]:
                unit += "/" + _UNIT_OF[match["second"]] + (f"^{match[7]}" if match[7] else "")
            return number.strip().replace(" degree", ""), "mph" if unit == "mi/h" else unit
    return text, None
