"""The generated tables of `docs/` are those of the code."""

from tools.docs_tables import DOCS, TABLES, with_tables


def test_the_pages_hold_the_tables_of_the_code() -> None:
    pages = {page.name: page.read_text() for page in DOCS.glob("*.md")}
    stale = [name for name, text in pages.items() if with_tables(text) != text]
    assert not stale, f"run `make docs`, which writes {', '.join(stale)}"
    found = "".join(pages.values())
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in found] == []


def test_a_table_is_put_between_its_marks_alone() -> None:
    page = "before\n<!-- table: unsupported -->\nold\n<!-- end -->\nbehind\n"
    written = with_tables(page)
    assert written.startswith("before\n<!-- table: unsupported -->\n| parameter | values that pass |\n| --- | --- |\n")
    assert written.endswith("|\n<!-- end -->\nbehind\n")
    assert '| `modalities` | `["text"]` |\n' in written
    assert "old" not in written
    assert with_tables(written) == written
