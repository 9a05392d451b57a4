"""A form reads the same however its body is cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from api.http.multipart import FormPart, MultipartReader

BOUNDARY = b"--a-b"
DELIMITER = b"\r\n--" + BOUNDARY

scraps = st.sampled_from([b"\r", b"\n", b"-", BOUNDARY, DELIMITER[:-1], b"a", b"\0\xff", b"x" * 50])
contents = st.lists(scraps).map(b"".join).filter(lambda content: DELIMITER not in b"\r\n" + content)
names = st.text(st.characters(exclude_characters='"\\', exclude_categories=["Cc", "Cs"]), min_size=1, max_size=10)
parts = st.lists(st.tuples(names, st.none() | names, contents), max_size=4)


def read(body: bytes, cuts: list[int]) -> list[tuple[str, str | None, bytes]]:
    reader = MultipartReader("multipart/form-data; boundary=" + BOUNDARY.decode())
    found: list[tuple[str, str | None, bytes]] = []
    edges = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        for piece in reader.feed(body[start:end]):
            if isinstance(piece, FormPart):
                found.append((piece.name, piece.filename, b""))
            else:
                name, filename, content = found[-1]
                found[-1] = (name, filename, content + piece)
    reader.finish()
    return found


@given(parts=parts, cuts=st.lists(st.integers(0, 2000), max_size=30))
def test_a_body_may_be_cut_anywhere(parts: list[tuple[str, str | None, bytes]], cuts: list[int]) -> None:
    body = b""
    for name, filename, content in parts:
        disposition = f'form-data; name="{name}"' + ("" if filename is None else f'; filename="{filename}"')
        body += b"--%b\r\nContent-Disposition: %b\r\nContent-Type: x/y\r\n\r\n%b\r\n" % (
            BOUNDARY,
            disposition.encode(),
            content,
        )
    assert read(body + b"--%b--\r\n" % BOUNDARY, cuts) == parts
