"""The errors of `jobs`. The message of each is one sentence.

    JobsError
      ApiError              answered in OpenAI's shape
      SettingsError         a setting cannot be used
      ServerError           no Redis server, or one that cannot be used
      QueueUnavailable      Redis cannot answer now
        QueueFull           it has no memory left
        MayExist            the object of an API call may exist
        NotBegun            nothing of a batch was stored
      StoreError            a file cannot be read or written
        StoreFull           there is no room for it
        StoreAway           its folder is not mounted, or another one
        KeysUnreadable
        ManifestDamaged
      Busy                  another process holds the folder
      InputError            an input file cannot be read as a whole
      BatchRefused          a batch cannot be made
        InputChanged
      TooManyBatches        the tenant has reached its limit of open batches
      TooManyCalls          the tenant has reached its limit of live calls
        ModelOverloaded     the model has reached its limit
      PartDamaged           a part file is damaged
      ResultsMissing        registered results are gone
      Superseded, Stopping  a job releases its batch

Each class has the consequences that `docs/architecture.md` lists for all trees: the status of an
HTTP answer, the exit code of a command, and whether a retry without changes may succeed.
"""


class JobsError(Exception):
    """Base of the errors of files, batches and the queue."""

    status = 500
    exit_code = 1
    retry = False


class SettingsError(JobsError, ValueError):
    """A setting that cannot be used.

    The sentence names its environment variable and how to fix it.
    """

    exit_code = 2
