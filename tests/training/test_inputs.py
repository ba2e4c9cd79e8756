"""Data sets of a resumed run: changed blends against an exact simulation, errors, and their description."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from megafp8.checkpoint import read_metadata
from megafp8.config import Config, ConfigError
from megafp8.data import DataError
from megafp8.data.blend import BLOCK
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megafp8.data.samples import PackedDataset, SamplePosition, split_documents
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.training.inputs import (
    RunInputs,
    check_ranks_agree,
    describe_data,
    describe_planned_data,
    missing_data,
    open_inputs,
)
from megafp8.training.validate import check_run
from tests.test_checkpoint_format import undocumented_keys
from tests.training.runs import run_job
from tests.world import World

S, SEED, SPLIT, VOCABULARY = 8, 11, "90,10", 500


def write(prefix: Path, documents: int, seed: int) -> str:
    """A data set of documents of 5 to 40 random tokens."""
    rng = np.random.default_rng(seed)
    writer = IndexedDatasetWriter(prefix, np.uint16, overwrite=True)
    for length in rng.integers(5, 41, documents):
        writer.add_document(rng.integers(0, VOCABULARY, length))
    writer.close()
    return str(prefix)


def config(train: Any, cache: Path, **data: Any) -> Config:
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": VOCABULARY}
    training = {"steps": 10, "seq_length": S, "global_batch_size": 4, "eval_interval": 5, "eval_steps": 2}
    data = {"train": train, "split": SPLIT, "index_cache": str(cache), **data}
    rest = {"training": training, "optimizer": {"learning_rate": 1, "schedule": "constant"}, "seed": SEED}
    return Config.model_validate({"name": "t", "model": model, "data": data, **rest})


def saved(inputs: RunInputs, samples: int, *, with_record: bool = True) -> dict[str, Any]:
    """The metadata of a checkpoint after `samples`, as they come back from a file."""
    about = {"step": samples // 4, "consumed_samples": samples, "config": inputs.config.model_dump(mode="json")}
    if with_record:
        about["data"] = inputs.record(samples)
    found: dict[str, Any] = json.loads(json.dumps(about))
    return found


def simulated(shares: list[float], starts: list[int], count: int) -> list[tuple[int, int]]:
    """The first `count` samples of a segment as (data set, number): one after another by Webster's method, and each
    block of them shuffled."""
    given, read, order = [0] * len(shares), list(starts), []
    for block in range(-(-count // BLOCK)):
        picks = []
        for _ in range(BLOCK):
            due = [(given[k] + 0.5) / shares[k] for k in range(len(shares))]
            picks.append(due.index(min(due)))
            given[picks[-1]] += 1
        shuffled = np.array(sorted(picks))
        np.random.Generator(np.random.Philox(key=np.array([SEED, block], np.uint64))).shuffle(shuffled)
        for k in shuffled.tolist():
            order.append((k, read[k]))
            read[k] += 1
    return order[:count]


@dataclass
class Chain:
    """A run that is stopped and resumed repeatedly, with a count of the samples that it has read."""

    folder: Path
    rng: np.random.Generator
    listed: list[tuple[str, float]] = field(default_factory=list)
    """Data sets as (name, weight), in the order of the config; a name may come twice."""
    path: dict[str, str] = field(default_factory=dict)
    samples: dict[str, PackedDataset] = field(default_factory=dict)
    read: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str) -> None:
        """List the data set `name`, and create it if needed."""
        if name not in self.path:
            self.path[name] = write(self.folder / name, int(self.rng.integers(20, 60)), len(self.path) + 100)
            dataset = IndexedDataset(self.path[name])
            documents = split_documents(dataset.num_documents, SPLIT)[0]
            self.samples[name] = PackedDataset(dataset, documents, S, SEED, self.folder / "cache")
            self.read[name] = []
        self.listed.append((name, float(self.rng.choice([1, 2, 3, 0.25, self.rng.uniform(0.1, 9)]))))

    def change(self) -> str:
        """Change the blend at random."""
        names = [name for name, _ in self.listed]
        kind = str(self.rng.choice(["weights", "add", "remove", "reorder", "move", "duplicate", "nothing"]))
        if kind == "weights":
            self.listed = [(name, float(self.rng.uniform(0.1, 9))) for name in names]
        elif kind == "add":
            others = sorted(set("abcdefg") - set(names))
            self.add(str(self.rng.choice(others or ["a"])))
        elif kind == "remove" and len(set(names)) > 1:
            gone = str(self.rng.choice(names))
            self.listed = [entry for entry in self.listed if entry[0] != gone]
        elif kind == "reorder":
            self.rng.shuffle(self.listed)  # type: ignore[arg-type]
        elif kind == "move":
            name = str(self.rng.choice(names))
            moved = self.folder / f"{name}-{self.rng.integers(10**9)}"
            for suffix in (".bin", ".idx"):
                shutil.move(self.path[name] + suffix, f"{moved}{suffix}")
            self.path[name] = str(moved)
        elif kind == "duplicate":
            self.listed.append(self.listed[int(self.rng.integers(len(self.listed)))])
        return kind

    def open(self) -> tuple[RunInputs, dict[str, float]]:
        """The inputs, and the weight of each data set, in the order of the config."""
        weights: dict[str, float] = {}
        if self.rng.random() < 0.3:  # a list weighs by size
            train: Any = [self.path[name] for name, _ in self.listed]
            for name, _ in self.listed:
                weights[name] = weights.get(name, 0.0) + float(self.samples[name].num_tokens)
        else:
            train = {}
            for i, (name, weight) in enumerate(self.listed):
                # Another spelling of the path for each place, since a mapping has each key once.
                train[self.path[name].replace("/", "/" + "./" * i, 1)] = weight
                weights[name] = weights.get(name, 0.0) + weight
        return open_inputs(config(train, self.folder / "cache"), "test"), weights


def test_a_changed_blend_continues_each_data_set_where_it_was(tmp_path: Path) -> None:
    """100 random changes: ten runs that are stopped, changed and resumed ten times each."""
    kinds: Counter[str] = Counter()
    for number in range(10):
        chain = Chain(tmp_path / str(number), np.random.default_rng(number))
        for name in "abc"[: int(chain.rng.integers(1, 4))]:
            chain.add(name)
        metadata, position = None, 0
        first, order, shares = 0, [], {}
        for _ in range(11):
            if metadata is not None:
                kinds[chain.change()] += 1
            inputs, weights = chain.open()
            if metadata is not None:
                inputs, said = inputs.resumed(metadata)
            total = float(np.sum(list(weights.values())))
            now = {name: weight / total for name, weight in weights.items()}
            if shares.keys() != now.keys() or any(abs(shares[k] / now[k] - 1) > 1e-9 for k in now):
                # The blend is another: the method begins again, with each data set where it was.
                assert metadata is None or said, "a change of the blend was not logged"
                first, order, shares = position, list(now), now
            else:
                assert said == []
            count = int(chain.rng.integers(1, 1200))
            starts = [len(chain.read[name]) for name in order]
            if first != position:  # the segment goes on: what it gave before this stop comes off again
                earlier = simulated(list(shares.values()), [0] * len(order), position - first)
                starts = [start - sum(k == i for k, _ in earlier) for i, start in enumerate(starts)]
            expected = simulated(list(shares.values()), starts, position - first + count)[position - first :]
            for i, (k, sample) in enumerate(expected):
                source, found = inputs.train.segment.locate(position + i)
                assert (inputs.progress.active[source].prefix.replace("./", ""), found) == (
                    chain.path[order[k]],
                    sample,
                )
            for i in chain.rng.integers(0, count, 10).tolist():
                k, sample = expected[i]
                assert inputs.train[position + i].tolist() == chain.samples[order[k]][sample].tolist()
            done = int(chain.rng.integers(0, count + 1))  # a kill: what was read after the last save is read again
            for k, sample in expected[:done]:
                chain.read[order[k]].append(sample)
            position += done
            metadata = saved(inputs, position)
            counts = {entry["prefix"].replace("./", ""): entry["consumed"] for entry in metadata["data"]["sources"]}
            assert all(counts[chain.path[name]] == len(chain.read[name]) for name in order)
        for name, read in chain.read.items():
            assert read == list(range(len(read))), f"samples of {name} were skipped or given twice"
    print(f"{kinds.total()} changes: {dict(kinds)}")
    assert (kinds.total(), len(kinds)) == (100, 7)


def write_alike(folder: Path, kind: str) -> list[str]:
    """Two data sets of equal size, which differ only where `fingerprint` does not look."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [str(folder / name) for name in ("v1", "v2")]
    if kind == "text":
        line = json.dumps({"text": "some words"}).encode() + b"\n"
        content = bytearray(line * (200_000 // len(line)))
        for name in names:
            Path(f"{name}.jsonl").write_bytes(content)
            start = len(line) * -(-5000 // len(line))  # between two blocks of 4 KiB
            content[start : start + len(line)] = line.replace(b"some", b"SOME")
        return [f"{name}.jsonl" for name in names]
    tokens = np.random.default_rng(1).integers(0, VOCABULARY - 1, 400_000)
    for name in names:
        writer = IndexedDatasetWriter(name, np.uint16)
        for document in np.split(tokens, 100):
            writer.add_document(document)
        writer.close()
        tokens[3000:3100] = VOCABULARY - 1
    return names


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_data_sets_that_seem_equal_are_not_one(tmp_path: Path, kind: str) -> None:
    """A resumed run finds each again at its path, and at other paths on another machine, in another order."""
    one, two = write_alike(tmp_path / "here", kind)
    options: dict[str, Any] = {"tokenizer": {"kind": "bytes"}, "validation": {"x": one}} if kind == "text" else {}

    def opened(train: dict[str, float]) -> RunInputs:
        found = config(train, tmp_path / "cache", **options)
        model = found.model.model_copy(update={"vocab_size": 257 if kind == "text" else VOCABULARY})
        return open_inputs(found.model_copy(update={"model": model}), "test")

    then = opened({one: 0.75, two: 0.25})
    contents = {entry.prefix: entry.contents for entry in then.progress.active}
    assert len(set(contents.values())) == 2
    assert (
        f"{two} has the size of {one}, and the same content where it is compared: they count as two"
        in describe_data(then.config, then.data_sets, then.progress, {}, 40)
    )
    about = saved(then, 40)
    elsewhere = [str(path) for path in write_alike(tmp_path / "there", kind)]
    for path, other in ((one, two), elsewhere):
        for train in ({path: 0.75, other: 0.25}, {other: 0.25, path: 0.75}):
            again, changes = opened(train).resumed(about)
            assert changes == []
            assert [entry.prefix for entry in again.progress.active] == [path, other]
            assert again.progress.segment(SEED) == then.progress.segment(SEED)
    fewer, _ = opened({elsewhere[1]: 1.0}).resumed(about)
    assert [entry.contents for entry in fewer.progress.active] == [contents[two]]
    assert fewer.progress.active[0].consumed == then.train.segment.given(40)[1]


def test_one_data_set_under_two_paths_is_one(tmp_path: Path) -> None:
    """Also through a link; the table of the data says so."""
    one = write_alike(tmp_path, "tokens")[0]
    for suffix in (".bin", ".idx"):
        (tmp_path / f"link{suffix}").symlink_to(f"{one}{suffix}")
    then = open_inputs(config({one: 0.5, str(tmp_path / "link"): 0.25}, tmp_path / "cache"), "test")
    assert [(entry.prefix, entry.weight) for entry in then.progress.active] == [(one, 0.75)]
    table = describe_data(then.config, then.data_sets, then.progress, {}, 40)
    assert f"{tmp_path}/link has the same files as {one}: they are one data set, with the sum of both weights" in table
    assert resume(then, 40, config({str(tmp_path / "link"): 1.0}, tmp_path / "cache"))[1] == []


def resume(then: RunInputs, samples: int, now: Config, *, with_record: bool = True) -> tuple[RunInputs, list[str]]:
    return open_inputs(now, "test").resumed(saved(then, samples, with_record=with_record))


def counts(inputs: RunInputs, samples: int) -> list[int]:
    """Samples that each listed data set has given."""
    return inputs.train.segment.given(samples)


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        resume(*arguments, **options)
    return str(error.value)


def test_another_split_or_other_contents_are_errors(tmp_path: Path) -> None:
    a, b, cache = write(tmp_path / "a", 50, 1), write(tmp_path / "b", 30, 2), tmp_path / "cache"
    then = open_inputs(config({a: 1.0, b: 1.0}, cache), "test")
    given = counts(then, 600)
    other_split = config({a: 1.0, b: 1.0}, cache, split="80,20")
    said = refusal(then, 600, other_split)
    assert f"data.split = '80,20': selects the documents 0-40 of {a} for training" in said
    assert f"has read {given[0]:,} samples of the documents 0-45; set data.split=90,10, or data.restart_changed" in said
    assert f"selects the documents 0-24 of {b}" in said
    same_documents = config({a: 1.0, b: 1.0}, cache, split="90,5,5")
    assert counts(resume(then, 600, same_documents)[0], 600) == given

    # The files of one data set change. The key counts that anew, once, and nothing else.
    write(tmp_path / "b", 30, 3)
    now = config({a: 1.0, b: 1.0}, cache)
    said = refusal(then, 600, now)
    assert f"data.train = '{b}': its files have changed since the run read {given[1]} samples of them" in said
    assert "data.restart_changed=true counts its samples from 0" in said
    anew = now.model_copy(update={"data": now.data.model_copy(update={"restart_changed": True})})
    went_on, changes = resume(then, 600, anew)
    assert counts(went_on, 600) == [given[0], 0]
    assert changes == [f"{b} added with a share of 50%, from its sample 0 on",
                       f"{b} removed after {given[1]} of its samples"]  # fmt: skip
    again, changes = resume(went_on, 800, anew)
    assert counts(again, 800) == counts(went_on, 800)
    assert changes == []
    assert "its files have changed" in refusal(then, 600, now)


def test_another_sequence_length_continues_with_what_was_not_predicted(tmp_path: Path) -> None:
    """Also from records without lengths. The blend goes on as it was; a source that was removed keeps its length."""
    a, b, cache = write(tmp_path / "a", 50, 1), write(tmp_path / "b", 30, 2), tmp_path / "cache"

    def with_length(length: int, train: dict[str, float]) -> Config:
        found = config(train, cache)
        return found.model_copy(update={"training": found.training.model_copy(update={"seq_length": length})})

    then = open_inputs(config({a: 3.0, b: 1.0}, cache), "test")
    given = counts(then, 40)
    old = saved(then, 40)
    for entry in old["data"]["sources"]:
        del entry["length"], entry["position"]
    for about in (saved(then, 40), old):
        inputs, changes = open_inputs(with_length(16, {a: 3.0, b: 1.0}), "test").resumed(about)
        assert changes == [f"samples of {prefix} have 16 tokens instead of 8" for prefix in (a, b)]
        assert [x.position for x in inputs.train.datasets] == [SamplePosition(n, 0, ((8, n, False),)) for n in given]
        assert [inputs.train.segment.locate(i) for i in range(40, 90)] == [
            then.train.segment.locate(i) for i in range(40, 90)
        ]
    again, changes = resume(inputs, 60, with_length(16, {a: 3.0, b: 1.0}))
    assert changes == []
    assert all(np.array_equal(again.train[i], inputs.train[i]) for i in range(60, 80))
    alone, _ = resume(inputs, 60, with_length(4, {a: 1.0}))
    back, _ = resume(alone, 64, with_length(8, {a: 1.0, b: 1.0}))
    of_b = counts(inputs, 60)[1]
    assert back.progress.active[1].position == SamplePosition(
        of_b, 0, ((8, given[1], False), (16, of_b - given[1], False))
    )
    assert [length for length, *_ in back.progress.active[0].position.given] == [8, 16, 4]


def test_a_checkpoint_without_a_data_record_continues(tmp_path: Path) -> None:
    """A list of data sets had equal shares then, and has them to the end of the run."""
    a, b, c = (write(tmp_path / name, 20 * (i + 1), i) for i, name in enumerate("abc"))
    cache = tmp_path / "cache"
    for listed, shares in (([b, a], {b: 1.0, a: 1.0}), ({a: 3.0, b: 1.0}, {a: 3.0, b: 1.0})):
        then = open_inputs(config(shares, cache), "test")
        about = saved(then, 500, with_record=False)
        about["config"]["data"]["train"] = listed
        del about["config"]["data"]["restart_changed"]
        inputs, changes = open_inputs(config(listed, cache), "test").resumed(about)
        assert changes == []
        assert all(np.array_equal(inputs.train[i], then.train[i]) for i in range(500, 560))
        again, changes = resume(inputs, 520, config(listed, cache))
        assert changes == []
        assert all(np.array_equal(again.train[i], then.train[i]) for i in range(520, 560))
        given = then.train.segment.given(500)[list(shares).index(a)]
        fewer, changes = open_inputs(config([a], cache), "test").resumed(about)
        assert counts(fewer, 500) == [given]
        assert f"{b} removed after" in changes[-1]
        back, _ = resume(fewer, 501, config({b: 1.0, a: 1.0}, cache))
        assert counts(back, 501) == [500 - given, given + 1]
        with pytest.raises(ConfigError, match=rf"data\.train = '{c}'.*its {b} is no longer listed.*list it as {b}"):
            open_inputs(config([a, c], cache), "test").resumed(about)
        with pytest.raises(ConfigError, match=r"data\.split = '80,20'.* set data.split=90,10"):
            open_inputs(config(listed, cache, split="80,20"), "test").resumed(about)


def test_another_packing_is_an_error(tmp_path: Path) -> None:
    """Also if the checkpoint's record has no packings, or if it has no record; `restart_changed` counts anew."""
    a, cache = write(tmp_path / "a", 50, 1), tmp_path / "cache"
    whole = {"packing": "best_fit", "reset_at_documents": True, "mask_eod_loss": True}
    plain, best_fit = config([a], cache), config([a], cache, **whole)
    restarted = config([a], cache, **whole, restart_changed=True)
    then = open_inputs(plain, "test")
    old = saved(then, 600)
    del old["data"]["sources"][0]["packing"]
    for about in (saved(then, 600), saved(then, 600, with_record=False), old):
        with pytest.raises(ConfigError) as error:
            open_inputs(best_fit, "test").resumed(about)
        assert (
            f"data.packing = 'best_fit': the run has read 600 samples of {a} with data.packing=concatenate; "
            "set data.packing=concatenate, or data.restart_changed=true counts its samples from 0"
        ) in str(error.value)
        assert counts(open_inputs(restarted, "test").resumed(about)[0], 600) == [0]
    went_on, _ = resume(then, 600, restarted)
    again, changes = resume(went_on, 650, best_fit)
    assert (counts(again, 650), changes) == ([50], [])
    assert all(np.array_equal(again.train[i], went_on.train[i]) for i in range(650, 660))
    assert counts(resume(again, 650, plain)[0], 650) == [600]
    assert "set data.packing=best_fit" in refusal(open_inputs(best_fit, "test"), 600, plain)


def test_balanced_orders_the_samples_of_best_fit_within_each_step(tmp_path: Path) -> None:
    """In the same micro-batches on any number of ranks, and again after a resume, also from a run of best_fit."""
    paths, cache = {write(tmp_path / "a", 60, 1): 0.7, write(tmp_path / "b", 20, 2): 0.3}, tmp_path / "cache"
    whole = {"reset_at_documents": True, "mask_eod_loss": True}
    then, inputs = (open_inputs(config(paths, cache, packing=x, **whole), "test") for x in ("best_fit", "balanced"))

    def read(inputs: RunInputs, consumed: int, ranks: int) -> list[list[int]]:
        """The samples of four steps, by step, in the order of micro-batches."""
        streams = [
            inputs.batches(inputs.train, Mock(**{"data.rank": r, "data.size": ranks}), consumed, num_workers=0)
            for r in range(ranks)
        ]
        steps = [[next(stream) for stream in streams] for _ in range(4)]
        return [[int(batch.samples) for row in zip(*step) for batch in row] for step in steps]  # type: ignore[arg-type]

    order = read(inputs, 0, 1)
    assert order == read(inputs, 0, 2) == read(inputs, 0, 4)
    assert [sorted(step) for step in order] == read(then, 0, 1) != order
    for before in (inputs, then):
        resumed, changes = inputs.resumed(saved(before, 8))
        assert (read(resumed, 8, 2)[:2], changes) == (order[2:], [])
    packed = inputs.train.datasets[0]
    assert isinstance(packed, PackedDataset)
    for i in range(packed.samples_per_epoch):
        lengths = [len(part) for part in packed.parts(i)]
        assert packed.document_lengths(i) == [*lengths, *([S + 1 - sum(lengths)] if sum(lengths) <= S else [])]


def test_a_best_fit_run_tells_how_documents_fit(tmp_path: Path) -> None:
    a, b, cache = write(tmp_path / "a", 60, 1), write(tmp_path / "b", 20, 2), tmp_path / "cache"
    inputs = open_inputs(config([a, b], cache, packing="best_fit"), "test")
    samples = [packed.samples_per_epoch for packed in inputs.train.datasets]
    assert inputs.train.segment.weights == tuple(samples)
    one, other = describe_data(inputs.config, inputs.data_sets, inputs.progress, {}, 40).splitlines()[-2:]
    pattern = (
        r"{}: best_fit: {} samples per epoch; \d+\.\d\d% of their tokens are padding; \d+\.\d\d% of documents are cut"
    )
    assert re.match(pattern.format(re.escape(a), samples[0]), one)
    assert re.match(pattern.format(re.escape(b), samples[1]), other)
    assert "padding" not in describe_planned_data(config([a, b], cache))


def test_a_list_weighs_by_size(tmp_path: Path) -> None:
    a, b, cache = write(tmp_path / "a", 60, 1), write(tmp_path / "b", 20, 2), tmp_path / "cache"
    shutil.copy(f"{a}.bin", tmp_path / "copy.bin")
    shutil.copy(f"{a}.idx", tmp_path / "copy.idx")
    tokens = [sum(map(len, map(IndexedDataset(p).document, range(n)))) for p, n in ((a, 54), (b, 18))]
    for listed, times in (([a, b], 1), ([a, b, a], 2), ([a, b, str(tmp_path / "copy")], 2)):
        inputs = open_inputs(config(listed, cache), "test")
        assert inputs.train.segment.weights == (times * tokens[0], tokens[1])
        assert len(inputs.train.datasets) == 2

    text, _, merged = describe_data(inputs.config, inputs.data_sets, inputs.progress, {}, 40).rpartition("\n")
    assert merged == f"{tmp_path}/copy is a copy of {a}: they are one data set, with the sum of both weights"
    _, *rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows] == [a, b, a, b]
    share = 2 * tokens[0] / (2 * tokens[0] + tokens[1])
    assert [row[-4:-2] for row in rows[:2]] == [
        [f"{tokens[0]:,}", f"{share:.2%}"],
        [f"{tokens[1]:,}", f"{1 - share:.2%}"],
    ]
    assert sum(int(row[-2]) for row in rows[:2]) == 40
    assert sum(int(row[-2]) for row in rows[2:]) == 8
    assert rows[0][-1] == f"{int(rows[0][-2]) / ((tokens[0] - 1) // S):.3f}"
    planned = describe_planned_data(config([a, b, a], cache))
    assert planned == text
    none = str(tmp_path / "x" / "none")
    assert missing_data(config([a, none, none], cache)) == [f"data.train, {none}: no {none}.bin and no {none}.idx"]


def _train(settings: Config) -> str:
    """Run a whole job; return the message of a DataError, or an empty text."""
    inputs = open_inputs(settings, "test")
    check_run(inputs)
    try:
        run_job(inputs)
    except DataError as error:
        return str(error)
    return ""


def test_a_job_records_what_it_reads_and_ends_at_an_id_outside_the_vocabulary(
    world2: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a", 60, 1), write(tmp_path / "b", 20, 2)
    writer = IndexedDatasetWriter(tmp_path / "bad", np.uint16)
    writer.add_document(np.full(300, VOCABULARY - 1))
    writer.add_document(np.array([1, 2, VOCABULARY] + 20 * [3]))
    writer.close({"max_token_id": 7})  # a sidecar is a hint

    def settings(steps: int, listed: Any, name: str, **data: Any) -> Config:
        tree = config(listed, tmp_path / "cache", **data).model_dump(mode="json")
        tree["training"] |= {"steps": steps, "eval_interval": 0}
        tree |= {"name": name, "run_dir": str(tmp_path), "logging": {"progress": False, "tensorboard": False}}
        return Config.model_validate(tree)

    def job(run: Config) -> str:
        return str(world2.run(_train, run, ranks=1)[0])

    def record(step: int) -> tuple[dict[str, Any], list[tuple[str, int, int]]]:
        about = read_metadata(tmp_path / "t" / "checkpoints" / f"step_{step:08d}")
        assert undocumented_keys(about) == []
        return about, [(s["prefix"], s["start"], s["consumed"]) for s in about["data"]["sources"]]

    assert job(settings(2, [a], "t")) == ""
    assert record(2)[1] == [(a, 0, 8)]
    assert job(settings(6, {b: 3, a: 1}, "t")) == ""
    about, sources = record(6)
    (_, _, of_b), (_, _, of_a) = sources
    assert sources == [(b, 0, of_b), (a, 8, of_a)]
    assert (of_a + of_b, about["data"]["first_sample"], about["consumed_samples"]) == (24, 8, 24)
    said = capfd.readouterr().err
    assert (
        f"data changed since step 2: {b} added with a share of 75%, from its sample 0 on; share of {a} 100% -> 25%"
        in said
    )
    assert re.search(rf"{a} +[\d,]+ +25\.00% +{of_a} ", said)
    with pytest.raises(ConfigError, match=r"data\.split = '50,50': selects the documents"):
        check_run(open_inputs(settings(8, {b: 3, a: 1}, "t", split="50,50"), "test"))
    bad = tmp_path / "bad"
    said = job(settings(10, [str(bad)], "bad", split="100"))
    assert said.startswith(f"{bad}.bin: document 1, position 2 holds token 500, but model.vocab_size is 500: ")
    assert "\n" not in said


def _agree(folders: list[str], orders: list[list[str]], other_index: bool) -> str:
    """The error of this rank, which works in its own folder, about the inputs of all ranks."""
    device = initialize_distributed("cpu")
    world = initialize_model_parallel(1, 1, device=device).world
    before = os.getcwd()
    os.chdir(folders[world.rank])
    try:
        inputs = open_inputs(config(orders[world.rank], Path("cache")), "test")
        if other_index and world.rank == 1:
            packed = inputs.train.datasets[1]
            packed._make = lambda number, *more: PackedDataset._make(packed, number + 1, *more)  # type: ignore[method-assign]
        check_ranks_agree(inputs, 0, world.group)
    except DataError as error:
        return str(error)
    finally:
        os.chdir(before)
    return ""


def test_ranks_that_would_read_other_data_are_named(world2: World, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("0", "1", "2", "3")]
    for folder, seed in zip(folders, (1, 1, 2, 1)):
        write(folder / "a", 30, seed)
        write(folder / "b", 30, 3)

    def said(second: Path, order: list[str], other_index: bool = False) -> str:
        one, two = world2.run(_agree, [str(folders[0]), str(second)], [["a", "b"], order], other_index)
        assert one == two
        return str(one)

    host = socket.gethostname()
    there = f"differs on rank 1 ({host}) from rank 0 ({host}); copy the data sets"
    assert said(folders[1], ["a", "b"]) == ""
    assert f"would not train on the same data: a {there}" in said(folders[2], ["a", "b"])
    assert f": the order of the data sets {there}" in said(folders[1], ["b", "a"])
    assert f": the sample index of b {there}" in said(folders[3], ["a", "b"], other_index=True)
