r"""Units behind a number in an answer: their spellings, and the number without them."""

from __future__ import annotations

import re

# Units by dimension and size: spellings of one unit are equal, two units never are.
_UNIT_NAMES = {
    "mm": "mm millimeter millimetre millimeters millimetres",
    "cm": "cm cms centimeter centimetre centimeters centimetres",
    "dm": "dm decimeter decimetre decimeters decimetres",
    "m": "m meter metre meters metres",
    "km": "km kms kilometer kilometre kilometers kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yds yard yards",
    "mi": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gm gram grams gramme grammes",
    "kg": "kg kgs kilogram kilograms kilo kilos",
    "t": "tonne tonnes ton tons",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "ml": "ml mL milliliter millilitre milliliters millilitres",
    "L": "l L liter litre liters litres",
    "gal": "gal gallon gallons",
    "ms": "ms millisecond milliseconds",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "degree": "degree degrees deg °",
    "rad": "rad radian radians",
    "°C": "°C Celsius celsius",
    "°F": "°F Fahrenheit fahrenheit",
    "K": "K Kelvin kelvin kelvins",
    "$": "$ dollar dollars USD usd",
    "cent": "cent cents ¢",
    "€": "€ euro euros EUR",
    "£": "£ GBP",
    "¥": "¥ yen JPY yuan RMB",
    "₹": "₹ rupee rupees INR Rs",
    "%": "% percent percentage pct",
    "mph": "mph",
    "N": "N newton newtons",
    "J": "J joule joules",
    "kJ": "kJ kilojoule kilojoules",
    "W": "W watt watts",
    "kW": "kW kilowatt kilowatts",
    "V": "V volt volts",
    "A": "A amp amps ampere amperes",
    "Hz": "Hz hertz",
    "Pa": "Pa pascal pascals",
    "mol": "mol mole moles",
    "acre": "acre acres",
    "ha": "ha hectare hectares",
}
_UNITS_IN_OTHER_SCRIPTS = dict(
    one.split("=")
    for one in (
        "毫米=mm 厘米=cm 分米=dm 米=m 千米=km 公里=km 克=g 千克=kg 公斤=kg 吨=t 毫升=ml 升=L 秒=s 分钟=min 小时=h "
        "元=¥ 度=degree 平方厘米=cm^2 平方米=m^2 平方千米=km^2 立方厘米=cm^3 立方米=m^3 см=cm км=km м=m"
    ).split()
)
TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textrm|textnormal|mbox|operatorname|rm)\s*\{([^{}]*)\}")
OTHER_SCRIPTS = r"\u0400-\u06ff\u0900-\u1fff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_MULTIPLE = "万亿千百億萬만억천"
_NUMBER_BORDER = re.compile(rf"(?<=[{OTHER_SCRIPTS}])(?=[-\d$\\])|(?<=\d)(?=[{OTHER_SCRIPTS}])(?![{_MULTIPLE}])")
_UNIT_IN_OTHER_SCRIPT = re.compile(rf"(.*[\d)}}\]])\s*(?![{_MULTIPLE}])([{OTHER_SCRIPTS}]{{1,12}})")
_UNIT_OF = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}
# One letter alone may be a variable: it is a unit only in \text{...}, or behind a number and a space.
_UNIT_WORD = "|".join(sorted((re.escape(name) for name in _UNIT_OF), key=len, reverse=True))
_SPEEDS = {"mi/h": "mph"}
_POWER = r"(?:\s*\^\s*\{?\s*(-?\d)\s*\}?)?"
_PLAIN_UNIT = re.compile(
    rf"(?P<shape>(?:sq\.?|square|cubic|cu\.?)\s+)?(?P<unit>{_UNIT_WORD})(?![a-zA-Z]){_POWER}"
    rf"(?:\s*(?:/|per|\\cdot|\*|\s)\s*(?P<second>{_UNIT_WORD})(?![a-zA-Z])(?:\s*\^\s*\{{?\s*(-?\d)\s*\}}?)?)?"
)
_CIRCLE = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\?(?:text|mathrm)\s*\{\s*)?([CF])?\}?|\s*\\degree(?![a-zA-Z])")
_PREFIXED = re.compile(r"^\s*(-?)\s*(?:\\\$|\$(?=\s*[\d.])|([€£¥₹]|Rs\.?|USD|EUR|GBP)\s*)(?=\s*[\d.])")


def split_unit(text: str) -> tuple[str, str | None]:
    """Return the text without the unit that ends it (or, of money, begins it), and the unit; None where it has none."""
    text = text.strip().rstrip(".").strip()
    before = _PREFIXED.match(text)
    if before is not None:
        unit = _UNIT_OF.get((before[2] or "$").rstrip("."), "$")
        inner = split_unit(text[before.end() :])
        return before[1] + inner[0], unit
    plain = TEXT_COMMAND.sub(r" \1 ", text)
    plain = _CIRCLE.sub(lambda match: f" °{match[1] or ''} ", plain).replace(r"\%", "%").replace("$", "").strip()
    for unit, name in _UNITS_IN_OTHER_SCRIPTS.items():
        if plain.endswith(unit) and re.search(r"[\d)}\]]\s*$", plain[: -len(unit)]):
            return plain[: -len(unit)].strip(), name
    if (foreign := _UNIT_IN_OTHER_SCRIPT.fullmatch(plain)) is not None:
        return foreign[1].strip(), foreign[2]
    for match in _PLAIN_UNIT.finditer(plain):
        number = plain[: match.start()]
        if plain[match.end() :].strip() or not re.search(r"[\d}).]\s*(?:\\[,;:! ]|~|-)?\s*$", number):
            continue
        alone = len(match["unit"]) == 1 and match["unit"].isalpha() and match["second"] is None
        if alone and not number.endswith(" ") or number.rstrip().endswith(("^", "_", "*", "/")):
            continue
        unit = _UNIT_OF[match["unit"]]
        power = match[3]
        if match["shape"]:
            power = "2" if match["shape"].startswith("sq") else "3"
        unit += f"^{power}" if power not in (None, "1") else ""
        if match["second"]:
            unit += "/" + _UNIT_OF[match["second"]] + (f"^{match[5]}" if match[5] else "")
        return re.sub(r"(?:\\[,;:! ]|~|-|\s)+$", "", number), _SPEEDS.get(unit, unit)
    return text, None


def numbers_apart(text: str) -> str:
    """Return the text with spaces around numbers, which Chinese, Japanese and Korean do not write."""
    return _NUMBER_BORDER.sub(" ", text)


def without_degrees(text: str) -> str:
    """Return the text without the degrees of any number in it: "30^\\circ, 60^\\circ" is "30, 60"."""
    return _CIRCLE.sub("", text).replace("°", "")
