"""The parser of a command's arguments: what it complains of is one line, as all bad input."""

from __future__ import annotations

import argparse
from typing import NoReturn

from .functional.errors import LossPlusError


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are LossPlusErrors, without the usage before them."""

    def error(self, message: str) -> NoReturn:
        raise LossPlusError(f"{message}.")
