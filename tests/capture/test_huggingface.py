"""Small Hugging Face models: the same losses, outputs, gradients and output types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.compare import assert_same_state, build, compiled, tensors_of
from zcompile import compat
from zcompile.errors import BackwardError, CaptureError

transformers = pytest.importorskip("transformers")

G = torch.Generator().manual_seed(1)
IDS = torch.randint(3, 64, (2, 10), generator=G)
LABELS = IDS.masked_fill(torch.arange(10) < 3, -100)
MASK = torch.ones(2, 10, dtype=torch.int64).masked_fill(torch.arange(10) > torch.tensor([[9], [6]]), 0)
SMALL = dict(vocab_size=64, hidden_size=16, num_attention_heads=2)


def llama(layers: int = 1, **options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL,
        num_hidden_layers=layers,
        intermediate_size=24,
        num_key_value_heads=1,
        max_position_embeddings=32,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def tied_llama(layers: int) -> nn.Module:
    return llama(layers, tie_word_embeddings=True)


def llama_with_dropout(layers: int) -> nn.Module:
    return llama(layers, attention_dropout=0.2)


def gpt2(layers: int) -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=layers, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def bert_config(layers: int, **options: Any) -> Any:
    return transformers.BertConfig(
        **SMALL, num_hidden_layers=layers, intermediate_size=24, max_position_embeddings=32, **options
    )


def bert(layers: int) -> nn.Module:
    return transformers.BertForMaskedLM(bert_config(layers))


def bert_classifier(layers: int) -> nn.Module:
    return transformers.BertForSequenceClassification(bert_config(layers, num_labels=3))


def t5(layers: int) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=layers, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit(layers: int) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
    )
    return transformers.ViTForImageClassification(config)


def mixtral(layers: int, experts: str = "batched_mm") -> nn.Module:
    config = transformers.MixtralConfig(
        **SMALL,
        num_hidden_layers=layers,
        intermediate_size=24,
        num_key_value_heads=1,
        max_position_embeddings=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation=experts,
    )
    return transformers.MixtralForCausalLM(config)


def lora(layers: int) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(llama(layers), config)


#: its cache copies the configuration, which Dynamo of torch 2.11 does not trace
T5_OPTIONS: dict[str, Any] = {} if compat.TRACES_COPIES else {"use_cache": False}
IMAGES = torch.randn(2, 3, 8, 8, generator=G)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, dict(input_ids=IDS, labels=LABELS)),
    "llama with a mask": (llama, dict(input_ids=IDS, labels=LABELS, attention_mask=MASK)),
    "llama with positions": (
        llama,
        dict(input_ids=IDS, labels=LABELS, position_ids=torch.arange(10).expand(2, 10) + 3),
    ),
    "llama without cache": (llama, dict(input_ids=IDS, labels=LABELS, use_cache=False)),
    "llama tied": (tied_llama, dict(input_ids=IDS, labels=LABELS)),
    "llama with dropout": (llama_with_dropout, dict(input_ids=IDS, labels=LABELS)),
    "llama from embeddings": (llama, dict(inputs_embeds=torch.randn(2, 10, 16, generator=G), labels=LABELS)),
    "llama without labels": (llama, dict(input_ids=IDS)),
    "gpt2": (gpt2, dict(input_ids=IDS, labels=LABELS)),
    "gpt2 with a mask": (gpt2, dict(input_ids=IDS, labels=LABELS, attention_mask=MASK)),
    "bert": (bert, dict(input_ids=IDS, labels=LABELS, attention_mask=MASK, token_type_ids=torch.zeros_like(IDS))),
    "bert classifier": (bert_classifier, dict(input_ids=IDS, attention_mask=MASK, labels=torch.tensor([0, 2]))),
    "t5": (t5, dict(input_ids=IDS, attention_mask=MASK, labels=LABELS[:, :6].contiguous(), **T5_OPTIONS)),
    "vit": (vit, dict(pixel_values=IMAGES, labels=torch.tensor([0, 1]))),
    "mixtral": (mixtral, dict(input_ids=IDS, labels=LABELS)),
    "lora": (lora, dict(input_ids=IDS, labels=LABELS)),
}
#: in training mode with two layers; what the others show beside these does not depend on depth
DEEP = ("llama", "gpt2", "bert", "t5", "vit", "mixtral", "lora")


#: in evaluation mode only with ``--wide``: arguments differ from those of another case, and no layer knows the mode
ALIKE = (
    "llama with a mask",
    "llama with positions",
    "llama without cache",
    "llama tied",
    "llama from embeddings",
    "llama without labels",
    "gpt2 with a mask",
)


def modes() -> list[Any]:
    """(case, whether in training mode)."""
    alike = [pytest.param(case, False, marks=pytest.mark.wide) for case in ALIKE]
    return [(case, True) for case in CASES] + [(case, False) for case in CASES if case not in ALIKE] + alike


def assert_close(have: Any, want: Any) -> None:
    assert type(have) is type(want)
    assert list(have.keys()) == list(want.keys())
    for a, b in zip(tensors_of(have), tensors_of(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("case", "train"), modes())
def test_model(case: str, train: bool) -> None:
    make_layers, batch = CASES[case]
    layers = 2 if train and case in DEEP else 1

    def make() -> nn.Module:
        return make_layers(layers)

    plain, model = build(make).train(train), compiled(make, verify="fast").train(train)
    outs = []
    for m in (plain, model):
        torch.manual_seed(3)
        outs.append(m(**batch))
        loss: Tensor = outs[-1].loss if "labels" in batch else outs[-1].logits.square().mean()
        loss.backward()
    assert_close(outs[1], outs[0])
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_causal_masks_of_llama_are_recognised() -> None:
    model = compiled(lambda: llama(2), verify="off")
    model(input_ids=IDS)
    assert model._session.latest.captured.num_causal == 2
    model(input_ids=IDS, attention_mask=MASK)
    assert model._session.latest.captured.num_causal == 0


def test_two_kinds_of_batches_and_evaluation() -> None:
    plain, model = build(llama), compiled(llama, verify="off")
    for m in (plain, model):
        m(input_ids=IDS, labels=LABELS).loss.backward()
        m.eval()
    with torch.no_grad():
        assert_close(model(input_ids=IDS, attention_mask=MASK), plain(input_ids=IDS, attention_mask=MASK))
    for m in (plain, model):
        m.train()
        m(input_ids=IDS[:, :7], labels=LABELS[:, :7]).loss.backward()
    assert_same_state(model, plain, exact=False)
    assert model._session.num_captures == 3


def test_gradient_into_logits_beside_a_loss() -> None:
    model = compiled(llama, verify="off")
    out = model(input_ids=IDS, labels=LABELS)
    with pytest.raises(BackwardError, match=r"output logits.*'logits'"):
        (out.loss + out.logits.mean()).backward()


def test_tuple_output() -> None:
    plain, model = build(llama), compiled(llama, verify="off")
    have, want = (m(input_ids=IDS, labels=LABELS, return_dict=False, use_cache=False) for m in (model, plain))
    assert type(have) is tuple and len(have) == len(want)
    for a, b in zip(tensors_of(have), tensors_of(want), strict=True):
        torch.testing.assert_close(a, b)


def test_config_changed_between_calls() -> None:
    plain, model = build(llama), compiled(llama, verify="off")
    for use_cache in (True, False):
        for m in (plain, model):
            m.config.use_cache = use_cache
        assert list(model(input_ids=IDS).keys()) == list(plain(input_ids=IDS).keys())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    plain, made = (build(lambda: llama_with_dropout(2)) for _ in range(2))
    import zcompile

    for m in (plain, made):
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model = zcompile.compile(made, backend="eager", verify="fast")
    for m in (plain, model):
        torch.manual_seed(3)
        m(input_ids=IDS, labels=LABELS).loss.backward()
    assert_same_state(model, plain, exact=False)


def test_batch_encoding() -> None:
    batch = transformers.BatchEncoding({"input_ids": IDS, "attention_mask": MASK})
    plain, model = build(llama), compiled(llama, verify="off")
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)


def test_cache_as_argument_is_refused() -> None:
    model = compiled(llama, verify="off").eval()
    cache = transformers.DynamicCache()
    with torch.no_grad(), pytest.raises(CaptureError, match="past_key_values"):
        model(input_ids=IDS, past_key_values=cache)


def test_default_experts_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"mixtral|moe|\.py:\d+"):
        compiled(lambda: mixtral(1, experts="eager"), verify="off")(input_ids=IDS)


def test_hidden_states_and_attentions() -> None:
    plain, model = build(llama), compiled(llama, verify="off")
    for options in ({"output_hidden_states": True}, {"output_attentions": True}):
        try:
            have = model(input_ids=IDS, **options)
        except CaptureError:
            continue
        assert_close(have, plain(input_ids=IDS, **options))
