"""Reading text: every kind of source, and one clear line for everything that can be wrong."""

import gzip
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakeful.data import readers
from wakeful.data.preparing import prepare
from wakeful.data.readers import Document
from wakeful.data.sources import (
    TextBeginning,
    parse_hub,
    read_beginning,
    read_documents,
    source_manifest,
)
from wakeful.data.split import Spool
from wakeful.errors import WakefulError


def failure(source, **options):
    with pytest.raises(WakefulError) as caught:
        list(read_documents(source, **options))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("één\r\ntwee\n".encode())
    assert list(read_documents(str(path))) == [Document("a.txt", "één\r\ntwee\n")]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert next(read_documents(str(tmp_path / "a.txt"))).text == "hello"


def test_a_folder_is_read_below_in_order_and_without_what_is_no_text(tmp_path):
    for name in ["b.md", "a/z.txt", "a/a.py", ".git/config.txt", ".hidden.txt", "p.png", "q.pkl"]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\xff\xfe" if path.suffix in {".png", ".pkl"} else name.encode())
    (tmp_path / "empty.txt").touch()
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    assert [d.name for d in read_documents(str(tmp_path))] == ["a/a.py", "a/z.txt", "b.md"]


def test_what_is_not_read_of_a_folder_is_said(tmp_path, caplog):
    for name in ["a.txt", "README", "p.png", "x/q.pkl", ".hidden", ".git/c", "bad\x1b.bin"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [d.name for d in read_documents(str(tmp_path))] == ["a.txt"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: 4 of its files are not read, since their endings name no text or their "
        "folder holds prepared data: README, bad\ufffd.bin, p.png, x/q.pkl"
    ]
    caplog.clear()
    list(read_documents(f"{tmp_path}/*.txt"))
    assert not caplog.records


def test_what_is_not_read_of_a_folder_at_home_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ["a.txt", "p.png"]:
        (tmp_path / "texts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text("text")
    assert [d.name for d in read_documents("~/texts")] == ["a.txt"]
    assert "texts: 1 of its files are not read" in caplog.text


def test_a_folder_that_is_called_as_the_standard_library_is_not_read(tmp_path, caplog, monkeypatch):
    (tmp_path / "python-stdlib").mkdir()
    (tmp_path / "python-stdlib" / "p.png").touch()
    monkeypatch.chdir(tmp_path)
    assert next(read_documents("python-stdlib")).name == "__future__.py"
    assert not caplog.records


def test_a_glob_and_a_list(tmp_path):
    for name in ["x/1.txt", "x/2.odd", "y/3.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [d.name for d in read_documents(f"{tmp_path}/**/*.txt")] == ["x/1.txt", "y/3.txt"]
    assert [d.name for d in read_documents(f"{tmp_path}/x/*")] == ["1.txt", "2.odd"]
    both = [f"{tmp_path}/y", f"{tmp_path}/x/1.txt"]
    assert [d.text for d in read_documents(both)] == ["y/3.txt", "x/1.txt"]


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    (tmp_path / "a[1].txt").write_text("text")
    assert next(read_documents(str(tmp_path / "a[1].txt"))).name == "a[1].txt"


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two", "n": 1}', encoding="utf-8")
    assert list(read_documents(str(path))) == [
        Document("a.jsonl:1", "one"),
        Document("a.jsonl:4", "two"),
    ]


@pytest.mark.parametrize("ending", ["json", "jsonl", "JSON"])
@pytest.mark.parametrize(
    "content",
    [
        '{"text": "one", "n": 1}\n\n{"text": "two"}\n',
        '[{"text": "one"}, {"n": 1, "text": "two"}]',
        '\ufeff [\n{"text": "one"},\n{"text": "two"}\n]\n',
    ],
)
def test_rows_of_json_are_read_whatever_their_form(tmp_path, ending, content):
    path = tmp_path / f"a.{ending}"
    path.write_text(content, encoding="utf-8")
    assert [each.text for each in read_documents(str(path))] == ["one", "two"]
    assert [each.text for each in read_documents(str(tmp_path))] == ["one", "two"]


def test_a_json_file_of_one_value_is_text_and_one_row_is_a_row(tmp_path):
    path = tmp_path / "a.json"
    for text in ('{\n  "name": "x"\n}\n', '{"name": "x"}', "[1, 2]", '{"name": \n"x"}\n{', "{"):
        path.write_text(text)
        assert list(read_documents(str(path))) == [Document("a.json", text)]
    path.write_text('{"text": "x"}\n')
    assert list(read_documents(str(path))) == [Document("a.json:1", "x")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"body": "x"}]', "row 0: no field 'text' (fields: 'body')"),
        ('[{"text": "x"}, 3]', "row 1: a JSON int, not an object"),
        ('[{"text": "x"}, {"te', "not JSON"),
        ('[{"text": "\\ud800"}]', "row 0: field 'text' has half a surrogate pair"),
        ('{"body": "x"}\n{"body": "y"}\n', "line 1: no field 'text'"),
        ('[{"text": ' + "[" * 100_000, "too large or too deep"),
    ],
)
def test_a_bad_row_of_a_json_file_is_named(tmp_path, content, words):
    (tmp_path / "a.json").write_text(content)
    assert words in failure(str(tmp_path / "a.json"))


def test_parquet_is_read_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "ROWS_AT_A_TIME", 7)
    texts = [f"row {row}" for row in range(30)]
    texts[3], texts[4] = None, " "
    path = tmp_path / "a.parquet"
    polars.DataFrame({"body": texts, "n": range(30)}).write_parquet(path, row_group_size=11)
    documents = list(read_documents(str(path), text_field="body"))
    assert [d.text for d in documents] == [text for text in texts if text and text.strip()]
    assert documents[3].name == "a.parquet:5"


def test_the_standard_library():
    documents = []
    for document in read_documents("python-stdlib"):
        documents.append(document)
        if len(documents) == 150:
            break
    names = [d.name for d in documents]
    assert names == sorted(names)
    assert "abc.py" in names
    assert all(name.endswith(".py") for name in names)
    assert all(d.text.strip() and "\r" not in d.text for d in documents)


def test_the_standard_library_leaves_out_tests_and_what_others_installed():
    from wakeful.data.sources import stdlib_files

    names = [name for name, _ in stdlib_files()]
    assert {"os.py", "json/decoder.py", "unittest/case.py"} <= set(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__", "_bundled"}
    assert not any("_sysconfigdata" in name or name.startswith("config-") for name in names)


def test_python_files_are_read_in_their_declared_encoding(tmp_path):
    from wakeful.data.sources import read_python

    path = tmp_path / "a.py"
    path.write_bytes("# coding: latin-1\r\nx = 'é'\r\n".encode("latin-1"))
    assert read_python(path) == "# coding: latin-1\nx = 'é'\n"
    path.write_bytes(b"x = '\xff'\n")
    assert read_python(path) is None
    path.write_bytes(b"# coding: no-such-thing\n")
    assert read_python(path) is None
    with pytest.raises(WakefulError, match=r"cannot read .*check the path and its permissions"):
        read_python(tmp_path / "gone.py")


def test_what_is_not_there(tmp_path):
    assert "no such file" in failure(str(tmp_path / "nothing.txt"))
    assert "no file matches" in failure(str(tmp_path / "*.txt"))
    assert "no text files" in failure(str(tmp_path))
    assert "no source" in failure([])
    assert "no source" in failure("")
    assert "neither a file nor a folder" in failure("/dev/null")
    assert "File name too long" in failure("x" * 10_000)
    assert "no such file or folder: ~nobody/texts" in failure("~nobody/texts")
    for task in ("backcopy", "backcopy(triggers=2)", "backcopy(text='*.txt')"):
        assert f"{task} is a task, whose tokens are drawn, and text is needed" in failure(task)


def test_empty_text(tmp_path):
    (tmp_path / "a.txt").write_text(" \n\n")
    assert "holds no text" in failure(str(tmp_path / "a.txt"))


def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    message = failure(str(tmp_path / "a.txt"))
    assert "a.txt" in message
    assert "byte 3" in message
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    assert "byte 24" in failure(str(tmp_path / "a.jsonl"))


WESTERN = "Zoë’s café costs 3 € and is open from nine to five"


def followed(message):
    """Run the command that a message names."""
    command = re.search(r"(?<=\()iconv .*(?=\) or leave it out)", message)[0]
    subprocess.run(command, shell=True, check=True)


@pytest.mark.parametrize("name", ["it's a text.txt", "rows.jsonl"])
@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32LE", "CP1252"])
def test_text_in_another_encoding_is_read_after_the_command_that_is_named(tmp_path, name, encoding):
    content = (
        json.dumps({"text": WESTERN}, ensure_ascii=False) + "\n" if "json" in name else WESTERN
    )
    (tmp_path / name).write_bytes(content.encode(encoding))
    message = failure(str(tmp_path))
    assert "not UTF-8 text" in message
    followed(message.replace("ENCODING", encoding))
    assert [each.text for each in read_documents(str(tmp_path))] == [WESTERN]


def test_a_packed_file_is_no_text(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "hello"}'))
    assert "not UTF-8 text at byte 1: unpack it" in failure(str(path))


def test_odd_letters_are_text(tmp_path):
    text = "a form feed \f, a zero \0, an escape \x1b and \uffff\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert next(read_documents(str(tmp_path))).text == text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": ', "not JSON"),
        ("[1, 2]", "not an object"),
        ('"text"', "not an object"),
        ('{"body": "x"}', "no field 'text' (fields: 'body')"),
        ('{"text": 3}', "holds int"),
        ('{"text": "\\ud800"}', "surrogate"),
        ("[" * 100_000, "not JSON"),
        ('{"text": ' + "9" * 10_000 + "}", "not JSON"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    message = failure(str(path))
    assert "line 2" in message
    assert words in message
    assert len(message) < 500


def test_a_null_is_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": null}\n{"text": "more"}\n')
    assert [each.text for each in read_documents(str(path)) if each.text] == ["good", "more"]


def test_tokens_are_never_read_as_text(tmp_path):
    text, folder = tmp_path / "texts", tmp_path / "prepared"
    text.mkdir()
    (text / "a.txt").write_text("apples and pears " * 100)
    (text / "b.txt").write_text("plums and cherries " * 100)
    prepare(str(text), folder, vocab_size=270, validation_fraction=0.5, keep_overlap=True)
    assert "holds tokens that wakeful prepare wrote" in failure(str(folder))
    folder.rename(text / "prepared")
    assert [each.name for each in read_documents(str(text))] == ["a.txt", "b.txt"]


def test_bad_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nothing of the kind")
    message = failure(str(path))
    assert message.startswith(f"cannot read {path}: Parquet magic bytes not found in footer")
    path.write_bytes(b"")
    assert "a.parquet: Parquet file size is 0 bytes" in failure(str(path))
    polars.DataFrame({"body": ["x"], "text": [1]}).write_parquet(path)
    assert "row 0: field 'text' holds int, not text" in failure(str(path))
    message = failure(str(path), text_field="words")
    assert "a.parquet: No match for FieldRef.Name(words) in body" in message
    assert "name its column of text ('words' now)" in message


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("x")

    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    assert "Permission denied" in failure(str(path))


@pytest.mark.parametrize(
    ("source", "parsed"),
    [
        ("hf:a/b", ("a/b", None, "train")),
        ("hf:a/b:config", ("a/b", "config", "train")),
        ("hf:a/b:validation", ("a/b", None, "validation")),
        ("hf:a/b:config:test", ("a/b", "config", "test")),
        ("hf:a/b::odd", ("a/b", None, "odd")),
        ("hf:a/b::", ("a/b", None, "train")),
    ],
)
def test_names_on_the_hub(source, parsed):
    assert parse_hub(source) == parsed


@pytest.mark.parametrize("source", ["hf:", "hf:a:b:c:d"])
def test_names_not_on_the_hub(source):
    assert "write hf:" in failure(source)


@pytest.fixture
def fake_datasets(monkeypatch):
    module = types.ModuleType("datasets")
    module.calls = []

    def load_dataset(name, config, *, split, streaming, cache_dir):
        assert Path(cache_dir).is_dir()
        module.calls.append((name, config, split, streaming))
        if module.error is not None:
            raise module.error
        return iter(module.rows)

    module.error, module.rows = None, []
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_a_dataset_streams(fake_datasets):
    fake_datasets.rows = [{"body": "one"}, {"body": ""}, {"body": None}, {"body": "two"}]
    documents = list(read_documents("hf:a/b:c:test", text_field="body"))
    assert documents == [Document("a/b:c:test:0", "one"), Document("a/b:c:test:3", "two")]
    assert fake_datasets.calls == [("a/b", "c", "test", True)]


def test_a_dataset_that_cannot_be_read(fake_datasets):
    fake_datasets.rows = [{"body": "one"}]
    assert "row 0: no field 'text' (fields: 'body')" in failure("hf:a/b")
    fake_datasets.rows = [{"text": 1}]
    assert "row 0" in failure("hf:a/b")
    fake_datasets.error = ConnectionError("the hub is not there\nat all")
    assert "cannot read hf:a/b: the hub is not there; check its name" in failure("hf:a/b")


@pytest.mark.slow
def test_text_is_read_without_datasets(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text('{"text": "more"}')
    program = (
        "import sys; from wakeful.data import read_documents; "
        f"print(len(list(read_documents([{str(tmp_path)!r}, 'python-stdlib:email/*']))) > 2, "
        "'datasets' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]


DOCUMENTS = st.lists(st.builds(Document, st.text(), st.text(min_size=1)), max_size=5)


@settings(deadline=None)
@given(DOCUMENTS, DOCUMENTS)
def test_the_hash_tells_corpora_apart(tmp_path_factory, ours, theirs):
    def corpus(documents):
        spool = Spool(tmp_path_factory.mktemp("corpus") / "spool")
        spool.fill(documents)
        return spool.corpus_sha256

    assert (corpus(ours) == corpus(theirs)) == (ours == theirs)


def test_the_manifest_follows_the_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = source_manifest(str(path))
    assert source_manifest(str(path)) == first
    path.write_text("other")
    assert source_manifest(str(path)) != first
    assert source_manifest("hf:a/b") != source_manifest("hf:a/c")


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def lines(text: str) -> list[int]:
    """A tokenizer whose tokens are as long as lines are."""
    return [len(line) for line in text.split("\n")]


def test_no_more_is_read_than_the_tokens_need(tmp_path: Path) -> None:
    for number, letter in enumerate("abc"):
        (tmp_path / f"{number}.txt").write_text(letter * 640)
    folder = str(tmp_path)
    whole = "\n".join(letter * 640 for letter in "abc")
    assert read_beginning(folder, 0).text == whole
    assert read_beginning(folder, 10).text == "a" * 640
    assert read_beginning(folder, 11).text == whole[:1281]
    assert read_beginning(folder, 5).tokens(letters, 5) == [ord("a")] * 5
    assert read_beginning(folder, 5).text_of(letters, 5) == "a" * 320
    assert read_beginning(folder, 9).text_of(letters, 0) == whole


def test_documents_after_enough_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("a" * 640)
    (tmp_path / "1.txt").write_bytes(b"\xff\xfe\xff")
    assert read_beginning(str(tmp_path), 10).tokens(letters, 10) == [ord("a")] * 10
    with pytest.raises(WakefulError, match=r"1\.txt"):
        read_beginning(str(tmp_path), 11)


def test_tokens_of_any_length_are_read_on_for(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("x" * (500 + number))
    beginning = read_beginning(str(tmp_path), 6)
    assert len(beginning.text) < 6 * 500
    assert beginning.tokens(lines, 6) == [500, 501, 502, 503, 504, 505]
    # The next is there too, or the sixth could have been cut short.
    assert len(beginning.text) < sum(range(500, 509))
    assert beginning.tokens(lines, 100) == list(range(500, 509))
    assert TextBeginning("a\n" * 99).tokens(lines, 3) == [1, 1, 1]


@pytest.mark.parametrize(("ending", "comma"), [(".csv", ","), (".tsv", "\t")])
def test_a_table_in_text_is_read_by_a_column(tmp_path: Path, ending: str, comma: str) -> None:
    path = tmp_path / f"table{ending}"
    rows = [("id", "text"), ("1", '"a ""b""\nc"'), ("2", "long " * 40_000), ("3", '""')]
    path.write_text("".join(comma.join(row) + "\n" for row in rows), "utf-8")
    found = list(read_documents(str(path)))
    assert [(each.name, each.text) for each in found] == [
        (f"table{ending}:0", 'a "b"\nc'), (f"table{ending}:1", "long " * 40_000),
    ]  # fmt: skip
    assert [each.text for each in read_documents(str(path), text_field="id")] == ["1", "2", "3"]
    with pytest.raises(WakefulError, match=r"columns expected but not found: .'body'.*\.txt"):
        list(read_documents(str(path), text_field="body"))
    path.write_bytes(b"id" + comma.encode() + b"text\n1" + comma.encode() + b"\xff\n")
    with pytest.raises(WakefulError, match=rf"table\{ending}: 'utf-8' codec can't decode"):
        list(read_documents(str(path)))


def test_every_value_of_a_table_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a[1]*.csv"
    rows = ["text,id", "NA,1", "123,2", "null,3", "2020-01-01,4", ",5", '"a\r\nb",6']
    path.write_text("\ufeff" + "\n".join(rows), "utf-8", newline="")
    texts = ["NA", "123", "null", "2020-01-01", "a\r\nb"]
    assert [each.text for each in read_documents(str(path))] == texts
    path.write_text("text,id\na,1,9\nb,2\n")  # more fields than names: none is an index
    assert [each.text for each in read_documents(str(path))] == ["a", "b"]


@pytest.mark.slow
def test_a_table_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.csv").write_text("text\na\n")
    for variable in ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "TMPDIR"):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    program = (
        "from wakeful.data import read_documents; "
        f"print(next(read_documents({str(tmp_path / 'a.csv')!r})).text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["a"], done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".csv"]
