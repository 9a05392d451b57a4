"""What `jobs` raises. The message of each is one sentence.

    JobsError
      ApiError              answered in OpenAI's shape
      SettingsError         a setting cannot be used
      ServerError           no Redis server, or one that cannot be used
      QueueUnavailable      Redis cannot answer now
        QueueFull           it has no memory left
        MayExist            what an API call makes may be there
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
      TooManyBatches        the tenant may have no more
      TooManyCalls          the tenant may have no more live calls at once
        ModelOverloaded     the model may have no more
      PartDamaged           a part file lacks what was written
      ResultsMissing        registered results are gone
      Superseded, Stopping  a job gives its batch up

Each says what follows from it, which `docs/architecture.md` lists for all trees: the status of an
HTTP answer, the exit code of a command, and whether the same may succeed later, nothing changed.
"""


class JobsError(Exception):
    """Base of the errors of files, batches and the queue."""

    status = 500
    exit_code = 1
    retry = False


class SettingsError(JobsError, ValueError):
    """A setting that cannot be used; the sentence names its environment variable and says what to
    do.
    """

    exit_code = 2
