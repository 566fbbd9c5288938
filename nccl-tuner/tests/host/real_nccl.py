"""The loader, the adapters and the logger of a real NCCL take the plugin, without a GPU. Arguments: libnccl.so.2, plugin.

NCCL makes no communicator without a GPU, so its own functions that load a tuner are called directly: they are in the
symbol table of the library. A communicator is only a large row of zeros to them, into which they write the tuner.
"""

import ctypes
import os
import subprocess
import sys

library, plugin = sys.argv[1:]
P, I, Z, U = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64
ALL_REDUCE, BROADCAST, NONE, TREE, RING = 4, 0, -1, 0, 1
#: Bytes; a communicator has about one million.
COMMUNICATOR = 8 << 20

nccl = ctypes.CDLL(library)
number = I()
assert nccl.ncclGetVersion(ctypes.byref(number)) == 0
release = number.value
#: The interface that this NCCL speaks itself; others go through its adapters.
native = 2 if release < 22200 else 3 if release < 22400 else 4 if release < 22800 else 5 if release < 23003 else 6


def symbol_table():
    places = {}
    for options in ([], ["-D"]):
        out = subprocess.run(["nm", *options, library], capture_output=True, text=True, check=True).stdout
        for words in map(str.split, out.splitlines()):
            if len(words) == 3 and words[1] in "tTwW":
                places[words[2].partition("@")[0]] = int(words[0], 16)
    return places


places = symbol_table()
base = ctypes.cast(nccl.ncclGetVersion, P).value - places["ncclGetVersion"]


def internal(name, *arguments, result=I):
    return ctypes.CFUNCTYPE(result, *arguments)(base + places[name])


class Table(ctypes.Structure):
    _fields_ = [(name, P) for name in ("name", "init", "info", "end")]


def load():
    """As for the process's first communicator; the address of the tuner that NCCL has taken."""
    if native == 2:
        tuner = P()
        assert internal("_Z19ncclTunerPluginLoadPP14ncclTuner_v2_t", P)(ctypes.byref(tuner)) == 0
        return [tuner.value]
    communicator = ctypes.create_string_buffer(COMMUNICATOR)
    assert internal("_Z19ncclTunerPluginLoadP8ncclComm", P)(communicator) == 0
    return [word for word in (U * (COMMUNICATOR // 8)).from_buffer(communicator) if word]


taken = load()
# Only what NCCL has loaded: this opens nothing.
ours = ctypes.CDLL(plugin, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
own = {n: ctypes.addressof(Table.in_dll(ours, f"ncclTunerPlugin_v{n}")) for n in range(2, 8)}
assert own[native] in taken, f"NCCL {release} takes the interface {native}: {taken} {own}"
prefer = ours.flexcomm_tuner_prefer
prefer.argtypes = [I, I, U]
log = base + next(at for name, at in places.items() if name.startswith("_Z12ncclDebugLog"))


def call_init(table, context):
    if native < 5:
        return ctypes.CFUNCTYPE(I, Z, Z, P, P)(table.init)(8, 2, log, context)
    constants = (ctypes.c_double * 256)(*range(256))
    domains = (I * 3)(1, 2, 3)
    result = ctypes.CFUNCTYPE(I, P, U, Z, Z, P, P, P)(table.init)(context, 9, 8, 2, log, domains, constants)
    assert list(constants) == list(range(256)) and list(domains) == [1, 2, 3], "the plugin changes no constants"
    return result


def ask(table, context, function):
    """The algorithm that NCCL would run; its own choice is the ring."""
    costs = (ctypes.c_float * 21)(*[90, 50, 40, 80, 30, 35], *[-1] * 15)
    algorithm, protocol, channels = I(-1), I(-1), I()
    results = ctypes.byref(algorithm), ctypes.byref(protocol), ctypes.byref(channels)
    if native == 2:
        info = ctypes.CFUNCTYPE(I, P, I, Z, I, I, I, P, P, P)(table.info)
        assert info(context, function, 1 << 20, 0, 0, 1, *results) == 0
    elif native == 3:
        info = ctypes.CFUNCTYPE(I, P, I, Z, I, P, I, I, P)(table.info)
        assert info(context, function, 1 << 20, 1, costs, 7, 3, results[2]) == 0
    else:
        info = ctypes.CFUNCTYPE(I, P, I, Z, I, P, I, I, I, P)(table.info)
        assert info(context, function, 1 << 20, 1, costs, 7, 3, 0, results[2]) == 0
    assert channels.value == 0
    if algorithm.value >= 0:
        return algorithm.value
    return min((cost, at) for at, cost in enumerate(costs) if cost >= 0)[1] // 3


def drive(table):
    context = P()
    assert call_init(table, ctypes.byref(context)) == 0 and context.value
    for step, (preferred, expected) in enumerate([(NONE, RING), (TREE, TREE), (RING, RING), (TREE, TREE), (NONE, RING)]):
        assert prefer(0, preferred, 100 + step) == 0
        assert ask(table, context, ALL_REDUCE) == expected, (step, preferred)
        assert ask(table, context, BROADCAST) == RING
    assert ctypes.CFUNCTYPE(I, P)(table.end)(context) == 0


drive(Table.from_address(own[native]))
adapters = [n for n in range(2, native) if f"_Z15getNcclTuner_v{n}Pv" in places]
for older in adapters:
    adapter = internal(f"_Z15getNcclTuner_v{older}Pv", P, result=P)(ours._handle)
    drive(Table.from_address(adapter))
print(f"NCCL {release}: interface {native}, and {adapters} through its adapters")
