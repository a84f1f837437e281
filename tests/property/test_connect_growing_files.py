"""Growing files, cut anywhere and copied in between: at the end, the records are the file's rows, each once."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import example, given, note
from hypothesis import strategies as st

from kera.connect.endpoints import CODECS, FilesEnd
from kera.connect.errors import SourceChanged
from kera.connect.files.source import PART, FilesSource
from kera.connect.files.text import CsvRecords
from kera.connect.pieces import Span
from kera.core.errors import SchemaMismatch

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
TEXTS = st.text(st.sampled_from('aé€😀",\r\n '), max_size=6)
PACKED = ["", *CODECS]


def rendered(kind: str, texts: list[str], newline: str) -> bytes:
    """A file of rows numbered from 0, without its header."""
    if kind == "jsonl":
        lines = (json.dumps({"n": n, "text": text}, ensure_ascii=False) for n, text in enumerate(texts))
        return "".join(line + newline for line in lines).encode()
    return "".join(f"{n},{field(n, f'x{text}')}{newline}" for n, text in enumerate(texts)).encode()


def field(n: int, text: str) -> str:
    """A field, in quotes where needed; a quote after the start of a field is an ordinary character."""
    if n % 2 and not set(text) & set(",\r\n"):
        return text
    doubled = text.replace('"', '""')
    return f'"{doubled}"'


def packed(text: bytes, ending: str) -> bytes:
    if not ending:
        return text
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, CODECS[ending]) as stream:
        stream.write(text)
    whole: bytes = sink.getvalue().to_pybytes()
    return whole


class Copy:
    """Copies a file at each `run`, from the end of the previous run."""

    def __init__(self, path: str, kind: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self._end = FilesEnd(path, kind)
        self._place: Any = None
        self._spans: list[tuple[Span, list[dict[str, Any]]]] = []

    def run(self, piece_bytes: int) -> None:
        asyncio.run(self._run(piece_bytes))

    async def _run(self, piece_bytes: int) -> None:
        source = FilesSource(self._end, SCHEMA)
        try:
            await source.open()
            async for piece in source.read({} if self._place is None else {PART: self._place}, piece_bytes):
                rows = piece.rows.to_pylist()
                self.rows += rows
                self._place = piece.end
                self._spans.append((Span(PART, piece.start, piece.end, len(rows)), rows))
        finally:
            await source.close()

    def read_again(self) -> None:
        asyncio.run(self._read_again())

    async def _read_again(self) -> None:
        source = FilesSource(self._end, SCHEMA)
        try:
            await source.open()
            found = await source.again([span for span, _ in self._spans])
            assert [None if rows is None else rows.to_pylist() for rows in found] == [rows for _, rows in self._spans]
        finally:
            await source.close()


@st.composite
def growths(draw: Any) -> tuple[str, str, list[str], bytes, list[int], int]:
    """A kind of file, its compression, its texts, its bytes, its cuts, and the size of pieces."""
    kind, ending = draw(st.sampled_from(["csv", "jsonl"])), draw(st.sampled_from(PACKED))
    texts = draw(st.lists(TEXTS, min_size=1, max_size=12))
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    text = (f"n,text{newline}".encode() if kind == "csv" else b"") + rendered(kind, texts, newline)
    frames = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    whole = b"".join(
        packed(text[start:end], ending)
        for start, end in zip([0, *frames], [*frames, len(text)], strict=True)
        if start < end
    )
    cuts = sorted(draw(st.sets(st.integers(0, len(whole)), max_size=6)))
    return kind, ending, texts, whole, cuts, draw(st.sampled_from([1, 7, 64, 1 << 20]))


def expected(kind: str, texts: list[str]) -> list[dict[str, Any]]:
    return [{"n": n, "text": text if kind == "jsonl" else f"x{text}"} for n, text in enumerate(texts)]


@given(growths())
@example(("csv", "", ["a\r\nb", "c"], b'n,text\n0,"xa\r\nb"\n1,xc\n', [11, 12, 14, 17], 1))
def test_a_file_that_is_held_open_for_appends_is_copied_record_by_record(
    growth: tuple[str, str, list[str], bytes, list[int], int],
) -> None:
    kind, ending, texts, whole, cuts, piece_bytes = growth
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"x.{kind}{ending}")
        copy = Copy(str(path), kind)
        with path.open("wb", buffering=0) as file:
            for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
                file.write(whole[start:end])
                copy.run(piece_bytes)
                assert copy.rows == expected(kind, texts)[: len(copy.rows)]
        copy.run(piece_bytes)
        assert copy.rows == expected(kind, texts)
        copy.read_again()


@given(growths())
@example(("csv", "", ["ab"], b"n,text\n0,xab\n", [11], 64))
@example(("jsonl", "", ["ab"], b'{"n": 0, "text": "ab"}\n', [22], 64))
def test_no_record_of_a_file_closed_between_appends_is_split(
    growth: tuple[str, str, list[str], bytes, list[int], int],
) -> None:
    kind, ending, texts, whole, cuts, piece_bytes = growth
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"x.{kind}{ending}")
        path.touch()
        copy = Copy(str(path), kind)
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            with path.open("ab") as file:
                file.write(whole[start:end])
            try:
                copy.run(piece_bytes)
            except SourceChanged as error:  # half a row of CSV looked complete, and the next start finds it longer
                note(str(error))
                assert kind == "csv"
                assert copy.rows[:-1] == expected(kind, texts)[: len(copy.rows) - 1]
                return
            except SchemaMismatch as error:  # the next start goes on, unless this was the last start
                note(str(error))
                assert end < len(whole)
        assert copy.rows == expected(kind, texts)


@given(st.lists(st.sampled_from([b'"', b'"', b"a", b",", b"\n", b"\r", b"\r\n", b'""']), max_size=40).map(b"".join))
@example(b'\n"\n"\r"')
def test_rows_of_csv_end_according_to_the_grammar(text: bytes) -> None:
    """Compare with a loop over characters, as in Arrow's reader."""
    ends, sure_end, quoted, field_begins = [0], 0, False, True
    at = 0
    while at < len(text):
        each = text[at : at + 1]
        if quoted:
            if text[at : at + 2] == b'""':
                at += 1
            elif each == b'"':
                quoted = False
        elif each == b'"' and field_begins:
            quoted = True
        elif each == b"\n" or (each == b"\r" and at + 1 < len(text)):
            at += text[at : at + 2] == b"\r\n"
            ends.append(at + 1)
            sure_end = at + 1 if text[at : at + 1] == b"\n" else sure_end
        field_begins = not quoted and each in b",\r\n"
        at += 1

    found = CsvRecords().last_end(text)

    # `last_end` may miss an end that is only a carriage return: more text follows, or the end of the file.
    assert found in ends
    assert found >= sure_end
