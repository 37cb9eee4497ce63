"""The commands of the command line, one module each: parse, call the library, show.

A module of this folder has one function named `command`; its docstring is the command's help. It imports torch and
transformers only inside that function.
"""

from typing import NamedTuple


class Command(NamedTuple):
    """Where a command's function `command` lives, and its line in `hybridize --help`."""

    module: str
    summary: str


# In the order in which a person meets them. `hybridize --help` reads only this table.
COMMANDS: dict[str, Command] = {
    "probe": Command("hybridize.commands.probe", "Score attention layers, and select those that can fade."),
    "prime": Command("hybridize.commands.prime", "Convert a model's layers, align them, and write a hybrid."),
    "push": Command("hybridize.commands.push", "Verify a hybrid, write its model card, and upload it to the Hub."),
    "quickstart": Command("hybridize.commands.quickstart", "The whole path on a small built-in model, in minutes."),
}
