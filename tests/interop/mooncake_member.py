"""Beside Mooncake's wheel: ``mooncake_member.py write|read MASTER FOLDER [PID]``. The writer stays until its input closes."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

SETTINGS = {"mooncake_global_segment_gib": 0.0625, "mooncake_local_buffer_gib": 0.0625}
STATES = torch.randn(300, 4, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
TENSORS = {"hidden_states": STATES, "token_ids": torch.arange(300)}


def write(master: str, folder: Path) -> None:
    from speculators_vllm_connector.mooncake import MooncakeTransport

    transport = MooncakeTransport({**SETTINGS, "mooncake_master": master}, "engine", {"dtype": "bfloat16"})
    transport.open()
    shapes = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    answers = {}
    for name in ("good", "failed", "missing", "lies"):
        ticket = transport.ticket(name)
        answers[name] = transport.announcement(ticket, shapes)
        if name == "good":
            transport.deliver(ticket, TENSORS, {})
        elif name == "failed":
            transport.fail(ticket, "the disk is\nfull")
        elif name == "lies":
            transport.deliver(ticket, {name: tensor[:9] for name, tensor in TENSORS.items()}, {})
    (folder / "part").write_text(json.dumps(answers))
    (folder / "part").rename(folder / "answers.json")
    sys.stdin.read()


def read(master: str, folder: Path, master_pid: int) -> None:
    from speculators.errors import VerifierError
    from speculators.verifiers.vllm.mooncake import MooncakeReader
    from speculators.verifiers.vllm.readers import BadStates
    from speculators.verifiers.vllm.settings import MooncakeSettings

    reader = MooncakeReader(MooncakeSettings(master=master, global_segment_gib=0.0625, local_buffer_gib=0.0625))
    answers, found = json.loads((folder / "answers.json").read_text()), {}

    def tell(name: str, params: dict) -> None:
        try:
            got = reader.read(params, 0.5, 1 << 24)
            equal = all(torch.equal(got.tensors[key], TENSORS[key]) for key in TENSORS) and len(got.tensors) == len(TENSORS)
            found[name] = f"equal {got.record['dtype']}" if equal else "other tensors"
        except (BadStates, VerifierError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    for name, params in answers.items():
        tell(name, params)
    reader.forget(answers["good"])
    tell("forgotten", answers["good"])
    os.kill(master_pid, signal.SIGKILL)
    time.sleep(0.5)
    began = time.monotonic()
    tell("dead", answers["good"])
    found["seconds"] = time.monotonic() - began
    (folder / "found.json").write_text(json.dumps(found))
    os._exit(0)  # without waiting for the master that is gone


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], Path(sys.argv[3]))
    else:
        read(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
