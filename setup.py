"""The build of a wheel: it carries the CPU kernels, compiled for each instruction set of this
machine's kind, where there is a C compiler; pyproject.toml has the rest.
"""

import platform
import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from workers.engine.native.build import NativeUnavailable, compile_by_first, find_compilers
from workers.engine.native.choose import PREBUILT, library_name
from workers.engine.native.levels import LEVELS

GLIBC_VERSION = re.compile(rb"\0GLIBC_(\d+)\.(\d+)")
"""A version of symbols, in the strings of an ELF file."""
OLDEST_GLIBC = (2, 17)


def compilers() -> list[list[str]]:
    """Return the C compilers' commands, none where a wheel of this platform has no libraries."""
    if sys.platform != "linux" or platform.machine() not in LEVELS:
        return []
    try:
        return find_compilers()
    except NativeUnavailable:
        return []


class WithKernels(Distribution):
    """A distribution whose wheel is for one platform where it carries libraries."""

    def has_ext_modules(self) -> bool:
        return bool(compilers())


class BuildKernels(build_py):
    """Compile the libraries beside the sources that a wheel is made of."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / PREBUILT.relative_to(Path(__file__).parent)
        shutil.rmtree(folder, ignore_errors=True)  # those of an earlier build
        if commands := compilers():
            self._compile(commands, folder)
        else:
            self.warn("without a C compiler the wheel carries no CPU kernels: where it is used there has to be one")

    def _compile(self, commands: list[list[str]], folder: Path) -> None:
        folder.mkdir()
        for level in LEVELS[platform.machine()]:
            with TemporaryDirectory() as scratch:
                library = Path(scratch) / library_name(level)
                try:
                    compile_by_first(commands, level.flags, library)
                except NativeUnavailable as error:  # compilers that are older than the instructions
                    self.warn(f"the wheel carries no CPU kernels for {level.name}: {error}")
                else:
                    shutil.copy(library, folder)


class PlatformWheel(bdist_wheel):
    """A wheel for any Python of its platform: the libraries do not use Python's interface."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, plat = super().get_tag()
        if self.root_is_pure:
            return python, abi, plat
        if platform.libc_ver()[0] == "glibc":
            plat = plat.replace("linux_", f"manylinux_{self._glibc()}_")
        return "py3", "none", plat

    def _glibc(self) -> str:
        """Return the oldest glibc that has every symbol of the libraries, as a tag writes it."""
        folder = Path(self.get_finalized_command("build").build_lib) / PREBUILT.relative_to(Path(__file__).parent)
        found = [version for path in folder.glob("*.so") for version in GLIBC_VERSION.findall(path.read_bytes())]
        newest = max([OLDEST_GLIBC, *((int(major), int(minor)) for major, minor in found)])
        return "{}_{}".format(*newest)


setup(distclass=WithKernels, cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel})
