"""Plain data of every shape, for property tests, and when two such values are the same."""

from hypothesis import strategies as st

from reward.jail.codec import encode
from reward.kinds.compare_data import matches

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
PLAIN = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=12,
)


def same(left: object, right: object, tolerance: float | None = None) -> bool:
    return matches(encode(left), right, tolerance)
