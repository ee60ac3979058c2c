"""Models by name, configuration and factory, and the errors of those that are none."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from zcompile.errors import PlanError
from zcompile.planner.models import BUILT_IN, load_model

NUM_PARAMS = {
    "gpt2": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
    "vit-l": 304_326_632,
    "bert-base": 109_514_298,
}


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "llama3-8b"])
def test_built_in_models_have_their_published_sizes(name: str) -> None:
    model = load_model(name, micro_batch=2, seq=64)
    assert sum(p.numel() for p in model.module.parameters()) == NUM_PARAMS[name]
    assert all(p.is_meta for p in model.module.parameters())
    assert all(t.shape == (2, 64) and t.is_meta for t in model.inputs.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_model(name: str) -> None:
    model = load_model(name)
    assert sum(p.numel() for p in model.module.parameters()) == NUM_PARAMS[name]
    assert bool(model.notes) == (name in ("gpt2", "bert-base", "mixtral-8x7b"))


def test_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    path.write_text(
        json.dumps(
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8, **sizes}
        )
    )
    model = load_model(str(path), micro_batch=3)
    assert type(model.module).__name__ == "LlamaForCausalLM"
    assert model.inputs["input_ids"].shape == (3, 8), "as many tokens as it has positions"
    with pytest.raises(PlanError, match="sequence length is 9 and the model has 8 positions"):
        load_model(str(path), seq=9)


def pair(micro_batch: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(3, 4), torch.empty(micro_batch, 3)


def alone() -> nn.Module:
    return nn.Linear(3, 4)


def test_a_factory_is_called_on_meta() -> None:
    model = load_model("tests.planner.test_models:pair", micro_batch=5)
    assert all(p.is_meta for p in model.module.parameters()) and model.inputs.shape == (5, 3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("llama", "model 'llama' is not known; the known ones are gpt2, llama3-8b"),
        ("nowhere/config.json", "config 'nowhere/config.json' cannot be read: No such file"),
        ("tests.planner.test_models:alone", "returns a model alone; return .model, example_inputs."),
        ("tests.planner.test_models:missing", "cannot be imported: AttributeError"),
        ("no_such_module:factory", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_is_no_model(spec: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_model(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "has no model_type"), ('{"model_type": "nothing"}', "cannot be built: ")],
)
def test_bad_configuration_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        load_model(str(path))


def test_sizes_that_have_no_meaning() -> None:
    with pytest.raises(PlanError, match="micro-batch is 0; it must be at least 1"):
        load_model("gpt2", micro_batch=0)
    with pytest.raises(PlanError, match="sequence length is -4; it must be at least 1"):
        load_model("gpt2", seq=-4)


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PlanError, match=r"needs transformers, which is not installed; pip install 'zcompile\[hf\]'"):
        load_model("gpt2")
