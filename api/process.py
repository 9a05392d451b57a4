"""What an API process asks of its system and of its interpreter before it serves."""

import gc
import resource


def prepare_process() -> None:
    """Allow as many connections as the system lets the process have, and leave what the imports
    made out of garbage collection: it stays, and looking through it holds up every stream.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.collect()
    gc.freeze()
