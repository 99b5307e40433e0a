"""The compiler that Triton wants of a backend; it is never called."""

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget, Language

MESSAGE = "this backend only names the CPU; run with TRITON_INTERPRET=1"


class InterpretedBackend(BaseBackend):
    """Refuses everything but its own name."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "cpu-interpreted"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise RuntimeError(MESSAGE)

    def add_stages(self, stages: dict[str, Any], options: object, language: Language) -> None:
        raise RuntimeError(MESSAGE)

    def load_dialects(self, context: Any) -> None:
        raise RuntimeError(MESSAGE)

    def get_module_map(self) -> dict[str, Any]:
        raise RuntimeError(MESSAGE)
