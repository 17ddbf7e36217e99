import gc

import pytest
from toyrun import toy_path


@pytest.fixture(scope="session", autouse=True)
def nothing_imported_is_collected():
    """Every run ends with a collection; over all that was imported it would take as long as the run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    return toy_path(tmp_path_factory.mktemp("toy"))
