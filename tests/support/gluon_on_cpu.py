"""Runs a Gluon kernel for Hopper on the CPU, with all the freedom that a GPU has to reorder what it does.

Triton's interpreter does not know Gluon. Here a kernel's own source runs, with another meaning of Gluon's words: a
block is a torch tensor, each part of a ``warp_specialize`` in each program of the grid a thread, of which one runs at a
time, and what is asynchronous takes its time. A seed decides who runs next and when a copy arrives. So parts that wait
for too little read what is not there yet, and parts that wait for too much never end; both are errors, and so are

- reads outside a tensor, or of shared memory that nothing was written to;
- shared memory that changes while an MMA or a copy still reads it;
- what threads have written read by a copy or an MMA without a fence between;
- a barrier with more arrivals than it waits for, MMAs and copies that nobody waits for.

Not here: layouts, which the compiler checks, and the warps of one part, which it synchronises.
"""

import ast
import inspect
import random
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_READY, _EMPTY, _ARRIVING, _UNFENCED = range(4)


class Fault(Exception):
    """What a GPU would not report."""


class Block(Tensor):
    """Values in registers. A block is never changed, only its name given to another."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Block":
        return self.view(dtype) if bitcast else super().to(dtype)

    def __iadd__(self, other):
        return self + other

    def __isub__(self, other):
        return self - other

    def __imul__(self, other):
        return self * other


class Pointer:
    """A place in the memory of a tensor, which its offsets may not leave."""

    def __init__(self, memory: Tensor, offset: Any = 0):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def at_start(cls, x: Tensor) -> "Pointer":
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return cls(x.as_strided((extent,), (1,)))

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def to(self, dtype: torch.dtype, bitcast: bool) -> "Pointer":
        """Return this pointer, the number that inline assembly takes."""
        return self

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        at = torch.as_tensor(self.offset).long()
        at, mask = torch.broadcast_tensors(at, torch.as_tensor(True if mask is None else mask))
        used = at[mask]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < self.memory.numel():
            raise Fault(f"{int(used.min())} to {int(used.max())} of {self.memory.numel()} numbers are asked for")
        return at, mask

    def load(self, mask: Any, other: Any) -> Tensor:
        at, mask = self.places(mask)
        values = self.memory[torch.where(mask, at, 0)]
        return _block(values if other is None else torch.where(mask, values, other))

    def add(self, values: Tensor) -> None:
        at, _ = self.places(None)
        self.memory.index_put_((at.flatten(),), values.flatten(), accumulate=True)

    def store(self, values: Tensor, mask: Any) -> None:
        at, mask = self.places(mask)
        self.memory[at[mask]] = values.expand(at.shape)[mask].to(self.memory.dtype)


class Shared:
    """A view of shared memory, and of what may be done with each of its numbers."""

    def __init__(self, device: "_SM", values: Tensor, state: Tensor):
        self.device, self.values, self.state = device, values, state

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def _view(self, of: Callable[[Tensor], Tensor]) -> "Shared":
        return Shared(self.device, of(self.values), of(self.state))

    def index(self, i: Any) -> "Shared":
        return self._view(lambda x: x[int(i)])

    def reshape(self, shape: list[int]) -> "Shared":
        return self._view(lambda x: x.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return self._view(lambda x: x.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return self._view(lambda x: x.narrow(dim, start, length))

    def load(self, layout: Any) -> Tensor:
        self.device.step()
        self.check_ready(by_threads=True)
        return _block(self.values.clone())

    def store(self, values: Tensor) -> None:
        self.device.step()
        self.values.copy_(values)
        self.state.fill_(_UNFENCED)
        self.device.running.unfenced.append(self.state)

    def check_ready(self, by_threads: bool = False) -> None:
        if (self.state == _EMPTY).any():
            raise Fault("shared memory is read before anything was written")
        if (self.state == _ARRIVING).any():
            raise Fault("shared memory is read while a copy into it is under way")
        if not by_threads and (self.state == _UNFENCED).any():
            raise Fault("what threads have written is read by a copy or an MMA without a fence between")


class _Reading:
    """Shared memory that is read from now on until somebody waits for the end."""

    def __init__(self, memory: list[Shared]):
        for one in memory:
            one.check_ready()
        self.memory, self.before = memory, [one.values.clone() for one in memory]

    def end(self) -> list[Tensor]:
        for one, before in zip(self.memory, self.before, strict=True):
            one.check_ready()
            if not torch.equal(one.values, before):
                raise Fault("shared memory changes while a copy or an MMA reads it")
        return self.before


class _MMA(_Reading):
    """An MMA in flight: its result is there only after the wait."""

    def __init__(self, a: Any, b: Shared, acc: Tensor | None):
        super().__init__([x for x in (a, b) if isinstance(x, Shared)])
        self.left = None if isinstance(a, Shared) else a
        self.acc, self.result = acc, None

    def end(self) -> list[Tensor]:
        operands = super().end()
        left, right = operands if self.left is None else (self.left, *operands)
        self.result = _block(left.float() @ right.float())
        if self.acc is not None:
            self.result = self.result + self.acc
        return operands


class _Store(_Reading):
    """A copy to a tensor, of which the part beyond its end is dropped."""

    def __init__(self, place: Tensor, memory: Shared):
        super().__init__([memory])
        self.place = place

    def end(self) -> list[Tensor]:
        (values,) = super().end()
        self.place.copy_(values[tuple(map(slice, self.place.shape))])
        return [values]


class _Load:
    """A copy from a tensor, with zeros for the part beyond its end; arrives when the seed says so."""

    def __init__(self, place: Tensor, barrier: "Barrier", memory: Shared):
        memory.state.fill_(_ARRIVING)
        memory.values.fill_(float("nan"))
        self.place, self.barrier, self.memory = place, barrier, memory

    def arrive(self) -> None:
        self.memory.values.zero_()[tuple(map(slice, self.place.shape))] = self.place
        self.memory.state.fill_(_READY)
        self.barrier.bring(self.memory.values.numel() * self.memory.values.element_size())


class _CopyByThreads:
    """Copies that the threads of a warp have asked for; each of them arrives at a barrier when its own are done."""

    def __init__(self, copies: list[tuple[Shared, Pointer, Any]], barrier: "Barrier"):
        self.copies, self.barrier = copies, barrier

    def arrive(self) -> None:
        for memory, pointer, mask in self.copies:
            # What the mask leaves out holds anything.
            memory.values.copy_(pointer.load(mask, float("nan")))
            memory.state.fill_(_READY)
        self.barrier.arrive(32)


class Barrier:
    """Ends a phase when so many have arrived and all bytes are there."""

    def __init__(self):
        self.count, self.missing, self.bytes, self.phase = 0, 0, 0, 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int = 1) -> None:
        if count > self.missing:
            raise Fault("more arrivals at a barrier than it waits for")
        self.missing -= count
        self._end_phase()

    def expect(self, size: int) -> None:
        self.bytes += size
        self.arrive()

    def bring(self, size: int) -> None:
        self.bytes -= size
        self._end_phase()

    def has_ended(self, parity: Any) -> bool:
        """Return True if the phase of this parity has ended; as the GPU has it, the one before the first has."""
        return self.phase & 1 != int(parity)

    def _end_phase(self) -> None:
        if not self.missing and not self.bytes:
            self.phase, self.missing = self.phase + 1, self.count


class _Part:
    """A thread of its own for one part of a kernel; it runs only while it has the turn."""

    def __init__(self, device: "_SM", function: Callable, arguments: tuple):
        self.is_ready: Callable[[], bool] = lambda: True
        self.unfenced: list[Tensor] = []
        self.mmas: list[_MMA] = []
        self.stores: list[_Store] = []
        # Copies that its threads have asked for, and of which no barrier has been told.
        self.copies: list[tuple[Shared, Pointer, Any]] = []
        self.seen: tuple[Tensor, Tensor] | None = None
        self.error: BaseException | None = None
        self.is_done, self.is_given_up = False, False
        self.turn = threading.Semaphore(0)
        self.device, self.function, self.arguments = device, function, arguments
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.is_given_up:
                with torch.no_grad():  # a setting of threads
                    self.function(*self.arguments)
                if self.mmas or self.stores or self.copies:
                    raise Fault("a part ends with MMAs or copies that it has not waited for")
        except BaseException as error:
            self.error = error
        self.is_done = True
        self.device.turn.release()

    def pause(self, is_ready: Callable[[], bool]) -> None:
        self.is_ready = is_ready
        self.device.turn.release()
        self.turn.acquire()
        if self.is_given_up:
            raise SystemExit

    def go_on(self) -> None:
        self.turn.release()
        self.device.turn.acquire()


class _SM:
    """One CTA of the grid: its memory, its parts, and what is in flight."""

    def __init__(self, program: int, chance: random.Random):
        self.program, self.chance = program, chance
        self.turn, self.loads, self.parts = threading.Semaphore(0), [], []
        self.running: Any = SimpleNamespace(unfenced=[], pause=lambda _: None)

    def step(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Others may run now, and must until `is_ready`."""
        self.running.pause(is_ready)

    def add(self, parts: list[tuple[Callable, tuple]]) -> None:
        self.parts = [_Part(self, *part) for part in parts]
        # Some are much slower than others, and so are copies: what works in step need not out of it.
        self.speeds = [10 ** self.chance.uniform(-3, 3) for _ in self.parts]
        self.speed_of_copies = 10 ** self.chance.uniform(-3, 3)

    def choices(self) -> dict[Any, float]:
        """What may happen next, and how likely."""
        ready = {
            part: speed
            for part, speed in zip(self.parts, self.speeds, strict=True)
            if not part.is_done and part.is_ready()
        }
        return ready | dict.fromkeys(self.loads, self.speed_of_copies)

    def do(self, chosen: Any) -> None:
        if isinstance(chosen, _Load | _CopyByThreads):
            self.loads.remove(chosen)
            chosen.arrive()
            return
        self.running = chosen
        chosen.go_on()
        if chosen.error is not None:
            raise chosen.error

    def give_up(self) -> None:
        for part in self.parts:
            if not part.is_done:
                part.is_given_up = True
                part.go_on()


def _run(devices: list[_SM], chance: random.Random) -> None:
    """All programs of a grid at the same time."""
    try:
        while not all(part.is_done for device in devices for part in device.parts):
            choices = {(device, what): weight for device in devices for what, weight in device.choices().items()}
            if not choices:
                raise Fault("the parts wait for each other for ever")
            ((device, chosen),) = chance.choices(list(choices), list(choices.values()))
            device.do(chosen)
        if any(device.loads for device in devices):
            raise Fault("the kernel ends with copies under way")
    finally:
        for device in devices:
            device.give_up()


class Simulated:
    """A kernel of a module, launched as Triton's are: ``Simulated(module, "name", seed)[grid](**arguments)``.

    ``edit`` changes the source first, to see that the changed one fails.
    """

    def __init__(
        self, module: ModuleType, name: str, seed: int = 0, edit: Callable[[str], str] = lambda source: source
    ):
        self.module, self.name, self.chance, self.edit = module, name, random.Random(seed), edit

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        imported = [_functions(module, inspect.getsource(module)) for module in _imported(self.module)]
        own = _functions(self.module, self.edit(inspect.getsource(self.module)))

        def launch(num_warps: int, maxnreg: int | None = None, launch_pdl: bool = False, **arguments: Any) -> None:
            passed = {name: _as_in_kernels(x) for name, x in arguments.items()}
            devices = [_SM(program, self.chance) for program in range(grid[0])]
            for device in devices:
                names = _constants(self.module) | _words(device, grid[0])
                for code in (*imported, own):
                    exec(code, names)
                names[self.name](**passed)
            _run(devices, self.chance)

        return launch


def mistake(old: str, new: str) -> Callable[[str], str]:
    """An ``edit`` that puts one into the source."""

    def edit(source: str) -> str:
        assert source.count(old) == 1
        return source.replace(old, new)

    return edit


def shows_in_some_order(is_wrong: Callable[[int], bool]) -> bool:
    """Return True if with one of some seeds the run fails, or is wrong."""
    for seed in range(24):
        try:
            if is_wrong(seed):
                return True
        except Fault:
            return True
    return False


def _as_in_kernels(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer.at_start(x)
    if isinstance(x, TensorDescriptor):
        return SimpleNamespace(tensor=x.base, block=x.block_shape, dtype=x.base.dtype, layout=x.layout)
    return x


def _imported(module: ModuleType) -> list[ModuleType]:
    """Return the modules beside a kernel's whose functions it imports; constants come by :func:`_constants`."""
    owners = sorted({getattr(x, "__module__", "") for x in vars(module).values() if hasattr(x, "fn")})
    return [sys.modules[x] for x in owners if x != module.__name__ and x.rpartition(".")[0] == module.__package__]


def _functions(module: ModuleType, source: str) -> Any:
    """Compile the functions of a module's source, without their decorators."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for function in tree.body:
        function.decorator_list = []
    return compile(tree, str(module.__file__), "exec")


def _constants(module: ModuleType) -> dict[str, Any]:
    return {name: x.value for name, x in vars(module).items() if isinstance(x, tl.constexpr)}


def _block(x: Any) -> Any:
    return x.as_subclass(Block)


def _overlap(descriptor: Any, corner: list) -> Tensor:
    """What of the block at this corner lies in the tensor."""
    starts = [int(start) for start in corner]
    if min(starts) < 0:
        raise Fault(f"a copy from {starts}")
    return descriptor.tensor[tuple(slice(start, start + n) for start, n in zip(starts, descriptor.block, strict=True))]


def _words(device: _SM, programs: int) -> dict[str, Any]:
    """What Gluon's words mean here."""

    def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            return _Barriers(shape[0])
        values = torch.full(shape, float("nan"), dtype=dtype)
        return Shared(device, values, torch.full(shape, _EMPTY, dtype=torch.int8))

    def load(pointer: Pointer, mask: Any = None, other: Any = None, volatile: bool = False) -> Tensor:
        device.step()
        if not volatile:
            return pointer.load(mask, other)
        # What was seen is asked for again to see it change.
        part, at = device.running, pointer.places(mask)[0]
        is_new = part.seen is None or not part.seen[0].equal(at)
        device.step(lambda: is_new or not part.seen[1].equal(pointer.load(mask, other)))
        part.seen = at, pointer.load(mask, other)
        return part.seen[1]

    def store(pointer: Pointer, values: Tensor, mask: Any = None) -> None:
        device.step()
        pointer.store(values, mask)

    def inline_asm_elementwise(asm: str, constraints: str, arguments: list, dtype: Any, is_pure: bool, pack: int):
        device.step()
        known = {"sub.rn.f32": torch.sub, "red.relaxed.gpu.global.add.v4.f32": Pointer.add}
        (operation,) = (known[name] for name in known if name in asm)
        return operation(*arguments)

    def wait(barrier: Barrier, parity: Any) -> None:
        device.step(lambda: barrier.has_ended(parity))

    def arrive(barrier: Barrier, count: int) -> None:
        device.step()
        barrier.arrive(count)

    def expect(barrier: Barrier, size: int, pred: Any = True) -> None:
        device.step()
        if pred:
            barrier.expect(size)

    def copy_to_shared(descriptor: Any, corner: list, barrier: Barrier, memory: Shared, pred: Any = True) -> None:
        device.step()
        if pred:
            device.loads.append(_Load(_overlap(descriptor, corner), barrier, memory))

    def copy_to_global(descriptor: Any, corner: list, memory: Shared) -> None:
        device.step()
        device.running.stores.append(_Store(_overlap(descriptor, corner), memory))

    def copy_by_threads(memory: Shared, pointer: Pointer, mask: Any = None) -> None:
        device.step()
        memory.state.fill_(_ARRIVING)
        device.running.copies.append((memory, pointer, mask))

    def arrive_after_copies(barrier: Barrier, increment_count: bool) -> None:
        assert not increment_count
        device.step()
        device.loads.append(_CopyByThreads(device.running.copies, barrier))
        device.running.copies = []

    def store_wait(left: int) -> None:
        device.step()
        _end_all_but(left, device.running.stores)

    def fence() -> None:
        device.step()
        for state in device.running.unfenced:
            state[state == _UNFENCED] = _READY
        device.running.unfenced = []

    def mma(a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> _MMA:
        assert is_async
        device.step()
        device.running.mmas.append(_MMA(a, b, acc if use_acc else None))
        return device.running.mmas[-1]

    def mma_wait(left: int, deps: tuple) -> Tensor:
        device.step()
        _end_all_but(left, device.running.mmas)
        (issued,) = deps
        if issued.result is None:
            raise Fault("an MMA is used that was not waited for")
        return issued.result

    def static_assert(condition: bool, message: str) -> None:
        assert condition, message

    def of_numbers(operation: Callable) -> Callable:
        return lambda *arguments: operation(*(torch.as_tensor(x) for x in arguments))

    gl = SimpleNamespace(
        constexpr=None, int32=torch.int32, int64=torch.int64, float32=torch.float32, static_range=range,
        static_assert=static_assert,
        program_id=lambda axis: _block(torch.tensor(device.program)), num_programs=lambda axis: programs,
        cdiv=lambda a, b: -(-a // b),
        arange=lambda start, stop, layout: _block(torch.arange(start, stop, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout: _block(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: _block(torch.full(shape, value, dtype=dtype)),
        load=load, store=store, where=torch.where, broadcast=torch.broadcast_tensors, permute=torch.permute,
        reshape=torch.reshape,
        convert_layout=lambda x, layout: x,
        max=lambda x, axis: x.amax(axis), min=lambda x, axis: x.amin(axis), sum=lambda x, axis: x.sum(axis),
        maximum=of_numbers(torch.maximum), minimum=of_numbers(torch.minimum),
        exp=torch.exp, exp2=torch.exp2, log=torch.log, log2=torch.log2, abs=torch.abs,
        inline_asm_elementwise=inline_asm_elementwise,
        allocate_shared_memory=allocate, warp_specialize=lambda parts, warps, registers: device.add(parts),
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda shape, dtype: None),
        **dict.fromkeys(("BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout",
                         "SwizzledSharedLayout"), lambda *_: None),
    )  # fmt: skip
    barriers = SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=lambda barrier, count: barrier.init(count),
        wait=wait, arrive=arrive, expect=expect,
    )  # fmt: skip
    copies = SimpleNamespace(
        async_copy_global_to_shared=copy_to_shared, async_copy_shared_to_global=copy_to_global, store_wait=store_wait
    )
    by_threads = SimpleNamespace(async_copy_global_to_shared=copy_by_threads, mbarrier_arrive=arrive_after_copies)
    return {
        "gl": gl, "mbarrier": barriers, "tma": copies, "async_copy": by_threads, "fence_async_shared": fence,
        "gdc_wait": lambda: None, "warpgroup_mma": mma, "warpgroup_mma_wait": mma_wait,
    }  # fmt: skip


class _Barriers:
    def __init__(self, number: int):
        self.all = [Barrier() for _ in range(number)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


def _end_all_but(left: int, under_way: list) -> None:
    while len(under_way) > left:
        under_way.pop(0).end()
