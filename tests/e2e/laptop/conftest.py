"""One stack for all tests of this folder; it is brought up for the first of them."""

from collections.abc import Iterator

import pytest

from deployments.paths import Home
from tests.e2e.conftest import LocalStack, stack_in
from tests.support.checkout import ROOT


@pytest.fixture(scope="session")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    home = Home(tmp_path_factory.mktemp("laptop") / "home")
    with stack_in(home, {"PYTHONPATH": str(ROOT)}) as laptop:  # recipes name code of tests/support
        yield laptop
