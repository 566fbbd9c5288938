//! Exact top-k: selection, memory, energies and payload against `compression`.

use crate::data::{gradients, lengths};
use crate::emulated::{Emulated, Memory};
use flexcomm_compression::pipeline::{Gradient, Member, Pipeline, Step};
use flexcomm_compression::wire::Writer;
use flexcomm_compression::{Layers, naive};
use flexcomm_gpu_kernels::{
    DType, ErrorFeedback, Form, LaunchError, Outcome, Selection, Span, pack, payload_room, topk, workspace_bytes,
};
use half::{bf16, f16};

pub struct Step1 {
    pub compensated: Memory,
    pub indices: Memory,
    pub values: Memory,
    pub workspace: Memory,
    pub payload: Memory,
}

impl Step1 {
    pub fn new(n: u64, room: u64) -> Self {
        Self {
            compensated: Memory::new(4 * n),
            indices: Memory::new(4 * room),
            values: Memory::new(4 * room),
            workspace: Memory::new(workspace_bytes(n)),
            payload: Memory::new(payload_room(n, room)),
        }
    }

    pub fn feedback(&self, (n, dtype): (u64, DType), gradient: &Memory, memory: Option<&Memory>) -> ErrorFeedback {
        let memory = memory.map_or(Span::NONE, Memory::span);
        ErrorFeedback {
            n,
            dtype,
            gradient: gradient.span(),
            memory,
            compensated: self.compensated.span(),
            beta: 1.0,
            gamma: 1.0,
        }
    }

    pub fn to(&self, len: u64) -> Selection {
        Selection { indices: self.indices.span(), values: self.values.span(), len }
    }

    pub fn outcome(&self) -> Outcome {
        self.workspace.outcome()
    }

    /// What is left and what goes out.
    pub fn payload(&self) -> Vec<u8> {
        self.payload.bytes()[..self.outcome().bytes as usize].to_vec()
    }
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// What stays has the energy that the outcome says, to the rounding of sums.
pub fn check_energy_of(residual: &[f32], outcome: &Outcome) {
    let energy: f64 = residual.iter().map(|x| f64::from(*x).powi(2)).sum();
    assert!((outcome.residual - energy).abs() <= 1e-9 * outcome.compensated, "{outcome:?}, {energy}");
}

/// The payload that the CPU side writes for the strategy, and its residual, after two steps of this gradient.
pub fn reference(strategy: &str, gradient: Gradient<'_>, n: usize) -> [(Vec<u8>, Vec<f32>, f64, f64); 2] {
    let strategy = strategy.parse().unwrap();
    let mut rank = Pipeline::new(&strategy, Layers::fused(n).unwrap(), Member::alone(1));
    [0, 1].map(|index| {
        let mut message = Writer::new();
        let outcome = rank.compress(gradient, Step { index, learning_rate: 0.1 }, &mut message).unwrap();
        let bytes = message.bytes();
        // Behind the header and its parameters.
        let payload = bytes[32 + 8 * usize::from(bytes[7])..].to_vec();
        (payload, rank.residual().to_vec(), outcome.energy.compensated, outcome.energy.sent)
    })
}

pub fn check_two_steps(device: &Emulated, k: usize, (dtype, gradient): (DType, &Memory), cpu: Gradient<'_>, n: usize) {
    let want = reference(&format!("topk(k={})+ef(vanilla)", k.max(1)), cpu, n);
    let mut memory = Some(Memory::of(&vec![0.0f32; n]));
    for (payload, residual, compensated, sent) in want {
        let step = Step1::new(n as u64, k as u64);
        let feedback = step.feedback((n as u64, dtype), gradient, memory.as_ref());
        topk(device, &feedback, k as u64, &step.to(k as u64), step.workspace.span()).unwrap();
        pack(device, &step.to(k as u64), n as u64, step.payload.span(), Form::FIXED, step.workspace.span()).unwrap();
        let outcome = step.outcome();
        assert_eq!((outcome.kept as usize, outcome.refused, outcome.over), (k, false, false));
        assert_eq!(bits(&step.compensated.f32s()), bits(&residual));
        assert_eq!(step.payload(), payload);
        check_energy_of(&residual, &outcome);
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-12 * b.abs();
        assert!(
            close(outcome.compensated, compensated) && close(outcome.sent, sent),
            "{outcome:?}, {compensated}, {sent}"
        );
        memory = Some(step.compensated);
    }
}

#[test]
fn two_steps_are_the_cpus_bit_for_bit() {
    for (at, n) in lengths().into_iter().enumerate() {
        for (what, gradient) in gradients(n) {
            let Some(device) = Emulated::new(at as u64) else { return };
            for k in [n.min(1), n / 100, n / 3, n - n.min(1), n].into_iter().filter(|k| *k > 0 || n == 0) {
                println!("{what}, {k} of {n}");
                check_two_steps(&device, k, (DType::F32, &Memory::of(&gradient)), Gradient::F32(&gradient), n);
            }
        }
    }
}

#[test]
fn halves_are_widened_as_on_the_cpu() {
    for (at, n) in [1usize, 3, 33, 4097, 9999].into_iter().enumerate() {
        for (_, gradient) in gradients(n) {
            let Some(device) = Emulated::new(at as u64) else { return };
            let k = n.div_ceil(10);
            // Finite halves: what is larger becomes the largest.
            let small: Vec<u16> =
                gradient.iter().map(|x| f16::from_f32(x.clamp(-65504.0, 65504.0)).to_bits()).collect();
            check_two_steps(&device, k, (DType::F16, &Memory::of(&small)), Gradient::F16(&small), n);
            let brain: Vec<u16> = gradient.iter().map(|x| bf16::from_f32(*x * 0.5).to_bits()).collect();
            check_two_steps(&device, k, (DType::Bf16, &Memory::of(&brain)), Gradient::Bf16(&brain), n);
        }
    }
}

/// Without a memory the gradient is taken as it is: -0 stays -0.
#[test]
fn a_strategy_without_memory_sends_the_gradient_itself() {
    let (n, Some(device)) = (500, Emulated::new(2)) else { return };
    for (_, gradient) in gradients(n) {
        let [(payload, ..), _] = reference("topk(k=499)", Gradient::F32(&gradient), n);
        let (step, source) = (Step1::new(n as u64, 499), Memory::of(&gradient));
        let feedback = step.feedback((n as u64, DType::F32), &source, None);
        topk(&device, &feedback, 499, &step.to(499), step.workspace.span()).unwrap();
        pack(&device, &step.to(499), n as u64, step.payload.span(), Form::FIXED, step.workspace.span()).unwrap();
        assert_eq!(step.payload(), payload);
    }
}

/// Whoever goes first: the same bits, energies but for the blocks' number among them.
#[test]
fn no_order_of_threads_and_blocks_changes_anything() {
    let n = 20_000;
    let (_, gradient) = gradients(n).swap_remove(1);
    let want = naive::topk(&gradient, 5000);
    for seed in 0..24 {
        let Some(device) = Emulated::new(seed) else { return };
        let (step, source) = (Step1::new(n as u64, 5000), Memory::of(&gradient));
        let feedback = step.feedback((n as u64, DType::F32), &source, None);
        topk(&device, &feedback, 5000, &step.to(5000), step.workspace.span()).unwrap();
        assert_eq!(step.indices.u32s(), want, "seed {seed}");
    }
}

/// More keys share two digits than the list of the workspace holds.
#[test]
fn a_list_that_overflows_changes_nothing() {
    let n = 50_000u32;
    let gradient: Vec<f32> = (0..n).map(|i| f32::from_bits(0x3f80_0000 | i.wrapping_mul(0x9e37_79b1) >> 22)).collect();
    for (seed, k) in [(0, 1), (1, 777), (2, 25_000), (3, 49_999)] {
        let Some(device) = Emulated::new(seed) else { return };
        let cpu = Gradient::F32(&gradient);
        check_two_steps(&device, k, (DType::F32, &Memory::of(&gradient)), cpu, n as usize);
    }
}

/// Warps that count with one word wait for each other: what they list goes there many keys at a time.
#[test]
fn keys_in_play_are_listed_many_at_a_time() {
    let (n, k) = (60_000u32, 3000);
    let Some(device) = Emulated::new(3) else { return };
    // A tenth shares its first digit, and the cut lies among these.
    let bits =
        |i: u32| if i.is_multiple_of(10) { 0x3f80_0000 | i.wrapping_mul(0x9e37_79b1) >> 12 } else { 0x3e00_0000 + i };
    let gradient: Vec<f32> = (0..n).map(|i| f32::from_bits(bits(i))).collect();
    let cpu = Gradient::F32(&gradient);
    check_two_steps(&device, k, (DType::F32, &Memory::of(&gradient)), cpu, n as usize);
    // By 16 blocks: each counts once that it is done, and hands over what its 8 warps hold, no more than 512 each.
    if let Some(most) = device.most_atomics("cut_second") {
        assert!(most <= 16 * 8 * (1 + n / 10 / 16 / 8 / 384), "{most} on one word");
    }
}

#[test]
fn what_is_not_finite_leaves_the_memory_and_sends_zeros() {
    let n = 5000;
    for (seed, bad) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
        let Some(device) = Emulated::new(seed as u64) else { return };
        let (_, memory) = gradients(n).swap_remove(0);
        let mut gradient = memory.clone();
        gradient[4321] = bad;
        let (gradient, memory) = (Memory::of(&gradient), Memory::of(&memory));
        let step = Step1::new(n as u64, 50);
        let feedback = step.feedback((n as u64, DType::F32), &gradient, Some(&memory));
        topk(&device, &feedback, 50, &step.to(50), step.workspace.span()).unwrap();
        pack(&device, &step.to(50), n as u64, step.payload.span(), Form::FIXED, step.workspace.span()).unwrap();
        assert!(step.outcome().refused);
        assert_eq!(step.compensated.bytes(), memory.bytes());
        assert_eq!(step.values.f32s(), [0.0; 50]);
        assert_eq!(step.indices.u32s(), (0..50).collect::<Vec<u32>>());
        assert_eq!(u32::from_le_bytes(step.payload()[..4].try_into().unwrap()), 50);
    }
}

/// The memory decays, and the gradient weighs less.
#[test]
fn weights_are_rounded_as_on_the_cpu() {
    let (n, Some(device)) = (3000, Emulated::new(1)) else { return };
    let (_, gradient) = gradients(n).swap_remove(0);
    let want = reference("topk(k=30)+ef(vanilla,beta=0.7,gamma=0.3)", Gradient::F32(&gradient), n);
    let (source, mut memory) = (Memory::of(&gradient), Some(Memory::of(&[0.0f32; 3000])));
    for (payload, residual, ..) in want {
        let step = Step1::new(n as u64, 30);
        let mut feedback = step.feedback((n as u64, DType::F32), &source, memory.as_ref());
        (feedback.beta, feedback.gamma) = (0.7, 0.3);
        topk(&device, &feedback, 30, &step.to(30), step.workspace.span()).unwrap();
        pack(&device, &step.to(30), n as u64, step.payload.span(), Form::FIXED, step.workspace.span()).unwrap();
        assert_eq!((step.payload(), bits(&step.compensated.f32s())), (payload, bits(&residual)));
        memory = Some(step.compensated);
    }
}

#[test]
fn bad_calls_are_refused_before_anything_is_launched() {
    /// Launches nothing.
    struct Never;
    impl flexcomm_gpu_kernels::Device for Never {
        fn launch(&self, kernel: &'static str, _: u32, _: &[u64]) -> Result<(), LaunchError> {
            panic!("{kernel} was launched")
        }
        fn zero(&self, _: Span) -> Result<(), LaunchError> {
            panic!("memory was cleared")
        }
        fn copy(&self, _: Span, _: Span) -> Result<(), LaunchError> {
            panic!("memory was copied")
        }
        fn blocks(&self, _kernel: &'static str) -> u32 {
            1
        }
    }
    // SAFETY: nothing is launched.
    let span = |at, bytes| unsafe { Span::new(at, bytes) };
    let n = 1000;
    let good = ErrorFeedback {
        n,
        dtype: DType::F32,
        gradient: span(0x1_0000, 4 * n),
        memory: span(0x2_0000, 4 * n),
        compensated: span(0x3_0000, 4 * n),
        beta: 1.0,
        gamma: 1.0,
    };
    let to = Selection { indices: span(0x4_0000, 400), values: span(0x5_0000, 400), len: 100 };
    let workspace = span(0x10_0000, workspace_bytes(n));
    let call = |feedback: ErrorFeedback, k: u64, to: Selection, workspace| {
        topk(&Never, &feedback, k, &to, workspace).unwrap_err()
    };
    let text = |error: LaunchError| error.to_string();
    let long = ErrorFeedback { n: 1 << 31, ..good };
    assert_eq!(call(long, 1, to, workspace), LaunchError::TooLong(1 << 31));
    let odd = ErrorFeedback { gradient: span(0x1_0002, 4 * n), ..good };
    assert!(text(call(odd, 1, to, workspace)).contains("the gradient at 0x10002: it must be aligned to 4 bytes"));
    let odd = ErrorFeedback { memory: span(0x2_0004, 4 * n), ..good };
    assert!(text(call(odd, 1, to, workspace)).contains("the memory at 0x20004: it must be aligned to 16 bytes"));
    let short = ErrorFeedback { memory: span(0x2_0000, 4 * n - 1), ..good };
    assert!(text(call(short, 1, to, workspace)).contains("the memory of 3999 bytes: 4000 are needed"));
    let same = ErrorFeedback { compensated: good.memory, ..good };
    assert_eq!(call(same, 1, to, workspace), LaunchError::Overlap("compensated", "the memory"));
    assert!(text(call(good, 1, to, span(0x10_0000, 1000))).contains("the workspace of 1000 bytes"));
    assert!(matches!(call(good, 1, to, span(0x10_0010, 1 << 30)), LaunchError::Misaligned { need: 256, .. }));
    for k in [0, 101, 1001] {
        assert!(matches!(call(good, k, to, workspace), LaunchError::Parameter { what: "k", .. }));
    }
    let nan = ErrorFeedback { beta: f32::NAN, ..good };
    assert!(matches!(call(nan, 1, to, workspace), LaunchError::Parameter { what: "beta", .. }));
}
