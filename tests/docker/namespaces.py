"""What an engine does for an image and for a container, by Linux' own means, for machines without
one. Needs root.

An image is a stack of overlay layers upon this machine's root, with a new virtual environment in
place of the base image's Python; Debian's packages are this machine's. A container has namespaces
of its own (mounts, network, processes, host name), a read-only root, its service's volumes, and no
capability. All of it lies in a namespace that one process holds, and is gone with that process.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

from jobs.process import die_with_parent
from tests.docker.composition import Service
from tests.docker.recipe import environment, lineage
from tests.support.commands import REPOSITORY
from tests.support.waiting import wait_until

USER = 10001
NETWORK = "10.77.0"
_PYTHON = "/python"  # where a stage finds the Python of its base image
_PATH = f"{_PYTHON}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_PACKAGES = "/run/packages"  # out of reach of what a service mounts over this machine's folders
_NO_RIGHTS = (
    f"setpriv --reuid={USER} --regid={USER} --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs "
    "--pdeathsig=KILL"  # another user's process has lost what `unshare --kill-child` asked for
)
_BIND = re.compile(r"--mount=type=bind,from=(\w+),source=(\S+),target=(\S+)")
_ENTER_A_CONTAINER = ("--mount", "--net", "--pid", "--uts", "--root", "--wd=/")

Done = subprocess.CompletedProcess[str]


def why_not() -> str | None:
    """Return why this machine cannot replace a container engine; None where it can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "setpriv", "chroot") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        return f"containers made by hand need root{''.join(f' and {tool}' for tool in missing)}"
    overlay = (
        "mkdir /mnt/u /mnt/w /mnt/r && mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r"
    )
    probe = f"mount -t tmpfs tmpfs /mnt && {overlay} && ip link add type veth"
    done = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "sh", "-c", probe], capture_output=True, text=True
    )
    return None if done.returncode == 0 else f"this kernel makes no containers: {done.stderr.strip()}"


@dataclass
class Image:
    """`layers` from the uppermost to the lowest, which lies on this machine's root."""

    layers: list[Path]
    entrypoint: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    place: str = "/"  # where its commands run
    packages: Path | None = None  # a folder of this machine that its Python imports from as well


class Container:
    """A running service. `log` is what it printed."""

    def __init__(self, process: "subprocess.Popen[bytes]", address: str, log: Path, command: str) -> None:
        self.address = address
        self.pid = wait_until(lambda: _children(process.pid), 60, "the container's namespaces")[0]
        self._process = process
        self._log = log
        self._command = command

    @property
    def log(self) -> str:
        """What it printed so far."""
        return self._log.read_text(errors="replace")

    def begin(self) -> None:
        """Lets it go on, once its network is there."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.close()

    def run(self, *command: str) -> Done:
        """Runs a command in it, as its user."""
        enter = [
            "nsenter",
            f"--target={self.pid}",
            *_ENTER_A_CONTAINER,
            "sh",
            "-c",
            f"exec {self._command} {shlex.join(command)}",
        ]
        return subprocess.run(enter, capture_output=True, text=True, timeout=120)

    def wait(self, seconds: float) -> int:
        """Waits for its end; returns the exit code."""
        return self._process.wait(seconds)

    def stop(self, grace: float) -> int:
        """SIGTERM, as an engine sends it; returns the exit code.

        Raises TimeoutExpired where an engine would have killed it.
        """
        os.kill(self.pid, signal.SIGTERM)
        return self.wait(grace)

    def kill(self) -> None:
        """Ends it at once, with all of its processes, of which `pid` is the first."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()


class ContainerEngine:
    """A context in which images are built and containers run, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images: dict[str, Image] = {}
        self._containers: list[Container] = []

    def __enter__(self) -> "ContainerEngine":
        self._holder = _start(["unshare", "--mount", "--net", "--fork", "--kill-child", "sleep", "infinity"])
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise
        return self

    def _prepare(self) -> None:
        self._pid = wait_until(lambda: _children(self._holder.pid), 60, "the engine's namespaces")[0]
        wait_until(lambda: Path(f"/proc/{self._pid}/comm").read_text() == "sleep\n", 60, "the engine's namespaces")
        self._inside(f"mount -t tmpfs tmpfs {self._folder}")
        self._inside(
            f"ip link set lo up; ip link add name bridge0 type bridge; ip address add {NETWORK}.1/24 dev bridge0; ip"
            " link set bridge0 up",
            "--net",
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of every container, and the namespaces with them."""
        for container in self._containers:
            container.kill()
        self._holder.kill()
        self._holder.wait()

    def seen(self, path: Path) -> Path:
        """A path of the engine's, for this process."""
        return Path(f"/proc/{self._pid}/root", path.relative_to("/"))

    def folder(self, *parts: str) -> Path:
        """A folder of the engine's, made if need be; named as it is there."""
        path = self._folder.joinpath(*parts)
        self.seen(path).mkdir(parents=True, exist_ok=True)
        return path

    def build(self, target: str) -> Image:
        """Carries out the instructions of a stage and of those below it, one by one, as in the
        Dockerfile.
        """
        below = self._base()
        for stage in lineage(target):
            if stage.name not in self._images:
                self._images[stage.name] = self._build_stage(stage.name, stage.instructions, below)
            below = self._images[stage.name]
        return below

    def image_of_files(self, name: str, files: dict[str, Path]) -> Image:
        """An image of this machine with `files` in it, and an own folder /data."""
        layer = self.folder("layers", name)
        for place, file in files.items():
            self.seen(layer / place).parent.mkdir(parents=True)
            shutil.copy(file, self.seen(layer / place))
        os.chown(self.seen(self.folder("layers", name, "data")), USER, USER)
        return Image([layer])

    def start(
        self, name: str, service: Service, image: Image, names: dict[str, Container], **variables: str
    ) -> Container:
        """A container of a service of the composition, to which `names` are known; `variables` come
        on top of the service's.
        """
        address = f"{NETWORK}.{len(self._containers) + 2}"
        given = {
            **image.variables,
            **service.get("environment", {}),
            **variables,
            **({"PYTHONPATH": _PACKAGES} if image.packages is not None else {}),
            "PATH": _PATH,
            "HOME": "/home/pipeline",
        }
        confined = shlex.join(
            [
                *shlex.split(_NO_RIGHTS),
                "env",
                "-i",
                *(f"{key}={value}" for key, value in given.items() if value is not None),
            ]
        )
        command = shlex.join([*service.get("entrypoint", image.entrypoint), *service["command"]])
        root = self.folder("containers", name)
        script = [
            f"read go; hostname {name}; ip link set lo up; ip address add {address}/24 dev eth0; ip link set eth0 up"
        ]
        script += self._mounts(
            root, service, image, {name: address, **{other: there.address for other, there in names.items()}}
        )
        script += [f"exec chroot {root} {confined} {command}"]
        own = ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        log = self.seen(self.folder("logs")) / name
        process = _start([*self._enter("--mount", "--net"), *own, "sh", "-ec", "\n".join(script)], log)
        container = Container(process, address, log, confined)
        self._containers.append(container)
        link = f"link{len(self._containers)}"
        self._inside(
            f"ip link add name {link} type veth peer name eth0 netns {container.pid}; ip link set {link} master"
            " bridge0 up",
            "--net",
        )
        container.begin()
        return container

    def client(self, *command: object, **variables: str) -> Done:
        """Runs a command of this machine that reaches the containers' network."""
        whole = [*self._enter("--net"), *(str(part) for part in command)]
        return subprocess.run(
            whole, capture_output=True, text=True, timeout=240, cwd=REPOSITORY, env={**os.environ, **variables}
        )

    def _mounts(self, root: Path, service: Service, image: Image, addresses: dict[str, str]) -> list[str]:
        """Commands that put a container's file system together."""
        hosts = self.folder("hosts") / root.name
        self.seen(hosts).write_text(
            "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items())
        )
        commands = [
            f"mount -t overlay overlay -o lowerdir={':'.join(map(str, image.layers))}:/ {root}",
            (
                f"mount -t proc proc {root}/proc; mount --rbind /dev {root}/dev; mount -t tmpfs -o mode=1777 tmpfs"
                f" {root}/dev/shm"
            ),
            f"mount --bind {hosts} {root}/etc/hosts; mount -t tmpfs tmpfs {root}/run; mkdir {root}/run/secrets",
            *(f"cp {self.folder('secrets')}/{secret} {root}/run/secrets/" for secret in service["secrets"]),
            *(
                [f"mkdir {root}{_PACKAGES}; mount --bind {image.packages} {root}{_PACKAGES}"]
                if image.packages is not None
                else []
            ),
            f"mount -o remount,ro {root}/run",
        ]
        for place, options in (mount.split(":") for mount in service["tmpfs"]):
            commands.append(f"mount -t tmpfs -o {options} tmpfs {root}{place}")
        for volume, place in (volume.split(":") for volume in service["volumes"]):
            commands.append(f"mount --bind {self._volume(volume, image, place)} {root}{place}")
        return commands

    def _volume(self, name: str, image: Image, place: str) -> Path:
        """A named volume, which takes its owner from the folder that it covers first."""
        path = self._folder / "volumes" / name
        if not self.seen(path).exists():
            covered = next(
                layer / place.lstrip("/") for layer in image.layers if self.seen(layer / place.lstrip("/")).exists()
            )
            status = self.seen(covered).stat()
            os.chown(self.seen(self.folder("volumes", name)), status.st_uid, status.st_gid)
        return path

    def _base(self) -> Image:
        if "" not in self._images:
            python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
            above = " ".join(
                {str(folder) for prefix in (sys.base_prefix, sys.prefix) for folder in Path(prefix).parents}
            )
            # For it may belong to root alone
            made = f"{python} -m venv {_PYTHON} && chmod o+x {above}"
            self._images[""] = self._build_stage("python", [("RUN", made)], Image([]))
        return self._images[""]

    def _build_stage(self, name: str, instructions: list[tuple[str, str]], below: Image) -> Image:
        layer, work, root = self.folder("layers", name), self.folder("work", name), self.folder("roots", name)
        lower = ":".join(map(str, [*below.layers, Path("/")]))
        self._inside(
            f"mount -t overlay overlay -o lowerdir={lower},upperdir={layer},workdir={work} {root}; mount --rbind /dev"
            f" {root}/dev"
        )
        self._inside(f"mount -t proc proc {root}/proc")
        image = Image([layer, *below.layers], below.entrypoint, environment(name), below.place)
        for kind, value in instructions:
            if kind == "RUN" and not value.startswith("apt-get "):
                self._run(root, value, image)
            elif kind == "COPY":
                self._copy(value.split(), self.seen(root) / image.place.lstrip("/"))
            elif kind == "WORKDIR":
                image.place = value
                self.seen(root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif kind == "ENTRYPOINT":
                image.entrypoint = json.loads(value)
        self._inside(f"umount --recursive {root}")
        return image

    def _run(self, root: Path, command: str, image: Image) -> None:
        before, after = "", ""
        for stage, source, target in _BIND.findall(command):
            self.build(stage)
            before += f"mkdir -p {root}{target}; mount --bind {self._images[stage].layers[0]}{source} {root}{target}; "
            after += f"; umount {root}{target}; rmdir {root}{target}"
        line = f"cd {image.place} && {re.sub(r'--mount=[^ ]+ ', '', command)}"
        known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._inside(
            f"{before}chroot {root} sh -ec {shlex.quote(line)}{after}",
            variables={**known, **image.variables, "PATH": _PATH},
        )

    def _copy(self, names: list[str], folder: Path) -> None:
        *sources, target = names
        for source in sources:
            if (REPOSITORY / source).is_dir():
                shutil.copytree(REPOSITORY / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(REPOSITORY / source, folder / target)

    def _inside(self, script: str, *namespaces: str, variables: dict[str, str] | None = None) -> None:
        done = subprocess.run(
            [*self._enter("--mount", *namespaces), "sh", "-ec", script], capture_output=True, text=True, env=variables
        )
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"

    def _enter(self, *namespaces: str) -> list[str]:
        return ["nsenter", f"--target={self._pid}", *namespaces]


def _start(command: list[str], log: Path | None = None) -> "subprocess.Popen[bytes]":
    """A process that ends with this one."""
    output = subprocess.DEVNULL if log is None else log.open("wb")
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
