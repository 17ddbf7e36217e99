import pytest

from trl_lossplus.check.run import main


@pytest.fixture
def checked(capsys):
    """Runs `trl-lossplus check` in this process: its exit code, its last line, and everything that it printed."""

    def run(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        text = capsys.readouterr().out
        return code, text.strip().splitlines()[-1], text

    return run
