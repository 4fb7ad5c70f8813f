"""Sizes as text."""

import pytest

from soapjax.helpers.sizes import size


@pytest.mark.parametrize("n, text", [(999.4, "999 B"), (999.6, "1 kB"), (999_600_000, "1 GB"), (8.5e9, "8.5 GB"), (2e12, "2 TB")])
def test_three_digits_and_a_unit(n, text):
    assert size(n) == text
