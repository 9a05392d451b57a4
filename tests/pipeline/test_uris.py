"""Inputs and outputs of run-batch in stores and on web servers: a real S3 client against a server
on loopback, what is refused before anything begins, and what a kill leaves behind.
"""

import gzip
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pyarrow
import pytest
from pyarrow import dataset, parquet
from pyarrow.fs import FileSystem

from pipeline.errors import Refused, Unfinished
from pipeline.input_names import named_files
from pipeline.signals import Signals
from pipeline.uris.addresses import AllowedHosts
from pipeline.uris.fetch_process import FetchOrder
from pipeline.uris.fetching import fetch
from pipeline.uris.order_process import run_order
from pipeline.uris.uploading import check_writable, upload
from pipeline.uris.uri import Uri
from tests.pipeline.conftest import RunHere
from tests.pipeline.test_fleet import wait_for_leader
from tests.support.commands import RunningCommand, run_pipeline, running_pipeline
from tests.support.file_server import FileServer, claim_size, file_server
from tests.support.s3_server import S3Server, s3_server
from tests.support.waiting import wait_until

COUNT = 4
OUTPUT = "s3://results/run/answers.jsonl"


def lines(name: str = "a") -> bytes:
    """Some requests, whose ids begin with the name."""
    made = (
        {
            "custom_id": f"{name}-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"Count to {number}", "max_tokens": 4, "temperature": 0},
        }
        for number in range(COUNT)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


def ids(results: bytes | None) -> list[str]:
    assert results is not None
    found = [json.loads(line) for line in results.splitlines()]
    assert all(line["error"] is None for line in found)
    return [line["custom_id"] for line in found]


@pytest.fixture
def s3() -> Iterator[S3Server]:
    """A server with the buckets `data` and `results`, and the requests `data/in/a.jsonl`."""
    with s3_server() as server:
        server.put("data")
        server.put("results")
        server.put("data/in/a.jsonl", lines())
        yield server


@pytest.fixture
def web() -> Iterator[FileServer]:
    """A web server with the requests `/a.jsonl`."""
    with file_server() as server:
        server.at["/a.jsonl"] = lines()
        yield server


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which this process is."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def in_s3(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, for clients in this process."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return s3


def the_parts(folder: Path) -> Path:
    [found] = folder.glob("*.parts")
    return found


def written_parts(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (the_parts(folder) / "parts").iterdir()}


def uploads(s3: S3Server) -> int:
    return sum(call.startswith("POST") and "uploadId" in call for call in s3.calls)


@pytest.mark.proof
def test_a_run_from_a_bucket_to_another(in_s3: S3Server, here: Path, run_here: RunHere) -> None:
    in_s3.put("data/in/two words.jsonl.gz", gzip.compress(lines("z")))
    command = ["run-batch", "s3://data/in/two%20words.jsonl.gz", "-o", OUTPUT]
    done = run_pipeline(*command, folder=here)
    assert done.returncode == 0, done.stderr
    assert f"results: {OUTPUT}" in done.stdout
    assert ids(in_s3.get("results/run/answers.jsonl")) == [f"z-{number}" for number in range(COUNT)]
    assert in_s3.keys("results") == ["run/answers.jsonl"]
    assert [path.name for path in here.iterdir()] == [the_parts(here).name]
    parts, once = written_parts(here), uploads(in_s3)
    assert run_here(*command).code == 0
    assert (written_parts(here), uploads(in_s3)) == (parts, once)
    assert in_s3.call("DELETE", "results/run/answers.jsonl")[0] == 204
    assert run_here(*command).code == 0
    assert ids(in_s3.get("results/run/answers.jsonl")) == [f"z-{number}" for number in range(COUNT)]
    assert (written_parts(here), uploads(in_s3)) == (parts, once + 1)


@pytest.mark.proof
def test_tables_by_a_pattern_of_a_store_and_results_beside_each_other(s3: S3Server, here: Path) -> None:
    for name in ("b", "a"):
        s3.put(f"data/tables/2026/{name}.csv", f"text\n{name} lion\n".encode())
    s3.put("data/tables/_SUCCESS")
    command = ["run-batch", "s3://data/tables/**/*.csv", "--prompt-column", "text", "--body", '{"max_tokens": 4}']
    done = run_pipeline(*command, "-o", "s3://results/out/", folder=here, **s3.environment)
    assert done.returncode == 0, done.stderr
    assert s3.keys("results") == ["out/a.csv", "out/b.csv"]
    assert b"row-1" in (s3.get("results/out/a.csv") or b"")


@pytest.mark.proof
def test_a_run_from_a_web_server_goes_on_with_what_it_fetched(web: FileServer, here: Path) -> None:
    web.headers["etag"] = '"1"'
    command = ["run-batch", web.url("/a.jsonl?token=to-ken"), "--allow-hosts", "127.0.0.0/8"]
    done = run_pipeline(*command, folder=here)
    assert done.returncode == 0, done.stderr
    assert "to-ken" not in done.stderr + done.stdout
    assert ids((here / "a.results.jsonl").read_bytes()) == [f"a-{number}" for number in range(COUNT)]
    parts = written_parts(here)
    assert run_pipeline(*command, folder=here).returncode == 0
    assert written_parts(here) == parts
    web.headers["etag"] = '"2"'
    changed = run_pipeline(*command, folder=here)
    assert changed.returncode == 2
    assert "/a.jsonl has changed since" in changed.stderr
    assert "remove that folder, or name another output" in changed.stderr
    (here / "a.results.jsonl").unlink()
    assert run_pipeline(*command, folder=here).returncode == 0


@contextmanager
def held_run(s3: S3Server, calls: str, command: list[str], here: Path) -> Iterator[RunningCommand]:
    """A run at one of these calls, which the server holds."""
    s3.held = calls
    with running_pipeline(*command, folder=here, **s3.environment) as run:
        wait_until(lambda: s3.waiting.is_set() or run.process.poll() is not None, 150, calls)
        assert s3.waiting.is_set(), run.output
        yield run


def release(s3: S3Server) -> None:
    """Answer the call that is held, and those that follow."""
    s3.held = ""
    s3.released.set()


@pytest.mark.proof
def test_a_run_that_is_killed_while_it_uploads_leaves_no_object(s3: S3Server, here: Path) -> None:
    command = ["run-batch", "s3://data/in/a.jsonl", "-o", OUTPUT]
    with held_run(s3, "PUT partNumber", command, here) as run:
        run.process.kill()
        run.wait()
    parts = written_parts(here)
    assert s3.get("results/run/answers.jsonl") is None
    release(s3)
    done = run_pipeline(*command, folder=here, **s3.environment)
    assert done.returncode == 0, done.stderr
    assert ids(s3.get("results/run/answers.jsonl")) == [f"a-{number}" for number in range(COUNT)]
    assert written_parts(here) == parts


@pytest.mark.proof
def test_a_run_that_is_killed_while_it_fetches_begins_again(s3: S3Server, here: Path) -> None:
    command = ["run-batch", "s3://data/in/a.jsonl", "-o", "answers.jsonl"]
    with held_run(s3, "GET ", command, here) as run:
        second = run_pipeline(*command, folder=here, **s3.environment)
        assert second.returncode == 2
        assert "another run is at work on" in second.stderr
        assert the_parts(here).exists()
        run.process.kill()
        run.wait()
    assert not (the_parts(here) / "input" / "a.jsonl").exists()
    release(s3)
    done = run_pipeline(*command, folder=here, **s3.environment)
    assert done.returncode == 0, done.stderr
    assert ids((here / "answers.jsonl").read_bytes()) == [f"a-{number}" for number in range(COUNT)]
    assert not [name for name in os.listdir(the_parts(here) / "input") if name.endswith(".tmp")]


@pytest.mark.parametrize("order", [pytest.param(signal.SIGINT, marks=pytest.mark.proof), signal.SIGTERM])
def test_a_run_that_is_interrupted_while_it_fetches_ends_at_once(
    s3: S3Server, here: Path, order: signal.Signals
) -> None:
    s3.held = "GET "
    with running_pipeline("run-batch", "s3://data/in/a.jsonl", folder=here, **s3.environment) as run:
        wait_until(lambda: s3.waiting.is_set() or run.process.poll() is not None, 150, "a fetch")
        run.process.send_signal(order)
        assert run.wait() == 130
        assert "fetching s3://data/in/a.jsonl" in run.output
        assert "Interrupted: run the same command again to go on." in run.output


@pytest.mark.proof
def test_an_upload_that_fails_halfway_leaves_what_was_there(in_s3: S3Server, here: Path) -> None:
    path = here / "answers.jsonl"
    path.write_bytes(bytes(24 << 20))
    (here / "msgspec.py").write_text("raise ImportError")  # which the process that uploads must not import
    in_s3.put("results/run/answers.jsonl", b"before")
    in_s3.refused = "partNumber=2"
    with Signals() as signals:
        with pytest.raises(Unfinished, match=r"no permission to write .*; the results are in .*answers"):
            upload(path, Uri(OUTPUT), (), signals, lambda line: None)
        with pytest.raises(Unfinished, match="failed to write"):
            upload(Path("/proc/self/mem"), Uri(OUTPUT), (), signals, lambda line: None)  # which cannot be read
        assert uploads(in_s3) == 0
        assert in_s3.get("results/run/answers.jsonl") == b"before"
        in_s3.refused = ""
        upload(path, Uri(OUTPUT), (), signals, lambda line: None)
    assert in_s3.get("results/run/answers.jsonl") == path.read_bytes()


def test_an_upload_by_a_user_who_may_not_read_is_complete(in_s3: S3Server, here: Path) -> None:
    path = here / "answers.jsonl"
    path.write_bytes(lines())
    in_s3.write_only = True
    with Signals() as signals:
        upload(path, Uri(OUTPUT), (), signals, lambda line: None)
        assert in_s3.call("DELETE", "results/run/answers.jsonl")[0] == 204
        upload(path, Uri(OUTPUT), (), signals, lambda line: None)
    assert in_s3.get("results/run/answers.jsonl") == lines()


def test_results_are_written_to_a_store_of_fsspec(here: Path) -> None:
    path, stored = here / "answers.jsonl", Uri(f"local://{here}/out/answers.jsonl")
    with Signals() as signals:
        for name in ("a", "b"):
            path.write_bytes(lines(name))
            check_writable(stored, ())
            upload(path, stored, (), signals, lambda line: None)
            fetch(stored, here / name / "input.jsonl", AllowedHosts(), has_begun=False)
            assert (here / name / "input.jsonl").read_bytes() == lines(name)
    assert [found.name for found in (here / "out").iterdir()] == ["answers.jsonl"]


def test_results_by_columns_are_whole_where_two_runs_wrote(in_s3: S3Server, here: Path) -> None:
    folder, paths = Uri("s3://results/words"), [here / "a.parquet", here / "b.parquet"]
    for path in paths:
        parquet.write_table(pyarrow.table({"word": [path.stem], "year": [2026]}), path)
    with Signals() as signals:
        upload(paths[0], folder, ("year",), signals, lambda line: None)
        stored = in_s3.keys("results")
        with pytest.raises(Unfinished, match="has files of another run, such as part-"):
            upload(paths[1], folder, ("year",), signals, lambda line: None)
        assert in_s3.keys("results") == stored
        [rows] = [name for name in stored if name.endswith(".parquet")]
        assert in_s3.call("DELETE", quote(f"results/{rows}"))[0] == 204
        upload(paths[0], folder, ("year",), signals, lambda line: None)
    assert rows in in_s3.keys("results")


def test_values_that_are_no_names_of_folders_leave_the_results(here: Path) -> None:
    path = here / "a.parquet"
    parquet.write_table(pyarrow.table({"word": ["x" * 300], "year": [2026]}), path)
    with Signals() as signals:
        with pytest.raises(
            Unfinished, match="too long for a file name: name other columns with --partition-by; the results"
        ):
            upload(path, Uri((here / "words").as_uri()), ("word",), signals, lambda line: None)
        upload(path, Uri((here / "words").as_uri()), ("year",), signals, lambda line: None)
    assert dataset.dataset(here / "words", partitioning="hive").count_rows() == 1


@pytest.mark.proof
def test_results_that_cannot_be_uploaded_are_kept_for_the_next_start(s3: S3Server, here: Path) -> None:
    command = ["run-batch", "s3://data/in/a.jsonl", "-o", OUTPUT]
    with held_run(s3, "PUT partNumber", command, here) as run:
        s3.read_only = True
        run.process.terminate()
        assert run.wait() == 130
        assert "run the same command again to upload them" in run.output
    release(s3)
    refused = run_pipeline(*command, folder=here, **s3.environment)
    assert refused.returncode == 1, refused.stderr
    assert f"no permission to write {OUTPUT}" in refused.stderr
    assert s3.keys("results") == []
    s3.read_only = False
    assert run_pipeline(*command, folder=here, **s3.environment).returncode == 0
    assert ids(s3.get("results/run/answers.jsonl")) == [f"a-{number}" for number in range(COUNT)]


REFUSED = [
    (["s3://data/in/none.jsonl"], "there is no file s3://data/in/none.jsonl"),
    (["s3://none/a.jsonl"], "there is no bucket none"),
    (["s3://data/in"], "the input s3://data/in is a folder: end it with / to read all of its files"),
    (["s3://data"], "s3://data names no file"),
    (["s3://data/in/*.pq"], "no file matches s3://data/in/*.pq"),
    (["s3://data/none/"], "no file is in s3://data/none/"),
    (["s3://none/*.csv"], "there is no bucket none"),
    (["s3://data/in/a.jsonl", "-o", "s3://none/x.jsonl"], "there is no bucket none"),
    (["s3://data/in/a.jsonl", "-o", "s3://results/out/"], "the output s3://results/out/ is a folder"),
    (["s3://data/in/a.jsonl", "-o", "s3://data/in/a.jsonl"], "the output s3://data/in/a.jsonl is the input itself"),
    (["s3://data/in/a.jsonl", "-o", "https://example.com/x"], "results cannot be written to https://example.com/x"),
    (["s3://data/in/a.jsonl", "-o", "s3://results/x.jsonl", "--detach"], "leave out --detach"),
    (["s3://data/in/a.jsonl?color=red"], "Unexpected query parameter"),
    (["s3://user:pass-word@data/in/none.jsonl"], "there is no file s3://data/in/none.jsonl"),
    (["{table}", "--partition-by", "year", "-o", "out"], "--partition-by names no column of the results: year"),
    (["{table}", "--partition-by", "model", "-o", "out", "--detach"], "leave out --detach"),
    (["{table}", "--partition-by", "model"], "--partition-by needs one input, and -o with the folder"),
    (["{table}", "s3://data/in/a.jsonl", "--partition-by", "model", "-o", "out"], "--partition-by needs one input"),
    (["{table}", "--partition-by", "model", "-o", "s3://data/in/"], "s3://data/in has files already, such as a.jsonl"),
    (["{table}", "--partition-by", "model", "-o", "s3://none/out"], "there is no bucket none"),
    (["zz://data/a.jsonl"], "zz://data/a.jsonl has an unknown scheme"),
    (["gdrive://data/a.jsonl"], "the scheme of gdrive://data/a.jsonl needs a package"),
    (["fsspec+http://127.0.0.1/a.jsonl"], "has an unknown scheme"),
    (["ftp://127.0.0.1/a.jsonl"], "has an unknown scheme"),
    (["webhdfs://127.0.0.1/a.jsonl"], "has an unknown scheme"),
    (["github://owner:repository@main/a.jsonl"], "has an unknown scheme"),
    (["simplecache::zz://data/a.jsonl"], "there is no file simplecache::zz:/data/a.jsonl"),
    (["memory://x/a::http://127.0.0.1/a.jsonl"], "is a chain of URIs: name the file itself"),
    (["s3://data/in/table.csv", "--prompt-column", "word"], "word"),
    (["s3://data/in/table.csv", "--template", "Spell {word}"], "word"),
    (["s3://data/in/a.jsonl", "--prompt-column", "word"], "a.jsonl is neither Parquet nor CSV"),
    (["{web}/a.jsonl"], "the host 127.0.0.1 is not on the public internet: to allow it, add --allow-hosts 127.0.0.1"),
    (["{web}/none.jsonl", "--allow-hosts", "127.0.0.1"], "/none.jsonl (status 404)"),
    (["{web}/", "--allow-hosts", "127.0.0.1"], "names no file"),
    (["{web}/a.jsonl", "--allow-hosts", "10.0.0.0/40"], "10.0.0.0/40"),
    (["{web}/large.jsonl", "--allow-hosts", "127.0.0.1"], "/large.jsonl has more than the 10,737,418,240 bytes"),
    (["http:///a.jsonl"], "neither http nor https"),
]


@pytest.mark.parametrize(("arguments", "reason"), REFUSED)
def test_what_is_wrong_is_refused_before_anything_begins(
    in_s3: S3Server, web: FileServer, here: Path, run_here: RunHere, arguments: list[str], reason: str
) -> None:
    in_s3.put("data/in/table.csv", b"text\nlion\n")
    web.at["/large.jsonl"] = claim_size(11 << 30)
    done = run_here(
        "run-batch",
        *(
            argument.replace("{web}", web.url("")).replace("{table}", "s3://data/in/table.csv")
            for argument in arguments
        ),
    )
    assert done.code == 2, done.err
    assert reason in " ".join(done.err.split())
    assert "pass-word" not in done.err
    assert list(here.iterdir()) == []
    assert in_s3.keys("results") == []


def test_a_bucket_without_rights_is_refused(in_s3: S3Server, here: Path, run_here: RunHere) -> None:
    in_s3.read_only = True
    done = run_here("run-batch", "s3://data/in/a.jsonl", "-o", OUTPUT)
    assert (done.code, f"no permission to write {OUTPUT}: check the credentials" in done.err) == (2, True), done.err
    in_s3.denied = True
    for source in ("s3://data/in/a.jsonl", "s3://data/in/*.jsonl"):
        done = run_here("run-batch", source)
        assert done.code == 2, done.err
        assert "check the credentials and their permissions" in done.err
    assert list(here.iterdir()) == []


@pytest.mark.proof
def test_a_store_that_cannot_be_reached_ends_the_command(here: Path, in_s3: S3Server, run_here: RunHere) -> None:
    done = run_here("run-batch", "s3://data/a.jsonl", AWS_ENDPOINT_URL="http://127.0.0.1:1")
    assert done.code == 1
    assert "there is no connection to the store of s3://data/a.jsonl" in done.err


def test_a_file_that_fsspec_knows_is_fetched(here: Path) -> None:
    (here / "in").mkdir()
    (here / "in" / "a.jsonl").write_bytes(lines())
    fetch(Uri(f"local://{here}/in/a.jsonl"), here / "x.parts" / "input" / "a.jsonl", AllowedHosts(), has_begun=False)
    assert (here / "x.parts" / "input" / "a.jsonl").read_bytes() == lines()
    found = [str(source) for source, _ in named_files([Uri(f"local://{here}/in/*.jsonl")], Path("out"))]
    assert found == [f"local://{here}/in/a.jsonl"]
    check_writable(Uri(f"local://{here}/in/b.jsonl"), ())
    assert [path.name for path in (here / "in").iterdir()] == ["a.jsonl"]


def test_two_inputs_are_both_fetched_or_none(in_s3: S3Server, here: Path, run_here: RunHere) -> None:
    in_s3.put("data/in/b.csv", b"text\nlion\n")
    in_s3.put("data/in/c.csv", b"word\nlion\n")
    done = run_here("run-batch", "s3://data/in/b.csv", "s3://data/in/c.csv", "--prompt-column", "text")
    assert done.code == 2, done.err
    assert list(here.iterdir()) == []


def test_an_input_with_bad_lines_leaves_no_folder(in_s3: S3Server, here: Path, run_here: RunHere) -> None:
    in_s3.put("data/in/a.jsonl", b"{}\n")
    done = run_here("run-batch", "s3://data/in/a.jsonl")
    assert done.code == 2, done.err
    assert "s3://data/in/a.jsonl:1: " in done.err
    assert list(here.iterdir()) == []


def test_files_of_a_store_are_named_by_folders_and_patterns(in_s3: S3Server) -> None:
    for name in ("b.jsonl", ".hidden.jsonl", "_SUCCESS", "deep/c.jsonl", "_temporary/c.jsonl", "d e.jsonl", "f.csv"):
        in_s3.put(f"data/in/{name}", lines())

    def found(text: str) -> list[str]:
        return [str(source) for source, _ in named_files([Uri(text)], Path("out"))]

    assert found("s3://data/in/*.jsonl") == [f"s3://data/in/{name}.jsonl" for name in ("a", "b", "d%20e")]
    assert found("s3://data/in/") == [*found("s3://data/in/*.jsonl"), "s3://data/in/f.csv"]
    assert found("s3://data/**/*.jsonl")[-1] == "s3://data/in/deep/c.jsonl"
    assert found("s3://data/*/*/*.jsonl") == ["s3://data/in/deep/c.jsonl"]
    assert found("s3://data/i*/b.jsonl") == ["s3://data/in/b.jsonl"]
    for name in ("g1.jsonl", "g[1].jsonl"):
        in_s3.put(f"data/in/{name}", lines())
    assert found("s3://data/in/g[1].jsonl") == ["s3://data/in/g1.jsonl"]
    assert found("s3://data/in/g%5B1].jsonl") == ["s3://data/in/g%5B1].jsonl"]
    assert found("s3://data/in/*%5B1].jsonl") == ["s3://data/in/g%5B1%5D.jsonl"]


def test_folders_are_named_as_they_are(here: Path) -> None:
    for folder in (here / "words[1]", here / "words1"):
        write_dataset(folder)
    for named in ("words[1]", "words[1]/year=2025/.."):
        [(source, output)] = named_files([Path(named)], None)
        assert isinstance(source, Uri)
        assert (source.path, output) == (f"{here}/words[1]/", here / "words[1].results.parquet")


def test_results_of_one_uri_are_in_the_present_folder_and_have_one_name() -> None:
    assert named_files([Uri("https://example.com/data/x.csv.gz?sig=a/b")], None)[0][1] == Path("x.results.csv")
    sources = [Uri("s3://data/a/x.jsonl"), Path("y.jsonl")]
    outputs = [str(output) for _, output in named_files(sources, Uri("s3://results/out"))]
    assert outputs == ["s3://results/out/x.jsonl", "s3://results/out/y.jsonl"]


def test_a_folder_contains_what_is_below_it() -> None:
    folder = Uri("s3://data/in/")
    assert folder.contains(Uri("s3://data/in/deep/x.parquet"))
    assert not folder.contains(Uri("s3://data/in.parquet"))
    assert not folder.contains(Uri("s3://other/in/x.parquet"))
    assert not Uri("s3://data/in").contains(Uri("s3://data/in/x.parquet"))


def write_dataset(folder: str | Path, filesystem: FileSystem | None = None) -> None:
    rows = pyarrow.table({"word": ["lion", "fish", "mice"], "year": [2025, 2026, 2025]})
    partitioning = dataset.partitioning(pyarrow.schema([("year", pyarrow.int64())]), flavor="hive")
    dataset.write_dataset(rows, folder, filesystem=filesystem, format="parquet", partitioning=partitioning)


@pytest.mark.proof
def test_a_folder_of_parquet_files_is_one_table(here: Path) -> None:
    write_dataset(here / "words")
    (here / "words" / "_SUCCESS").touch()
    parquet.write_table(pyarrow.table({"word": ["wolf"], "size": [1.5]}), here / "words" / "year=2025" / "z.parquet")
    command = ["run-batch", "words", "--template", "{word} {year}", "--keep-columns", "word,year,size"]
    done = run_pipeline(*command, "--body", '{"max_tokens": 4}', folder=here)
    assert done.returncode == 0, done.stderr
    rows = parquet.read_table(here / "words.results.parquet").to_pylist()
    assert [(row["word"], row["year"], row["size"]) for row in rows] == [
        ("lion", 2025, None),
        ("mice", 2025, None),
        ("wolf", 2025, 1.5),
        ("fish", 2026, None),
    ]
    (here / "words" / "year=2025" / "z.parquet").unlink()
    changed = run_pipeline(*command, "--body", '{"max_tokens": 4}', folder=here)
    assert changed.returncode == 2
    assert "/words/ has changed since" in changed.stderr


def test_a_dataset_in_a_store_is_one_input(in_s3: S3Server, here: Path) -> None:
    store, inside = FileSystem.from_uri("s3://data/words")
    write_dataset(inside, store)
    [(source, output)] = named_files([Uri("s3://data/words/")], None)
    assert isinstance(source, Uri)
    assert (str(source), output) == ("s3://data/words/", Path("words.results.parquet"))
    fetch(source, here / "run.parts" / "input" / "words.parquet", AllowedHosts(), has_begun=False)
    rows = parquet.read_table(here / "run.parts" / "input" / "words.parquet").to_pylist()
    assert sorted((row["word"], row["year"]) for row in rows) == [("fish", 2026), ("lion", 2025), ("mice", 2025)]
    in_s3.put("data/words/readme.txt", b"words")
    with pytest.raises(Refused, match="is a folder of Parquet files and others: name its files by a pattern"):
        named_files([Uri("s3://data/words/")], None)


def test_what_a_small_table_takes_is_bounded(here: Path) -> None:
    (here / "words").mkdir()
    words = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4096), ["x" * (8 << 20)])
    path = here / "words" / "a.parquet"
    parquet.write_table(pyarrow.table({"word": words}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1 << 16
    uri = Uri(f"{(here / 'words').as_uri()}/")
    order = FetchOrder(
        uri=uri.text, path=str(here / "in" / "a.parquet"), allowed="", has_begun=False, memory_bytes=1 << 28
    )
    with Signals() as signals, pytest.raises(Refused, match=r"to read .*/words/ takes more than 256 MiB of memory"):
        run_order(FetchOrder.__module__, order, signals, "")


def test_parquet_files_that_are_no_table_are_refused(here: Path, run_here: RunHere) -> None:
    folder = here / "words"
    folder.mkdir()
    parquet.write_table(pyarrow.table({"word": ["wolf"]}), folder / "a.parquet")
    parquet.write_table(pyarrow.table({"word": [1.5]}), folder / "b.parquet")
    for content in (None, b"no Parquet"):
        if content is not None:
            (folder / "b.parquet").write_bytes(content)
        done = run_here("run-batch", folder, "--prompt-column", "word")
        assert done.code == 2, done.err
        assert "/words/ is not a table of Parquet files" in done.err
    (folder / "b.parquet").unlink()
    parquet.write_table(pyarrow.table({"word": ["wolf"], "legs": [[4]]}), folder / "a.parquet")
    kept = ["--prompt-column", "word", "--keep-columns", "legs", "--partition-by", "legs", "-o", here / "answers"]
    for source in (folder, folder / "a.parquet"):
        done = run_here("run-batch", source, *kept)
        assert (done.code, "a column of lists, structs or maps: legs" in done.err) == (2, True), done.err
    done = run_here("run-batch", folder, "--prompt-column", "word", "-o", folder / "answers.parquet")
    assert f"the output {folder}/answers.parquet is in the folder of the input" in done.err
    done = run_here("run-batch", folder / "a.parquet", folder / "none")
    assert "there is no file" in done.err
    assert [path.name for path in here.iterdir()] == ["words"]


PARTITIONED = ["--prompt-column", "word", "--keep-columns", "year", "--partition-by", "year,finish_reason"]


def words_by_year(names: list[str]) -> list[str]:
    return sorted(name.partition("/finish_reason=")[0] for name in names if name.endswith("-0.parquet"))


@pytest.mark.proof
def test_results_are_written_by_columns_into_a_folder(here: Path, run_here: RunHere) -> None:
    write_dataset(here / "words")
    command = ["run-batch", "words", *PARTITIONED, "--body", '{"max_tokens": 4}', "-o", "answers/"]
    done = run_pipeline(*command, folder=here)
    assert done.returncode == 0, done.stderr
    assert f"results: {here / 'answers'}" in done.stdout
    written = [str(path.relative_to(here / "answers")) for path in (here / "answers").rglob("*") if path.is_file()]
    assert words_by_year(written) == ["year=2025", "year=2026"]
    rows = dataset.dataset(here / "answers", partitioning="hive").to_table().to_pylist()
    assert sorted(row["year"] for row in rows) == [2025, 2025, 2026]
    assert all(row["text"] and row["finish_reason"] for row in rows)
    stamps = {name: (here / "answers" / name).stat().st_mtime_ns for name in written}
    assert run_here(*command).code == 0
    assert {name: (here / "answers" / name).stat().st_mtime_ns for name in written} == stamps
    assert run_here(*command, "--partition-by", "year").code == 0
    again = sorted(path.relative_to(here / "answers") for path in (here / "answers").rglob("*.parquet"))
    assert [str(path.parent) for path in again] == ["year=2025", "year=2026"]


@pytest.mark.proof
def test_results_are_written_by_columns_into_a_store(s3: S3Server, here: Path) -> None:
    s3.put("data/words.csv", b"word,year\nlion,2025\nfish,2026\nmice,2025\n")
    command = ["run-batch", "s3://data/words.csv", *PARTITIONED, "--body", '{"max_tokens": 4}']
    command += ["-o", "s3://results/words/"]
    with held_run(s3, "PUT partNumber", command, here) as run:
        run.process.kill()
        run.wait()
    parts = written_parts(here)
    assert "words/_SUCCESS" not in s3.keys("results")
    release(s3)
    s3.put("results/words/year=2020/part-other-0.parquet", b"of another run")
    done = run_pipeline(*command, folder=here, **s3.environment)
    assert done.returncode == 1
    assert "has files of another run, such as part-other-0.parquet" in done.stderr
    assert "words/_SUCCESS" not in s3.keys("results")
    s3.call("DELETE", "results/words/year%3D2020/part-other-0.parquet")
    done = run_pipeline(*command, folder=here, **s3.environment)
    assert done.returncode == 0, done.stderr
    names = [name for name in s3.keys("results") if not name.endswith("/")]
    assert "words/_SUCCESS" in names
    assert words_by_year(names) == ["words/year=2025", "words/year=2026"]
    assert written_parts(here) == parts


@pytest.mark.proof
def test_a_fleet_answers_what_was_fetched(s3: S3Server, redis_url: str, here: Path) -> None:
    command = ["run-batch", "s3://data/in/a.jsonl", "-o", OUTPUT, "--local-worker"]
    with running_pipeline("jobs", redis_url=redis_url):
        wait_for_leader(redis_url)
        for _ in range(2):
            done = run_pipeline(*command, redis_url=redis_url, folder=here, **s3.environment)
            assert done.returncode == 0, done.stderr
    assert ids(s3.get("results/run/answers.jsonl")) == [f"a-{number}" for number in range(COUNT)]
    assert uploads(s3) == 1
