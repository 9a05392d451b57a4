"""The names of the files that `run-batch` reads and writes."""

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.errors import Refused
from pipeline.uris.uri import Uri

PARTS_SUFFIX = ".parts"
"""Suffix of the folder beside an output from which a run resumes."""

Location = Path | Uri


def named_files(inputs: Iterable[Location], output: Location | None) -> list[tuple[Location, Location]]:
    """Return each input with its output.

    A pattern is replaced by the files that match it, and a folder by the files in it. A folder of
    Parquet files is one input. The outputs of several inputs, or of a pattern, are in the folder
    `output`. Raise `Refused` and `Unfinished`.
    """
    sources: list[Location] = []
    several = False
    for named in inputs:
        found = _matches(named)
        is_dataset = isinstance(found[0], Uri) and found[0].is_folder
        several = several or bool(sources) or (found != [named] and not is_dataset)
        sources += found
    if not several:
        return [(sources[0], output or default_output(sources[0]))]
    if isinstance(output, Path) and output.exists() and not output.is_dir():
        raise Refused(f"the output {output} is a file: the results of several inputs need a folder")
    files = [(source, output / _output_name(source) if output else default_output(source)) for source in sources]
    taken: dict[Location, Location] = {}
    read = {_resolved(source) for source in sources}
    for source, target in files:
        if _resolved(target) in read - {_resolved(source)}:
            raise Refused(f"the results of {source} would take the place of the input {target}: name another -o")
        if (other := taken.setdefault(target, source)) is not source:
            raise Refused(f"the results of {other} and {source} would both be {target}: run them one by one")
    return files


def default_output(source: Location) -> Path:
    """Return the default path of the results of an input.

    requests.jsonl and requests.jsonl.gz -> requests.results.jsonl; requests.parquet ->
    requests.results.parquet; requests.csv -> requests.results.csv. The results of a URI are in the
    current folder.
    """
    beside = source if isinstance(source, Path) else _present_folder(source) / _name_of(source)
    return beside.with_name(_output_name(source, ".results"))


def _present_folder(source: Uri) -> Path:
    """Return the folder for the results of a URI: the parent of a local path, else the current."""
    return Path(source.path).parent if source.scheme == "file" else Path()


def _name_of(source: Uri) -> str:
    if not source.file_name:
        raise Refused(f"{source} names no file")
    return source.file_name


def _resolved(location: Location) -> Location:
    return location.resolve() if isinstance(location, Path) else Uri(str(location))


def _output_name(named: Location, behind: str = "") -> str:
    from jobs.batch.input_files import format_of, is_csv, is_parquet
    from jobs.store.input_formats import PARQUET

    source = named if isinstance(named, Path) else Path(_name_of(named))
    plain = source.with_suffix("") if source.suffix.lower() in (".gz", ".zst") else source
    parquet = is_parquet(str(plain)) or (source is named and source.is_file() and format_of(str(source)) == PARQUET)
    suffix = ".parquet" if parquet else ".csv" if is_csv(str(plain)) else ".jsonl"
    return f"{plain.stem}{behind}{suffix}"


def _matches(named: Location) -> Sequence[Location]:
    """Return the files that match a pattern, or the path itself if it is not a pattern.

    Files that an earlier start of the same command wrote do not match.
    """
    if isinstance(named, Uri):
        return _matching_uris(named)
    if named.is_dir():
        found_there = _matching_uris(Uri(f"{Path(os.path.abspath(named)).as_uri()}/"))
        return found_there if found_there[0].is_folder else [named / Path(one.path).name for one in found_there]
    if named.exists() or not glob.has_magic(str(named)):
        return [named]
    found = [Path(path) for path in sorted(glob.glob(str(named), recursive=True))]
    if found := [path for path in found if path.is_file() and not _is_written(path)]:
        return found
    raise Refused(f"no file matches {named}")


def _matching_uris(named: Uri) -> list[Uri]:
    if not named.is_pattern and not named.is_folder:
        return [named]
    from pipeline.uris.stores import files_of

    if named.is_folder and _is_one_table(named):
        return [named]
    if found := [one for one in files_of(named) if not (one.scheme == "file" and _is_written(Path(one.path)))]:
        return found
    raise Refused(f"no file {'matches' if named.is_pattern else 'is in'} {named}")


def _is_one_table(folder: Uri) -> bool:
    """Return whether all files of a folder are Parquet. Raise `Refused` for a mix."""
    from jobs.batch.input_files import is_parquet
    from pipeline.uris.stores import infos_below

    below = infos_below(folder)
    tables = [info for info in below if is_parquet(info.base_name)]
    if len(tables) == len(below):
        return bool(below)
    if all(folder.scheme == "file" and _is_written(Path(info.path)) for info in tables):
        return False
    raise Refused(f"{folder} is a folder of Parquet files and others: name its files by a pattern")


def _is_written(path: Path) -> bool:
    """Return whether a run wrote the file, as a complete output, beside its parts or in them."""
    from jobs.batch.manifest import NAME
    from pipeline.completed import is_noted

    folders = path.resolve().parents
    parts = [folder for folder in folders if folder.suffix == PARTS_SUFFIX]
    return is_noted(path) or any(
        (folder / NAME).is_file() for folder in [*parts, path.with_name(path.name + PARTS_SUFFIX)]
    )
