"""The driver that Triton wants of a backend; it is never made, since it is never active."""

from typing import Any

from triton.backends.driver import DriverBase

from triton_cpu_interp.compiler import MESSAGE


class InterpretedDriver(DriverBase):
    """Never active, so that Triton does not pick it for launching."""

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise RuntimeError(MESSAGE)

    def get_current_target(self) -> Any:
        raise RuntimeError(MESSAGE)

    def get_active_torch_device(self) -> Any:
        raise RuntimeError(MESSAGE)

    def get_benchmarker(self) -> Any:
        raise RuntimeError(MESSAGE)
