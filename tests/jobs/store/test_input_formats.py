"""What an uploaded file's name and first bytes say of its format."""

import pytest

from jobs.store.input_formats import GZIP, JSONL, PARQUET, ZSTD, content_problem, format_of_upload, name_problem

HEADS = {JSONL: b"{}", GZIP: b"\x1f\x8b\x08", ZSTD: b"\x28\xb5\x2f\xfd\x04", PARQUET: b"PAR1\x15"}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.jsonl", JSONL),
        ("A.JSONL.GZ", GZIP),
        ("a.jsonl.zst", ZSTD),
        ("a.pq", PARQUET),
        ("a.b.parquet", PARQUET),
        (".jsonl", JSONL),
        ("upload", None),
        ("jsonl", None),
        ("-", None),
        ("17", None),
    ],
)
def test_a_suffix_has_to_agree_with_the_content(name: str, said: str | None, kind: str) -> None:
    assert name_problem(name) is None
    assert format_of_upload(name, HEADS[kind]) == (kind if said in (None, kind) else None)


@pytest.mark.parametrize("name", ["a.json", "a.gz", "a.csv.gz", "a.jsonl.bz2", "a.txt", "a.jsonl.tmp"])
def test_another_suffix_is_none_of_a_batch(name: str) -> None:
    assert name_problem(name) == f"'{name}' has another suffix."
    assert {format_of_upload(name, head) for head in HEADS.values()} == {None}


def test_the_first_line_is_looked_at_where_it_ends_in_the_head() -> None:
    assert content_problem("a", b"{", 1) == "Its first line is not valid JSON: Input data was truncated."
    assert content_problem("a", b"{", 2) is None
    assert content_problem("a", b"{\n", 9) is not None
    assert content_problem("a", b" \n \n[]\n", 99) == "Its first line is not a JSON object."
    assert content_problem("a", b" \n", 2) is None
    assert content_problem("a", b"", 0) == "The file is empty."
