"""Chain drafts: the training forward gives, slot by slot, what the drafter computes from its caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, PretrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from speculators.batch import PackedBatch
from speculators.config import VerifierConfig
from speculators.errors import ConfigError
from speculators.models import chain_drafter
from speculators.models.attention import causal_attention
from speculators.models.draft_config import build_draft_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.layers import LatentAttention, RotaryEmbedding
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.sampling import SamplingParams
from tests.models.small import HIDDEN, LAYER_IDS, VOCAB, draft_config, packed_row, verifier_config

STEPS = 4
LENGTHS = [12, 9]
ANCHORS = [1, 3, 7, 8, 14, 16]


def latent_verifier(**values: Any) -> DeepseekV3Config:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "initializer_range": 0.5,
    }
    return DeepseekV3Config(**(shape | values))


def chain_model(family: str, arch: str = "llama", *, window: int = 0, layers: int = 2, **values: Any) -> Any:
    verifier: PretrainedConfig = latent_verifier() if arch == "deepseek_v3" else verifier_config()
    decoder = build_draft_config(verifier, num_layers=layers, draft_arch=arch, sliding_window=window)
    defaults: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": list(LAYER_IDS), "draft_vocab_size": VOCAB}
    record = VerifierConfig(name_or_path=None, architectures=[])
    torch.manual_seed(0)
    if family == "eagle3":
        config = Eagle3SpeculatorConfig.build(decoder, record, speculative_tokens=STEPS, **(defaults | values))
        return Eagle3DraftModel(config).double().eval()
    defaults["mask_token_id"] = 3
    parallel = PEagleSpeculatorConfig.build(decoder, record, speculative_tokens=STEPS, **(defaults | values))
    return PEagleDraftModel(parallel).double().eval()


def served_logits(model: Any, row: Any, anchor: int, start: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Logits ``[STEPS, D]`` of the drafter at one anchor, whose drawn tokens are replaced by the row's own."""
    drafter, rows = model.drafter(), []
    forced = row.input_ids[anchor + 1 : anchor + 1 + STEPS]

    class Teacher(chain_drafter.DraftBuilder):
        def add(self, logits: torch.Tensor) -> torch.Tensor:
            rows.append(logits)
            super().add(logits)
            place = min(len(rows), len(forced)) - 1
            return forced[place : place + 1]

    monkeypatch.setattr(chain_drafter, "DraftBuilder", Teacher)
    drafter.start(1)
    for span in (
        slice(start, start + 1),
        slice(start + 1, max(start + 1, anchor - 2)),
        slice(max(start + 1, anchor - 2), anchor),
    ):
        drafter.extend([row.input_ids[span]], [row.features[span]])
    assert drafter.context_length(0) == anchor - start
    drafter.propose([int(row.input_ids[anchor])], STEPS, SamplingParams(temperature=0))
    return torch.cat(rows)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "deepseek_v3"])
@pytest.mark.parametrize("family", ["eagle3", "peagle"])
def test_training_computes_what_serving_does(family: str, arch: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain_model(family, arch, window=window, norm_before_fc=True, norm_before_residual=True)
    row = packed_row(LENGTHS, ANCHORS, padding=2)
    hidden = model.draft_hidden(row)
    torch.testing.assert_close(model.draft_hidden(row, attn_impl="reference"), hidden, rtol=0, atol=1e-10)
    trained = model.lm_head(hidden)
    for place, anchor in enumerate(ANCHORS):
        start, end = (0, LENGTHS[0]) if anchor < LENGTHS[0] else (LENGTHS[0], sum(LENGTHS))
        served = served_logits(model, row, anchor, start, monkeypatch)
        # A slot whose input token lies past the document reads nothing that counts.
        slots = min(STEPS, end - anchor)
        torch.testing.assert_close(served[:slots], trained[place, :slots], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": True},
    ],
)
def test_each_option_changes_the_draft_and_keeps_training_and_serving_equal(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, changed = chain_model("eagle3"), chain_model("eagle3", **options)
    with torch.no_grad():
        for model in (plain, changed):
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    generator = torch.Generator().manual_seed(sum(name.encode()))
                    parameter.uniform_(0.5, 1.5, generator=generator)
        changed.load_state_dict(plain.state_dict(), strict=False)
    row = packed_row(LENGTHS, ANCHORS)
    hidden = changed.draft_hidden(row)
    assert not torch.allclose(hidden, plain.draft_hidden(row), atol=1e-3)
    served = served_logits(changed, row, 7, 0, monkeypatch)
    torch.testing.assert_close(served, changed.lm_head(hidden)[ANCHORS.index(7)], rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["eagle3", "peagle"])
def test_documents_do_not_see_one_another(family: str) -> None:
    model = chain_model(family)
    together = packed_row(LENGTHS, ANCHORS)
    hidden = model.draft_hidden(together)
    alone = packed_row(LENGTHS, ANCHORS)
    alone.input_ids = alone.input_ids.clone()
    alone.input_ids[: LENGTHS[0]] = 0
    alone.features = alone.features.clone()
    alone.features[: LENGTHS[0]] = 0
    torch.testing.assert_close(model.draft_hidden(alone)[-2:], hidden[-2:], rtol=0, atol=1e-12)


def test_fewer_slots_are_a_prefix_of_more() -> None:
    for family in ("eagle3", "peagle"):
        model, row = chain_model(family), packed_row(LENGTHS, ANCHORS)
        torch.testing.assert_close(model.draft_hidden(row, 2), model.draft_hidden(row)[:, :2], rtol=0, atol=1e-12)


def test_a_recurrent_chain_drafts_past_its_steps_and_a_parallel_one_does_not() -> None:
    row = packed_row(LENGTHS, ANCHORS)
    drafts = {}
    for family in ("eagle3", "peagle"):
        drafter = chain_model(family).drafter()
        drafter.start(1)
        drafter.extend([row.input_ids[:5]], [row.features[:5]])
        drafts[family] = drafter
    eight = drafts["eagle3"].propose([1], 8, SamplingParams(temperature=0))[0]
    four = drafts["eagle3"].propose([1], 4, SamplingParams(temperature=0))[0]
    assert eight.tokens[:4].tolist() == four.tokens.tolist()
    with pytest.raises(ValueError, match="ask for 1 to 4"):
        drafts["peagle"].propose([1], 5, SamplingParams(temperature=0))


@pytest.mark.parametrize("rope", [None, {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}])
@pytest.mark.parametrize("query_rank", [8, None])
def test_latent_attention_is_that_of_transformers(query_rank: int | None, rope: dict[str, Any] | None) -> None:
    if rope is not None:
        rope = rope | {"rope_theta": 10000.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
    config = latent_verifier(q_lora_rank=query_rank, rope_parameters=rope)
    config._attn_implementation = "eager"
    theirs, ours = DeepseekV3Attention(config, 0).double(), LatentAttention(config).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
    ours.load_state_dict(theirs.state_dict())
    states, positions = torch.randn(1, 6, HIDDEN, dtype=torch.float64), torch.arange(3, 9)[None]
    mask = torch.full((6, 6), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    rotation = DeepseekV3RotaryEmbedding(config)(states, positions)
    expected = theirs(states, rotation, mask)[0]
    own = RotaryEmbedding(config)(positions[0], torch.float64)
    keys, values = ours.keys_values(states[0], own)
    documents = torch.zeros(6, dtype=torch.long)
    found = ours.output(causal_attention(ours.queries(states[0], own), keys, values, documents))
    # Theirs computes angles in float32.
    torch.testing.assert_close(found, expected[0], rtol=0, atol=2e-5)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="Qwen3-style layers, not llama"):
        draft_config("dspark", decoder={"draft_arch": "llama"})
    with pytest.raises(ConfigError, match="exclude each other"):
        chain_model("eagle3", norm_before_fc=True, fc_norm=True)
    with pytest.raises(ConfigError, match="mask_token_id"):
        chain_model("peagle", mask_token_id=VOCAB)
    with pytest.raises(ConfigError, match="latent attention from the verifier"):
        build_draft_config(verifier_config(), draft_arch="deepseek_v3")


@pytest.mark.parametrize("family", ["eagle3", "peagle"])
def test_a_row_without_documents_gives_no_states_but_a_graph(family: str) -> None:
    model = chain_model(family).train()
    hidden = model.draft_hidden(PackedBatch.empty(len(LAYER_IDS), HIDDEN))
    assert hidden.shape == (0, STEPS, HIDDEN)
    hidden.sum().backward()


@pytest.mark.parametrize("family", ["eagle3", "peagle"])
def test_recomputed_activations_give_the_same_gradients(family: str) -> None:
    gradients = []
    for recomputed in (False, True):
        model = chain_model(family).train()
        model.gradient_checkpointing = recomputed
        model.draft_hidden(packed_row(LENGTHS, ANCHORS)).square().sum().backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-12)
