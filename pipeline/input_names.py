"""The files that `run-batch` reads, and those that it writes."""

import glob
from collections.abc import Iterable
from pathlib import Path

from pipeline.errors import Refused

PARTS_SUFFIX = ".parts"
"""Of the folder beside an output, from which a run goes on."""


def named_files(inputs: Iterable[Path], output: Path | None) -> list[tuple[Path, Path]]:
    """Return each input with its output; a pattern stands for the files that match it.

    The outputs of several inputs, or of a pattern, are in the folder `output`. Raise `Refused`.
    """
    sources: list[Path] = []
    several = False
    for named in inputs:
        found = _matches(named)
        several = several or bool(sources) or found != [named]
        sources += found
    if not several:
        return [(sources[0], output or default_output(sources[0]))]
    if output is not None and output.exists() and not output.is_dir():
        raise Refused(f"the output {output} is a file: the results of several inputs need a folder")
    files = [(source, output / _output_name(source) if output else default_output(source)) for source in sources]
    taken: dict[Path, Path] = {}
    read = {source.resolve() for source in sources}
    for source, target in files:
        if target.resolve() in read - {source.resolve()}:
            raise Refused(f"the results of {source} would take the place of the input {target}: name another -o")
        if (other := taken.setdefault(target, source)) is not source:
            raise Refused(f"the results of {other} and {source} would both be {target}: run them one by one")
    return files


def default_output(source: Path) -> Path:
    """requests.jsonl -> requests.results.jsonl, requests.jsonl.gz too; requests.parquet ->
    requests.results.parquet; requests.csv -> requests.results.csv.
    """
    return source.with_name(_output_name(source, ".results"))


def _output_name(source: Path, behind: str = "") -> str:
    from jobs.batch.input_files import format_of, is_csv, is_parquet
    from jobs.store.input_formats import PARQUET

    plain = source.with_suffix("") if source.suffix.lower() in (".gz", ".zst") else source
    parquet = is_parquet(str(plain)) or (source.is_file() and format_of(str(source)) == PARQUET)
    suffix = ".parquet" if parquet else ".csv" if is_csv(str(plain)) else ".jsonl"
    return f"{plain.stem}{behind}{suffix}"


def _matches(named: Path) -> list[Path]:
    """Return the files that match a pattern, or the path itself where it is none.

    What an earlier start of the same command wrote does not match.
    """
    if named.exists() or not glob.has_magic(str(named)):
        return [named]
    found = [Path(path) for path in sorted(glob.glob(str(named), recursive=True))]
    if found := [path for path in found if path.is_file() and not _is_written(path)]:
        return found
    raise Refused(f"no file matches {named}")


def _is_written(path: Path) -> bool:
    """Return whether a run wrote the file, beside its parts or among them."""
    from jobs.batch.manifest import NAME

    folders = path.resolve().parents
    parts = [folder for folder in folders if folder.suffix == PARTS_SUFFIX]
    return any((folder / NAME).is_file() for folder in [*parts, path.with_name(path.name + PARTS_SUFFIX)])
