"""What the Triton kernels need of each chip: python -m benchmarks.triton_resources

Needs no GPU. The kernels' own launchers are called with tensors of real models' shapes that have
no storage; a driver that stands in for the GPU's notes every launch instead of running it, and
each is compiled ahead of time for every target. The table shows registers and spilled registers
of a thread, shared memory of a program, and the matrix instruction that the compiler chose.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource

from benchmarks.triton_cases import CASES
from pagefleet_kernels.triton_tiling import Chip


@dataclass(frozen=True)
class Machine:
    """A target of the compiler, the chip behind it, and the shared memory a program may have."""

    target: GPUTarget
    chip: Chip
    shared_limit: int
    matrix_instructions: tuple[str, ...]


MACHINES = {
    "cuda:80": Machine(GPUTarget("cuda", 80, 32), Chip(108, False, 5), 163 * 1024, ("mma.sync",)),
    "cuda:90": Machine(
        GPUTarget("cuda", 90, 32), Chip(132, True, 5, True), 227 * 1024, ("wgmma.mma", "mma.sync")
    ),
    "cuda:100": Machine(
        GPUTarget("cuda", 100, 32),
        Chip(148, True, 5, True),
        227 * 1024,
        ("tcgen05.mma", "mma.sync"),
    ),
    "hip:gfx942": Machine(
        GPUTarget("hip", "gfx942", 64), Chip(304, False, 2, lanes=64), 64 * 1024, ("v_mfma",)
    ),
}


@dataclass(frozen=True)
class Launch:
    """One compilation that a launcher asked for."""

    case: str
    function: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs: registers and spills per thread, bytes of shared memory."""

    case: str
    kernel: str
    machine: str
    warps: int
    registers: int
    spills: int
    shared: int
    matrix: str


class NotingDriver(DriverBase):  # type: ignore[misc]  # Triton has no types
    """Stands where the GPU's driver would; launches end in the hook of `noted_launches`."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__()
        self._target = target

    @classmethod
    def is_active(cls) -> bool:
        """Never chosen by itself."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Unused: no launcher is built."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """The target that launches are specialized for."""
        return self._target

    def get_current_device(self) -> str:
        """A device per target, so that Triton keeps their kernels apart."""
        return str(self._target)

    def get_current_stream(self, device: str) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors without storage are."""
        return torch.device("meta")

    def get_benchmarker(self) -> Callable[..., Any]:
        """Nothing is timed here."""
        raise NotImplementedError


def noted_launches(machine: Machine, cases: dict[str, Callable[[Chip], object]]) -> list[Launch]:
    """The compilations that running the cases on the machine asks for."""
    launches = []
    case = ""

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        options = {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        signature, constants = compile["signature"], compile["constants"]
        launches.append(
            Launch(case, fn.jit_function, signature, constants, compile["configs"][0], options)
        )
        return True

    triton.runtime.driver.set_active(NotingDriver(machine.target))
    triton.knobs.runtime.jit_cache_hook = note
    for case, run in cases.items():  # noqa: B007  (`note` reads it)
        run(machine.chip)
    return launches


def compiled(launch: Launch, name: str) -> Resources:
    """Compile a launch for the machine of that name."""
    machine = MACHINES[name]
    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    kernel = triton.compile(source, target=machine.target, options=launch.options)
    read = _amd_registers if machine.target.backend == "hip" else _nvidia_registers
    registers, spills = read(kernel.asm)
    text = kernel.asm["amdgcn" if machine.target.backend == "hip" else "ptx"]
    matrix = next((each for each in machine.matrix_instructions if each in text), "-")
    return Resources(
        launch.case,
        launch.function.__name__.strip("_"),
        name,
        kernel.metadata.num_warps,
        registers,
        spills,
        kernel.metadata.shared,
        matrix,
    )


def _nvidia_registers(asm: dict[str, Any]) -> tuple[int, int]:
    """(registers, spilled ones): a spill is a store to local memory in the machine code."""
    tools = triton.knobs.nvidia
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for command in (
                [tools.cuobjdump.path, "--dump-resource-usage", file.name],
                [tools.nvdisasm.path, file.name],
            )
        )
    found = re.search(r"REG:(\d+)", usage)
    assert found, f"cuobjdump names no registers: {usage}"
    return int(found[1]), len(re.findall(r"\bSTL\b", code))


def _amd_registers(asm: dict[str, Any]) -> tuple[int, int]:
    found = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", asm["amdgcn"]))
    return int(found["vgpr_count"]), int(found["vgpr_spill_count"])


def report(machines: list[str], cases: dict[str, Callable[[Chip], object]]) -> Iterator[Resources]:
    """The resources of every kernel that the cases launch, on each machine."""
    for name in machines:
        for launch in noted_launches(MACHINES[name], cases):
            yield compiled(launch, name)


def main() -> None:
    """Print the table, one kernel a line."""
    parser = argparse.ArgumentParser(description="Resources of the Triton kernels, without a GPU.")
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {', '.join(MACHINES)}")
    parser.add_argument("--case", default="", help="only the cases whose name contains this")
    chosen = parser.parse_args()
    cases = {name: run for name, run in CASES.items() if chosen.case in name}
    print(f"Triton {triton.__version__}\n")
    print("| case | kernel | target | warps | registers | spills | shared bytes | matrix |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for line in report(chosen.targets or list(MACHINES), cases):
        print(
            f"| {line.case} | {line.kernel} | {line.machine} | {line.warps} | {line.registers} "
            f"| {line.spills} | {line.shared} | {line.matrix} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
