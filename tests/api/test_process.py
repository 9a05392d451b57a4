"""What an API process does before it serves, in a process of its own."""

import subprocess
import sys

_SCRIPT = """
import gc, resource
from api.process import prepare_process
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
prepare_process()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
assert gc.get_freeze_count() > 0
assert gc.isenabled()
"""


def test_it_may_have_as_many_connections_as_the_system_allows() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=60)
