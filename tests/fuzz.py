"""Random input from outside: how much of it, and shapes that are often forgotten."""

from hypothesis import settings
from hypothesis import strategies as st

THOROUGH = "thorough"
"""Name of the profile: pytest --hypothesis-profile=thorough."""


def examples(few: int) -> settings:
    """Take `few` examples by default, a hundred times as many with the profile `thorough`."""
    times = 100 if settings.get_current_profile_name() == THOROUGH else 1
    return settings(max_examples=few * times, deadline=None)


NUMBERS = st.sampled_from([10**400, -(10**400), 2**63, -1, 0, 1, float("nan"), float("inf"), 1e308, 0.5])
TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        "\ud800",
        "\0",
        "9" * 5000,
        "1e999",
        "NaN",
        "\\boxed{" * 50,
        "}" * 50,
        "<action>" * 200,
        "-" * 2000,
        "(" * 3000,
        "²",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
