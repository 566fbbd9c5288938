"""Native core. Private: it reads and writes the memory of the tensors that it is given, so only ``flexcomm.torch`` may call it."""

from typing import TypedDict, final

from torch import Tensor

from flexcomm.torch._clock import Times

__all__ = [
    "PROTOCOL", "CONTROL_BYTES", "VERSION", "FlexcommError", "NotOnDeviceError", "AutoLeaders", "Compressor", "Core", "CudaStream",
    "DeviceNeeds", "Element", "Fault", "How", "LogLevel", "Message", "Named", "Next", "Parameter", "Pipelines", "Region", "Round",
    "ShadowGain", "ShadowNeeds", "ShadowStep", "State", "Status", "TensorDecoder", "TensorEncoder", "Tick", "Transfer",
    "parse_strategy", "digest", "parse_compressor", "parse_candidate", "parse_byteps", "parse_policy", "compressors", "take_log",
]

PROTOCOL: int
CONTROL_BYTES: int
VERSION: str

class FlexcommError(RuntimeError): ...
class NotOnDeviceError(FlexcommError): ...

def parse_strategy(text: str) -> Named: ...
def digest(text: str) -> int: ...
def parse_compressor(text: str) -> str: ...
def parse_candidate(text: str) -> str: ...
def parse_byteps(map: dict[str, str]) -> str: ...
def parse_policy(text: str) -> str: ...
def compressors() -> list[Compressor]: ...
def take_log() -> list[tuple[LogLevel, str]]: ...

@final
class LogLevel:
    Info: "LogLevel"
    Warning: "LogLevel"
    Error: "LogLevel"
    def __int__(self) -> int: ...

@final
class Next:
    Train: "Next"
    Switched: "Next"
    TrialStarts: "Next"
    Candidate: "Next"
    TrialEnds: "Next"
    TrialLeft: "Next"

@final
class Status:
    Ready: "Status"
    Failed: "Status"
    NotFinite: "Status"
    Overflowed: "Status"
    def __int__(self) -> int: ...

@final
class Transfer:
    Rounds: "Transfer"
    Float16: "Transfer"
    Bfloat16: "Transfer"
    def __hash__(self) -> int: ...

@final
class How:
    Gather: "How"
    Broadcast: "How"
    Sum: "How"
    Refused: "How"

@final
class Element:
    Byte: "Element"
    Float32: "Element"
    Float16: "Element"
    Bfloat16: "Element"
    def __hash__(self) -> int: ...

@final
class Named:
    strategy: str
    spec: str | None
    dense: bool
    drops: bool

@final
class Parameter:
    name: str
    allowed: str
    about: str

@final
class Compressor:
    name: str
    about: str
    parameters: list[Parameter]
    examples: list[str]

@final
class Fault:
    status: Status
    why: str

@final
class State:
    step: int
    version: int
    strategy: str
    error_feedback: bool
    in_trial: bool
    connected: bool
    steps: int

@final
class Tick:
    agreed: bool
    strategy: str
    dense: bool
    index: int

@final
class ShadowGain:
    strategy: str
    gain: float
    steps: int

@final
class AutoLeaders:
    mode: str
    skew: float
    staleness: int

@final
class Pipelines:
    def __new__(cls, compressor: str, step: int, buckets: list[tuple[list[int], bytes]]) -> Pipelines: ...
    compressor: str
    step: int
    buckets: list[tuple[list[int], bytes]]

@final
class CudaStream:
    def __new__(cls, ordinal: int, handle: int) -> CudaStream: ...
    ordinal: int
    handle: int

@final
class Region:
    address: int
    bytes: int

@final
class Round:
    how: How
    element: Element
    elements: int
    root: int
    last: bool
    outcome: Region | None

@final
class DeviceNeeds:
    memory: int
    block: int
    headers: int

@final
class ShadowNeeds:
    coordinates: bytes
    memory: int

@final
class ShadowStep:
    outcomes: Region
    generation: int

class _Costs(TypedDict):
    compute: float
    compress: float
    sync: float
    step: float
    sent: int
    gain: float

@final
class Message:
    @staticmethod
    def from_bytes(bytes: bytes) -> Message: ...
    def to_bytes(self) -> bytes: ...
    def spec(self) -> str: ...
    def shape(self) -> list[int]: ...
    def dtype(self) -> str: ...
    def step(self) -> int: ...
    def wire_bytes(self) -> int: ...

@final
class TensorEncoder:
    def __new__(cls, spec: str, shape: list[int], dtype: str, seed: int) -> TensorEncoder: ...
    def encode(self, address: int, learning_rate: float) -> tuple[Message, float]: ...
    def residual(self, address: int) -> bool: ...

@final
class TensorDecoder:
    def __new__(cls, message: Message) -> TensorDecoder: ...
    def decode(self, message: Message, address: int) -> None: ...

@final
class Core:
    def __new__(
        cls,
        job: str,
        rank: int,
        world: int,
        model: list[tuple[int, int]],
        *,
        strategy: str,
        selection: str,
        seed: int,
        shadow_share: float,
        spec: str | None = None,
    ) -> Core: ...
    def agree(self, run: str, announced: bool, follow: bool) -> None: ...
    def connect(
        self,
        socket: str,
        backend: str,
        collectives: list[str],
        candidates: list[str] | None = None,
        ordinal: int | None = None,
        momentum: float | None = None,
        policy: str | None = None,
        machine: str | None = None,
    ) -> None: ...
    def trial_asked(self) -> bool: ...
    def refuse_trials(self, why: str | None) -> None: ...
    def begin(self) -> bytes | None: ...
    def write_control(self, out: Tensor) -> bool: ...
    def sample(self) -> bytes | None: ...
    def take_samples(self, rows: list[bytes]) -> None: ...
    def awaits_control(self) -> bool: ...
    def take_control(self, message: Tensor) -> None: ...
    def layout(self, index: int, ids: list[int]) -> None: ...
    def finish(
        self, loss: float | None = None, ticket: int | None = None, answers: list[bytes] | None = None
    ) -> Next: ...
    def fault(self) -> Fault | None: ...
    def resolve(self, ticket: int, times: Times | None = None) -> None: ...
    def add_compression(self, seconds: float, in_hook: bool) -> None: ...
    def wants_hook(self) -> bool: ...
    def diverged(self) -> None: ...
    def save(self) -> None: ...
    def restore(self) -> None: ...
    def residuals(self) -> dict[int, bytes]: ...
    def set_residuals(self, state: dict[int, Tensor], pipelines: Pipelines | None = None) -> bool: ...
    def pipelines(self) -> Pipelines | None: ...
    def shadow(self, strategies: list[str]) -> None: ...
    def shadow_gains(self) -> list[ShadowGain]: ...
    def state(self) -> State: ...
    def tick(self, index: int) -> Tick: ...
    def costs(self) -> _Costs | None: ...
    def auto_leaders(self) -> AutoLeaders: ...
    def close(self) -> None: ...
    def reports_energies(self) -> bool: ...
    def enter(
        self, index: int, n: int, gradient: int | None, on_device: bool = False, energy: float | None = None
    ) -> Transfer | None: ...
    def begin_exchange(
        self, index: int, gradient: Tensor, rates: list[float], stream: CudaStream | None = None, element: Element = ...
    ) -> Round: ...
    def write_round(self, index: int, out: Tensor, stream: CudaStream | None = None) -> None: ...
    def next_round(self, index: int, arrived: Tensor, stream: CudaStream | None = None) -> Round: ...
    def finish_exchange(self, index: int, arrived: Tensor, out: Tensor, stream: CudaStream | None = None) -> bool: ...
    @staticmethod
    def load_kernels(ordinal: int) -> None: ...
    def watching(self) -> bool: ...
    def device_ready(self, index: int, stream: CudaStream, memory: Tensor | None = None) -> DeviceNeeds: ...
    def add_blocks_on(self, index: int, stream: CudaStream, blocks: Tensor, out: Tensor) -> None: ...
    def judge(self, index: int, headers: Tensor, outcome: Tensor) -> bool: ...
    def shadowing(self, index: int) -> tuple[bool, bool]: ...
    def shadow_on_host(self) -> None: ...
    def shadow_ready(self, index: int, stream: CudaStream, memory: Tensor | None = None) -> ShadowNeeds: ...
    def shadow_step(self, index: int, stream: CudaStream, values: Tensor) -> ShadowStep | None: ...
    def shadow_outcomes(self, generation: int, outcomes: list[tuple[int, Tensor]]) -> None: ...
    def launched_natively(self, index: int, n: int, element: int) -> None: ...
    def launched(self, bytes: int) -> None: ...
    def landed(self, count: int = 1) -> None: ...
    def warn_once(self, what: str) -> None: ...
