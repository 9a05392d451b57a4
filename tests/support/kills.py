"""A kill at one exact point, inside the test's own process."""


class Killed(BaseException):
    """Raised where a process is to be killed; nothing may catch it on the way out."""
