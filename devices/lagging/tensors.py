"""The tensors of imitated GPUs: they have their shape at once, and their values when the stream has run the work."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .memory import Block, Form, GpuMemory
from .pinned import PinnedMemory
from .shapes import Result, Shapes
from .streams import Gpu, LaggingStream

Call = Callable[..., Any]

DEVICE_TYPE = "privateuseone"
"""Name of the device type that torch reserves for devices from outside torch."""

_FACTS = (
    "size stride dim numel nelement data_ptr is_contiguous element_size __len__ "
    "is_floating_point is_complex is_inference ndimension __repr__ __hash__ __format__"
)
FACTS = frozenset(_FACTS.split())
"""Methods that depend only on a tensor's shape, dtype or address, and run at once."""

ANSWERS = frozenset(
    ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose", "__contains__")
)
"""Methods with a result on the host, for which they wait until the stream has computed it."""

SIZED_BY_VALUES = frozenset(("bincount", "nonzero", "unique", "masked_select"))
"""Operations with a result whose shape depends on values, so that their calls wait for the stream."""

_SHAPES = Shapes()
"""The shapes of results of all calls in this process."""


class LaggingTensor(torch.Tensor):
    """A tensor on an imitated GPU.

    Attributes:
        block: the memory that the tensor is in.
        values_now: a CPU tensor over that memory; its values are the results of the work that has run so far.
        form: the tensor's dtype, shape and place in the block.
    """

    block: Block
    values_now: torch.Tensor
    form: Form

    @classmethod
    def __torch_function__(
        cls, func: Call, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _operations.call(func, args, kwargs or {})


class OnGpu(TorchFunctionMode):
    """Lets the calling thread make tensors on imitated GPUs and in page-locked memory, while the context lasts."""

    def __torch_function__(
        self, func: Call, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _operations.call(func, args, kwargs or {})


class Operations:
    """Carries out torch's calls: calls that compute are queued on a stream, other calls run at once.

    Attributes:
        gpu: the streams of the GPUs.
        memories: the memory of each GPU.
        pinned: page-locked memory of the host.
        blocked: number of copies that were requested as asynchronous but made the calling thread wait, because the
            host's memory was not page-locked.
        staged: number of copies between host and GPU for which torch needs temporary memory on the GPU.
        calls: number of operations that were queued, by name.
        launches: number of kernels that were queued, without those of graphs.
        copies: number of copies that were queued, without those of graphs.
        misaligned: number of matrix products with weights whose address is no multiple of 16 bytes.
        most_to_host: bytes of the largest tensor that was copied to the host.
    """

    def __init__(self, gpu: Gpu, memories: Sequence[GpuMemory]) -> None:
        self.gpu = gpu
        self.memories = memories
        self.pinned = PinnedMemory(gpu)
        self.blocked = 0
        self.staged = 0
        self.calls: Counter[str] = Counter()
        self.launches = self.copies = 0
        self._caller = threading.local()
        """An object whose `inferring` tells whether the calling thread made its call in torch's inference mode."""
        self.misaligned = 0
        self.most_to_host = 0

    def call(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a call `func(*args, **kwargs)` of torch, on tensors of the host or of GPUs; returns its result."""
        self._caller.inferring = torch.is_inference_mode_enabled()
        with torch._C.DisableTorchFunction(), torch._C._InferenceMode(True):
            name = getattr(func, "__name__", "")
            if name in ("to", "cpu", "copy_"):
                return self._move(func, name, args, kwargs)
            if args and isinstance(args[0], LaggingTensor):
                if name == "__get__":
                    return self._attribute(func, args[0])
                if name in FACTS:
                    return func(args[0].values_now, *args[1:], **kwargs)
            tensors = _tensors((args, kwargs))
            first = next((each for each in tensors if isinstance(each, LaggingTensor)), None)
            if first is None:
                return self._on_host(func, name, args, kwargs)
            if name == "storage_offset":
                return first.form.offset
            if name == "untyped_storage":  # of its block, not of the segment
                return torch.UntypedStorage(first.block.nbytes, device="meta")
            if name == "is_pinned":
                return False
            number = _one_device(name, tensors, first)
            if isinstance(func, OpOverload):
                return self._launch(func, args, tensors, number)
            if name == "__iter__":
                return iter(self._queue(torch.Tensor.unbind, "unbind", (args[0], 0), {}, tensors, number))
            if name == "numpy":
                raise TypeError("can't convert a tensor of the GPU to numpy: copy it to the host first")
            if name in ANSWERS:
                self.most_to_host = max(self.most_to_host, args[0].nbytes)
                self.gpu.current_of(number).synchronize()
                return func(*_reals(args), **_reals(kwargs))
            if name in SIZED_BY_VALUES:
                self.gpu.current_of(number).synchronize()
                return self._new(func(*_reals(args), **_reals(kwargs)), number)
            return self._queue(func, name, args, kwargs, tensors, number)

    def _on_host(self, func: Call, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a call `func(*args, **kwargs)` without GPU tensors as arguments; its result may be on a GPU."""
        if name == "is_pinned":
            return self.pinned.holds(args[0])
        if kwargs.get("pin_memory"):
            return self.pinned.empty(_size(args), kwargs.get("dtype") or torch.get_default_dtype())
        if is_gpu(kwargs.get("device")):
            return self._queue(func, name, args, kwargs, (), self._number(torch.device(kwargs["device"])))
        return func(*args, **kwargs)

    def _number(self, device: torch.device) -> int:
        return self.gpu.number if device.index is None else device.index

    def _attribute(self, func: Any, tensor: LaggingTensor) -> Any:
        attribute = func.__self__.__name__
        if attribute == "device":
            return torch.device(DEVICE_TYPE, tensor.block.stream.number)
        if attribute == "is_cpu":
            return False
        value = func(tensor.values_now)
        if not isinstance(value, torch.Tensor):
            return value
        form = Form.of(value, tensor.form.offset)  # such as T, with the same first element
        return _shown(form, tensor.block)

    def _queue(
        self,
        func: Call,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        number: int,
    ) -> Any:
        """Queue a call on the current stream of a GPU; returns the results, which get values when the call runs.

        Args:
            name: name of the function `func`.
            tensors: the tensors among the arguments.
            number: number of the GPU.
        """
        stream = self.gpu.current_of(number)
        if stream.capture is None:
            self.calls[name] += 1
        if name == "linear" and isinstance(args[1], LaggingTensor):
            self.misaligned += args[1].values_now.data_ptr() % 16 > 0
        operands: list[LaggingTensor] = []
        (reals, real_kwargs), key = _with_values((args, _on_host(kwargs)), operands)
        shapes = _SHAPES.of(func, reals, real_kwargs, key, operands)
        fresh: list[torch.Tensor] = []

        def made(result: Any) -> Any:
            if not isinstance(result, Result):
                return result
            if result.operand >= 0:
                return _shown(result.form, operands[result.operand].block)
            tensor = self._allocated(result.form, result.nbytes, number)
            fresh.append(tensor.values_now)
            return tensor

        if isinstance(shapes, Result):
            results = made(shapes)
        else:
            results = tree_unflatten([made(each) for each in shapes.leaves], shapes.structure)
        changes = _changes(name, kwargs)
        if changes:
            self._require_writable(args[:1])
        if (fresh and not _is_empty(name)) or changes:

            def work() -> None:
                values = func(*reals, **real_kwargs)
                if fresh:
                    given = [values] if isinstance(values, torch.Tensor) else tree_flatten(values)[0]
                    for target, value in zip(fresh, given, strict=True):
                        target.copy_(value)

            self._enqueue(stream, work, tensors)
        return args[0] if changes and name != "__setitem__" else results

    def _launch(
        self,
        operator: OpOverload[Any, None],
        args: tuple[Any, ...],
        tensors: Sequence[torch.Tensor],
        number: int,
    ) -> None:
        """Queue a call of an operator of `kernels/operators.py`; the operator writes its results to some arguments.

        Args:
            tensors: the tensors among the arguments.
            number: number of the GPU.
        """
        stream = self.gpu.current_of(number)
        if stream.capture is None:
            self.calls[operator.overloadpacket.__name__] += 1
        written = [given for given, of in zip(args, operator._schema.arguments, strict=True) if of.is_write]
        self._require_writable(written)
        reals = _reals(args)
        self._enqueue(stream, lambda: operator(*reals), tensors)

    def _require_writable(self, targets: Any) -> None:
        """Raise RuntimeError, as torch does, if a call outside of inference mode writes to tensors made in that mode.

        targets: the tensors that the call writes to.
        """
        if not self._caller.inferring and any(
            isinstance(each, LaggingTensor) and each.block.inferring for each in _tensors(targets)
        ):
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed.")

    def _enqueue(
        self, stream: LaggingStream, work: Callable[[], object], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Queue a kernel on a stream.

        Args:
            work: runs the kernel.
            tensors: the kernel's arguments, whose memory is reported to the stream's capture, if there is one.
        """
        self.launches += stream.capture is None
        _note_use(stream, *tensors)
        stream.enqueue(work)

    def _move(self, func: Call, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "copy_":
            target, source = args[:2]
            at_once = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            return self._copy(target, source, at_once=at_once)
        tensor = args[0]
        device, dtype, rest = (
            _destination(args[1:], kwargs) if name == "to" else (torch.device("cpu"), None, {})
        )
        here = tensor.block.stream.number if isinstance(tensor, LaggingTensor) else None
        there = self._number(device) if is_gpu(device) and device is not None else None
        if device is None or here == there:
            if here is None:
                return func(*args, **kwargs)
            copy = {"copy": True} if rest.get("copy") else {}
            return self._queue(torch.Tensor.to, "to", (tensor, dtype or tensor.dtype), copy, [tensor], here)
        at_once = not rest.get("non_blocking")
        size, dtype = tensor.size(), dtype or tensor.dtype
        if there is not None:
            like = torch.empty(size, dtype=dtype, device="meta")
            return self._copy(self._allocated(Form.of(like), like.nbytes, there), tensor, at_once=at_once)
        empty = torch.empty(size, dtype=dtype) if at_once else self.pinned.empty(size, dtype)
        return self._copy(empty, tensor, at_once=at_once)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, *, at_once: bool) -> torch.Tensor:
        """Queue a copy from `source` to `target` on the current stream; returns the target.

        If both are on the host, the copy is made at once, without a stream.

        at_once: whether to wait for a copy between host and GPU.
        """
        to_gpu, from_gpu = isinstance(target, LaggingTensor), isinstance(source, LaggingTensor)
        if not to_gpu and not from_gpu:
            return target.copy_(source)
        there = next(each for each in (source, target) if isinstance(each, LaggingTensor))
        stream = self.gpu.current_of(there.block.stream.number)
        if not to_gpu:
            self.most_to_host = max(self.most_to_host, target.nbytes)
        if to_gpu != from_gpu and not (target.is_contiguous() and source.is_contiguous()):
            self.staged += 1
        if not from_gpu and not self.pinned.holds(source):
            self.blocked += not at_once
            at_once |= stream.capture is not None  # CUDA captures no such copy
            source = source.clone()  # ordinary memory is read before the call returns
        elif not to_gpu and not self.pinned.holds(target):
            self.blocked += not at_once
            at_once = True
        into, what = self._at_its_time(target), self._at_its_time(source)
        self._require_writable(target)
        self.copies += stream.capture is None
        _note_use(stream, target, source)
        stream.enqueue(lambda: into().copy_(what()))
        if at_once and to_gpu != from_gpu:
            stream.synchronize()
        return target

    def _at_its_time(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that a queued copy calls when it runs, to find the tensor that it copies from or to.

        The function raises RuntimeError if the tensor's memory was page-locked and is no longer locked.
        """
        if isinstance(tensor, LaggingTensor):
            values = tensor.values_now
            return lambda: values
        return self.pinned.at_its_time(tensor) if self.pinned.holds(tensor) else lambda: tensor

    def _new(self, value: torch.Tensor, number: int) -> LaggingTensor:
        made = self._allocated(Form.of(value), value.nbytes, number)
        target = made.values_now
        self.gpu.current_of(number).enqueue(lambda: target.copy_(value))
        return made

    def _allocated(self, form: Form, nbytes: int, number: int) -> LaggingTensor:
        block = self.memories[number].allocate(nbytes, self.gpu.current_of(number))
        block.inferring = self._caller.inferring
        return _shown(form, block)


def _shown(form: Form, block: Block) -> LaggingTensor:
    real = block.tensor(form)
    shown = real.as_subclass(LaggingTensor)
    shown.block, shown.values_now, shown.form = block, real, form
    return shown


def _note_use(stream: LaggingStream, *tensors: torch.Tensor) -> None:
    """Tell a stream's capture that captured work uses these tensors' memory; does nothing without a capture."""
    if stream.capture is not None:
        for each in tensors:
            if isinstance(each, LaggingTensor):
                stream.capture.uses(each.block)


def is_gpu(device: Any) -> bool:
    """Test whether a device is an imitated GPU."""
    return device is not None and torch.device(device).type == DEVICE_TYPE


def _tensors(of: Any) -> list[torch.Tensor]:
    """Collect the tensors in `of`: the arguments of a call, nested in tuples, lists or mappings."""
    found: list[torch.Tensor] = []
    left = [of]
    for each in left:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            left += each
        elif isinstance(each, dict):
            left += each.values()
    return found


def _reals(of: Any) -> Any:
    """Copy a call's arguments (nested tuples, lists, mappings), with `values_now` in place of each GPU tensor."""
    return _with_values(of, [])[0]


def _with_values(of: Any, operands: list[LaggingTensor]) -> tuple[Any, Any]:
    """Copy a call's arguments, with `values_now` in place of each GPU tensor.

    Args:
        of: the arguments, nested in tuples, lists or mappings.
        operands: a list to which the GPU tensors among the arguments are appended.

    Returns:
        The copy, and a key: calls of a function with equal keys have results of equal shapes.
    """
    if isinstance(of, LaggingTensor):
        operands.append(of)
        first = [each.block for each in operands].index(of.block)
        return of.values_now, (of.form, first)
    if isinstance(of, (tuple, list, dict)):
        parts = [_with_values(each, operands) for each in (of.values() if isinstance(of, dict) else of)]
        values, keys = zip(*parts, strict=True) if parts else ((), ())
        if isinstance(of, dict):
            return dict(zip(of, values, strict=True)), (*of, *keys)
        return type(of)(values), (type(of), *keys)
    if isinstance(of, slice):
        return of, (slice, of.start, of.stop, of.step)
    if isinstance(of, torch.Tensor):
        return of, []  # no key: shapes may depend on its values
    return of, (type(of), of)


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs


def _size(args: tuple[Any, ...]) -> list[int]:
    return list(args[0]) if len(args) == 1 and not isinstance(args[0], int) else list(args)


def _is_empty(name: str) -> bool:
    return name.startswith(("empty", "new_empty"))


def _changes(name: str, kwargs: dict[str, Any]) -> bool:
    """Test by a call's name and keyword arguments whether the call writes to its first argument."""
    by_name = name.endswith("_") and not name.endswith("__")
    return by_name or name == "__setitem__" or name.startswith("__i") or bool(kwargs.get("inplace"))


def _one_device(name: str, tensors: Sequence[torch.Tensor], first: LaggingTensor) -> int:
    """Return the number of the GPU that all of a call's tensors are on.

    Args:
        name: name of the call, for the error's message.
        first: a GPU tensor among `tensors`.

    Raises:
        RuntimeError: the tensors are on several GPUs, or a host tensor among them has one or more dimensions.
    """
    number = first.block.stream.number
    for each in tensors:
        there = each.block.stream.number == number if isinstance(each, LaggingTensor) else not each.dim()
        if not there:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    return number


def _destination(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, dict[str, Any]]:
    """Split the arguments of `Tensor.to` into the device, the dtype (None if not given) and all others by name."""
    rest = dict(kwargs)
    device, dtype = rest.pop("device", None), rest.pop("dtype", None)
    for each in args:
        if isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, torch.device | str):
            device = each
        elif isinstance(each, torch.Tensor):
            device = torch.device(DEVICE_TYPE) if isinstance(each, LaggingTensor) else each.device
            dtype = each.dtype
        elif isinstance(each, bool):
            rest.setdefault("copy" if "non_blocking" in rest else "non_blocking", each)
    return (None if device is None else torch.device(device)), dtype, rest


def operate(gpu: Gpu, memories: Sequence[GpuMemory]) -> Operations:
    """Set the imitated GPUs of this process; returns the object that carries out torch's calls on them.

    Args:
        gpu: the streams of the GPUs.
        memories: the memory of each GPU.
    """
    global _operations
    _operations = Operations(gpu, memories)
    return _operations


_operations = operate(_first := Gpu(), [GpuMemory(_first)])
