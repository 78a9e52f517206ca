"""The package that made tests fail is found by halving the list of packages that are newer than locked."""

import pytest

from tests.newest import find_culprit


@pytest.mark.parametrize("culprits", [{"p3"}, {"p0"}, {"p9"}, {"p0", "p9"}])
def test_the_package_with_which_tests_fail_is_found(culprits):
    packages, runs = [f"p{number}" for number in range(10)], []

    def passes_without(some):
        runs.append(some)
        return culprits <= set(some)

    found = find_culprit(packages, passes_without)
    assert set(found) == culprits if len(culprits) == 1 else culprits <= set(found)
    assert len(runs) <= 8


def test_without_candidates_there_is_no_culprit():
    assert find_culprit([], lambda packages: True) == []
