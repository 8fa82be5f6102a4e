"""Every rank's share of a model fits the others': together they are the whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagefleet.manifest import Weights
from pagefleet_worker.model.config import DecoderConfig, load_config
from pagefleet_worker.model.shares import Share
from pagefleet_worker.model.weights import LayerWeights, load_weights
from pagefleet_worker.model_files import ModelError
from tests.gguf_models import write_gguf
from tests.unit.worker.test_weights import CPU, files_of

Prepared = Callable[[str], Path]

SHARED = [
    (ranks, kv_heads)
    for ranks in range(1, 9)
    for kv_heads in range(1, 17)
    if kv_heads % ranks == 0 or ranks % kv_heads == 0
]
"""Numbers of ranks and of key/value heads that fit each other."""


@pytest.fixture(scope="module")
def config(small_model: Prepared) -> DecoderConfig:
    return load_config(small_model("llama"))


@given(st.data())
def test_each_query_head_finds_its_keys_where_it_is(data: st.DataObject) -> None:
    """Of either kind: several key/value heads for each rank, or ranks that hold the same one."""
    ranks, kv_heads = data.draw(st.sampled_from(SHARED))
    group = data.draw(st.integers(1, 6)) * max(ranks // kv_heads, 1)
    heads = kv_heads * group
    taken: list[int] = []
    for rank in range(ranks):
        share = Share(rank, ranks)
        queries, keys = share.even(heads), share.kv_heads(kv_heads)
        assert queries.count % keys.count == 0
        for own in range(queries.count):
            found = keys.first + own // (queries.count // keys.count)
            assert found == (queries.first + own) // group
        taken += range(heads)[queries.span]
    assert taken == list(range(heads))


@given(count=st.integers(1, 1000), ranks=st.integers(1, 8))
def test_a_vocabulary_of_any_size_is_dealt_out(count: int, ranks: int) -> None:
    cuts = [Share(rank, ranks).padded(count) for rank in range(ranks)]
    assert len({cut.count for cut in cuts}) == 1
    assert [at for cut in cuts for at in range(count)[cut.span]] == list(range(count))


@pytest.mark.parametrize(
    ("changes", "ranks", "possible"),
    [
        ({}, 3, "1, 2, 4"),
        ({"heads": 9, "kv_heads": 3}, 2, "1, 3"),
        ({"intermediate_size": 97}, 4, "1"),
        ({"kv_heads": 4}, 8, "1, 2, 4"),
    ],
)
def test_what_cannot_be_shared_evenly_is_refused(
    config: DecoderConfig, changes: dict[str, int], ranks: int, possible: str
) -> None:
    uneven = replace(config, **changes)
    with pytest.raises(ModelError, match=rf"--tensor-parallel-size may be {possible} for this"):
        Share(0, ranks).of(uneven)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-biases", "llama-tied", "qwen2", "qwen3", "gemma2", "phi3-partial"),
        *("olmo2", "glm4", "deepseek-v2-lite", "deepseek-v3"),
    ],
)
def test_the_shares_of_all_ranks_are_the_model(
    name: str, ranks: int, small_model: Prepared
) -> None:
    folder = small_model(name)
    assert_shared(files_of(folder), load_config(folder), ranks)


def test_the_shares_of_a_gguf_file_are_the_model(small_model: Prepared, tmp_path: Path) -> None:
    """Whose queries and keys lie in another order, and in blocks that no share may cut."""
    folder = small_model("llama")
    path = write_gguf(tmp_path / "model.gguf", folder, ["Q8_0", "Q4_0"])
    assert_shared(Weights("gguf", (str(path),)), load_config(folder), 4)


def assert_shared(files: Weights, config: DecoderConfig, ranks: int) -> None:
    """Each tensor of the files is what the ranks have of it, put together."""
    shares = [Share(rank, ranks) for rank in range(ranks)]
    whole, *parts = (
        load_weights(files, config, torch.float32, CPU, lambda *_: None, share=share)
        for share in (Share(0, 1), *shares)
    )
    vocabulary = torch.cat([part.embedding for part in parts])
    assert torch.equal(vocabulary[: config.vocab_size], whole.embedding)
    assert not vocabulary[config.vocab_size :].any()
    for layer, *own in zip(whole.layers, *(part.layers for part in parts), strict=True):
        expected = rows_and_columns(layer, config)
        found = [
            rows_and_columns(each, share.of(config))
            for each, share in zip(own, shares, strict=True)
        ]
        for field, tensor in expected.items():
            pieces = [each[field] for each in found if field in each]
            if field.startswith(("key", "value")) and ranks > config.kv_heads:
                pieces = pieces[:: ranks // config.kv_heads]
            if field == "latent" or (field == "query" and "query_up" in expected):
                assert all(torch.equal(piece, tensor) for piece in pieces)
                continue
            dimension = 1 if field in ("output", "down") else 0
            assert torch.equal(torch.cat(pieces, dimension), tensor), field


def rows_and_columns(layer: LayerWeights, config: DecoderConfig) -> dict[str, Tensor]:
    """The tensors of a layer that are cut, apart; biases behind a sum are those of rank 0."""
    kinds = {
        "qkv": {"query": config.query_size, "key": config.kv_size, "value": config.kv_size},
        "gate_up": {"gate": config.intermediate_size, "up": config.intermediate_size},
    }
    fields = ["qkv", "gate_up", "output", "down"]
    if config.latent is not None:
        query, entry = config.heads * config.latent.query, config.latent.entry
        kinds["qkv"] = {"query": config.latent.query_rank or query, "latent": entry}
        fields = ["qkv", "query_up", "kv_up", "output"]
        if layer.router is None:
            fields += ["gate_up", "down"]
    found = {}
    for field in fields:
        for name in (field, f"{field}_bias"):
            tensor = getattr(layer, name, None)
            if tensor is not None and field in kinds:
                suffix = name.removeprefix(field)
                for part, rows in zip(
                    kinds[field], tensor.split(list(kinds[field].values())), strict=True
                ):
                    found[part + suffix] = rows
            elif tensor is not None:
                found[name] = tensor
    return found
