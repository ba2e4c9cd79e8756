"""Read pickles without running code, by interpreting the opcodes that build plain data.

A pickle is a program that imports classes, calls them and sets their attributes. Python's unpickler is unsafe even if
its `find_class` admits only a few names: BUILD sets attributes of any admitted class, and a large memo index makes it
allocate an array of that size. The interpreter in this module imports nothing and calls nothing that a file names. A
name in the file becomes a `Global`. An object becomes a `PickledObject`, an inert record of its arguments and state.
Callers convert these records to values after checking them (`dcp`), or pass their own functions for a few names
(`torch_file`).

The time and memory to read a file are bounded by its length. Sizes are compared with the bytes that follow, the memo is
a dictionary, and dictionary keys and set members must be values that Python hashes in constant time. Values may be
shared: if a list holds another list twice, which holds another list twice, and so on for thirty levels, the tree has a
billion items. So a caller that walks through values recursively first calls `check_tree`.

The interpreter knows the data opcodes of protocols 2 to 5 (`pickletools` describes them). It refuses the other opcodes
of protocols 0 and 1, which torch does not use by default, extension registries and out-of-band buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

MAX_DEPTH = 200
_LONGEST_INTEGER = 255  # in bytes
_LARGEST_KEY = 1 << 60  # an attacker can make the hashes of larger integers collide
_LONGEST_KEY = 8  # length of a tuple; Python computes its hash at each use
_LARGEST_TREE = 10  # items per byte of the file; a shared item is counted each time it occurs


class PickleError(ValueError):
    """A pickle is damaged, or has an opcode that plain data does not need."""


class Global(NamedTuple):
    """Name of a class or function in a pickle."""

    module: str
    name: str

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}>"


class PickledObject:
    """Inert record of an object that Python's unpickler would make by calling a class or function.

    Attributes:
        of: Name of the class or function.
        arguments: Arguments of the call.
        state: State from which the object would be restored.
        items: Items that would be appended to the object, or (key, value) pairs that would be set.
    """

    __slots__ = ("arguments", "items", "of", "state")

    def __init__(self, of: Global, arguments: tuple[Any, ...]) -> None:
        self.of, self.arguments = of, arguments
        self.state: Any = None
        self.items: list[Any] = []

    def __repr__(self) -> str:
        return repr(self.of)


def read_pickle(
    content: bytes,
    *,
    constants: Mapping[tuple[str, str], Any] | None = None,
    builders: Mapping[tuple[str, str], Callable[..., Any]] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the value that the pickle `content` describes, without running its code.

    Args:
        content: Bytes of the pickle.
        constants: Values for names in the pickle, by module and name.
        builders: Functions to call when the pickle calls a name, by module and name. A builder gets the arguments in
            the pickle. It must check them, and raise ValueError or TypeError if they are wrong.
        persistent: Function that converts a persistent id to a value. If None, persistent ids are refused.

    Raises:
        PickleError: The pickle is damaged or has a refused opcode. The message states the position in bytes.
    """
    return _Interpreter(content, constants or {}, builders or {}, persistent).run()


class _Memo(dict[int, Any]):
    """Memo of the interpreter: values by number."""

    def __missing__(self, number: int) -> NoReturn:
        raise PickleError(f"it reads value {number} of the memo, which was never stored")


class _Interpreter:
    """Stack machine. `stack` holds the values since the last mark, and `marks` holds the stacks below each mark."""

    def __init__(
        self,
        content: bytes,
        constants: Mapping[tuple[str, str], Any],
        builders: Mapping[tuple[str, str], Callable[..., Any]],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.content, self.at = content, 0
        self.constants, self.builders, self.persistent = constants, builders, persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo = _Memo()

    def run(self) -> Any:
        content, end, stack, marks, memo = self.content, len(self.content), self.stack, self.marks, self.memo
        builders, at, start = self.builders, 0, 0
        try:
            while at < end:
                start, opcode = at, content[at]
                at += 1
                # The index of a checkpoint has 69 opcodes for each rectangle. These branches execute 67 of them, since
                # calling a method takes much longer. 42 of these are in sequences that make an object, call a function
                # with one tuple, or set a state. Methods handle all other opcodes, and most errors.
                if opcode == _LONG_BINGET and at + 4 <= end:
                    stack.append(memo[_UINT32(content, at)[0]])
                    at += 4
                elif opcode == _BINGET and at < end:
                    stack.append(memo[content[at]])
                    at += 1
                elif opcode == _BININT1 and at < end:
                    stack.append(content[at])
                    at += 1
                elif opcode == _SETITEMS and content[at : at + 1] == b"b" and self.set_state():
                    stack = self.stack
                    at += 1
                elif (
                    _TUPLE1 <= opcode <= _TUPLE3
                    and content[at : at + 5] == _CALL
                    and len(stack) > opcode - 0x84
                    and type(of := stack[0x83 - opcode]) is Global
                ):
                    values = tuple(stack[0x84 - opcode :])
                    builder = builders.get(of)
                    made = PickledObject(of, (values,)) if builder is None else builder(values)
                    stack[0x83 - opcode :] = [made]
                    count = len(memo)
                    memo[count], memo[count + 1], memo[count + 2] = values, (values,), made
                    at += 5
                elif (
                    opcode == _EMPTY_TUPLE
                    and content[at : at + 5] == _MAKE
                    and stack
                    and type(of := stack[-1]) is Global
                    and of not in builders
                    and len(marks) < MAX_DEPTH
                ):
                    stack[-1] = made = PickledObject(of, ())
                    stack.append({})
                    count = len(memo)
                    memo[count], memo[count + 1] = made, stack[-1]
                    marks.append(stack)
                    stack = self.stack = []
                    at += 5
                elif opcode == _BININT2 and at + 2 <= end:
                    stack.append(content[at] | content[at + 1] << 8)
                    at += 2
                elif opcode == _BININT and at + 4 <= end:
                    stack.append(_INT32(content, at)[0])
                    at += 4
                elif opcode == _MEMOIZE:
                    memo[len(memo)] = stack[-1]
                elif opcode == _STOP:
                    if len(stack) != 1 or marks:
                        self.fail("it ends with an unfinished value")
                    if at != end:
                        self.fail("bytes follow its end")
                    return stack[0]
                else:
                    action = _ACTIONS.get(opcode)
                    if action is None:
                        self.fail(f"opcode {opcode:#04x}, which plain data does not need")
                    self.at = at
                    action(self)
                    at, stack = self.at, self.stack
        except PickleError as error:
            raise PickleError(f"{error} (byte {start} of {end} of its pickle)") from None
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
            # An empty stack, a missing memo entry, a value of the wrong type.
            what = " ".join(str(error).split())[:200]
            raise PickleError(f"{type(error).__name__}: {what} (byte {start} of {end} of its pickle)") from None
        raise PickleError(f"it is truncated at byte {end} of its pickle")

    def fail(self, problem: str) -> NoReturn:
        raise PickleError(problem)

    # --- bytes of an opcode's argument ---

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self.content) - self.at:
            self.fail(f"{size} bytes are announced, but {len(self.content) - self.at} follow")
        self.at += size
        return self.content[self.at - size : self.at]

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def counted(self, size: int) -> bytes:
        return self.take(self.number(size))

    def line(self) -> str:
        end = self.content.index(b"\n", self.at)
        text = self.content[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    # --- stack and memo ---

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        if len(self.marks) >= MAX_DEPTH:
            self.fail(f"more than {MAX_DEPTH} values are nested")
        self.marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def get(self, size: int) -> None:
        self.push(self.memo[self.number(size)])

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    # --- collections ---

    def tuple_of(self, size: int) -> None:
        if len(self.stack) < size:
            self.fail(f"a tuple of {size} values, but the stack has {len(self.stack)}")
        self.stack[-size:] = [tuple(self.stack[-size:])]

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is PickledObject:
            target.items.extend(items)
        else:
            self.fail(f"it appends to a {type(target).__name__}")

    def set_items(self, items: list[Any], *, new: bool = False) -> None:
        if new:
            self.push({})
        target = self.stack[-1]
        if len(items) % 2:
            self.fail("a key without a value")
        keys = items[::2]
        if type(target) is dict:
            for key in keys:
                if type(key) is not str:
                    self.check_key(key)
            target.update(zip(keys, items[1::2]))
        elif type(target) is PickledObject:
            target.items.extend(zip(keys, items[1::2]))
        else:
            self.fail(f"it sets items of a {type(target).__name__}")

    def set_state(self) -> bool:
        """Store the items since the mark as a record's state, a dictionary, and return whether they fit."""
        if not self.marks or len(self.marks[-1]) < 2 or len(self.stack) % 2:
            return False
        record, state = self.marks[-1][-2:]
        keys = self.stack[::2]
        if type(record) is not PickledObject or type(state) is not dict or any(type(key) is not str for key in keys):
            return False
        state.update(zip(keys, self.stack[1::2]))
        record.state = state
        self.stack = self.marks.pop()
        self.stack.pop()
        return True

    def add_items(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        if type(target) is not set:
            self.fail(f"it adds members to a {type(target).__name__}")
        target.update(self.checked_keys(items))

    def checked_keys(self, items: list[Any]) -> list[Any]:
        for item in items:
            self.check_key(item)
        return items

    def check_key(self, key: Any, depth: int = 0) -> None:
        kind = type(key)
        if kind is str or kind is bytes or kind is PickledObject:
            return
        if kind is int:
            if not -_LARGEST_KEY < key < _LARGEST_KEY:
                self.fail(f"an integer of {key.bit_length()} bits as a key")
        elif isinstance(key, tuple):  # Global too
            if len(key) > _LONGEST_KEY or depth > 1:
                self.fail(f"a tuple of {len(key)} values, in {depth} others, as a key")
            for part in key:
                self.check_key(part, depth + 1)
        elif kind in (list, dict, set, frozenset, bytearray):
            self.fail(f"a {kind.__name__} as a key")

    # --- names in a file ---

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            self.fail("a name that is not text")
        self.push(self.constants.get((module, name), Global(module, name)))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or type(function) is not Global:
            self.fail(f"it calls a {type(function).__name__} with a {type(arguments).__name__}")
        builder = self.builders.get(function)
        self.push(PickledObject(function, arguments) if builder is None else builder(*arguments))

    def call_with_keywords(self) -> None:
        keywords, arguments, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        if type(keywords) is not dict or type(arguments) is not tuple or type(function) is not Global:
            self.fail(f"it calls a {type(function).__name__} with a {type(arguments).__name__}")
        self.push(PickledObject(function, (*arguments, keywords)))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is PickledObject:
            target.state = state
        elif type(target) is not dict:  # attributes of a dictionary, such as state_dict's _metadata, are dropped
            self.fail(f"it sets the state of a {type(target).__name__}")

    def persistent_id(self) -> None:
        if self.persistent is None:
            self.fail("a persistent id")
        self.push(self.persistent(self.stack.pop()))

    def integer(self, size: int) -> None:
        if size > _LONGEST_INTEGER:
            self.fail(f"an integer of {size} bytes")
        self.push(self.number(size, signed=True))

    def protocol(self) -> None:
        version = self.number(1)
        if not 2 <= version <= 5:
            self.fail(f"protocol {version}")


_STOP, _MEMOIZE, _BINGET, _LONG_BINGET, _SETITEMS = ord("."), 0x94, ord("h"), ord("j"), ord("u")
_BININT, _BININT1, _BININT2, _EMPTY_TUPLE, _TUPLE1, _TUPLE3 = ord("J"), ord("K"), ord("M"), ord(")"), 0x85, 0x87
_CALL = b"\x94\x85\x94R\x94"  # follows a tuple: the only argument of a call; memoizes tuple, arguments and result
_MAKE = b"\x81\x94}\x94("  # follows an empty tuple: makes an object and its state, and a mark for the state's items
_UINT32, _INT32 = struct.Struct("<I").unpack_from, struct.Struct("<i").unpack_from
_Action = Callable[[_Interpreter], object]


def _simple(value: Any) -> _Action:
    return lambda m: m.push(value)


_ACTIONS: dict[int, _Action] = {
    0x80: _Interpreter.protocol,
    0x95: lambda m: m.number(8),  # FRAME, a hint for buffering
    ord("("): _Interpreter.mark,
    ord("0"): _Interpreter.pop,
    ord("1"): lambda m: m.pop_mark(),
    ord("2"): lambda m: m.push(m.stack[-1]),
    ord("N"): _simple(None),
    0x88: _simple(True),
    0x89: _simple(False),
    _BININT: lambda m: m.push(m.number(4, signed=True)),
    _BININT1: lambda m: m.push(m.number(1)),
    _BININT2: lambda m: m.push(m.number(2)),
    0x8A: lambda m: m.integer(m.number(1)),
    0x8B: lambda m: m.integer(m.number(4)),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("C"): lambda m: m.push(m.counted(1)),
    ord("B"): lambda m: m.push(m.counted(4)),
    0x8E: lambda m: m.push(m.counted(8)),
    0x96: lambda m: m.push(bytearray(m.counted(8))),
    0x8C: lambda m: m.push(m.counted(1).decode("utf-8")),
    ord("X"): lambda m: m.push(m.counted(4).decode("utf-8")),
    0x8D: lambda m: m.push(m.counted(8).decode("utf-8")),
    ord("]"): lambda m: m.push([]),
    ord("}"): lambda m: m.push({}),
    _EMPTY_TUPLE: _simple(()),
    0x8F: lambda m: m.push(set()),
    ord("l"): lambda m: m.push(m.pop_mark()),
    ord("t"): lambda m: m.push(tuple(m.pop_mark())),
    ord("d"): lambda m: m.set_items(m.pop_mark(), new=True),
    0x91: lambda m: m.push(frozenset(m.checked_keys(m.pop_mark()))),
    _TUPLE1: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    _TUPLE3: lambda m: m.tuple_of(3),
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("e"): lambda m: m.extend(m.pop_mark()),
    ord("s"): lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    _SETITEMS: lambda m: m.set_items(m.pop_mark()),
    0x90: _Interpreter.add_items,
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: _Interpreter.stack_global,
    ord("R"): _Interpreter.call,
    0x81: _Interpreter.call,
    0x92: _Interpreter.call_with_keywords,
    ord("b"): _Interpreter.build,
    ord("Q"): _Interpreter.persistent_id,
    _BINGET: lambda m: m.get(1),
    _LONG_BINGET: lambda m: m.get(4),
    ord("q"): lambda m: m.put(m.number(1)),
    ord("r"): lambda m: m.put(m.number(4)),
}


def _parts(value: Any) -> Any:
    """Return the values that `value` directly contains, or None if it contains nothing."""
    kind = type(value)
    if kind is dict:
        return [*value, *value.values()] if value else None
    if kind in (list, set, frozenset) or isinstance(value, tuple):
        return value or None
    if kind is PickledObject:
        return [value.arguments, value.state, value.items]
    return None


def check_tree(value: Any, length: int) -> None:
    """Raise PickleError if a value is nested too deeply, contains itself, or is a huge tree because of shared values.

    The limits are `MAX_DEPTH` levels, and a number of items proportional to `length`, the length of the pickle in
    bytes.
    """
    limit = 10_000 + _LARGEST_TREE * length
    known: dict[int, tuple[int, int]] = {}  # size and depth by `id`; `value` keeps all of them alive
    opened: set[int] = set()
    todo = [value]
    while todo:
        iterator = todo[-1]
        parts = None if id(iterator) in known else _parts(iterator)
        if parts is None:
            todo.pop()
            continue
        if id(iterator) not in opened:
            opened.add(id(iterator))
            for part in parts:
                if type(part) in _LEAVES or id(part) in known:
                    continue
                if id(part) in opened:
                    raise PickleError("a value that contains itself")
                todo.append(part)
            continue
        todo.pop()
        size, depth = 1, 0
        for part in parts:
            inner, below = known.get(id(part), (1, 0))
            size, depth = size + inner, max(depth, below)
        if depth >= MAX_DEPTH:
            raise PickleError(f"more than {MAX_DEPTH} values are nested")
        if size > limit:
            raise PickleError(f"more than {limit} values, most of them shared")
        known[id(iterator)] = size, depth + 1


_LEAVES = (str, int, float, bool, type(None), bytes)
