//! Calls captured into CUDA graphs: with a GPU, else with the stand-in for its driver, which keeps launches and refuses what a
//! capture may not have.

use crate::data::heavy_tails;
use crate::emulated::{Memory, gpu};
use crate::standin::again;
use flexcomm_gpu_kernels::bench::BenchError;
use flexcomm_gpu_kernels::{
    DType, Device, ErrorFeedback, Fit, Form, LaunchError, ListRoom, Lists, Norm, OnStream, Quantizer, Random, RandomK,
    Selection, Set, Tail, Target, Threshold, add_lists, gains, list_bytes, pack, payload_room, quantize, random_k,
    subset_scratch, threshold, topk, workspace_bytes,
};

const N: u64 = 20_011;
const K: u64 = 201;

/// What a call reads and writes. Two of them get the same call, one by a graph.
struct Buffers {
    gradient: Memory,
    memory: Memory,
    compensated: Memory,
    indices: Memory,
    values: Memory,
    payload: Memory,
    scratch: Memory,
    candidates: Memory,
    workspace: Memory,
}

impl Buffers {
    fn new(gradient: &[f32], memory: &[f32]) -> Self {
        Self {
            gradient: Memory::of(gradient),
            memory: Memory::of(memory),
            compensated: Memory::new(4 * N),
            indices: Memory::new(4 * N),
            values: Memory::new(4 * N),
            payload: Memory::new(payload_room(N, N)),
            scratch: Memory::new(subset_scratch(N)),
            candidates: Memory::of(&[20u32, 2000]),
            workspace: Memory::new(workspace_bytes(N)),
        }
    }

    fn feedback(&self) -> ErrorFeedback {
        let [gradient, memory, compensated] = [&self.gradient, &self.memory, &self.compensated].map(Memory::span);
        ErrorFeedback { n: N, dtype: DType::F32, gradient, memory, compensated, beta: 1.0, gamma: 1.0 }
    }

    fn to(&self) -> Selection {
        Selection { indices: self.indices.span(), values: self.values.span(), len: N }
    }

    /// Outcome, message and memory.
    fn written(&self) -> [Vec<u8>; 3] {
        let outcome = self.workspace.outcome();
        // Gains have no message, but two pairs of numbers there.
        let payload = self.payload.bytes()[..outcome.bytes.max(32) as usize].to_vec();
        [format!("{outcome:?}").into_bytes(), payload, self.compensated.bytes()]
    }
}

type Call = fn(&OnStream<'_>, &Buffers) -> Result<(), LaunchError>;

const RANDOM: Random = Random { seed: 1, step: 0, tensor: 0, rank: Some(0) };

fn select(device: &OnStream<'_>, b: &Buffers, method: Threshold) -> Result<(), LaunchError> {
    threshold(device, &b.feedback(), method, &b.to(), b.workspace.span())?;
    pack(device, &b.to(), N, b.payload.span(), Form::VARYING, b.workspace.span())
}

fn round(device: &OnStream<'_>, b: &Buffers, method: Quantizer) -> Result<(), LaunchError> {
    quantize(device, &b.feedback(), method, RANDOM, b.payload.span(), b.workspace.span())
}

/// One of every family that says it can be captured.
const CALLS: [(&str, Call); 10] = [
    ("topk", |device, b| {
        topk(device, &b.feedback(), K, &b.to(), b.workspace.span())?;
        pack(device, &b.to(), N, b.payload.span(), Form::FIXED, b.workspace.span())
    }),
    ("add_lists", |device, b| {
        topk(device, &b.feedback(), K, &b.to(), b.workspace.span())?;
        pack(device, &b.to(), N, b.payload.span(), Form::FIXED, b.workspace.span())?;
        // As it was gathered, at an odd place.
        let (bytes, there) = (list_bytes(N, K), b.values.span());
        let payloads = there.part(7, bytes);
        device.copy(payloads, b.payload.span().part(0, bytes))?;
        let lists = Lists { n: N, k: K, payloads, stride: bytes, ranks: 1 };
        let room = ListRoom { counts: b.scratch.span(), refused: b.candidates.span().part(0, 4) };
        add_lists(device, &lists, Target { scale: 0.5, out: b.compensated.span() }, &room)
    }),
    ("mstopk", |device, b| select(device, b, Threshold::MsTopK { k: K, random: RANDOM })),
    ("dgc", |device, b| select(device, b, Threshold::Dgc { k: K, sample: 0.05, most: 1.3, random: RANDOM })),
    ("sidco", |device, b| select(device, b, Threshold::Sidco { k: K, fit: Fit::Exponential, first: 0.25, stages: 2 })),
    ("randomk", |device, b| {
        let at = Selection { len: K, indices: b.indices.span(), values: b.values.span() };
        let how = RandomK { k: K, scaled: false, random: RANDOM };
        random_k(device, &b.feedback(), how, &at, b.scratch.span(), b.workspace.span())?;
        let (from, form) = (Selection { len: K, ..b.to() }, Form { set: Set::Known, gaps: false, tail: Tail::Values });
        pack(device, &from, N, b.payload.span(), form, b.workspace.span())
    }),
    ("gains", |device, b| {
        let (ks, to) = (b.candidates.span(), b.payload.span().part(0, 32));
        gains(device, &b.feedback(), ks, 2, to, b.workspace.span())?;
        device.copy(b.compensated.span(), b.gradient.span())
    }),
    ("signsgd", |device, b| round(device, b, Quantizer::Signs)),
    ("qsgd", |device, b| round(device, b, Quantizer::Qsgd { s: 4, bucket: 512, norm: Norm::L2 })),
    ("eightbit", |device, b| round(device, b, Quantizer::EightBit { fixed: false })),
];

#[test]
fn a_graph_does_to_new_values_what_its_calls_do() {
    let Some(gpu) = gpu() else { return again("graph::a_graph_does_to_new_values_what_its_calls_do") };
    let (before, after) = (heavy_tails(N as usize), heavy_tails(N as usize + 1)[1..].to_vec());
    let residual: Vec<f32> = before.iter().rev().map(|x| 0.5 * x).collect();
    for (name, call) in CALLS {
        let (direct, captured) = (Buffers::new(&after, &residual), Buffers::new(&before, &residual));
        let stream = gpu.stream().unwrap();
        let graph = stream
            .graph::<BenchError>(|device| Ok(call(device, &captured)?))
            .unwrap_or_else(|why| panic!("{name}: {why:?}"));
        gpu.wait().unwrap();
        let garbage = captured.compensated.bytes();
        assert!(garbage.iter().all(|byte| *byte == 0xa5), "{name}: something ran while it was captured");
        call(&stream.device(), &direct).unwrap();
        assert!(!direct.workspace.outcome().refused, "{name}");
        // Where the graph looks for them, there are other values by now.
        stream.device().copy(captured.gradient.span(), direct.gradient.span()).unwrap();
        for time in ["first", "second"] {
            stream.replay(&graph).unwrap();
            gpu.wait().unwrap();
            assert!(captured.written() == direct.written(), "{name}, the {time} time");
        }
    }
}

/// What waits cannot be captured; the stream is of use afterwards.
#[test]
fn what_waits_is_refused() {
    let Some(gpu) = gpu() else { return again("graph::what_waits_is_refused") };
    let (stream, memory) = (gpu.stream().unwrap(), Memory::of(&[1.0f32; 8]));
    let waits = stream.graph::<BenchError>(|device| {
        use flexcomm_gpu_kernels::Copies;
        Ok(device.download(memory.span(), &mut [0; 32])?)
    });
    assert!(matches!(waits, Err(BenchError::Launch(_) | BenchError::Memory(_))), "{waits:?}");
    stream.device().zero(memory.span()).unwrap();
    gpu.wait().unwrap();
    assert_eq!(memory.bytes(), [0; 32]);
}
