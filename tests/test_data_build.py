"""Does text become exactly its tokens, does a killed build leave nothing that loads, and does a bad row say where it stands?"""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from moetrain.data.build import BuildOptions, build, split_of
from moetrain.data.cli import add_commands
from moetrain.data.corpus import corpus, fresh_paragraphs
from moetrain.data.inputs import Format, find_inputs, read_documents
from moetrain.data.loader import DataConfig, Loader, Source
from moetrain.data.shards import ShardSet, verify
from moetrain.data.statistics import count_ids, read_statistics, unigram_entropy
from moetrain.data.tokenizer import END_OF_TEXT, TextTokenizer, load_tokenizer, tokenizer_of, train_tokenizer
from moetrain.data.writer import building

ROOT = Path(__file__).resolve().parent.parent
WORDS = itertools.product(("quick", "slow", "old", "new"), ("fox", "hen", "ox"), ("hill", "sea", "town"))
TEXTS = [
    f"Chapter {i}.\n\nThe {a} {b} of the {c} — {'ünïcödé ☃ 漢字 ' * (i % 3)}and number {i * i}. " * 5 for i, (a, b, c) in enumerate(WORDS)
]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(TEXTS, 400)


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "ïnput ☃" / "täxts.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def texts_of(folder: Path) -> list[str]:
    shards, tokenizer = ShardSet(folder), load_tokenizer(folder.parent)
    return [tokenizer.decode(shards.document(i)) for i in range(shards.num_documents)]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def read(*paths, **form):
    return [document.text for document in read_documents(find_inputs([str(p) for p in paths]), Format(**form))]


# ---- tokenizer ----------------------------------------------------------------------------------------------------------------


@given(st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back(tokenizer, text):
    """Byte-level: nothing is unknown, and every document ends with the end-of-text id, the only one it holds."""
    ids = tokenizer.encode([text])[0]
    assert ids[-1] == tokenizer.eos_id and not (ids[:-1] == tokenizer.eos_id).any() and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text


def test_a_text_cannot_forge_the_end_of_a_document(tokenizer):
    ids = tokenizer.encode([f"a{END_OF_TEXT}b"])[0]
    assert (ids == tokenizer.eos_id).sum() == 1 and tokenizer.decode(ids) == f"a{END_OF_TEXT}b"


def test_training_gives_the_same_bytes_in_another_process(tokenizer):
    script = (
        "import json, sys; from moetrain.data.tokenizer import train_tokenizer; "
        "print(train_tokenizer(json.load(sys.stdin), 400).sha256, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], input=json.dumps(TEXTS), capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == [tokenizer.sha256, "False"]


def test_a_tokenizer_loads_by_file_or_folder_and_says_what_it_lacks(tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.json)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert (loaded.sha256, loaded.eos_id, loaded.pad_id, loaded.vocab_size) == (tokenizer.sha256, 0, 1, tokenizer.vocab_size)
    with pytest.raises(ValueError, match=r"no token '<\|endoftex\|>'; did you mean <\|endoftext\|>\?"):
        load_tokenizer(tmp_path, eos="<|endoftex|>")
    with pytest.raises(ValueError, match="no end-of-text token by a known name; pass --eos"):
        tokenizer_of(tokenizer.json.replace(b"<|endoftext|>", b"<|fin|>"))
    with pytest.raises(ValueError, match="no-such: No such file"):
        load_tokenizer(tmp_path / "no-such")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="at least 258 ids"):
        train_tokenizer(TEXTS, 257)


# ---- inputs -------------------------------------------------------------------------------------------------------------------


def test_every_kind_of_file_gives_its_documents(tmp_path, jsonl):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"body": "three"}\n\n{"body": "four"}\n')
    pq.write_table(pa.table({"n": [1, 2], "body": ["five", "sïx"]}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"body": pa.array(["seven", "seven"]).dictionary_encode()}), tmp_path / "d.parquet")
    assert read(tmp_path / "a.txt") == ["one\r\ntwo\n"] and read(tmp_path / "a.txt", unit="line") == ["one", "two"]
    assert read(tmp_path / "*.parquet", tmp_path / "b.jsonl.gz", field="body") == ["five", "sïx", "seven", "seven", "three", "four"]
    assert read(jsonl) == TEXTS == read(jsonl.parent) == read(tmp_path / "**" / "t*.jsonl")
    assert find_inputs([str(jsonl), str(jsonl.parent), str(tmp_path / "*" / "*.jsonl")]) == [jsonl]


def bad_parquet(kind):
    def write(path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        column = {"null": ["a", None], "number": [1, 2]}.get(kind, ["a", "b"])
        pq.write_table(pa.table({"txt" if kind == "missing" else "text": column}), path)

    return write


def lines(*rows):
    return lambda path: path.write_bytes(b"\n".join(rows))


BAD = {
    "not JSON": ("x.jsonl", lines(b'{"text": "a"}', b'{"text": '), r"x.jsonl:2: not JSON: Expecting value"),
    "no object": ("x.jsonl", lines(b'{"text": "a"}', b"", b"[1]"), r"x.jsonl:3: a list, not an object"),
    "no field": ("x.jsonl", lines(b'{"txt": "a"}'), r"x.jsonl:1: no field 'text'; did you mean 'txt'\? \(there: txt\); pass --field"),
    "a null": ("x.jsonl", lines(b'{"text": "a"}', b'{"text": null}'), r"x.jsonl:2: field 'text': is null, not text"),
    "a number": ("x.jsonl", lines(b'{"text": 3}'), r"x.jsonl:1: field 'text': is a number, not text"),
    "half a pair": ("x.jsonl", lines(b'{"text": "ab\\ud800"}'), r"x.jsonl:1: character 2 is half of a surrogate pair"),
    "nested too deep": ("x.jsonl", lines(b"[" * 100_000), r"x.jsonl:1: not JSON"),
    "not UTF-8": ("x.jsonl", lines(b'{"text": "a"}', b'{"text": "\xff"}'), r"x.jsonl:2: byte 10 of the line is not UTF-8 \(0xff\)"),
    "text not UTF-8": ("x.txt", lines(b"fine", b"\xe9t\xe9"), r"x.txt:2: byte 0 of the line is not UTF-8"),
    "no gzip": ("x.txt.gz", lines(b"plain"), r"x.txt.gz: Not a gzipped file"),
    "no Parquet": ("x.parquet", lines(b"plain"), r"x.parquet: not a readable Parquet file"),
    "no column": ("x.parquet", bad_parquet("missing"), r"x.parquet: no column 'text'; did you mean 'txt'\?"),
    "column of numbers": ("x.parquet", bad_parquet("number"), r"x.parquet: column 'text' holds int64, not text"),
    "null row": ("x.parquet", bad_parquet("null"), r"x.parquet: row 2: is null, not text"),
    "unknown kind": ("x.csv", lines(b"a,b"), r"x.csv: unknown kind of file; legal: .txt, .md, .jsonl"),
    "empty": ("x.jsonl", lines(b""), r"no training document: the input holds no text"),
    "blank": ("x.txt", lines(b" ", b"\t"), r"no training document: the input holds no text"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_input_is_refused_in_one_line_and_builds_nothing(tmp_path, tokenizer, case):
    name, write, words = BAD[case]
    write(tmp_path / name)
    with pytest.raises(ValueError, match=words) as error:
        build([str(tmp_path / name)], Format(), BuildOptions(tmp_path / "out", tokenizer))
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_inputs_that_are_not_there_are_named(tmp_path, jsonl):
    (tmp_path / "e").mkdir()
    cases = {jsonl.with_name("täxt.jsonl"): "did you mean .*täxts.jsonl", tmp_path / "*.txt": "no such file", tmp_path / "e": "no file of"}
    for pattern, words in cases.items():
        with pytest.raises(ValueError, match=words):
            find_inputs([str(pattern)])


# ---- build --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_a_build_holds_every_document_once_in_order(tmp_path, jsonl, tokenizer, workers):
    report = build([str(jsonl)], Format(), BuildOptions(tmp_path / "out", tokenizer, shard_tokens=300, validation=0.2, workers=workers))
    for split in ("train", "validation"):
        assert texts_of(tmp_path / "out" / split) == [text for text in TEXTS if split_of(text, 0.2) == split]
        shards = verify(tmp_path / "out" / split)
        assert len(shards.index.shards) > 1 and shards.index.sources[0].bytes == jsonl.stat().st_size
        assert report[split]["text_bytes"] == sum(len(text.encode()) for text in TEXTS if split_of(text, 0.2) == split)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["statistics.json", "tokenizer.json", "train", "validation"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", jsonl.parent.name]
    assert read_statistics(tmp_path / "out") == report


def test_the_share_of_validation_is_a_share():
    """Binomial: 3,000 texts at 0.1 within five standard deviations; the same text always the same way."""
    sides = [split_of(f"text {i}", 0.1) for i in range(3000)]
    assert abs(sides.count("validation") - 300) < 5 * np.sqrt(270) and {split_of("x", 0.0) for _ in range(3)} == {"train"}


def test_a_split_without_documents_is_refused_and_leaves_nothing_to_go_on_with(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("One document.")
    for share, words in ((0.999, "all went to validation"), (1e-9, "fell into the validation share of 1e-09")):
        with pytest.raises(ValueError, match=words):
            build([str(tmp_path / "a.txt")], Format(), BuildOptions(tmp_path / "out", tokenizer, validation=share))
    build([str(tmp_path / "a.txt")], Format(), BuildOptions(tmp_path / "out", tokenizer, validation=0))
    assert texts_of(tmp_path / "out" / "train") == ["One document."]


def test_the_tokenizer_is_trained_on_training_documents_alone(tmp_path, jsonl):
    build([str(jsonl)], Format(), BuildOptions(tmp_path / "out", 300, validation=0.3))
    expected = train_tokenizer([text for text in TEXTS if split_of(text, 0.3) == "train"], 300)
    assert ShardSet(tmp_path / "out" / "train").index.tokenizer_sha256 == expected.sha256 == load_tokenizer(tmp_path / "out").sha256


KILLED = """
import os, signal, sys
from pathlib import Path
from moetrain.data.build import BuildOptions, build
from moetrain.data.inputs import Format
out, source, parts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def progress(stage, done, total, note):
    if stage == "tokenise" and len(list(Path(f"{out}.building/parts").glob("*.json"))) >= parts:
        os.kill(os.getpid(), signal.SIGKILL)
build([source], Format(), BuildOptions(out, 300, shard_tokens=500, validation=0.2), progress)
"""


def test_a_killed_build_leaves_nothing_that_loads_and_goes_on_to_the_same_bytes(tmp_path, jsonl):
    options = {"shard_tokens": 500, "validation": 0.2}
    build([str(jsonl)], Format(), BuildOptions(tmp_path / "whole", 300, **options))
    out = tmp_path / "out"
    for parts in (0, 1, 3):
        run = subprocess.run([sys.executable, "-c", KILLED, str(out), str(jsonl), str(parts)], cwd=ROOT, capture_output=True)
        assert run.returncode == -9, run.stderr.decode()
        assert not out.exists() and len(list((building(out) / "parts").glob("*.json"))) == parts
        for folder in (building(out), building(out) / "train", building(out) / "validation"):
            with pytest.raises(ValueError, match="no index.json"):
                ShardSet(folder)
    seen = []
    build([str(jsonl)], Format(), BuildOptions(out, 300, **options), lambda stage, *_: seen.append(stage))
    assert "train tokenizer" not in seen and seen.count("tokenise") < len(TEXTS)
    assert files_of(out) == files_of(tmp_path / "whole") and not building(out).exists()


def test_an_unfinished_build_of_something_else_is_not_gone_on_with(tmp_path, jsonl, tokenizer):
    def stop(stage, done, total, note):
        if stage == "tokenise":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([str(jsonl)], Format(), BuildOptions(tmp_path / "out", tokenizer, validation=0), stop)
    with pytest.raises(ValueError, match="unfinished build with another tokenizer, another shard tokens; remove it or pass --restart"):
        build([str(jsonl)], Format(), BuildOptions(tmp_path / "out", 300, shard_tokens=5, validation=0))
    build([str(jsonl)], Format(), BuildOptions(tmp_path / "out", 300, shard_tokens=5, validation=0, restart=True))
    verify(tmp_path / "out" / "train")


def test_two_builds_of_one_folder_do_not_mix(tmp_path, jsonl, tokenizer):
    options = BuildOptions(tmp_path / "out", tokenizer, validation=0)
    refused = []

    def second(stage, done, total, note):
        if stage == "tokenise" and not refused:
            with pytest.raises(ValueError, match="another build is writing here") as error:
                build([str(jsonl)], Format(), options)
            refused.append(error)

    build([str(jsonl)], Format(), options, second)
    assert refused
    with pytest.raises(ValueError, match="exists and isn't empty"):
        build([str(jsonl)], Format(), options)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    (tmp_path / "mine").rename(building(tmp_path / "next"))
    with pytest.raises(ValueError, match="holds thesis.tex, which no build made"):
        build([str(jsonl)], Format(), BuildOptions(tmp_path / "next", tokenizer, restart=True))
    building(tmp_path / "next").rename(tmp_path / "mine")
    with pytest.raises(ValueError, match="something else than training data"):
        build([str(jsonl)], Format(), BuildOptions(tmp_path / "mine", tokenizer, overwrite=True))
    build([str(jsonl)], Format(), BuildOptions(tmp_path / "out", tokenizer, validation=0, overwrite=True))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        build([str(jsonl)], Format(), BuildOptions(tmp_path / "file", tokenizer))


# ---- statistics ---------------------------------------------------------------------------------------------------------------


def test_the_unigram_bar_is_the_entropy_that_numpy_says(tmp_path, jsonl, tokenizer):
    report = build([str(jsonl)], Format(), BuildOptions(tmp_path / "out", tokenizer, validation=0.2, shard_tokens=300))
    train, held = (np.concatenate([tokenizer.encode([t])[0] for t in TEXTS if split_of(t, 0.2) == s]) for s in ("train", "validation"))
    q = np.array([(train == i).sum() + 1 for i in range(tokenizer.vocab_size)]) / (train.size + tokenizer.vocab_size)
    assert report["validation"]["unigram_nats"] == pytest.approx(-np.log(q[held]).mean(), rel=1e-12)
    assert report["uniform_nats"] == pytest.approx(np.log(tokenizer.vocab_size))
    assert np.array_equal(count_ids(ShardSet(tmp_path / "out" / "train")), np.bincount(train, minlength=tokenizer.vocab_size))


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=20).filter(any))
def test_a_set_is_predicted_best_by_its_own_frequencies(counts):
    """Gibbs: of all laws the own frequencies cost least; add-one smoothing costs a little more, and tends to it with more data."""
    counts = np.array(counts)
    p = counts[counts > 0] / counts.sum()
    entropy = -(p * np.log(p)).sum()
    assert unigram_entropy(counts, counts) >= entropy - 1e-12
    assert unigram_entropy(counts * 10**6, counts) == pytest.approx(entropy, abs=1e-3)


# ---- the small corpus ---------------------------------------------------------------------------------------------------------


def test_a_paragraph_is_kept_where_it_is_first_met():
    seen: set[bytes] = set()
    assert fresh_paragraphs("One.\n\nTwo.\n\none.", seen) == "One.\n\nTwo." and fresh_paragraphs("TWO. \n\n\nThree.", seen) == "Three."


def test_the_corpus_is_real_text_made_twice_the_same_and_feeds_a_loader(tmp_path):
    for name in ("a", "b"):
        report = corpus(tmp_path / name, size_mb=0.6, vocab_size=600)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    bar = report["validation"]["unigram_nats"]
    assert 0.5e6 < report["train"]["text_bytes"] + report["validation"]["text_bytes"] <= 0.6e6
    assert 3 < bar < report["uniform_nats"] == pytest.approx(np.log(600))
    texts = texts_of(tmp_path / "a" / "train") + texts_of(tmp_path / "a" / "validation")
    assert len(set(texts)) == len(texts) and any("def " in text for text in texts)
    assert sum(" the " in text for text in texts) > len(texts) / 2
    with Loader(DataConfig([Source(str(tmp_path / "a" / "train"))]), 128, 8, validation=str(tmp_path / "a" / "validation")) as loader:
        assert loader.batch(0).tokens.shape == (8, 128) and loader.num_validation() > 10
    with pytest.raises(ValueError, match="isn't empty"):
        corpus(tmp_path / "a", size_mb=0.4)
    with pytest.raises(ValueError, match="0.05 to 100"):
        corpus(tmp_path / "c", size_mb=0)


# ---- commands -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def command():
    app = typer.Typer()
    app.callback()(lambda: None)
    add_commands(app)
    return lambda *args: CliRunner().invoke(app, ["data", *map(str, args)])


def test_build_verify_and_info_as_commands(command, tmp_path, jsonl):
    out = tmp_path / "out"
    built = command("build", out, jsonl, "--train-tokenizer", 300, "--validation", 0.2, "--workers", 2)
    assert built.exit_code == 0 and "the loss to beat" in built.stdout, built.output
    assert command("verify", out).stdout.count("whole:") == 2 and command("verify", out / "train").stdout.count("whole:") == 1
    told = command("info", out, "--document", 0)
    assert f"tokens, {len(texts_of(out / 'train'))} documents" in told.stdout and "Chapter" in told.stdout
    assert set(json.loads(command("info", out, "--json").stdout)) == {str(out / "train"), str(out / "validation")}
    (out / "train" / "00000.bin").write_bytes(b"")
    assert command("verify", out).exit_code == 2 and "truncated" in command("verify", out).stderr


@pytest.mark.parametrize(
    "options,words",
    [
        ((), "either --tokenizer PATH or --train-tokenizer"),
        (("--train-tokenizer", 300, "--tokenizer", "x"), "either --tokenizer"),
        (("--tokenizer", "nowhere.json"), "nowhere.json: No such file"),
        (("--train-tokenizer", 5), "at least 258"),
        (("--train-tokenizer", 300, "--text-unit", "page"), "legal: file, line"),
        (("--train-tokenizer", 300, "--validation", 1.5), "validation share is 1.5"),
        (("--train-tokenizer", 300, "--field", "txt"), "did you mean 'text'"),
    ],
)
def test_a_bad_command_ends_with_2_and_one_line(command, tmp_path, jsonl, options, words):
    ended = command("build", tmp_path / "out", jsonl, *options)
    assert ended.exit_code == 2 and words in ended.stderr and len(ended.stderr.strip().splitlines()) == 1, ended.output
    assert not (tmp_path / "out").exists()


def test_a_corpus_as_a_command(command, tmp_path):
    made = command("corpus", tmp_path / "tiny", "--size", 0.1, "--vocab", 300, "--validation", 0.3)
    assert made.exit_code == 0 and "the loss to beat" in made.stdout, made.output
    assert ShardSet(tmp_path / "tiny" / "train").vocab_size == 300
