"""Every error of AstraFlow, sorted by what the one who catches it does.

    AstraFlowError
    ├── TransientError     retry: the store was away, slow or answered 5xx
    ├── ConflictError      re-read: another writer created the object first
    ├── NotFoundError      wait or go on: the object does not exist (yet)
    ├── CorruptError       quarantine: the bytes are not what their name promises
    └── ConfigError        stop, and tell the person what to change

A rollout's own failure is none of these: it is data on the episode
(`storage.records.Episode.error`).
"""


class AstraFlowError(Exception):
    """Base of all errors this project raises on purpose; its message is a sentence for a person."""


class TransientError(AstraFlowError):
    """The store did not answer as it should; the same call may succeed later. The only kind that is
    retried.
    """


class ConflictError(AstraFlowError):
    """A created-once object exists with another body: somebody else was first."""


class NotFoundError(AstraFlowError):
    """The object does not exist."""


class CorruptError(AstraFlowError):
    """Stored bytes cannot be read as what their name promises, or a digest differs."""


class ConfigError(AstraFlowError):
    """Something a person wrote, or the environment they set up, cannot work. Says what, where, and
    the fix.
    """


UNREADABLE = (CorruptError, ConfigError)
"""What reading one object of a listing raises when it is damaged, or is not for this reader: named,
and the others go on.
"""
