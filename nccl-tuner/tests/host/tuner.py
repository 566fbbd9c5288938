"""Stands in for NCCL in a Python process and checks what `_tuner.py` makes it do. Arguments: case, module, plugin."""

import ctypes
import importlib.util
import logging
import os
import sys
import threading

case, module, plugin = sys.argv[1:]
spec = importlib.util.spec_from_file_location("_tuner", module)
tuner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tuner)
said = []
logging.getLogger("flexcomm").addHandler(type("Keep", (logging.Handler,), {"emit": lambda _, r: said.append(r.getMessage())})())


class Table(ctypes.Structure):
    """Version 5: name, init, getCollInfo, finalize."""

    _fields_ = [("name", ctypes.c_char_p), ("init", ctypes.c_void_p), ("info", ctypes.c_void_p), ("end", ctypes.c_void_p)]


P, I, Z, U = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64
INIT = ctypes.CFUNCTYPE(I, P, U, Z, Z, P, P, P)
INFO = ctypes.CFUNCTYPE(I, P, I, Z, I, P, I, I, I, P)
TREE, RING, ALL_REDUCE = 0, 1, 4


class Nccl:
    """Loads the plugin and opens a communicator, as NCCL does it with the first one of a process."""

    def __init__(self):
        # NCCL opens it itself, and Python's own handles are no part of that.
        self.library = ctypes.CDLL(plugin, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        table = Table.in_dll(self.library, "ncclTunerPlugin_v5")
        self.info, context = INFO(table.info), ctypes.c_void_p()
        assert INIT(table.init)(ctypes.byref(context), 7, 4, 2, None, None, None) == 0
        self.context = context

    def all_reduce(self):
        """What NCCL would run: its own choice is the ring."""
        costs = (ctypes.c_float * 21)(*[90, 50, 40, 80, 30, 35], *[-1] * 15)
        channels = ctypes.c_int()
        assert self.info(self.context, ALL_REDUCE, 1 << 20, 1, costs, 7, 3, 0, ctypes.byref(channels)) == 0
        return min((cost, at) for at, cost in enumerate(costs) if cost >= 0)[1] // 3

    def elsewhere(self):
        """As a non-blocking communicator does it."""
        picked = []
        thread = threading.Thread(target=lambda: picked.append(self.all_reduce()))
        thread.start()
        thread.join()
        return picked[0]


def steer():
    assert tuner.Tuner.find() is None, "nothing is loaded before NCCL does it"
    nccl = Nccl()
    found = tuner.agree(nccl.all_reduce, lambda mine: [mine, True])
    assert found is not None and not said, said
    for strategy, expected in [
        ("none@1/dense-tree", TREE),
        ("none@1/dense-ring", RING),
        ("topk@0.01/art-tree:star", TREE),
        ("topk@0.01/art-ring:var", RING),
        ("topk@0.01/allgather", RING),
        (None, RING),
    ]:
        with found.around(strategy, 12):
            assert nccl.all_reduce() == expected, strategy
            assert nccl.elsewhere() == RING, "other threads are left alone"
        assert nccl.all_reduce() == RING, "and so is what comes after"
    try:
        with found.around("none@1/dense-tree", 13):
            raise KeyError
    except KeyError:
        pass
    assert nccl.all_reduce() == RING, "also after an exception"
    counts = found.counts()
    assert (counts["steered"], counts["same"], counts["left"], counts["communicators"]) == (2, 2, 0, 1), counts


def agree():
    nccl = Nccl()
    assert tuner.agree(nccl.all_reduce, lambda mine: [mine, False]) is None
    assert "ranks [1]" in said.pop(), said
    assert tuner.agree(nccl.elsewhere, lambda mine: [mine, mine]) is None
    assert "ranks [0, 1]" in said.pop() and not said
    assert tuner.agree(nccl.all_reduce, lambda mine: [mine, mine]) is not None
    assert nccl.all_reduce() == RING


def absent():
    nccl = Nccl()
    ran = []
    assert tuner.Tuner.find() is None
    assert tuner.agree(lambda: ran.append(nccl.all_reduce()), lambda mine: [mine, mine]) is None
    assert ran == [RING, RING] and not said, "every rank runs the same collectives, with the plugin or without"


{"steer": steer, "agree": agree, "absent": absent}[case]()
print("done")
