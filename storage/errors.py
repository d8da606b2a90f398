"""The exceptions of AstraFlow, by the reaction of their handler.

    AstraFlowError
    ├── TransientError     retry: the store was unreachable, slow or answered 5xx
    ├── ConflictError      re-read: another writer created the object first
    ├── NotFoundError      wait or continue: the object does not exist (yet)
    ├── CorruptError       quarantine: the bytes are not a valid object of their key
    └── ConfigError        stop: a person must change something
        ├── ObjectTooLargeError  write a smaller object
        └── EmptyWindowError     skip: a data window has no row (yet)

The failure of an episode is not an exception but data of the episode
(`storage.records.rollouts.Episode.error`).
"""


class AstraFlowError(Exception):
    """Base class. The message is a sentence for a person."""


class TransientError(AstraFlowError):
    """A call to the store failed and may succeed later. The only kind that is retried."""


class ConflictError(AstraFlowError):
    """A created-once object exists with another body: another writer was first."""


class NotFoundError(AstraFlowError):
    """The object does not exist."""


class CorruptError(AstraFlowError):
    """Stored bytes are not a valid object of their key, or a digest differs."""


class ConfigError(AstraFlowError):
    """A setting or the environment is wrong. The message names what, where, and the fix."""


class ObjectTooLargeError(ConfigError):
    """Readers would refuse the object: it, or a value in it, is larger than they accept."""


class EmptyWindowError(ConfigError):
    """No row of the files is in the data window. Nothing was stored."""


UNREADABLE = (CorruptError, ConfigError)
"""Raised for a damaged or invalid object of a listing: it is reported, and the others are read."""
