"""Every error that Clover raises on purpose.

    CloverError
    |-- ConfigError       a configuration that is not understood, or whose values contradict each other
    |-- CheckpointError   a folder of weights that is damaged, incomplete or not what its config says
    |-- TokenizerError    a tokenizer file that cannot be used
    |-- TemplateError     a chat template that fails or tries to leave its sandbox
    |-- PromptError       a prompt that cannot be answered: empty, too long, holding reserved ids
    |-- RequestError      a request knob outside its range
    |-- GenerationError   decoding that cannot go on (for example NaN logits)
    |   `-- ConstraintError   a text whose constraint, the caller's, leaves nothing to go on with
    |-- CapacityError     a request too many for an engine and its queue
    |-- EngineClosedError an engine that no longer serves
    |-- RemoteError       a server elsewhere that cannot be reached, or breaks off
    |-- TaskError         an unknown task family or split
    |-- BenchmarkError    texts that have to be equal and are not: nothing is worth timing
    `-- TrainingError     training that cannot go on (for example a loss that is not finite)
        `-- TrainingInputError  data or options that a training run cannot start from

Each message says what was expected, what was found and what to do about it.
"""

from __future__ import annotations


class CloverError(Exception):
    """The base of all errors that Clover raises on purpose."""


class ConfigError(CloverError, ValueError):
    """A configuration that is not understood, or whose values contradict each other."""


class CheckpointError(CloverError):
    """A folder of weights that is damaged, incomplete or not what its config says."""


class TokenizerError(CloverError):
    """A tokenizer file that cannot be used."""


class TemplateError(CloverError):
    """A chat template that fails, or tries to leave its sandbox."""


class PromptError(CloverError, ValueError):
    """A prompt that cannot be answered: empty, too long, or holding reserved ids."""


class RequestError(CloverError, ValueError):
    """A request knob outside its range, or one that the model cannot honour."""


class GenerationError(CloverError):
    """Decoding that cannot go on, for example because logits are NaN."""


class ConstraintError(GenerationError):
    """A text that cannot go on under its constraint: what was asked for cannot be written."""


class CapacityError(CloverError):
    """One request more than an engine and its queue can hold: try again later."""


class EngineClosedError(CloverError):
    """An engine that was closed, or stopped by an error, before a request came to its end."""


class RemoteError(CloverError):
    """A server elsewhere that cannot be reached, does not take the key, fails or breaks off."""


class TaskError(CloverError, ValueError):
    """An unknown task family or split."""


class BenchmarkError(CloverError):
    """Two decoders that have to write the same text do not: their speeds say nothing."""


class TrainingError(CloverError):
    """Training that cannot go on, for example because the loss is not finite."""


class TrainingInputError(TrainingError, ValueError):
    """Data, options or a saved state that a training run cannot start from."""
