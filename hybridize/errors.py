"""Errors a person can act on: each message says what was found, where, and what to do."""


class HybridizeError(Exception):
    """The work failed for a known reason; the message is one sentence with a next step, and the exit code is 1."""

    exit_code = 1


class UsageError(HybridizeError):
    """The command line or an argument was wrong; the exit code is 2."""

    exit_code = 2


class PlanError(HybridizeError, ValueError):
    """A layer plan is malformed or does not fit the model."""


class SourceError(HybridizeError):
    """A source model is missing, damaged, or of a kind that cannot be converted."""


class ConversionError(HybridizeError):
    """A source model could not be turned into the hybrid that the plan asks for."""


class CheckpointError(HybridizeError):
    """A checkpoint of a run or of a hybrid is missing, damaged, or does not belong to what is being done."""


class DataError(HybridizeError):
    """Text to train or to measure on is missing, unreadable, or too short."""


class WorkspaceError(HybridizeError):
    """The workspace or an output folder cannot be read or written."""
