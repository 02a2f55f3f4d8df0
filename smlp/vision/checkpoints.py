"""Build a model as timm's options say, and load timm's checkpoints into it with checks."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from timm.models import clean_state_dict
from timm.models import load_state_dict as read_safetensors
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from smlp.checkpoint.torch_file import OtherClassError, check_records, is_archive, read_structure
from smlp.errors import UserError, out_of_memory
from smlp.files import is_safetensors, regular_file
from smlp.vision.model import ImageModel
from smlp.vision.weights import can_change_resolution, change_resolution, from_timm, img_size_of

#: registers smlp_mixer_* and smlp_gmlp_*
OWN_MODELS = "smlp.vision.timm_models"
#: what timm.create_model takes itself, and would take for a setting: with the option to give instead
_TIMMS_OWN = {
    **{"in_chans": "; give --in-chans", "num_classes": "; give --num-classes", "pretrained": "; give --pretrained"},
    **{"drop_rate": "; give --drop", "drop_path_rate": "; give --drop-path"},
    **{"checkpoint_path": "; give --initial-checkpoint", "features_only": "", "pretrained_cfg": ""},
    **{"pretrained_cfg_overlay": "", "cache_dir": "", "scriptable": "", "exportable": "", "no_jit": ""},
}


@contextmanager
def safe_classes_kept() -> Iterator[None]:
    """Keep the classes that torch reads from checkpoints.

    ``torch.serialization.safe_globals``, which timm's readers use too, forbids on exit all that it allowed, even what
    others, such as fairseq's checkpoints, have allowed as well.
    """
    allowed = torch.serialization.get_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(allowed)


@safe_classes_kept()
def create_model(args: Namespace) -> nn.Module:
    """Return a model of timm, ours included, as the options say; its weights are random or timm's pretrained ones.

    ``--img-size`` also goes to the model, whose token MLPs have one weight for each position.

    Raises:
        UserError: there is no such model, it refuses a setting, or its patches do not divide the image.
    """
    for name in [OWN_MODELS, *(args.device_modules or ())]:
        if not name or name.startswith("."):
            raise UserError(f"--device-modules takes full names of modules, got {name!r}")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            raise UserError(f"--device-modules: there is no module {name}") from None
    if not timm.is_model(args.model):
        close = difflib.get_close_matches(args.model, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() names them all"
        raise UserError(f"--model {args.model}: timm has no such model; {hint}")
    settings = dict(args.model_kwargs)
    if own := [name for name in settings if name in _TIMMS_OWN]:
        raise UserError(f"--model-kwargs: {own[0]} does not go there{_TIMMS_OWN[own[0]]}")
    if args.img_size is not None:
        settings.setdefault("img_size", args.img_size)
    try:
        model = timm.create_model(
            args.model,
            pretrained=args.pretrained,
            in_chans=args.in_chans,
            num_classes=args.num_classes,
            drop_rate=args.drop,
            drop_path_rate=args.drop_path,
            **settings,
        )
    except UserError:
        raise
    except (TypeError, AssertionError, ValueError, RuntimeError, LookupError, ArithmeticError) as error:
        reason = out_of_memory(error) or str(error).partition("\n")[0]  # torch adds its C++ stack
        raise UserError(f"--model {args.model} does not take these settings: {reason}") from None
    _check_patches(model, args)
    return model


def _check_patches(model: nn.Module, args: Namespace) -> None:
    """Raise UserError if patches do not cover the image; timm would leave out its last rows and columns."""
    stem = getattr(model, "patch_embed", None) or getattr(model, "stem", None)
    patch, size = getattr(stem, "patch_size", None), getattr(stem, "img_size", None)
    if not isinstance(patch, tuple) or not isinstance(size, tuple):  # our own models have checked it
        return
    if any(pixels % side for pixels, side in zip(size, patch, strict=True)):
        raise UserError(
            f"--img-size {size[0]}: {args.model} has patches of {patch[0]} x {patch[1]} pixels, which do not divide it"
        )


def read_checkpoint(path: str, is_mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint of timm or a bare state dict; no code from the file is run.

    Args:
        path: of the file.
        is_mapped: leave the tensors of an archive in the file.

    Returns:
        ``state_dict``, and what else a training checkpoint holds: ``args``, ``epoch``, ``optimizer``,
        ``state_dict_ema``.

    Raises:
        UserError: the file is missing, damaged, or something else.
    """
    file = regular_file(path, "checkpoint")
    check_records(file)
    with suppress(OtherClassError):  # torch says what to do
        if is_archive(file):
            read_structure(file)  # which bounds memory
    try:
        if is_safetensors(file):
            return {"state_dict": read_safetensors(str(file))}
        with safe_classes_kept(), torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # damaged pickles raise whatever their bytes lead to
        reason = str(error).partition("\n")[0].partition("Weights only load failed")[0]  # and advice that is not safe
        reason = reason and f": {reason}"
        raise UserError(f"{path} is not a checkpoint of timm, or is damaged{reason}") from None
    state = content.get("state_dict", content.get("model")) if isinstance(content, dict) else None
    if state is None:
        content = {"state_dict": content}
        state = content["state_dict"]
    if not _are_weights(state):
        raise UserError(f"{path} holds no weights: a checkpoint of timm has a state_dict")
    averaged = content.get("state_dict_ema")
    if averaged is not None and not (averaged and _are_weights(averaged)):
        raise UserError(f"{path} is damaged: its state_dict_ema holds no weights")
    content = {**content, "state_dict": state}
    names = [name for name in ("state_dict", "state_dict_ema") if content.get(name) is not None]
    weights = {name: {key: value.detach() for key, value in content[name].items()} for name in names}
    for key, value in ((key, value) for own in weights.values() for key, value in own.items()):
        if not _is_plain(value):
            raise UserError(f"{path}: {key:.80} is sparse, quantized, complex, expanded or without values")
    return {**content, **{name: clean_state_dict(own) for name, own in weights.items()}}


def _are_weights(state: Any) -> bool:
    return isinstance(state, dict) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    )


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor has a value of its own in memory for each element."""
    if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_complex():
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def image_config(args: Namespace, model: nn.Module) -> dict[str, Any]:
    """Return timm's configuration of a model's images; timm itself forgets ``--in-chans`` if no size is given."""
    config = resolve_data_config(vars(args), model=model)
    if args.in_chans is not None:
        config["input_size"] = (args.in_chans, *config["input_size"][1:])
    return config


def at_resolution(checkpoint: dict[str, Any], path: str, args: Namespace, use_ema: bool = True) -> dict[str, Any]:
    """Return a checkpoint whose weights are converted to ``args.img_size``, as the papers do before fine-tuning.

    Args:
        checkpoint: from :func:`read_checkpoint`, at ``path``; its weights over tokens say at which size it was trained.
        args: what the model is to be; ``model_kwargs`` gets the hidden width over tokens of the larger Mixer, and
            loses the size of the training.
        use_ema: convert the moving average if there is one, instead of the weights themselves.

    Raises:
        UserError: no size is given, the model is not ours, or the sizes do not fit (as
            :func:`smlp.vision.weights.change_resolution`).
    """
    if args.img_size is None:
        raise UserError("--change-resolution needs --img-size, the size to change to")
    args.model_kwargs = {name: value for name, value in args.model_kwargs.items() if name != "img_size"}
    model = _outline(args, checkpoint, path)
    if not isinstance(model, ImageModel):
        raise UserError(f"--change-resolution is for smlp_mixer_* and smlp_gmlp_*, not for timm's {args.model}")
    averaged = checkpoint.get("state_dict_ema") if use_ema else None
    trained = from_timm(averaged or checkpoint["state_dict"])
    config = model.config
    if (size := img_size_of(trained, config.patch_size)) is not None:
        config = dataclasses.replace(config, img_size=size)
    state, config = change_resolution(trained, config, args.img_size)
    if config.block == "mixer":
        args.model_kwargs = {**args.model_kwargs, "token_dim": config.token_dim}
    return {"state_dict": state}


#: in names of settings that make a model deep
_DEPTH = re.compile("depth|layers|blocks|^(block_config|stages|k_sec)$")
_MOST_PARAMETERS = 20_000  # of any model: timm's have fewer than 5,000


def _numbers(value: Any) -> Iterator[float]:
    """Yield those in a value, and in lists of lists."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, int | float):
        yield value


def _outline(args: Namespace, checkpoint: dict[str, Any], path: str) -> nn.Module:
    """Return a model as the options say, without weights: its tensors take no memory, however large they are.

    Raises:
        UserError: they are many more than those of its checkpoint.
    """
    made, most = 0, len(checkpoint["state_dict"])
    for name, value in ((name, value) for name, value in args.model_kwargs.items() if _DEPTH.search(name)):
        if not sum(map(abs, _numbers(value))) <= most:  # which NaN is not
            raise UserError(f"{path} does not fit {args.model}: {name} is {value!r:.60}, and it has {most} tensors")

    def count(*added: Any) -> None:
        nonlocal made
        made += 1
        if made > max(_MOST_PARAMETERS, 3 * most):  # some are replaced, as those of heads
            raise UserError(f"{path} does not fit {args.model}: it has {most} tensors, a model of its settings more")

    counting = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            return create_model(Namespace(**{**vars(args), "pretrained": False}))
    finally:
        counting.remove()


def check_fit(checkpoint: dict[str, Any], path: str, args: Namespace, use_ema: bool = True) -> None:
    """Check that weights fit a model of the sizes that their checkpoint records, before it is made.

    Raises:
        UserError: they do not.
    """
    _fitting(_outline(args, checkpoint, path), checkpoint, path, args, use_ema)


def load_weights(
    model: nn.Module,
    checkpoint: dict[str, Any],
    path: str,
    args: Namespace,
    use_ema: bool = True,
    new_head: bool = False,
) -> None:
    """Load the weights of a checkpoint, averaged ones first; ours also take those of timm's models of the same kind.

    Args:
        model: of any number of classes.
        checkpoint: from :func:`read_checkpoint`.
        path: for messages.
        args: with ``model`` and ``img_size``, for messages.
        use_ema: take the moving average if the checkpoint has one.
        new_head: keep the model's own head if the checkpoint's is of another number of classes, for fine-tuning.

    Raises:
        UserError: the weights do not fit, or are not finite.
    """
    state = _fitting(model, checkpoint, path, args, use_ema, new_head)
    if infinite := [name for name, value in state.items() if not torch.isfinite(value).all()]:
        raise UserError(f"{infinite[0]} of {path} is not finite: its training has diverged, or the file is damaged")
    model.load_state_dict(state)


def _fitting(
    model: nn.Module,
    checkpoint: dict[str, Any],
    path: str,
    args: Namespace,
    use_ema: bool,
    new_head: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the weights that the model is to load."""
    averaged = checkpoint.get("state_dict_ema") if use_ema else None
    state, own = dict(averaged or checkpoint["state_dict"]), model.state_dict()
    if isinstance(model, ImageModel):
        state = from_timm(state)
    named = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or "head"
    heads = tuple(f"{head}." for head in ([named] if isinstance(named, str) else named))  # a distilled model has two
    for name in [name for name in own if new_head and name.startswith(heads)]:
        if name in state and state[name].shape != own[name].shape:
            print(f"{name}: {path} has another number of classes, so the head is initialised anew", flush=True)
            state[name] = own[name]
    missing, other = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or other:
        what = f"lacks {missing[0]}" if missing else f"has {other[0]}, which the model lacks"
        raise UserError(f"{path} belongs to another model than {args.model}: it {what}")
    if misfits := [name for name, tensor in own.items() if tensor.shape != state[name].shape]:
        trained, name, converts = getattr(checkpoint.get("args"), "img_size", None), misfits[0], False
        if isinstance(model, ImageModel) and not getattr(args, "change_resolution", True):
            converts = can_change_resolution(model.config)
        if trained is not None and args.img_size not in (None, trained):
            what = f"was trained on images of {trained} pixels, --img-size is {args.img_size}:"
            remedies = "give the size of its training", "give --change-resolution to convert its weights"
        else:
            shapes = tuple(state[name].shape), tuple(own[name].shape)
            what = f"does not fit {args.model}: {name} has the shape {shapes[0]}, the model's is {shapes[1]};"
            remedies = (
                "give the --model-kwargs of its training",
                "if only the image size differs, give --change-resolution",
            )
        raise UserError(f"{path} {what} {remedies[converts]}")
    for name, tensor in own.items():
        if tensor.is_floating_point() and not state[name].is_floating_point():
            raise UserError(f"{path} does not fit {args.model}: {name} has type {state[name].dtype}, not floats")
    return state


def trained_with(checkpoint: dict[str, Any], path: str | Path) -> Namespace:
    """Return the options of the training that wrote a checkpoint.

    Raises:
        UserError: it has none.
    """
    args = checkpoint.get("args")
    if "cfg" in checkpoint:
        raise UserError(f"{path} is a checkpoint of fairseq-train, not of an image model")
    if not isinstance(args, Namespace) or vars(args).get("model") is None:
        raise UserError(f"{path} does not say which model it holds: name it with --model")
    check_recorded(args, path)
    return args


def check_recorded(args: Namespace, path: str | Path) -> None:
    """Check that the recorded options of a training can be such options.

    Raises:
        UserError: a value cannot be one.
    """
    for name, fits in TAKEN_OVER.items():
        value = getattr(args, name, None)
        if not fits(value) and (value is not None or (name == "model_kwargs" and hasattr(args, name))):
            raise UserError(f"{path} is damaged: it was trained with --{name.replace('_', '-')} {value!r:.99}")


def _are(kinds: type | tuple[type, ...]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, list | tuple) and all(isinstance(value, kinds) for value in values)


_MOST_PIXELS = 1 << 13  # of a side; every picture gets that size
#: what an evaluation takes over from a training unless it is given, and whether a value can be such an option
TAKEN_OVER: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, str),
    "model_kwargs": lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value),
    "img_size": lambda value: isinstance(value, int) and value <= _MOST_PIXELS,
    "input_size": lambda value: _are(int)(value) and len(value) == 3 and max(value) <= _MOST_PIXELS,
    "num_classes": lambda value: isinstance(value, int),
    "in_chans": lambda value: isinstance(value, int),
    "classes": _are(str),
    "mean": _are((int, float)),
    "std": _are((int, float)),
    "crop_pct": lambda value: isinstance(value, int | float) and 0.1 <= value <= 10,
    "interpolation": lambda value: isinstance(value, str),
}
