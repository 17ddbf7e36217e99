import pytest
from toyrun import toy_path


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    return toy_path(tmp_path_factory.mktemp("toy"))
