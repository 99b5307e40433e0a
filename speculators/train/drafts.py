"""The draft of a training: built for the verifier, or continued from an earlier draft."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from speculators.config import SpeculatorModelConfig, VerifierConfig
from speculators.convert.mtp_names import MTP_PREFIX, draft_tensors
from speculators.convert.source import ForeignCheckpoint
from speculators.data.vocabulary import VocabularyMapping
from speculators.errors import ConfigError, SpeculatorsError, VerifierError
from speculators.losses import LossConfig
from speculators.models import SpeculatorModel
from speculators.models.checkpoint_files import has_weights
from speculators.models.draft_config import build_draft_config, default_layer_ids
from speculators.models.family import DraftModelConfig
from speculators.models.mtp import DECODER_KINDS, build_mtp_decoder
from speculators.models.saving import EMBEDDING, HEAD
from speculators.models.verifier_weights import text_config
from speculators.models.warm_start import start_from_verifier
from speculators.train.checkpoints import disk_is_full
from speculators.train.config.derived import derive
from speculators.train.config.model import TrainConfig
from speculators.train.families import CHECKPOINT_KEYS, decay_length, family_of

__all__ = [
    "DraftInputs",
    "brings_weights",
    "build_draft",
    "build_loss_config",
    "checkpoint_config",
    "planned_config",
    "save_draft",
    "wanted_final_state",
]


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What a draft's config takes from the verifier and the data.

    :param mask_token_id: None for a family without a mask token.
    :param final_state: of the source's last states.
    :param training_answers: how the data's answers were made, for the checkpoint.
    :param measure_scales: :func:`~speculators.verifiers.query_keys.query_key_scales` of layers, by indices and head size.
    """

    verifier_path: str
    verifier_config: PretrainedConfig
    mask_token_id: int | None
    final_state: str
    training_answers: dict[str, Any] | None = None
    measure_scales: Callable[[Sequence[int], int], list[tuple[float, float]] | None] | None = None


def checkpoint_config(config: TrainConfig) -> DraftModelConfig | None:
    """Config of ``--from-pretrained``; None when a new draft is asked for.

    :raises ConfigError: for another family, or a given setting that contradicts the checkpoint.
    """
    path = config.draft.from_pretrained
    if not path:
        return None
    found = SpeculatorModelConfig.from_pretrained(path)
    if found.speculators_model_type != config.speculator_type or not isinstance(found, DraftModelConfig):
        raise ConfigError(
            f"--from-pretrained {path} is a {found.speculators_model_type} draft; train it with "
            f"--speculator-type {found.speculators_model_type}"
        )
    if brings_weights(path) and config.draft.d2t_path is not None:
        raise ConfigError(f"--from-pretrained {path} brings its own vocabulary; drop --d2t-path and --t2d-path")
    flat, own_settings = config.flatten(), config.own_settings()
    for name, key in CHECKPOINT_KEYS.items():
        if not config.given(name) or flat[name] is None or name not in own_settings:
            continue
        if hasattr(found, key) and flat[name] != getattr(found, key):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {flat[name]} contradicts the draft in {path}, which has {getattr(found, key)}; drop it")
    return found


def brings_weights(draft: str) -> bool:
    """Whether ``--from-pretrained`` is more than a config: a folder with weights, or a name to be looked up."""
    return not Path(draft).is_dir() or has_weights(draft)


def build_draft(
    config: TrainConfig, inputs: DraftInputs, mapping: VocabularyMapping | None, start: DraftModelConfig | None = None
) -> Any:
    """The draft to train, in float32 on the CPU, its frozen parts taken from the verifier.

    Fresh weights are a pure function of the seed and the shape.

    :param start: config of ``--from-pretrained``, as :func:`checkpoint_config` gives it.
    :returns: a :class:`~speculators.models.SpeculatorModel`.
    """
    t2d = torch.from_numpy(mapping.t2d) if mapping is not None else None
    d2t = torch.from_numpy(mapping.d2t) if mapping is not None else None
    values = _run_values(config, inputs)
    if start is None:
        draft_config = _new_config(config, inputs, mapping, values)
    else:
        draft_config = start.copy(**values)
        _point_at_verifier(draft_config, inputs)
        if brings_weights(config.draft.from_pretrained):
            model: Any = SpeculatorModel.from_pretrained(
                config.draft.from_pretrained, config=draft_config, verifier=inputs.verifier_path, t2d=t2d, d2t=d2t
            )
            # The frozen parts are this verifier's, also where the checkpoint carries an earlier one's.
            model.load_verifier_weights(inputs.verifier_path, (HEAD,) if model.trains_embeddings else (EMBEDDING, HEAD))
            return model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        fresh: Any = SpeculatorModel.from_verifier(draft_config, t2d=t2d, d2t=d2t, verifier=inputs.verifier_path)
        if family_of(config).of_verifier:
            _start_from_mtp_layer(fresh, config, inputs)
        elif config.draft.draft_init == "verifier" and family_of(config).blocks:
            scales = _query_key_scales(fresh, inputs)
            start_from_verifier(fresh, inputs.verifier_path, scales, inputs.verifier_config)
    return fresh.train()


def _start_from_mtp_layer(model: Any, config: TrainConfig, inputs: DraftInputs) -> None:
    """Copy the MTP layer that the verifier comes with, unless ``--draft-init random`` is given.

    :raises ConfigError: ``--draft-init verifier`` is given and there is none.
    :raises VerifierError: it has other tensors than the draft.
    """
    if config.given("draft_init") and config.draft.draft_init == "random":
        return
    verifier = ForeignCheckpoint(inputs.verifier_path)
    names = [name for name in verifier.names if name.startswith(MTP_PREFIX)]
    if not names or text_config(inputs.verifier_config).model_type not in DECODER_KINDS:
        if config.given("draft_init"):
            raise ConfigError("--draft-init verifier: the verifier comes without an MTP layer to start from; drop it")
        warnings.warn("the verifier comes without an MTP layer: the draft starts from random values", UserWarning, stacklevel=4)
        return
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("mtp_layers.")}
    tensors = draft_tensors(verifier.tensors(names))
    wrong = sorted(name for name in own.keys() | tensors.keys() if name not in own or name not in tensors)
    wrong += sorted(name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape)
    if wrong:
        raise VerifierError(
            f"the verifier's MTP layer does not fit its config ({wrong[0]}); use an unquantised copy, or --draft-init random"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def _query_key_scales(model: Any, inputs: DraftInputs) -> list[tuple[float, float]] | None:
    """Of the verifier's last layers, those that ``model``'s start from."""
    last = text_config(inputs.verifier_config).num_hidden_layers
    layers = range(last - len(model.layers), last)
    if inputs.measure_scales is None or layers[0] < 0:
        return None
    return inputs.measure_scales(layers, model.layers[0].self_attn.head_dim)


def _run_values(config: TrainConfig, inputs: DraftInputs) -> dict[str, Any]:
    """Keys of the draft's config that tell of this training."""
    values: dict[str, Any] = {"final_state": inputs.final_state, "training_answers": inputs.training_answers}
    if config.speculator_type == "dspark":
        values |= {"confidence_target": config.loss.target_support, "confidence_detach": config.dspark.confidence_detach}
    return values


def _new_config(
    config: TrainConfig,
    inputs: DraftInputs,
    mapping: VocabularyMapping | None,
    values: dict[str, Any],
    record: VerifierConfig | None = None,
) -> DraftModelConfig:
    family, verifier_layers = family_of(config), text_config(inputs.verifier_config).num_hidden_layers
    layer_ids = [] if family.of_verifier else config.draft.target_layer_ids
    if layer_ids is None:
        layer_ids = default_layer_ids(verifier_layers)
        warnings.warn(
            f"--target-layer-ids not given: capturing {layer_ids} of {verifier_layers} layers", UserWarning, stacklevel=3
        )
    values = family.values(config, layer_ids) | values
    if mapping is not None:
        values["draft_vocab_size"] = mapping.draft_vocab_size
    if family.masked:
        values["mask_token_id"] = inputs.mask_token_id
    decoder = build_mtp_decoder(inputs.verifier_config) if family.of_verifier else _decoder_config(config, inputs)
    verifier = record or _verifier_record(inputs)
    return family.config_class.build(decoder, verifier, num_verifier_layers=verifier_layers, **values)


def _decoder_config(config: TrainConfig, inputs: DraftInputs) -> PretrainedConfig:
    """The draft's decoder config: the verifier's shape, or that of ``--draft-config`` where a flag does not say otherwise."""
    derived, draft = derive(config), config.draft
    shape, num_layers, act = inputs.verifier_config, derived.num_layers, derived.draft_hidden_act
    if draft.draft_config:
        shape = _read_decoder_config(draft.draft_config, config.verifier.trust_remote_code)
        wanted, found = text_config(inputs.verifier_config).hidden_size, text_config(shape).hidden_size
        if wanted != found:
            source = draft.draft_config if isinstance(draft.draft_config, str) else "itself"
            raise ConfigError(f"--draft-config {source} has hidden_size {found}, but the verifier's is {wanted}")
        num_layers = draft.num_layers or text_config(shape).num_hidden_layers
        act = derived.draft_hidden_act if config.given("draft_hidden_act") else None
    # Engines serve latent attention over the whole context only.
    unwindowed = derived.draft_arch == "deepseek_v3" and not config.given("sliding_window")
    decoder = build_draft_config(
        shape,
        num_layers=num_layers,
        draft_arch=derived.draft_arch,
        draft_hidden_act=act,
        sliding_window=0 if unwindowed else draft.sliding_window,
        full_attention_indices=draft.full_attention_indices,
        mrope_full_head=draft.draft_mrope_full_head_hack,
    )
    decoder.vocab_size = text_config(inputs.verifier_config).vocab_size
    return decoder


def _read_decoder_config(source: str | dict[str, Any], trust_remote_code: bool) -> PretrainedConfig:
    try:
        if isinstance(source, str) and not source.endswith(".json"):
            return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        values = dict(source) if isinstance(source, dict) else PretrainedConfig._dict_from_json_file(source)
        return CONFIG_MAPPING[values.pop("model_type", "qwen3")](**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the last two: JSON that is no object
        raise ConfigError(
            f"--draft-config {source}: no readable model config; give a folder, a JSON file or JSON with model_type"
        ) from None


def planned_config(config: TrainConfig, verifier_config: PretrainedConfig) -> DraftModelConfig:
    """Config of the draft that a training with these settings would make, from the verifier's config alone.

    :raises ConfigError: a setting that the data would answer is not given, or values do not fit.
    """
    draft = config.draft
    if draft.mask_token_id is None and family_of(config).masked:
        raise ConfigError("the mask token is chosen by the verifier's tokenizer; give --mask-token-id to plan without it")
    inputs = DraftInputs(
        config.verifier.verifier_name_or_path, verifier_config, draft.mask_token_id, wanted_final_state(config) or "post_norm"
    )
    values = _run_values(config, inputs)
    if draft.draft_vocab_size is not None:
        values["draft_vocab_size"] = draft.draft_vocab_size
    record = VerifierConfig.from_config(verifier_config, config.verifier.verifier_name_or_path)
    return _new_config(config, inputs, None, values, record)


def wanted_final_state(config: TrainConfig) -> Literal["pre_norm", "post_norm"] | None:
    """``--final-state``, or what ``--apply-verifier-norm`` implies; None when neither was given."""
    data = config.data
    if data.final_state is not None:
        return data.final_state
    if data.apply_verifier_norm is not None:
        return "pre_norm" if data.apply_verifier_norm else "post_norm"
    return None


def _verifier_record(inputs: DraftInputs) -> VerifierConfig:
    return VerifierConfig.from_pretrained(inputs.verifier_path)


def _point_at_verifier(draft_config: DraftModelConfig, inputs: DraftInputs) -> None:
    """Name this training's verifier in a config that came from a checkpoint."""
    decoder, text = draft_config.transformer_layer_config, text_config(inputs.verifier_config)
    if (decoder.hidden_size, decoder.vocab_size) != (text.hidden_size, text.vocab_size):
        raise ConfigError(
            f"the draft of --from-pretrained is for a verifier of hidden size {decoder.hidden_size} and {decoder.vocab_size} "
            f"ids, but this one has {text.hidden_size} and {text.vocab_size}; use the verifier it was made for"
        )
    draft_config.check_layers(text.num_hidden_layers)
    if draft_config.speculators_config is not None:
        draft_config.speculators_config.verifier = _verifier_record(inputs)


def build_loss_config(config: TrainConfig) -> LossConfig:
    """The loss of the settings' family."""
    derived = derive(config)
    return LossConfig(
        loss_fn=derived.loss_fn,
        gamma=decay_length(config),
        normalization=config.loss.loss_normalization,
        ce_label=config.loss.ce_label,
        target_support=config.loss.target_support,
        confidence_alpha=config.dspark.confidence_head_alpha,
        per_position_weight=derived.per_position_loss_weight,
        dpace_alpha=config.dflash.dpace_alpha,
    )


def save_draft(model: Any, folder: Path, dtype: torch.dtype, include_embeddings: bool = False) -> None:
    """Write the draft's config and weights into ``folder``.

    :param include_embeddings: the verifier's embeddings and head, too.
    :raises SpeculatorsError: when the disk is full; the files that were there stay.
    """
    try:
        model.save_pretrained(folder, dtype=dtype, include_embeddings=include_embeddings)
    except OSError as error:
        if not disk_is_full(error):
            raise
        raise SpeculatorsError(f"the disk is full while saving the draft to {folder}; free some space and run again") from error
