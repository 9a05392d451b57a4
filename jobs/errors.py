"""The base of what `jobs` raises, and the settings' own error."""


class JobsError(Exception):
    """Base of the errors of files, batches and the queue; the message is one sentence."""


class SettingsError(JobsError, ValueError):
    """A setting that cannot be used; the sentence names its environment variable and says what to
    do.
    """
