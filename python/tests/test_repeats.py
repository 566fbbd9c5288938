"""A fault that lasts is written once a minute. Needs neither torch nor the built core."""

import importlib.util
import logging
import pathlib
import threading

_PATH = pathlib.Path(__file__).parent.parent / "flexcomm" / "_repeats.py"
_SPEC = importlib.util.spec_from_file_location("_repeats", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
repeats = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(repeats)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged():
    now = [0.0]
    logger = logging.Logger("test")
    lines = Lines()
    logger.addHandler(lines)
    logger.addFilter(repeats.Repeats(clock=lambda: now[0]))
    return logger, lines.lines, now


def test_a_cause_is_written_once_in_an_interval_with_the_number_of_the_others():
    logger, lines, now = logged()
    for step in range(120):
        logger.warning("step %d is not reported", step)
        logger.error("another cause")
        logger.info("step %d", step)
    assert [line for line in lines if not line.startswith("step ") or "not" in line] == [
        "step 0 is not reported",
        "another cause",
    ]
    assert len(lines) == 122
    now[0] = repeats.INTERVAL_S
    logger.warning("step %d is not reported", 120)
    assert lines[-1] == "step 120 is not reported (119 more like this were suppressed since the last one)"


def test_causes_are_bounded_and_forgotten():
    logger, lines, now = logged()
    for cause in range(400):
        logger.warning("cause %s", "x" * cause)
    assert len(lines) == repeats.MAX_CAUSES + 1
    now[0] = repeats.INTERVAL_S
    logger.warning("another")
    assert lines[-1].startswith("another")
    kept = logger.filters[0]._causes
    assert set(kept) <= {"", "another"}


def test_names_and_ranks_tell_causes_apart_and_numbers_do_not():
    logger, lines, _ = logged()
    for rank in (1, 2, 1, 2):
        logger.warning("%s is gone", f"rank {rank}")
        logger.warning("%(name)s is not finite", {"name": f"layer{rank}.weight"})
        logger.warning("the GPU is %d steps behind: %s", rank, OSError(f"{rank} bytes are left"))
    assert lines == [
        "rank 1 is gone", "layer1.weight is not finite", "the GPU is 1 steps behind: 1 bytes are left",
        "rank 2 is gone", "layer2.weight is not finite",
    ]


def test_a_warning_of_another_thread_breaks_nothing():
    logger, lines, now = logged()
    logger.warning("one")
    logger.warning("two")
    other = threading.Thread(target=logger.warning, args=("from another thread",))

    class Walked(dict):
        """The other thread warns while this one walks through it."""

        def items(self):
            for item in super().items():
                if not other.ident:
                    other.start()
                    other.join(0.2)
                yield item

    logger.filters[0]._causes = Walked(logger.filters[0]._causes)
    now[0] = repeats.INTERVAL_S
    logger.warning("one")
    other.join(60)
    assert sorted(lines[2:]) == ["from another thread", "one"]
