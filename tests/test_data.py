"""Do all layouts read one and the same stream, is the stream the documents, and does every damage say so in one line?"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetrain.data.batch import Batch
from moetrain.data.loader import DataConfig, Loader, Source, open_loader
from moetrain.data.order import MAX_PERIOD, Order, mix_table, period_counts, permute
from moetrain.data.packing import IGNORED, num_rows, packed_row
from moetrain.data.shards import INDEX, ShardSet, dtype_of, verify
from moetrain.data.synthetic import SyntheticLoader
from moetrain.data.writer import write_shards

VOCAB, EOS = 512, 0
S = 8


def documents(num=40, seed=0, longest=30):
    """Documents of 0 to ``longest`` ids and an eos; some hold no id at all, not even that."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, longest, num)
    return [np.append(rng.integers(1, VOCAB, n), EOS) if n % 7 else np.empty(0, dtype=np.int64) for n in sizes]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sources and a validation set; several shards each."""
    root = tmp_path_factory.mktemp("shärds ☃")
    for place, name in enumerate(("a", "b", "validation")):
        write_shards(root / name, documents(40 - 5 * place, seed=place), vocab_size=VOCAB, eos_id=EOS, shard_tokens=100)
    return root


def config(folders, *, mask=False):
    return DataConfig([Source(str(folders / "a"), 0.7), Source(str(folders / "b"), 0.3)], mask_documents=mask)


def loader(folders, gbs=12, rank=0, size=1, micro=1, seed=0, seq_len=S, **options):
    options = {"prefetch": 0, "validation": str(folders / "validation")} | options
    return Loader(config(folders), seq_len, gbs, rank, size, micro, seed, **options)


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("tokens", "labels", "documents"))


# ---- the order ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 1025, 2**14 + 1])
def test_a_permutation_is_one(size):
    assert np.array_equal(np.sort(permute(np.arange(size), size, 3)), np.arange(size))


@given(st.integers(1, 10**12), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=60, deadline=None)
def test_a_permutation_keeps_apart_what_it_gets(size, key, data):
    """At sizes nobody can list: images lie in range and are as many as the positions, and asking for some alone gives the same."""
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True)))
    images = permute(positions, size, key)
    assert images.min() >= 0 and images.max() < size and len(set(images.tolist())) == len(positions)
    assert permute(positions[-1:], size, key)[0] == images[-1]


def test_permutations_of_two_keys_are_unrelated():
    """Fixed points of a random permutation: one on average. Neighbours: 2/n of them stay together."""
    size, keys = 1000, 200
    images = [permute(np.arange(size), size, key) for key in range(keys)]
    fixed = np.mean([(image == np.arange(size)).sum() for image in images])
    neighbours = np.mean([(np.abs(np.diff(image)) == 1).sum() for image in images])
    assert abs(fixed - 1) < 5 / np.sqrt(keys) and abs(neighbours - 2) < 5 * np.sqrt(2 / keys)


def test_every_position_is_equally_likely():
    """Chi-square of where position 0 goes, over 5,000 keys: 9 degrees of freedom, 1 in 10,000 above 33.7."""
    hits = np.bincount([permute(np.array([0]), 10, key)[0] for key in range(5000)], minlength=10)
    assert ((hits - 500) ** 2 / 500).sum() < 33.7


@given(st.lists(st.integers(1, 400), min_size=1, max_size=7))
@settings(max_examples=80, deadline=None)
def test_every_prefix_of_the_mix_is_within_one_sample_of_its_weights(weights):
    counts = period_counts(weights)
    table, share = mix_table(counts), np.array(counts) / sum(counts)
    for source in range(len(counts)):
        given_out = np.cumsum(table == source)
        bound = 1 - 1 / (2 * len(counts) - 2) if len(counts) > 1 else 0
        assert np.abs(given_out - share[source] * np.arange(1, len(table) + 1)).max() <= bound + 1e-9
    assert np.allclose(share, np.array(weights) / sum(weights))


def test_weights_are_taken_as_written_and_rounded_only_when_they_must():
    assert period_counts((0.7, 0.3)) == (7, 3) and period_counts((2, 2)) == (1, 1) and period_counts((0.1, 0.2, 0.7)) == (1, 2, 7)
    long = (0.123456789, 0.5, 0.376543211)
    counts = period_counts(long)
    assert sum(counts) == MAX_PERIOD and np.abs(np.array(counts) / MAX_PERIOD - long).max() < 1 / MAX_PERIOD
    for bad, word in (((0.0, 1), "source 0 is 0.0"), ((1, float("nan")), "source 1"), ((1, 1e-9), "source 1 is below")):
        with pytest.raises(ValueError, match=word):
            period_counts(bad)


def test_an_epoch_reads_each_sequence_once_and_the_next_in_another_order():
    order = Order((5, 3), (3, 1), seed=4)
    source, epoch, sequence = order.locate(np.arange(80))
    for which, size in enumerate(order.sizes):
        read, turn = sequence[source == which], epoch[source == which]
        assert np.all(np.diff(turn) >= 0)
        for t in range(turn.max()):
            assert sorted(read[turn == t]) == list(range(size))
    first = [tuple(sequence[(source == 0) & (epoch == t)]) for t in range(10)]
    assert len(set(first)) > 5
    one_by_one = [order.locate(np.array([i])) for i in range(80)]
    assert [int(x[2][0]) for x in one_by_one] == sequence.tolist()


def test_a_mix_needs_sources_and_weights():
    with pytest.raises(ValueError, match="one weight a source"):
        Order((1, 2), (1,), 0)
    with pytest.raises(ValueError, match="source 1 holds no sequence"):
        Order((1, 0), (1, 1), 0)


# ---- rows ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_len", [1, 3, 8, 50])
def test_rows_are_the_token_stream(folders, seq_len):
    """Inputs end to end are the stream; labels are the stream one later; document numbers rise where a document starts."""
    shards = ShardSet(folders / "a")
    docs = [d for d in documents() if d.size]
    stream = np.concatenate(docs)
    owner = np.repeat(np.arange(len(docs)), [d.size for d in docs])
    rows = num_rows(shards.num_tokens, seq_len)
    assert shards.num_tokens == stream.size and rows == (stream.size - 1) // seq_len
    for i in range(rows):
        tokens, labels, numbers = packed_row(shards, seq_len, i)
        here = slice(i * seq_len, (i + 1) * seq_len)
        assert np.array_equal(tokens, stream[here]) and np.array_equal(labels, stream[i * seq_len + 1 : (i + 1) * seq_len + 1])
        assert np.array_equal(numbers, owner[here] - owner[here][0]) and numbers.dtype == np.int32


def test_labels_of_another_document_are_dropped_on_demand(folders):
    shards = ShardSet(folders / "a")
    owner = np.repeat(np.arange(40), [d.size for d in documents()])
    for i in range(num_rows(shards.num_tokens, S)):
        kept, dropped = packed_row(shards, S, i)[1], packed_row(shards, S, i, mask_boundary_labels=True)[1]
        other = owner[i * S : (i + 1) * S] != owner[i * S + 1 : (i + 1) * S + 1]
        assert np.array_equal(dropped == IGNORED, other) and np.array_equal(dropped[~other], kept[~other])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 12), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_any_documents_in_any_shards_give_one_stream(tmp_path_factory, sizes, seq_len, shard_tokens):
    if not sum(sizes):
        return
    folder = tmp_path_factory.mktemp("x") / "set"
    stream = np.arange(sum(sizes)) % VOCAB
    docs = np.split(stream, np.cumsum(sizes)[:-1])
    write_shards(folder, docs, vocab_size=VOCAB, shard_tokens=shard_tokens)
    shards = verify(folder)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    assert np.array_equal(shards.tokens(0, shards.num_tokens), stream)
    for i in range(num_rows(len(stream), seq_len)):
        tokens, _, numbers = packed_row(shards, seq_len, i)
        here = owner[i * seq_len : (i + 1) * seq_len]
        assert np.array_equal(tokens, stream[i * seq_len : (i + 1) * seq_len])
        assert np.array_equal(np.diff(numbers) > 0, np.diff(here) > 0) and numbers[0] == 0


def test_documents_come_back_by_number(folders):
    shards = ShardSet(folders / "a")
    # Documents without a token after the last shard's end are the only ones that no shard keeps.
    for number in range(shards.num_documents):
        assert np.array_equal(shards.document(number), documents()[number])
    with pytest.raises(ValueError, match="no document 40"):
        shards.document(40)


def test_big_vocabularies_take_four_bytes(tmp_path):
    assert (dtype_of(65536), dtype_of(65537)) == ("uint16", "uint32")
    write_shards(tmp_path / "s", [np.array([65536, 100_000])], vocab_size=100_352)
    assert (tmp_path / "s" / "00000.bin").read_bytes() == np.array([65536, 100_000], dtype="<u4").tobytes()
    assert ShardSet(tmp_path / "s").tokens(0, 2).tolist() == [65536, 100_000]


# ---- loaders ------------------------------------------------------------------------------------------------------------------


def make(kind, folders, **options):
    if kind == "shards":
        return loader(folders, **options)
    args = {"gbs": 12, "rank": 0, "size": 1, "micro": 1, "seed": 0, "seq_len": S} | options
    more = {"zipf": 1.1} if kind == "zipf" else {}
    return SyntheticLoader(VOCAB, args["seq_len"], args["gbs"], args["rank"], args["size"], args["micro"], args["seed"], prefetch=0, **more)


KINDS = ["shards", "uniform", "zipf"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size,micro", [(1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (6, 1), (12, 1)])
def test_ranks_and_microbatches_make_up_the_global_batch(folders, kind, size, micro):
    whole = make(kind, folders)
    for step in (0, 1, 57):
        ranks = [make(kind, folders, rank=r, size=size, micro=micro) for r in range(size)]
        pieces = [piece for rank in ranks for piece in rank.batch(step).split(rank.part.num_microbatches)]
        assert all(p.num_sequences == micro for p in pieces)
        together = Batch(*(torch.cat([getattr(p, n) for p in pieces]) for n in ("tokens", "labels", "documents")))
        assert same(together, whole.batch(step))


def test_a_step_is_the_order_row_by_row(folders):
    whole = loader(folders, gbs=5)
    sets = [ShardSet(folders / "a"), ShardSet(folders / "b")]
    source, _, sequence = Order(tuple(num_rows(s.num_tokens, S) for s in sets), (0.7, 0.3), 0).locate(np.arange(15, 20))
    rows = [packed_row(sets[s], S, i)[0] for s, i in zip(source, sequence, strict=True)]
    assert np.array_equal(whole.batch(3).tokens.numpy(), np.stack(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_where_it_stopped_on_other_ranks_and_batch_sizes(folders, kind):
    """The samples after a resume are those the first run would have read, in order."""
    first = make(kind, folders, gbs=12)
    for step in range(5):
        first.batch(step)
    state = json.loads(json.dumps(first.state()))
    assert (state["step"], state["sample"]) == (5, 60)
    samples = torch.cat([first.batch(step).tokens for step in range(5, 15)])
    for gbs, size, micro in ((12, 4, 3), (8, 2, 1), (20, 5, 2)):
        ranks = [make(kind, folders, gbs=gbs, rank=r, size=size, micro=micro) for r in range(size)]
        for rank in ranks:
            rank.load_state(state)
        after = torch.cat([rank.batch(step).tokens for step in range(5, 11) for rank in ranks])
        assert torch.equal(after[:48], samples[:48])
        assert ranks[0].state()["sample"] == 60 + 6 * gbs


def test_changed_data_is_refused_by_name(folders):
    state = loader(folders, seed=1).state()
    for options, words in (({"seed": 2}, "seed was 1, is now 2"), ({"seed": 1, "seq_len": 9}, "seq_len was 8, is now 9")):
        with pytest.raises(ValueError, match=words) as error:
            loader(folders, **options).load_state(state)
        assert "\n" not in str(error.value)
    other = Loader(DataConfig([Source(str(folders / "b"), 0.7), Source(str(folders / "a"), 0.2)]), S, 12, seed=1, prefetch=0)
    with pytest.raises(ValueError, match=r"weights was \[0.7, 0.3\], is now \[0.7, 0.2\]; sources was"):
        other.load_state(state)
    with pytest.raises(ValueError, match="kind was shards, is now synthetic"):
        make("uniform", folders, seed=1).load_state(state)
    with pytest.raises(ValueError, match="before the first sample"):
        loader(folders).batch(-1)


def test_made_ahead_or_not_the_batches_are_the_same(folders):
    with loader(folders, prefetch=3) as ahead:
        plain = loader(folders)
        for step in (0, 1, 2, 9, 10, 4, 4):
            assert same(ahead.batch(step), plain.batch(step))
        assert 0 <= ahead.data_wait_s <= ahead.data_wait_total_s


def test_an_error_of_the_thread_reaches_the_step_that_asked(folders, monkeypatch):
    with loader(folders, prefetch=2) as ahead:
        good = ahead.rows
        monkeypatch.setattr(ahead, "rows", lambda samples: good(samples) if samples[0] < 24 else 1 / 0)
        ahead.batch(0), ahead.batch(1)
        with pytest.raises(ZeroDivisionError):
            ahead.batch(2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size,micro", [(1, 1), (2, 3), (4, 3)])
@pytest.mark.parametrize("wanted", [1, 5, 24, None])
def test_validation_counts_each_sequence_once(folders, kind, size, micro, wanted):
    ranks = [make(kind, folders, rank=r, size=size, micro=micro) for r in range(size)]
    every = min(wanted or 10**9, ranks[0].num_validation())
    turns = [list(rank.validation(wanted)) for rank in ranks]
    assert len({len(t) for t in turns}) == 1 and all(b.num_sequences == micro for t in turns for b in t)
    rows = torch.cat([t[i].labels for i in range(len(turns[0])) for t in turns])
    expected = np.stack([ranks[0].validation_row(i)[1] for i in range(every)])
    assert np.array_equal(rows[:every].numpy(), expected) and bool((rows[every:] == IGNORED).all())


def test_documents_are_numbered_only_when_they_are_masked(folders):
    batch = loader(folders).batch(0)
    masked = Loader(config(folders, mask=True), S, 12, prefetch=0).batch(0)
    assert not batch.documents.any() and masked.documents.any() and torch.equal(batch.tokens, masked.tokens)
    assert (batch.tokens.dtype, batch.labels.dtype, batch.documents.dtype) == (torch.int64, torch.int64, torch.int32)


def test_synthetic_ids_follow_their_law():
    """Uniform and Zipf frequencies within five standard errors; labels are the next tokens; validation is other samples."""
    for zipf, share in ((None, np.full(16, 1 / 16)), (1.0, (1 / np.arange(1, 17)) / (1 / np.arange(1, 17)).sum())):
        source = SyntheticLoader(16, 999, 40, zipf=zipf, prefetch=0)
        batch = source.batch(0)
        hits = np.bincount(batch.tokens.flatten().numpy(), minlength=16) / batch.tokens.numel()
        assert np.abs(hits - share).max() < 5 * np.sqrt(0.25 / batch.tokens.numel())
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
        assert not torch.equal(next(source.validation(1)).tokens[0], batch.tokens[0])


@pytest.mark.parametrize(
    "change,words",
    [
        ({"gbs": 10, "size": 4}, "multiple of 4"),
        ({"rank": 2, "size": 2}, "no rank 2 of 2"),
        ({"micro": 0}, "at least 1"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seq_len": 10**6}, "one row of seq_len 1000000 needs 1000001"),
        ({"vocab_size": 500}, "its tokenizer has 512 ids; the model's vocabulary has 500"),
        ({"prefetch": -1}, "prefetch is -1"),
    ],
)
def test_a_loader_that_cannot_be_says_why(folders, change, words):
    with pytest.raises(ValueError, match=words):
        loader(folders, **change)


class Block:
    """A data block as a run's configuration holds it."""

    def __init__(self, **values):
        self.__dict__ |= values


def test_a_data_block_opens_by_its_kind(folders):
    at = {"vocab_size": VOCAB, "seq_len": S, "global_batch_sequences": 4, "prefetch": 0}
    made_up = open_loader(Block(kind="synthetic"), **at)
    assert isinstance(made_up, SyntheticLoader) and made_up.batch(0).num_sequences == 4
    block = Block(kind="shards", sources=config(folders).sources, mask_documents=True, validation=Block(path=str(folders / "validation")))
    assert open_loader(block, **at).num_validation() > 0
    with pytest.raises(ValueError, match="legal: synthetic, shards"):
        open_loader(Block(kind="files"), **at)
    with pytest.raises(ValueError, match="sources is empty"):
        open_loader(Block(kind="shards", sources=[], mask_documents=True, validation=None), **at)


def test_a_batch_checks_its_shapes_and_splits_evenly():
    ids = torch.arange(12).view(4, 3)
    batch = Batch(ids, torch.where(ids > 3, ids, IGNORED), ids.int())
    assert batch.num_labels == 8 and [b.tokens[0, 0].item() for b in batch.split(2)] == [0, 6]
    with pytest.raises(ValueError, match="4 sequences don't split into 3"):
        batch.split(3)
    with pytest.raises(ValueError, match="one shape"):
        replace(batch, labels=ids[:2])


# ---- damage -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path):
    write_shards(tmp_path / "set", documents(), vocab_size=VOCAB, eos_id=EOS, shard_tokens=100)
    return tmp_path / "set"


def cut(path, size=-1):
    path.write_bytes(path.read_bytes()[:size])


def edit_index(folder, **changes):
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | changes))


def put_id(folder, value):
    ids = np.memmap(folder / "00001.bin", dtype="<u2", mode="r+")
    ids[7] = value
    ids.flush()


def swap_starts(folder):
    starts = np.load(folder / "00000.idx")
    np.save((folder / "00000.idx").open("wb"), np.where(np.arange(len(starts)) == 1, starts[-1], starts))


DAMAGES = {
    "no folder": (lambda f: f.rename(f.with_name("sets")), "no such folder; did you mean .*sets"),
    "no index": (lambda f: (f / INDEX).unlink(), "no index.json"),
    "index cut": (lambda f: cut(f / INDEX, 40), "index.json: the file: Invalid JSON"),
    "index of another version": (lambda f: edit_index(f, schema_version=2), "schema_version"),
    "index with an unknown key": (lambda f: edit_index(f, colour=2), "colour"),
    "index that adds up to another total": (lambda f: edit_index(f, tokens=5), "says 5 tokens, but its shards add up to"),
    "ids cut": (lambda f: cut(f / "00001.bin"), "00001.bin: truncated"),
    "ids too long": (lambda f: (f / "00001.bin").open("ab").write(b"xx"), "00001.bin: too long"),
    "ids missing": (lambda f: (f / "00001.bin").unlink(), "00001.bin: missing"),
    "starts cut": (lambda f: cut(f / "00001.idx"), "00001.idx: truncated"),
    "starts of nothing": (lambda f: cut(f / "00001.idx", 0), "00001.idx: truncated"),
    "starts missing": (lambda f: (f / "00001.idx").unlink(), "00001.idx: missing"),
    "starts of floats": (lambda f: np.save((f / "00001.idx").open("wb"), np.zeros(3)), "00001.idx: holds float64"),
    "starts pickled": (lambda f: np.save((f / "00001.idx").open("wb"), np.array([{}]), allow_pickle=True), "00001.idx: .*document offsets"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_does_not_open(good, damage):
    harm, words = DAMAGES[damage]
    harm(good)
    with pytest.raises(ValueError, match=words) as error:
        ShardSet(good)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("harm,words", [(lambda f: put_id(f, 5), "00001.bin: changed since"), (swap_starts, "00000.idx: changed since")])
def test_verify_finds_what_opening_cannot(good, harm, words):
    verify(good)
    harm(good)
    ShardSet(good)
    with pytest.raises(ValueError, match=words):
        verify(good)


def test_an_id_outside_the_vocabulary_is_named_when_written_and_when_read(good, tmp_path):
    with pytest.raises(ValueError, match=r"00000.bin: token 3 is id 512; the vocabulary holds ids 0 to 511"):
        write_shards(tmp_path / "new", [np.array([1, 2]), np.array([3, 512])], vocab_size=VOCAB)
    with pytest.raises(ValueError, match="token 0 is id -1"):
        write_shards(tmp_path / "new", [np.array([-1])], vocab_size=VOCAB)
    assert not any(tmp_path.glob("new*"))
    put_id(good, 600)
    shards = ShardSet(good)
    with pytest.raises(ValueError, match="00001.bin: token 7 is id 600"):
        shards.tokens(0, shards.num_tokens)


def test_nothing_is_built_of_nothing_nor_over_something(good, tmp_path):
    with pytest.raises(ValueError, match="no token"):
        write_shards(tmp_path / "empty", [np.empty(0, dtype=np.int64)], vocab_size=VOCAB)
    with pytest.raises(ValueError, match="pass --overwrite"):
        write_shards(good, documents(), vocab_size=VOCAB)
    before = ShardSet(good).digest
    write_shards(good, documents(seed=5), vocab_size=VOCAB, overwrite=True)
    assert ShardSet(good).digest != before and sorted(p.name for p in tmp_path.iterdir()) == ["set"]


def test_a_set_knows_its_content_wherever_it_lies(good, tmp_path):
    again = tmp_path / "elsewhere" / "copy"
    write_shards(again, documents(), vocab_size=VOCAB, eos_id=EOS, shard_tokens=100)
    assert ShardSet(again).digest == ShardSet(good).digest
    assert (again / INDEX).read_text() == (good / INDEX).read_text()
